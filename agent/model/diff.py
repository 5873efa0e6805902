# SPDX-License-Identifier: Apache-2.0
"""Two traces compared, operator by operator (see `diffunits` for what is alike, `diffstats` for what
counts as different)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from . import diffstats as stats
from .diffcounts import Counted, counted
from .diffdata import Diff, Phase, Ratio, Row, Side
from .diffunits import Kind, Order, Sides, Stratum, Units, matrix, read, units
from .tokens import Phase as PhaseName
from .trace import Trace

Floats = npt.NDArray[np.float64]
_LAYER_FLOOR = 0.015
_LAYERS = 3
_PHASES = [phase.value for phase in PhaseName]


def compare(a: Trace, b: Trace) -> Diff:
    """How B differs from A, phase by phase; decode first."""
    sides = read(a), read(b)
    found = units(sides)
    notes = [
        f"{word}: {side.left_out} executions were not compared, because some of their kernels have no time"
        for word, side in zip("AB", sides, strict=True)
        if side.left_out
    ]
    for word, trace in zip("AB", (a, b), strict=True):
        if trace.facts.ops != "all":
            notes.append(f"{word} was recorded with --ops {trace.facts.ops}: its operators were not recorded")
    of_phase = defaultdict(list)
    for stratum in sorted({*sides[0].strata, *sides[1].strata}):
        of_phase[stratum.phase].append(stratum)
    phases = []
    for name in sorted(of_phase, key=lambda name: (name != "decode", _PHASES.index(name))):
        pairs = _Pairs(sides, (counted(a), counted(b)), of_phase[name], found)
        if not pairs.count:
            notes.append(
                f"{name}: nothing to compare, for no execution in A ({pairs.executions[0]}) has the tokens "
                f"and KV length of one in B ({pairs.executions[1]})"
            )
            continue
        phases.append(_phase(name, pairs, found))
        if pairs.count < stats.MIN_PAIRS:
            notes.append(
                f"{name}: {pairs.count} pairs of executions are too few to tell a difference from noise "
                f"(at least {stats.MIN_PAIRS}): record longer"
            )
    if any(p.total is not None and p.total.significant for p in phases):
        notes.append(
            "time per token differs as a whole: a slower build and a busier machine look alike in two "
            "recordings; record both again, in turn"
        )
    return Diff(tuple(phases), tuple(notes))


class _Pairs:
    """Executions of one phase, paired: the i-th with the i-th of the same stratum."""

    def __init__(
        self,
        sides: tuple[Sides, Sides],
        events: tuple[Counted, Counted],
        strata: Sequence[Stratum],
        found: Units,
    ) -> None:
        self.sides = sides
        self.executions = [
            sum(len(side.strata[s].orders) for s in strata if s in side.strata) for side in sides
        ]
        times: tuple[list[Floats], list[Floats]] = ([], [])
        self.orders: tuple[set[int], set[int]] = (set(), set())
        faults: tuple[list[Floats], list[Floats]] = ([], [])
        waits: tuple[list[Floats], list[Floats]] = ([], [])
        tokens: list[int] = []
        for stratum in strata:
            its = [side.strata.get(stratum) for side in sides]
            if its[0] is None or its[1] is None:
                continue
            chosen = range(min(len(its[0].orders), len(its[1].orders)))
            tokens += [max(stratum.tokens, 1)] * len(chosen)
            for which in (0, 1):
                one = its[which]
                assert one is not None  # noqa: S101 - for the type checker: looked at above
                times[which].append(matrix(sides[which], one, chosen, found))
                self.orders[which].update(one.orders[i] for i in chosen)
                per_unit = events[which].by_unit(sides[which], one, chosen, found)
                faults[which].append(per_unit[0])
                waits[which].append(per_unit[1])
        self.count = len(tokens)
        if not self.count:
            return
        self.tokens = np.array(tokens, dtype=np.float64)
        self.a, self.b = (np.concatenate(side) for side in times)
        self.faults = tuple(np.concatenate(side) for side in faults)
        self.waits = tuple(np.concatenate(side) for side in waits)
        self.has_faults = all(e.has_faults for e in events)
        self.has_waits = all(e.has_waits for e in events)


@dataclass(frozen=True, slots=True)
class _Group:
    """Units of the same kinds, in whatever layers."""

    kinds: tuple[Kind, ...]
    units: tuple[int, ...]


def _groups(found: Units, there: npt.NDArray[np.bool_]) -> list[_Group]:
    by_kinds: dict[tuple[Kind, ...], list[int]] = defaultdict(list)
    for unit, members in enumerate(found.members):
        if there[unit]:
            by_kinds[tuple(node.kind for node in members)].append(unit)
    return [_Group(kinds, tuple(its)) for kinds, its in by_kinds.items()]


def _phase(name: str, pairs: _Pairs, found: Units) -> Phase:
    parts = stats.blocks(pairs.count)
    in_a, in_b = (np.asarray(~np.isnan(side).all(axis=0)) for side in (pairs.a, pairs.b))
    groups = _groups(found, in_a | in_b)
    columns = [list(g.units) for g in groups]
    both = [[u for u in its if in_a[u] and in_b[u]] for its in columns]
    a = np.stack([_summed(pairs.a, its) for its in both], axis=1)
    whole = np.nansum(pairs.a, axis=1), np.nansum(pairs.b, axis=1)
    share = np.median(np.nan_to_num(a), axis=0) / max(float(np.median(whole[0])), 1.0)
    ratios: list[Ratio | None] = [None] * len(groups)
    deviating: list[tuple[int, int, Ratio]] = []
    tested = 0
    factor: float | None = None
    if parts:
        layered = _layers(pairs, both, parts)
        # Layers and groups are two families of tests: each may use half of the level.
        judged = stats.judged([one for _, _, one in layered], families=2)
        deviating = [
            (group, unit, ratio)
            for (group, unit, _), ratio in zip(layered, judged, strict=True)
            if ratio is not None and ratio.significant
        ]
        # A group is judged without the layers that are rows of their own.
        alone = {unit for _, unit, _ in deviating}
        rest = [[u for u in its if u not in alone] or its for its in both]
        judge = [np.stack([_summed(side, its) for its in rest], axis=1) for side in (pairs.a, pairs.b)]
        medians = stats.block_medians(judge[0], judge[1], parts)
        shared = stats.common(medians, share)
        factor = float(np.exp(np.mean(shared)))
        kernel_ns = np.array([_usual_kernel(a[:, i], len(its)) for i, its in enumerate(both)])
        # Each layer of each run is a little different; the more layers, the less is left of it.
        layers = stats.spread([one for _, _, one in layered])
        besides = layers / np.array([max(len(its), 1) for its in rest])
        measured = stats.differences(medians - shared[:, None], share, kernel_ns, besides=besides)
        ratios = stats.judged(measured, families=2)
        tested = sum(r is not None for r in (*judged, *ratios))
    rows = _Rows(pairs, found, groups, in_a, in_b, parts).rows(ratios, deviating)
    tokens = pairs.tokens
    mean = [float(side.sum() / tokens.sum() / 1e9) for side in whole]
    usual = [stats.usual(side / tokens[:, None]) / 1e9 for side in (pairs.a, pairs.b)]
    return Phase(
        phase=name, pairs=pairs.count, a_executions=pairs.executions[0], b_executions=pairs.executions[1],
        a_seconds=mean[0], b_seconds=mean[1], a_usual_seconds=usual[0], b_usual_seconds=usual[1],
        total=stats.total(pairs.a, pairs.b, parts), common=factor, tested=tested, rows=rows,
    )  # fmt: skip


def _summed(side: Floats, its: list[int]) -> Floats:
    return side[:, its].sum(axis=1) if its else np.full(len(side), np.nan)


def _usual_kernel(column: Floats, kernels: int) -> float:
    known = column[~np.isnan(column)]
    return float(np.median(known)) / max(kernels, 1) if len(known) else 1.0


def _layers(
    pairs: _Pairs, both: list[list[int]], parts: list[slice]
) -> list[tuple[int, int, stats.Measured | None]]:
    """(group, unit, how it differs from its group), where a group has several layers."""
    places = [(g, u) for g, its in enumerate(both) if len(its) >= _LAYERS for u in its]
    if not places:
        return []
    of_group, chosen = [g for g, _ in places], [u for _, u in places]
    own = stats.block_medians(pairs.a[:, chosen], pairs.b[:, chosen], parts)
    # The group as most of its layers did, so that one slow layer does not move it.
    usual = {
        g: np.nanmedian(own[:, [i for i, x in enumerate(of_group) if x == g]], axis=1) for g in set(of_group)
    }
    apart = own - np.stack([usual[g] for g in of_group], axis=1)
    kernel_ns = np.nanmedian(pairs.a[:, chosen], axis=0)
    share = np.ones(len(chosen))
    found = stats.differences(apart, share, kernel_ns, floor=_LAYER_FLOOR)
    return [(g, u, one) for (g, u), one in zip(places, found, strict=True)]


class _Rows:
    """The rows of one phase from what was measured."""

    def __init__(
        self, pairs: _Pairs, found: Units, groups: list[_Group],
        in_a: npt.NDArray[np.bool_], in_b: npt.NDArray[np.bool_], parts: list[slice],
    ) -> None:  # fmt: skip
        self.pairs, self.found, self.groups = pairs, found, groups
        self.there, self.parts = (in_a, in_b), parts
        self.about = tuple(
            _about(side, orders, found) for side, orders in zip(pairs.sides, pairs.orders, strict=True)
        )

    def rows(self, ratios: list[Ratio | None], deviating: list[tuple[int, int, Ratio]]) -> tuple[Row, ...]:
        """By how much time they changed, most first."""
        counts = self._counts()
        rows = []
        for number, group in enumerate(self.groups):
            faults, waits = (column[number] for column in counts)
            for change, its in self._changes(group).items():
                whole = len(its) == len(group.units)
                same = change in ("same", "fused", "split")
                rows.append(
                    self._row(
                        group, its, change, None if whole else self._layers(its),
                        ratios[number] if same else None, faults if same else None, waits if same else None,
                    )
                )  # fmt: skip
        for number, unit, ratio in deviating:
            rows.append(
                self._row(self.groups[number], [unit], "same", self._layers([unit]), ratio, None, None)
            )
        rows.sort(key=lambda row: -_impact(row))
        return tuple(rows)

    def _changes(self, group: _Group) -> dict[str, list[int]]:
        out: dict[str, list[int]] = defaultdict(list)
        for unit in group.units:
            if not self.there[0][unit] or not self.there[1][unit]:
                out["added" if self.there[1][unit] else "removed"].append(unit)
                continue
            before, after = (about[unit].kernels for about in self.about)
            out["fused" if after < before else "split" if after > before else "same"].append(unit)
        return out

    def _layers(self, its: list[int]) -> tuple[int, ...] | None:
        layers = sorted({node.layer for unit in its for node in self.found.members[unit] if node.layer >= 0})
        return tuple(layers) or None

    def _row(
        self, group: _Group, its: list[int], change: str, layers: tuple[int, ...] | None,
        time: Ratio | None, faults: Ratio | None, wait: Ratio | None,
    ) -> Row:  # fmt: skip
        first = group.kinds[0]
        texts = [self._texts(which, its) for which in (0, 1)]
        return Row(
            "+".join(kind.op for kind in group.kinds), first.role, first.shape, layers, change,
            texts[0][0], texts[1][0], texts[0][1], texts[1][1],
            self._side(0, its), self._side(1, its), time, faults, wait,
        )  # fmt: skip

    def _texts(self, which: int, its: list[int]) -> tuple[str, str]:
        known = [self.about[which][unit] for unit in its if unit in self.about[which]]
        return (known[0].ops, known[0].dtype) if known else ("", "")

    def _side(self, which: int, its: list[int]) -> Side | None:
        present = [unit for unit in its if self.there[which][unit]]
        if not present:
            return None
        times = (self.pairs.a, self.pairs.b)[which][:, present]
        tokens = float(self.pairs.tokens.sum())
        ran = ~np.isnan(times)
        kernels = np.array([self.about[which][unit].kernels for unit in present])
        size = np.array([self.about[which][unit].bytes for unit in present])
        moved = float((ran * size).sum() / tokens) if bool((size >= 0).all()) else None
        p = self.pairs
        return Side(
            float((ran * kernels).sum() / tokens), float(np.nansum(times) / tokens / 1e9),
            stats.usual(times / p.tokens[:, None]) / 1e9, moved,  # so that rows add up to the whole
            float(p.faults[which][:, present].sum() / tokens) if p.has_faults else None,
            float(p.waits[which][:, present].sum() / tokens / 1e9) if p.has_waits else None,
        )  # fmt: skip

    def _counts(self) -> tuple[list[Ratio | None], list[Ratio | None]]:
        """Faults and waits of each group."""
        p = self.pairs
        return self._counted(p.faults, p.has_faults), self._counted(p.waits, p.has_waits)

    def _counted(self, sides: tuple[Floats, ...], known: bool) -> list[Ratio | None]:
        if not known or not self.groups:
            return [None] * len(self.groups)
        a, b = (
            np.stack([side[:, list(group.units)].sum(axis=1) for group in self.groups], axis=1)
            for side in sides
        )
        return stats.judged(stats.counts(a, b, self.parts))


@dataclass(frozen=True, slots=True)
class _About:
    """How one side runs a unit: in how many kernels, called what, of which type, moving how much."""

    kernels: int
    ops: str
    dtype: str
    bytes: int


def _about(side: Sides, orders: set[int], found: Units) -> dict[int, _About]:
    out: dict[int, _About] = {}
    for number in sorted(orders):
        order: Order = side.orders[number]
        its: dict[int, list[int]] = defaultdict(list)
        for place, kernel in enumerate(order.kernels):
            its[found.of[kernel[0]]].append(place)
        for unit, places in its.items():
            moved = order.bytes[places]
            size = int(moved.sum()) if bool((moved >= 0).all()) else -1
            ops = ", ".join(order.ops[place] for place in places)
            out[unit] = _About(len(places), ops, order.dtypes[places[0]], size)
    return out


def _impact(row: Row) -> float:
    return abs((row.b.seconds if row.b else 0.0) - (row.a.seconds if row.a else 0.0))
