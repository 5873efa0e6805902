# SPDX-License-Identifier: Apache-2.0
"""From sums of calls to their figures, and from those to compiled programs. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from .calldata import CallTotal, HeldMemory, ProgramTotal

STATES = ("outermost", "inner", "recorded", "overflow")
PROGRAM = "program"
"""Kind of object that stands for a compiled program, in every engine's description."""
BYTES_IN, BYTES_OUT, SIZE, SWITCHES = "bytes_in", "bytes_out", "program_size", "switches"
"""Names of sums that are a program's."""
ALLOCATED, FREED = "bytes", "freed_bytes"
"""Names of sums of calls of kind memory that give memory and take it back."""
_HEAVY, _RUNS = 0.05, 2
"""Share of the time that a program needs to be one of two that alternate, and runs of it."""
RUN = "run"
"""The label that tells a program's first run."""
MAX_NAME = 100


@dataclass(frozen=True, slots=True)
class FieldMeaning:
    """What the value of one field means: ``names`` of its values; ``subject``: kind of the
    object that it numbers; ``code``: an address of a function, of which ``library`` only wants
    the file; ``device_of``: it is the address of what the object in that field numbers;
    ``address``: the field with its address, of an object that is a function;
    ``text``: the row's text
    belongs to it, of which ``find`` (a regular expression) gives the name."""

    name: str
    label: bool
    names: Mapping[int, str] = field(default_factory=dict)
    subject: str | None = None
    code: bool = False
    library: bool = False
    text: bool = False
    find: str | None = None
    signed: bool = False
    device_of: str | None = None
    address: str | None = None


@dataclass(frozen=True, slots=True)
class CallMeaning:
    """What one call of an engine means. ``pends``: its completion can be seen. ``around``: it is
    one of what the engine works for."""

    engine: str
    call: str
    kind: str
    fields: tuple[FieldMeaning, ...]
    sums: tuple[str, ...]
    pends: bool
    begins: bool
    around: bool = False


@dataclass(frozen=True, slots=True)
class CallRow:
    """One entry of the kernel's sums; ``values`` None where a field could not be read."""

    meaning: CallMeaning
    state: int
    status: int
    count: int
    ns: int
    max_ns: int
    untimed: int
    done: int
    done_ns: int
    sums: tuple[int, ...]
    values: tuple[int | None, ...]
    text: bytes


@dataclass(slots=True)
class _Program:
    name: str | None
    compiles: int = 0
    compile_ns: int = 0
    executions: int = 0
    dispatch_ns: int = 0
    completions: int = 0
    completion_ns: int = 0
    bytes_in: int | None = None
    bytes_out: int | None = None
    errors: int = 0
    size: int | None = None
    switches: int = 0
    cold: int = 0
    cold_ns: int = 0
    cold_done: int = 0
    cold_done_ns: int = 0


def text_of(row: CallRow) -> str | None:
    """The text of a row, printable, or its name where the description says how to find it."""
    raw = row.text.split(b"\0")[0].decode("utf-8", "replace")
    for one in row.meaning.fields:
        if one.text and one.find is not None:
            found = re.search(one.find, raw)
            raw = found.group(1) if found and found.group(1) else ""
    clean = "".join(c if c.isprintable() else "?" for c in raw)[:MAX_NAME]
    return clean or None


def names_of(rows: Iterable[CallRow]) -> dict[tuple[str, int], str]:
    """Names of objects by (kind, number): said by any call that has both the object and a text."""
    found: dict[tuple[str, int], str] = {}
    for row in rows:
        text = text_of(row) if row.status == 0 else None
        if text is None:
            continue
        for one, value in zip(row.meaning.fields, row.values, strict=False):
            if one.subject is not None and value:
                found[one.subject, value] = text
    return found


def devices(rows: Iterable[CallRow]) -> dict[tuple[str, int], int]:
    """Addresses of objects by (kind, number), of those whose name the process keeps."""
    found: dict[tuple[str, int], int] = {}
    for row in rows:
        pairs = {f.name: (f, v) for f, v in zip(row.meaning.fields, row.values, strict=False)}
        for one, value in pairs.values():
            its, number = pairs.get(one.device_of or "", (None, None))
            if value and number and its is not None and its.subject is not None:
                found[its.subject, number] = value
    return found


def totals(
    rows: Sequence[CallRow],
    code_name: Callable[[int], str],
    known: Mapping[tuple[str, int], str] | None = None,
) -> tuple[CallTotal, ...]:
    """Figures of calls, rows with the same labels together, the longest first.

    ``code_name``: name of the function at an address of the process; ``known``: names of objects
    that no call says.
    """
    names = {**(known or {}), **names_of(rows)}
    merged: dict[tuple[object, ...], CallTotal] = {}
    for row in rows:
        if row.count == 0:
            continue
        labels = _labels(row, names, code_name)
        one = _total(row, labels)
        key = (one.engine, one.call, one.kind, one.state, one.status, tuple(sorted(labels.items(), key=str)),
               frozenset(one.sums))  # fmt: skip
        merged[key] = one if key not in merged else _add(merged[key], one)
    return tuple(
        sorted(merged.values(), key=lambda t: (-(t.seconds or 0.0), t.engine, t.call, str(t.labels)))
    )


def memory(calls: Iterable[CallTotal]) -> tuple[HeldMemory, ...]:
    """Memory that was given and taken back, by engine that says both; runtime and driver once. Absent
    where some was not watched: a difference of parts says nothing."""
    found: dict[str, list[int]] = {}
    calls = list(calls)
    partly = {one.engine for one in calls if one.kind == "memory" and one.unwatched_seconds}
    for one in calls:
        if one.engine in partly:
            continue
        if one.kind == "memory" and one.state == "outermost" and one.status == 0:
            for place, name in enumerate((ALLOCATED, FREED)):
                if name in one.sums:
                    found.setdefault(one.engine, [0, 0])[place] += one.sums[name]
    return tuple(HeldMemory(engine, *both) for engine, both in sorted(found.items()))


def _labels(
    row: CallRow, names: Mapping[tuple[str, int], str], code_name: Callable[[int], str]
) -> dict[str, str | int]:
    out: dict[str, str | int] = {}
    if row.state == 3:  # overflow: it stands for many
        return out
    for one, value in zip(row.meaning.fields, row.values, strict=False):
        if not one.label or value is None:
            continue
        if one.text:
            text = text_of(row)
            if text is not None:
                out[one.name] = text
        elif one.subject is not None:
            out[one.name] = names.get((one.subject, value)) or _function(row, one, code_name, value)
        elif one.code:
            name = code_name(value)
            out[one.name] = name.partition("+0x")[0] if one.library else name
        else:
            number = value - (1 << 64) if one.signed and value >> 63 else value
            out[one.name] = one.names.get(number, number)
    return out


def _function(row: CallRow, one: FieldMeaning, code_name: Callable[[int], str], number: int) -> str:
    """Of an object that is a function, where it lies; else its number."""
    pairs = zip(row.meaning.fields, row.values, strict=False)
    address = next((value for f, value in pairs if f.name == one.address), None)
    return code_name(address) if address else f"{one.subject} {number}"


def _total(row: CallRow, labels: Mapping[str, str | int]) -> CallTotal:
    timed = row.count - row.untimed
    return CallTotal(
        row.meaning.engine, row.meaning.call, row.meaning.kind, labels, STATES[min(row.state, 3)], row.status,
        row.count, row.ns / 1e9 if timed else None, row.max_ns / 1e9 if timed else None, row.untimed,
        row.done if row.meaning.pends else None,
        row.done_ns / 1e9 if row.meaning.pends and row.done else None,
        _sums(row),
    )  # fmt: skip


def _sums(row: CallRow) -> dict[str, int]:
    """What was added up; a field that could not be read when the row began is absent."""
    read = {one.name for one, value in zip(row.meaning.fields, row.values, strict=False) if value is not None}
    pairs = zip(row.meaning.sums, row.sums, strict=False)
    return {name: number for name, number in pairs if number or name in read}


def _add(a: CallTotal, b: CallTotal) -> CallTotal:
    return CallTotal(
        a.engine, a.call, a.kind, a.labels, a.state, a.status, a.count + b.count, _plus(a.seconds, b.seconds),
        max(a.max_seconds or 0.0, b.max_seconds or 0.0) if a.max_seconds or b.max_seconds else None,
        a.untimed + b.untimed, None if a.completed is None else a.completed + (b.completed or 0),
        _plus(a.completion_seconds, b.completion_seconds),
        {name: a.sums.get(name, 0) + b.sums.get(name, 0) for name in {**a.sums, **b.sums}},
    )  # fmt: skip


def _plus(a: float | None, b: float | None) -> float | None:
    return b if a is None else a if b is None else a + b


def programs(rows: Sequence[CallRow], partly: Collection[str] = ()) -> tuple[ProgramTotal, ...]:
    """Compiled programs, those of one name together, the most time first.

    ``partly``: engines of which some calls were not watched all the time. Whose a buffer is, is not
    known there, for another one may lie at its address by now: no bytes are told.
    """
    names = names_of(rows)
    found: dict[str, _Program] = {}
    for row in rows:
        number = next(
            (v for f, v in zip(row.meaning.fields, row.values, strict=False) if f.subject == PROGRAM and v),
            None,
        )
        compiles = row.meaning.kind == "compile" and row.meaning.begins
        if row.count == 0 or row.state == 3 or (number is None and not compiles):
            continue
        name = names.get((PROGRAM, number)) if number is not None else text_of(row)
        key = name or f"program {number}"
        one = found.setdefault(key, _Program(name))
        _count(one, row, compiles)
        if row.meaning.engine in partly:
            one.bytes_in = one.bytes_out = None
    phases = _phases(found)
    done = [_program(one, phases.get(key)) for key, one in found.items()]
    return tuple(sorted(done, key=lambda p: -(p.completion_seconds or p.dispatch_seconds or 0.0)))


def _count(one: _Program, row: CallRow, compiles: bool) -> None:
    sums = _sums(row)
    if row.status != 0:
        one.errors += row.count
        return
    if compiles:
        one.compiles += row.count
        one.compile_ns += row.ns
    elif row.meaning.kind == "compute":
        one.executions += row.count
        one.dispatch_ns += row.ns
        one.completions += row.done
        one.completion_ns += row.done_ns
        one.switches += sums.get(SWITCHES, 0)
        if _is_cold(row):
            one.cold += row.count
            one.cold_ns += row.ns
            one.cold_done += row.done
            one.cold_done_ns += row.done_ns
    if BYTES_IN in sums:
        one.bytes_in = (one.bytes_in or 0) + sums[BYTES_IN]
    if BYTES_OUT in sums:
        one.bytes_out = (one.bytes_out or 0) + sums[BYTES_OUT]
    if sums.get(SIZE):
        one.size = sums[SIZE] // row.count


def _is_cold(row: CallRow) -> bool:
    return any(f.name == RUN and v == 1 for f, v in zip(row.meaning.fields, row.values, strict=False))


def _phases(programs: Mapping[str, _Program]) -> dict[str, str]:
    """A guess: of two programs that take nearly all of the time, one runs several times for each run
    of the other, which takes longer and does not follow itself. So a prompt is processed, and then
    tokens one by one; other pairs that do so are called the same."""
    time = {key: one.completion_ns or one.dispatch_ns for key, one in programs.items()}
    heavy = sorted((key for key in time if time[key] > _HEAVY * sum(time.values())), key=lambda k: -time[k])
    if len(heavy) != 2:
        return {}
    first, then = sorted(heavy, key=lambda key: programs[key].executions)
    one, other = programs[first], programs[then]
    runs = one.executions - one.cold, other.executions - other.cold
    if runs[0] < _RUNS or other.executions < 2 * one.executions or one.switches < one.executions / 2:
        return {}
    if _warm_mean(one) <= _warm_mean(other):
        return {}
    return {first: "prefill", then: "decode"}


def _warm_mean(one: _Program) -> float:
    done, ns = one.completions - one.cold_done, one.completion_ns - one.cold_done_ns
    runs = one.executions - one.cold
    return ns / done if done else (one.dispatch_ns - one.cold_ns) / max(runs, 1)


def _program(one: _Program, phase: str | None) -> ProgramTotal:
    return ProgramTotal(
        name=one.name, compiles=one.compiles, compile_seconds=one.compile_ns / 1e9 if one.compiles else None,
        executions=one.executions, dispatch_seconds=one.dispatch_ns / 1e9 if one.executions else None,
        completions=one.completions if one.executions else None,
        completion_seconds=one.completion_ns / 1e9 if one.completions else None,
        bytes_in=one.bytes_in, bytes_out=one.bytes_out, errors=one.errors, size=one.size, cold=one.cold,
        cold_dispatch_seconds=one.cold_ns / 1e9 if one.cold else None,
        cold_completion_seconds=one.cold_done_ns / 1e9 if one.cold_done else None, phase_guess=phase,
    )  # fmt: skip
