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
LONGEST = 1.0
PEAK = 0.5
"""Share of the fullest ring that may be filled at the fastest rate of late: an engine that was fast and
works at a long prompt now, with a graph a second, will be fast again in the middle of a pause."""
AT_FIRST = 1.0
"""Rings a second that an engine is thought capable of before anything is known of it."""
FORGOTTEN_S = 30.0
"""What was seen counts half as much after so long."""
WINDOW_S = 0.5
"""Rates are taken over so long: a graph that is described fills a ring in a moment, once."""
IN_BURST = 0.05
"""Shortest while probes are armed for a burst, which shall not last much longer than it was meant to;
far from its end, most of what is left of it."""
MOST = 0.75
SETTLING, UNSETTLED = 0.005, 0.05
"""Until the layout is chosen every graph is sent in full, and the ring for that holds three
tokens' graphs; the second while nothing comes."""


class Pace:
    """Of one set of rings that are drained together."""

    def __init__(self) -> None:
        self._peak = AT_FIRST
        self._filled = self._passed = 0.0

    def pause(
        self, elapsed_s: float, fill: float, *, settling: bool = False, burst_s: float | None = None
    ) -> float:
        """Seconds until the next drain. ``fill``: share of the fullest ring that was filled in the
        ``elapsed_s`` seconds since the last one. ``burst_s``: what is left of a burst, None without one."""
        if settling:
            return SETTLING if fill > 0 else UNSETTLED
        elapsed_s = max(elapsed_s, SHORTEST)
        self._filled, self._passed = self._filled + fill, self._passed + elapsed_s
        if self._passed >= WINDOW_S:
            faded = self._peak * 0.5 ** (self._passed / FORGOTTEN_S)
            self._peak = max(faded, self._filled / self._passed)
            self._filled = self._passed = 0.0
        if fill <= 0:
            return IDLE if burst_s is None else IN_BURST
        longest = LONGEST if burst_s is None else min(LONGEST, max(IN_BURST, MOST * burst_s))
        return min(longest, max(SHORTEST, min(elapsed_s * FILL / fill, PEAK / self._peak)))
