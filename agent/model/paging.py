# SPDX-License-Identifier: Apache-2.0
"""Page faults of one process: how many, of what, and how long they were waited for."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping

import numpy as np

from .addresses import ANON, UNKNOWN, AddressBook, Place
from .causes import FaultCount, Faults, ModelMemory, TensorFaults
from .records import Records

KINDS = ("minor", "major")
MAX_TENSORS = 4096
SHOWN_TENSORS = 32
#: Faults in memory of which nothing is known yet wait for the first graph, those in no mapping that is
#: known for the next look at them: so long, and so many.
HOLD_NS = 5_000_000_000
MAX_HELD = 1 << 15
_NO_TIME = (1 << 64) - 1
_MOST_NS = 1 << 50


class _Tensor:
    __slots__ = ("counts", "known", "ns", "place")

    def __init__(self, place: Place) -> None:
        self.place = place
        self.counts = [0, 0]
        self.ns = 0
        self.known = False


class FaultStore:
    """Adds up. No count ever falls; what cannot be told yet is held back for some seconds."""

    def __init__(self, tgid: int) -> None:
        self.tgid = tgid
        self.book = AddressBook()
        self._counts: Counter[tuple[str, str]] = Counter()
        self._ns: Counter[tuple[str, str]] = Counter()
        self._timed: set[tuple[str, str]] = set()
        self._tensors: OrderedDict[tuple[str, str], _Tensor] = OrderedDict()
        self._held: list[tuple[int, int, int, int]] = []
        self._strange: list[tuple[int, int, int, int]] = []

    @property
    def holds(self) -> bool:
        """Whether something is held back."""
        return bool(self._held or self._strange)

    @property
    def wants_maps(self) -> bool:
        """Whether a later look at the mappings would tell more."""
        return bool(self._strange)

    def take(self, faults: Records, now_ns: int) -> None:
        """New records of ring "faults"; those of other processes are passed over."""
        faults = faults[faults["tgid"] == self.tgid]
        if len(faults):
            waits = np.where(faults["wait_ns"] > _MOST_NS, _NO_TIME, faults["wait_ns"])
            for address, kind, wait, ts in zip(
                faults["addr"].tolist(), faults["kind"].tolist(), waits.tolist(), faults["ts"].tolist(),
                strict=True,
            ):  # fmt: skip
                self._one(address, min(kind, 1), wait, ts)
        self.settle(now_ns)

    def _one(self, address: int, kind: int, wait: int, ts: int) -> None:
        place = self.book.find(address)
        if place.mapping == UNKNOWN and ts > self.book.read_ns and len(self._strange) < MAX_HELD:
            self._strange.append((address, kind, wait, ts))
            return
        if place.mapping == ANON and not self.book.has_tensors and len(self._held) < MAX_HELD:
            self._held.append((address, kind, wait, ts))
            return
        self._add(place, kind, wait)

    def _add(self, place: Place, kind: int, wait: int) -> None:
        key = (KINDS[kind], place.mapping)
        self._counts[key] += 1
        if wait != _NO_TIME:
            self._ns[key] += wait
            self._timed.add(key)
        if place.tensor is None:
            return
        name = (place.mapping, place.tensor)
        tensor = self._tensors.get(name)
        if tensor is None:
            tensor = self._tensors[name] = _Tensor(place)
            while len(self._tensors) > MAX_TENSORS:
                self._tensors.popitem(last=False)
        tensor.counts[kind] += 1
        if wait != _NO_TIME:
            tensor.ns += wait
            tensor.known = True

    def settle(self, now_ns: int) -> None:
        """Decide about faults that were held back, where that is possible or due."""
        strange, self._strange = self._strange, []
        for address, kind, wait, ts in strange:
            if now_ns - ts > HOLD_NS:
                self._add(self.book.find(address), kind, wait)
            else:
                self._one(address, kind, wait, ts)
        if not self._held:
            return
        held, self._held = self._held, []
        for address, kind, wait, ts in held:
            place = self.book.find(address)
            if self.book.has_tensors or now_ns - ts > HOLD_NS:
                self._add(place, kind, wait)
            else:
                self._held.append((address, kind, wait, ts))

    def figures(
        self,
        totals: Mapping[str, int] | None,
        *,
        model: ModelMemory | None = None,
        fault_around: int | None = None,
    ) -> Faults:
        """``totals``: the kernel's own counts (minor, major, minor_unrecorded, major_unrecorded)."""
        counts = Counter(self._counts)
        unrecorded = 0
        for kind in KINDS:
            missing = (totals or {}).get(f"{kind}_unrecorded", 0)
            counts[kind, UNKNOWN] += missing
            unrecorded += missing
        rows = sorted(self._tensors.values(), key=lambda t: (t.ns, t.counts[1], t.counts[0]), reverse=True)[
            :SHOWN_TENSORS
        ]
        return Faults(
            counts=tuple(
                FaultCount(*key, count, self._ns[key] / 1e9 if key in self._timed else None)
                for key, count in sorted(counts.items())
                if count
            ),
            tensors=tuple(
                TensorFaults(
                    t.place.tensor or "", t.place.layer, t.place.mapping, t.counts[1], t.counts[0],
                    t.ns / 1e9 if t.known else None, t.place.source or "",
                )
                for t in rows
            ),
            model=model,
            unrecorded=unrecorded,
            fault_around_bytes=fault_around,
        )  # fmt: skip
