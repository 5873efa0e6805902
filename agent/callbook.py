# SPDX-License-Identifier: Apache-2.0
"""Numbers of calls, shared by all processes that one set of programs watches.

The kernel knows calls by number; an engine's call has the same one in every process.
"""

from __future__ import annotations

from .callprice import ASSUMED, price_of_call
from .kernel.callprograms import CallPrices, CallPrograms
from .model.callrows import CallMeaning, FieldMeaning
from .target.calldata import CallEntry, encode
from .target.catalogue import Catalogue, load_catalogue


class CallBook:
    """The loaded programs, and which call has which number in them. Close it last."""

    def __init__(self, programs: CallPrograms, catalogue: Catalogue | None = None) -> None:
        self.programs = programs
        self.catalogue = catalogue or load_catalogue()
        self.meanings: list[CallMeaning] = []
        self.entries: list[CallEntry] = []
        self._numbers: dict[tuple[str, int], int] = {}
        self._kinds: dict[str, int] = {}
        self._tables: list[dict[int, int]] = []
        self._groups: dict[str, int] = {}
        self._sets: dict[str, int] = {}
        self._families: dict[tuple[str, str], int] = {}
        self._prices: dict[bool, tuple[float, float]] = {}

    def number(self, engine: str, index: int, machine: str) -> int:
        """The number of call ``index`` of an engine, which the kernel is told about the first time."""
        if (engine, index) in self._numbers:
            return self._numbers[engine, index]
        entry = self.catalogue.engine(engine).calls[index]
        number = len(self.meanings)
        group = 0 if entry.around else self._groups.setdefault(engine, len(self._groups) + 1)
        known = len(self._tables)
        conf = encode(entry, machine, self.programs.constants, self._kinds, group, self._tables)
        for place, bits in enumerate(self._tables[known:], known):
            self.programs.set_table(place, bits)
        conf |= {"set": self.set_of(engine), "family": self.family_of(engine, entry.call)}
        self.programs.describe(number, conf)
        self._numbers[engine, index] = number
        self.meanings.append(meaning_of(engine, entry))
        self.entries.append(entry)
        return number

    def set_of(self, engine: str) -> int:
        """The number of an engine, whose calls share a limit in the kernel."""
        return self._sets.setdefault(engine, len(self._sets))

    def family_of(self, engine: str, call: str) -> int:
        """The number of an engine's calls of one name, which the kernel counts together."""
        return self._families.setdefault((engine, call), len(self._families))

    def prices(self, *, stepped: bool) -> CallPrices:
        """What a call costs here, measured the first time that somebody asks (some 20 ms); ``stepped``:
        there are some whose probed instruction the kernel does not emulate."""
        for kind in (False, True) if stepped else (False,):
            if kind not in self._prices:
                self._prices[kind] = price_of_call(self.programs, stepped=kind)
        watched, over = self._prices[False]
        slow, slow_over = self._prices.get(True, (ASSUMED.stepped, ASSUMED.over_stepped))
        return CallPrices(watched, slow, over, slow_over)

    def close(self) -> None:
        """Detach everything and unload."""
        self.programs.close()


def meaning_of(engine: str, entry: CallEntry) -> CallMeaning:
    """What the model has to know of a call."""
    fields = tuple(
        FieldMeaning(
            name=f.name,
            label=f.label,
            names=f.values,
            subject=f.owner or (f.object if f.role in ("begins", "subject", "same_as") else None),
            code=f.type in ("code", "library"),
            library=f.type == "library",
            text=f.type in ("text", "inline_text"),
            find=f.find,
            device_of=f.of if f.device else None,
            address=f.of if f.role == "subject" else None,
            signed=f.type in ("int8", "int16", "int32", "int64"),
        )
        for f in entry.fields
    )
    roles = {f.role for f in entry.fields}
    pends = bool(roles & {"pends", "yields"})
    return CallMeaning(
        engine, entry.call, entry.kind, fields, tuple(entry.sums()), pends, "begins" in roles, entry.around
    )  # fmt: skip
