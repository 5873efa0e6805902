# SPDX-License-Identifier: Apache-2.0
"""For all tests: property tests look at the same examples each time, and take as long as they take, for
they assert what is true on any machine, also on one that others use. Whoever changes what they are about
looks for other examples: ``pytest --hypothesis-profile=search``."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile(
    "any machine", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("search", settings.get_profile("any machine"), derandomize=False)
settings.load_profile("any machine")
