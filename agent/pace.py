# SPDX-License-Identifier: Apache-2.0
"""How long to sleep between two drains of the rings.

What a drain costs is waking up: the engine has meanwhile filled the caches with its weights, and
our own code and data come from memory again, 0.6 ms each time, twenty times what the few
records themselves take. So rings are drained as seldom as their size allows.
"""

from __future__ import annotations

FILL = 0.125
"""Share of the fullest ring that may be filled when it is drained, at the rate of just now: the
engine may become so much faster within one pause before records are lost."""
SHORTEST = 0.005
IDLE = 0.1
"""While nothing comes: short, for an engine that begins may be a very fast one, and cheap, for
an idle machine leaves the caches alone."""
LONGEST = 0.25
IN_BURST = 0.05
"""While probes are armed for a burst, which shall not last much longer than it was meant to."""
SETTLING, UNSETTLED = 0.005, 0.05
"""Until the layout is chosen every graph is sent in full, and the ring for that holds three
tokens' graphs; the second while nothing comes."""


def pause(elapsed_s: float, fill: float, *, settling: bool = False, in_burst: bool = False) -> float:
    """Seconds until the next drain. ``fill``: share of the fullest ring that was filled in the
    ``elapsed_s`` seconds since the last one."""
    if settling:
        return SETTLING if fill > 0 else UNSETTLED
    if fill <= 0:
        return IN_BURST if in_burst else IDLE
    longest = IN_BURST if in_burst else LONGEST
    return min(longest, max(SHORTEST, elapsed_s * FILL / fill))
