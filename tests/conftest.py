# SPDX-License-Identifier: Apache-2.0
"""For all tests: property tests have no deadline, for they assert what is true on any machine, also on
one that others use."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")
