# SPDX-License-Identifier: Apache-2.0
"""Figures of calls from sums: names, states, programs, memory, worked by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from profinferd.agent.model.callrows import (
    CallMeaning,
    CallRow,
    FieldMeaning,
    memory,
    names_of,
    programs,
    text_of,
    totals,
)

PROGRAM = FieldMeaning("program", True, subject="program")
NAME = FieldMeaning("name", True, text=True, find=r"module @(\w+)")
COMPILE = CallMeaning("pjrt", "compile", "compile", (NAME, PROGRAM), ("program_size",), False, True)
RUN = CallMeaning("pjrt", "execute", "compute", (PROGRAM,), ("bytes_in",), True, False)
GIVE = CallMeaning("npu", "allocate", "memory", (FieldMeaning("bytes", False),), ("bytes",), False, True)
FREED = (FieldMeaning("freed_bytes", False),)
TAKE = CallMeaning("npu", "free", "memory", FREED, ("freed_bytes",), False, False)


def row(
    meaning: CallMeaning, *values: int | None, count: int = 1, ns: int = 1000, text: bytes = b"",
    state: int = 0, status: int = 0, sums: tuple[int, ...] = (0, 0, 0), done: int = 0, done_ns: int = 0,
    untimed: int = 0,
) -> CallRow:  # fmt: skip
    return CallRow(meaning, state, status, count, ns, ns, untimed, done, done_ns, sums, values, text)


def nowhere(address: int) -> str:
    return f"lib.so+{address:#x}"


def test_a_program_is_named_by_what_compiled_it() -> None:
    rows = [
        row(COMPILE, None, 7, text=b"module @step attributes {x = 1}", ns=2_000_000_000, sums=(900, 0, 0)),
        row(RUN, 7, count=10, ns=50_000_000, done=9, done_ns=400_000_000, sums=(4096, 0, 0)),
        row(RUN, 8, count=1, ns=1_000_000),
        row(RUN, 7, count=2, status=1),
        row(COMPILE, None, None, text=b"module @step {", status=1),
    ]
    step, other = programs(rows)
    assert (step.name, step.compiles, step.compile_seconds, step.size) == ("step", 1, 2.0, 900)
    assert (step.executions, step.dispatch_seconds) == (10, 0.05)
    assert (step.completions, step.completion_seconds, step.bytes_in) == (9, 0.4, 4096)
    assert step.errors == 3 and step.bytes_out is None
    # One that was compiled before we looked: no name, no compile time, and not zero.
    assert (other.name, other.compiles, other.compile_seconds) == (None, 0, None)
    assert (other.executions, other.completions, other.completion_seconds) == (1, 0, None)
    assert names_of(rows) == {("program", 7): "step"}
    # Where some calls were not watched, nobody knows whose a buffer is by now.
    partly = programs(rows, {"pjrt"})
    assert [(p.executions, p.bytes_in, p.bytes_out) for p in partly] == [(10, None, None), (1, None, None)]


def test_memory_of_which_parts_were_not_watched_is_absent() -> None:
    calls = totals([row(GIVE, 4, sums=(64, 0, 0)), row(TAKE, 4, sums=(16, 0, 0))], nowhere)
    assert [(m.allocated_bytes, m.freed_bytes) for m in memory(calls)] == [(64, 16)]
    gap = [replace(c, unwatched_seconds=0.1 if c.call == "free" else 0.0) for c in calls]
    assert memory(gap) == ()


def test_of_a_text_only_the_name_is_kept() -> None:
    assert text_of(row(COMPILE, text=b"module @decode_step public @main(secret)")) == "decode_step"
    assert text_of(row(COMPILE, text=b"ML\xefR bytecode")) is None
    plain = CallMeaning("npu", "run", "compute", (FieldMeaning("name", True, text=True),), (), False, False)
    assert text_of(row(plain, text=b"blk.0\x1b[31m\xff\0rest")) == "blk.0?[31m\ufffd"


def test_labels_by_value_name_and_address() -> None:
    fields = (
        FieldMeaning("dtype", True, names={1: "f16"}), FieldMeaning("axis", True, signed=True),
        FieldMeaning("code", True, code=True), FieldMeaning("backend", True, code=True, library=True),
        FieldMeaning("hidden", False),
    )  # fmt: skip
    meaning = CallMeaning("npu", "run", "compute", fields, (), False, False)
    (one,) = totals([row(meaning, 1, (1 << 64) - 2, 0x40, 0x50, 9)], nowhere)
    assert one.labels == {"dtype": "f16", "axis": -2, "code": "lib.so+0x40", "backend": "lib.so"}
    (unknown,) = totals([row(meaning, 5, None, None, None, None)], nowhere)
    assert unknown.labels == {"dtype": 5}


def test_rows_of_one_name_are_one_total_and_times_may_be_absent() -> None:
    meaning = CallMeaning("npu", "run", "compute", (FieldMeaning("dtype", True, names={1: "x", 2: "x"}),),
                          (), False, False)  # fmt: skip
    (one,) = totals([row(meaning, 1, count=2, ns=10), row(meaning, 2, count=3, ns=90)], nowhere)
    assert (one.count, one.max_seconds) == (5, 9e-8) and one.seconds == pytest.approx(1e-7)
    (never,) = totals([row(meaning, 1, count=4, ns=0, untimed=4)], nowhere)
    assert (never.count, never.untimed, never.seconds, never.max_seconds) == (4, 4, None, None)
    assert totals([row(meaning, 1, count=0)], nowhere) == ()


def test_memory_counts_outermost_and_successful_calls() -> None:
    rows = [
        row(GIVE, 500, count=2, sums=(1000, 0, 0)), row(GIVE, 500, count=2, state=1, sums=(1000, 0, 0)),
        row(GIVE, 1, status=2, sums=(1 << 50, 0, 0)), row(TAKE, 500, sums=(500, 0, 0)), row(TAKE, None),
    ]  # fmt: skip
    (held,) = memory(totals(rows, nowhere))
    assert (held.engine, held.allocated_bytes, held.freed_bytes) == ("npu", 1000, 500)
    # What was freed and is not known to have been given has no bytes, and not 0.
    assert [t.sums for t in totals(rows[4:], nowhere)] == [{}]


RUNS = CallMeaning(
    "pjrt", "execute", "compute", (PROGRAM, FieldMeaning("run", True, names={0: "warm", 1: "cold"})),
    ("switches",), True, False,
)  # fmt: skip


def runs(number: int, warm: int, ms: int, switches: int, *, cold: bool = True) -> list[CallRow]:
    """Runs of a program that take ``ms`` each, its first one a second."""
    rows = [row(RUNS, number, 0, count=warm, ns=warm * 1000, done=warm, done_ns=warm * ms * 1_000_000,
                sums=(switches, 0, 0))]  # fmt: skip
    first = row(RUNS, number, 1, count=1, ns=9000, done=1, done_ns=1_000_000_000, sums=(1, 0, 0))
    return [*rows, first] if cold else rows


def test_the_first_run_is_part_of_all_and_shown_by_itself() -> None:
    (one,) = programs(runs(7, 4, 20, 0))
    assert (one.executions, one.completions, one.cold) == (5, 5, 1)
    assert one.completion_seconds == pytest.approx(1.08) and one.cold_completion_seconds == 1.0
    assert one.cold_dispatch_seconds == pytest.approx(9e-6) and one.dispatch_seconds == pytest.approx(13e-6)
    (other,) = programs(runs(7, 4, 20, 0, cold=False))
    assert (other.cold, other.cold_dispatch_seconds, other.cold_completion_seconds) == (0, None, None)


@pytest.mark.parametrize(
    ("rows", "guess"),
    [
        # A prompt of 100 ms, then ten tokens of 20 ms, five times over.
        ([*runs(1, 5, 100, 5), *runs(2, 50, 20, 5)], {"prefill": 6, "decode": 51}),
        # Small programs in between do not matter.
        ([*runs(1, 5, 100, 5), *runs(2, 50, 20, 50), *runs(3, 500, 0, 50, cold=False)],
         {"prefill": 6, "decode": 51}),
        # A third one that takes its part: who knows.
        ([*runs(1, 5, 100, 5), *runs(2, 50, 20, 50), *runs(3, 50, 20, 50)], {}),
        # One that runs in one go: no prompt is followed by tokens.
        ([*runs(1, 10, 100, 0), *runs(2, 100, 20, 1)], {}),
        # As often as the other; the frequent one is longer; too little seen.
        ([*runs(1, 20, 100, 20), *runs(2, 20, 20, 20)], {}),
        ([*runs(1, 5, 20, 5), *runs(2, 50, 100, 5)], {}),
        ([*runs(1, 1, 100, 1), *runs(2, 10, 20, 1)], {}),
        (runs(1, 50, 20, 0), {}),
    ],
)  # fmt: skip
def test_phases_are_guessed_from_two_programs_that_alternate(
    rows: list[CallRow], guess: dict[str, int]
) -> None:
    assert {p.phase_guess: p.executions for p in programs(rows) if p.phase_guess} == guess


def test_sums_that_are_not_known_are_not_among_those_that_are() -> None:
    """Absent is not 0: two copies of 100 bytes, and three of who knows how many."""
    meaning = CallMeaning("npu", "copy", "copy", (FieldMeaning("bytes", False),), ("bytes",), False, False)
    rows = [row(meaning, 100, count=2, sums=(200, 0, 0)), row(meaning, None, count=3)]
    assert sorted((c.count, dict(c.sums)) for c in totals(rows, nowhere)) == [(2, {"bytes": 200}), (3, {})]
