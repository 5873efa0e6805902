# SPDX-License-Identifier: Apache-2.0
"""What a watched process gives by address is looked into within bounds, and named in plain text."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from profinferd.agent import callwatch
from profinferd.agent.callwatch import MAX_ROUNDS, MAX_ROUNDS_IN_ALL, CallWatch
from profinferd.agent.model.callrows import CallMeaning, CallRow, FieldMeaning
from profinferd.agent.target import process

MEANING = CallMeaning("cuda", "get", "other", (FieldMeaning("function", False),), (), False, False)


def row(name: str, address: int, status: int = 0) -> tuple[int, CallRow]:
    return 0, CallRow(MEANING, 0, status, 1, 1, 1, 0, 0, 0, (), (address,), name.encode())


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> tuple[CallWatch, list[dict[str, int]]]:
    """One without a process, and the rounds of functions that it has looked into."""
    rounds: list[dict[str, int]] = []

    @contextlib.contextmanager
    def followed(pid: int, engine: object, addresses: Mapping[str, int]) -> Iterator[list[Any]]:
        rounds.append(dict(addresses))
        yield []

    monkeypatch.setattr(callwatch, "followed", followed)
    made: Any = CallWatch.__new__(CallWatch)
    made.process = SimpleNamespace(pid=1)
    made._book = SimpleNamespace(entries={0: SimpleNamespace(fields=[SimpleNamespace(function=True)])})
    made._catalogue = SimpleNamespace(engine=lambda name: name)
    made._followed, made._rounds, made._notes, made._functions, made._maps = set(), 0, [], {}, []
    return made, rounds


def test_each_address_is_looked_into_once(watch: tuple[CallWatch, list[dict[str, int]]]) -> None:
    """Whether its call succeeded or not; two that go by one name are in two rounds."""
    made, rounds = watch
    rows = [row("a", 1), row("a", 1, status=1), row("b", 2), row("a", 3)]
    for _ in range(3):
        made._follow(rows)
    assert rounds == [{"a": 1, "b": 2}, {"a": 3}]


def test_very_many_that_go_by_one_name(watch: tuple[CallWatch, list[dict[str, int]]]) -> None:
    """Each round is a process that we wait for: few at a time, and an end."""
    made, rounds = watch
    rows = [row("a", address) for address in range(1, 1001)]
    made._follow(rows)
    assert rounds == [{"a": 1}, {"a": 2}, {"a": 3}] and MAX_ROUNDS == 3
    for _ in range(1000):
        made._follow(rows)
    assert len(rounds) == MAX_ROUNDS_IN_ALL
    assert [note for note in made._notes if "too many" in note]


def test_how_busy_it_was_is_told_by_clocks_that_are_read_at_once(
    watch: tuple[CallWatch, list[dict[str, int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A turn puts probes on, which takes 0.4 s, and then asks what these did cost of how much: by the time
    at which it began the process would not have been busy, and everything that it called too dear."""
    made: Any = watch[0]
    clock = {"wall": 100.0, "cpu": 5.0}
    monkeypatch.setattr(callwatch, "time", SimpleNamespace(monotonic=lambda: clock["wall"]))
    monkeypatch.setattr(callwatch, "cpu_seconds", lambda pid: clock["cpu"])
    monkeypatch.setattr(CallWatch, "_rows", lambda self: [])
    made._clock = (99.0, 4.5, 0.0)
    asked: list[float] = []
    made._probes = SimpleNamespace(
        due=lambda now: True, tick=lambda now, busy, free: asked.append(busy), charged_s=lambda: 0.0
    )
    began = clock["wall"]
    made.keep(began, 0.01)
    clock.update(wall=100.4, cpu=5.3)
    made.keep(began, 0.01)
    clock.update(wall=100.5, cpu=9.0)  # several threads
    made.keep(began, 0.01)
    assert asked == pytest.approx([0.5, 0.3, 0.1])


def test_a_library_with_a_hostile_name(watch: tuple[CallWatch, list[dict[str, int]]]) -> None:
    """What stands for a function without a name is one line of text that can be written anywhere."""
    made, _ = watch
    path = os.fsdecode(b"/tmp/a\n\x1b[31m\xff.so")
    made._maps = [process.Mapping(0x1000, 0x2000, "r-xp", 0x500, "0:0", 1, path, False)]
    name = made._code_name(0x1010)
    assert name == "a\\n\\x1b[31m\\xff.so+0x510" and name.isprintable()
