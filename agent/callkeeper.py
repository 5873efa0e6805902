# SPDX-License-Identifier: Apache-2.0
"""When calls that the catalogue describes by data are watched beside an engine, and within which budget.

The watching itself is :mod:`.callwatch`'s. An engine that computes on the CPU alone has such calls too
(its backends'), and nothing to tell by them: the kernel takes 0.2 s to verify these programs, on the
target's cores.
"""

from __future__ import annotations

from typing import Any

from .bursts import BurstDriver
from .callfigures import with_calls
from .callwatch import CallWatch
from .errors import ProfinferError
from .hooks import Attached
from .model.snapshot import Snapshot
from .target.facts import TargetInfo


class CallKeeper:
    """The calls of one target."""

    def __init__(self, attached: Attached, budget_ratio: float | None) -> None:
        """``budget_ratio``: of the target's time, for all probes; None: there is no budget."""
        self._attached = attached
        self._ratio = 1.0 if budget_ratio is None else budget_ratio
        self._watch: CallWatch | None = None
        #: How the programs are had (keywords of :meth:`.CallWatch.open`); None: calls are not watched.
        self.options: dict[str, Any] | None = None
        #: Whether other backends than the CPU compute.
        self.offloads = False

    @property
    def watching(self) -> bool:
        """Whether some calls are watched."""
        return self._watch is not None

    @property
    def hurried(self) -> bool:
        """Whether :meth:`keep` should be asked again soon."""
        return self._watch is not None and self._watch.hurried

    def look(self, now: float, info: TargetInfo, driver: BurstDriver | None) -> None:
        """Watch what there is to watch by now, or look at what is new of it. ``now`` in seconds.

        Raises ProfinferError where calls are all that could be seen of the target.
        """
        levels = has_levels(info)
        if self._watch is not None:
            self._watch.look(now, info)
        elif levels and not self.offloads and CallWatch.offloading(info):
            return
        elif self.options is not None and CallWatch.wanted(info):
            try:
                free = self._free(driver)
                self._watch = CallWatch.open(info, budget=self._ratio, free=free, **self.options)
            except ProfinferError as error:
                if not levels:
                    raise
                self.options = None
                self._attached.note(f"calls of {info.engine}'s backends are not watched: {error.what}")
            else:
                self._attached.sites += self._watch.sites

    def _free(self, driver: BurstDriver | None) -> float:
        """The part of the budget that is for these calls: what tokens and graphs leave over, and half of
        that where operators are sampled."""
        return self._ratio if driver is None else driver.free_for_calls / 2

    def keep(self, now: float, driver: BurstDriver | None) -> None:
        """What watching calls costs stays within the budget, and the operators' account knows of it."""
        if self._watch is not None:
            cost = self._watch.keep(now, self._free(driver))
            if driver is not None:
                driver.engine_calls_s += cost

    def add(self, info: TargetInfo) -> None:
        """Attach to files that are new in the process. Raises ProfinferError."""
        if self._watch is not None:
            self._watch.add(info)

    def awaits_table(self, info: TargetInfo) -> bool:
        """Whether a library has still to give out its functions."""
        return self._watch is not None and self._watch.awaits_table(info)

    def table_was_given(self) -> bool:
        """Whether it did since the last time."""
        return self._watch is not None and self._watch.table_was_given()

    def seen(self) -> bool:
        """Whether there was any call."""
        return self._watch is not None and self._watch.seen()

    def describe(self, snapshot: Snapshot, info: TargetInfo) -> Snapshot:
        """The snapshot, with what calls tell."""
        if self._watch is None:
            return snapshot
        return with_calls(snapshot, self._watch.figures(), alone=not has_levels(info))

    def close(self) -> None:
        """Detach."""
        if self._watch is not None:
            self._watch.close()


def has_levels(info: TargetInfo) -> bool:
    """Whether tokens, graphs or operators can be seen, and not only calls described by data."""
    return bool({"call", "graph", "op"} & set(info.levels))
