# SPDX-License-Identifier: Apache-2.0
"""Sampled op level with real probes on an engine that logs what it did (cases C18, C19)."""

from __future__ import annotations

import dataclasses
import os
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import pytest

from profinferd.agent.kernel.check import check_machine
from profinferd.agent.model.budget import BudgetConfig, Level
from profinferd.agent.model.snapshot import Snapshot

from .bursting import POINTS, Bursts, Monotone, check_shares, shares
from .cases import Engine, Reply, Watch, call_span, engine, kernels, library, plain, seconds_of, wait_for
from .traced import code_of, links_of

MACHINE = check_machine()
WAYS = {"session": "uprobe_session", "multi": "uprobe_multi", "perf": "perf_uprobes"}
METHODS = [method for method, fact in WAYS.items() if MACHINE.has(fact)]
each_method = pytest.mark.parametrize("method", METHODS)


class Chat:
    """Tokens and prompts of one conversation after the other; a prompt's shape never comes again.

    ``all`` replies by phase, and those of graphs that began while they were ``summed``. The first
    prompt comes at once, so that what follows continues something.
    """

    def __init__(self, watch: Watch, us: int = 200) -> None:
        self._watch, self._us = watch, us
        self.at = 0
        self._prompt = 32
        self.all: dict[str, list[Reply]] = {"decode": [], "prefill": []}
        self.summed: dict[str, list[Reply]] = {"decode": [], "prefill": []}
        self.turns: dict[str, list[tuple[bool, list[Reply]]]] = {"decode": [], "prefill": []}
        self.prompt()

    def _note(self, phase: str, reply: Reply, summed: bool) -> None:
        self.all[phase].append(reply)
        turns = self.turns[phase]
        if not turns or turns[-1][0] is not summed:
            turns.append((summed, []))
        turns[-1][1].append(reply)
        if summed:
            self.summed[phase].append(reply)

    def _summing(self) -> bool:
        return isinstance(self._watch, Bursts) and self._watch.told.summing

    def prompt(self) -> None:
        self._prompt += 1
        self.at = self._prompt
        summed = self._summing()
        words = f"pos=0-{self.at - 1} out={self.at - 1} us={2 * self._us}"
        self._note("prefill", self._watch.run(words), summed)

    def tokens(self, count: int) -> None:
        for _ in range(count):
            self.begin()
            self.end()

    def begin(self) -> None:
        """A token that does not end yet."""
        self._was = self._summing()
        self._watch.stub.send(f"run pos={self.at} us={self._us}")
        self.at += 1

    def hold(self) -> None:
        """One that stands still in the middle of its graph until :meth:`let_go`, however long that takes."""
        self._was = self._summing()
        self._watch.stub.send(f"run pos={self.at} us={self._us} end=hold at=2")
        self.at += 1
        assert self._watch.stub.reply(self._watch.drain) == {"held": True}

    def let_go(self, whole: bool = True) -> None:
        """Its end; ``whole``: as in :meth:`end`."""
        self._watch.stub.send("go")
        self.end(whole)

    def end(self, whole: bool = True) -> None:
        """Its end; ``whole``: not one whose probes went away in the middle."""
        reply = self._watch.stub.reply(self._watch.drain)
        self._watch.drain()
        self._note("decode", reply, self._was and whole)

    def expected(self, phase: str) -> dict[str, float]:
        """Seconds by op as bursts can know them: what was timed, and for the graphs before and after
        the mean of the shares in the bursts around them. Exact whatever stretched those graphs."""
        timed = [_parts_of_graphs(replies) for summed, replies in self.turns[phase] if summed]
        seconds: dict[str, float] = defaultdict(float)
        burst = 0
        for summed, replies in self.turns[phase]:
            if summed:
                for op, value in seconds_of(replies).items():
                    seconds[op] += value
                burst += 1
                continue
            around = timed[max(0, burst - 1) : burst + 1]
            for parts in around:
                for op, share in parts.items():
                    seconds[op] += share * _graph_seconds(replies) / len(around)
        return seconds

    def check(self, snapshot: Snapshot, *phases: str) -> None:
        """Shares are those of the graphs that were timed."""
        for phase in phases:
            check_shares(snapshot, phase, self.summed[phase])


def _graph_seconds(replies: Sequence[Reply]) -> float:
    ns = sum(int(r["graph"][1]) - int(r["graph"][0]) for r in replies)
    return ns / 1e9


def _parts_of_graphs(replies: Sequence[Reply]) -> dict[str, float]:
    return {op: value / _graph_seconds(replies) for op, value in seconds_of(replies).items()}


def steps(snapshot: Snapshot) -> tuple[int, int, int | None]:
    """Count, sampled and uncovered of the decode graphs."""
    graphs = [g for g in snapshot.graphs if g.phase == "decode"]
    assert len({g.id for g in graphs}) == len(graphs) == 1
    return graphs[0].count, graphs[0].sampled, graphs[0].uncovered


@pytest.fixture
def stub() -> Iterator[Engine]:
    with Engine(engine()) as one:
        yield one


@each_method
def test_shares_and_totals(stub: Engine, method: str) -> None:
    """C18: half of the graphs are timed; shares within 2 points, calls exact, counters only grow."""
    with Bursts(stub, method) as watch:
        chat, counters = Chat(watch), Monotone()
        for _ in range(3):
            chat.tokens(8)
            watch.begin()
            chat.prompt()
            chat.tokens(8)
            watch.end()
            chat.prompt()
            counters.look(watch.snapshot())
        watch.attachment.close()
        last = counters.look(watch.attachment.snapshot())
    for phase, replies in chat.all.items():
        expected = chat.expected(phase)
        for op_name, share in shares(last, phase).items():
            assert abs(share - expected[op_name] / sum(expected.values())) < POINTS, (phase, op_name)
        seen: Counter[tuple[str, bool]] = Counter()
        for op in last.ops:
            if op.phase == phase:
                seen[op.op, op.kernel.startswith("fused_")] += op.calls
        assert seen == kernels(replies)
        graphs = [g for g in last.graphs if g.phase == phase]
        assert sum(g.count for g in graphs) == len(replies)
        # Ops and setup are the graphs, as far as they are attributed: all of them at the end.
        ops = sum(op.seconds for op in last.ops if op.phase == phase)
        setup = sum(g.setup_seconds or 0.0 for g in graphs)
        assert ops + setup == pytest.approx(sum(g.seconds for g in graphs), rel=0.01)
        assert all(op.seconds_stderr is not None for op in last.ops)
    assert steps(last) == (48, 24, 0)
    # The one prompt of each burst, whose shape nobody had seen before:
    assert sum(g.sampled for g in last.graphs if g.phase == "prefill") == 3
    assert all(g.uncovered == 0 for g in last.graphs if g.sampled)
    assert all(g.uncovered is None for g in last.graphs if not g.sampled)
    assert last.lost.total == 0


def test_the_first_prompt_is_sampled(stub: Engine) -> None:
    """Armed before anything is known of the target: not even the layout has been chosen."""
    with Bursts(stub) as watch:
        watch.begin()
        chat = Chat(watch)
        chat.tokens(10)
        watch.end()
        seen = watch.snapshot()
    chat.check(seen, "decode", "prefill")
    assert {(g.phase, g.count, g.sampled) for g in seen.graphs} == {("prefill", 1, 1), ("decode", 10, 10)}


def test_a_phase_that_no_burst_met(stub: Engine) -> None:
    """Absent, with a note; its graphs and seconds are there."""
    with Bursts(stub) as watch:
        chat = Chat(watch)
        chat.tokens(3)
        watch.begin()
        chat.tokens(9)
        watch.end()
        seen = watch.snapshot()
    assert {op.phase for op in seen.ops} == {"decode"}
    assert any("none for prefill" in note for note in seen.notes)
    assert next(g for g in seen.graphs if g.phase == "prefill").setup_seconds is None
    chat.check(seen, "decode")


def test_idle_between_bursts(stub: Engine) -> None:
    """A burst that meets nothing adds nothing, and the next one is none the worse."""
    with Bursts(stub) as watch:
        chat, counters = Chat(watch), Monotone()
        for _ in range(2):
            watch.begin()
            chat.prompt()
            chat.tokens(8)
            watch.end()
            before = counters.look(watch.snapshot()).ops
            watch.begin()
            watch.end()
            assert counters.look(watch.snapshot()).ops == before
        chat.check(watch.snapshot(), "decode", "prefill")


def test_a_summed_graph_runs_to_its_end(stub: Engine) -> None:
    """Summing stops, the graph that began goes on, and only then the probes go."""
    with Bursts(stub) as watch:
        chat = Chat(watch)
        chat.tokens(3)
        watch.begin()
        chat.tokens(8)
        chat.hold()
        wait_for(lambda: watch.tick() and watch.told.loads[-1].summing == 1, "the graph to begin")
        watch.told.summing = False
        watch.drain()
        assert watch.told.loads[-1].summing == 1
        chat.let_go()
        assert watch.told.loads[-1].summing == 0
        watch.end()
        seen = watch.snapshot()
    assert steps(seen) == (12, 9, 0)
    chat.check(seen, "decode")


@each_method
def test_probes_that_go_in_the_middle_of_a_graph(stub: Engine, method: str) -> None:
    """The kernels that were seen make no whole graph: nothing is uncovered, no share moves."""
    with Bursts(stub, method) as watch:
        chat = Chat(watch)
        chat.tokens(1)
        watch.begin()
        chat.tokens(4)
        chat.hold()
        wait_for(lambda: watch.tick() and watch.told.loads[-1].summing == 1, "the graph to begin")
        watch.end(read=False)
        # Else the time in which it was held is in the sums, if its end is seen.
        wait_for(lambda: watch.tick() and watch.driver._leaving is None, "the probes to go")
        chat.let_go(whole=False)
        wait_for(lambda: watch.tick() and watch.driver._state.unread_since is None, "the sums to be read")
        first = watch.snapshot()
        watch.begin()
        chat.tokens(4)
        watch.end()
        seen = watch.snapshot()
    assert steps(first) == (6, 5, 0)
    assert steps(seen) == (10, 9, 0)
    chat.check(seen, "decode")


def test_threads_and_children(stub: Engine) -> None:
    """A thread that exits in a summed graph frees its slot; a child's graphs are not ours."""
    with Bursts(stub) as watch:
        chat = Chat(watch)
        chat.tokens(2)
        watch.begin()
        watch.run(f"pos={chat.at} us=200 end=exit at=5")
        assert watch.attachment._programs.owned_slots() == []
        chat.tokens(8)
        watch.order("fork us=200 times=5")
        watch.end()
        seen = watch.snapshot()
    assert steps(seen) == (10, 8, 0)
    check_shares(seen, "decode", chat.summed["decode"])


@pytest.mark.parametrize("how", ["kill", "hang"])
def test_the_end_comes_in_a_burst(stub: Engine, how: str) -> None:
    """The target is killed, or we leave while a summed graph hangs: what there was is told."""
    with Bursts(stub) as watch:
        chat = Chat(watch)
        chat.tokens(2)
        watch.begin()
        chat.tokens(8)
        if how == "kill":
            stub.kill()
            watch.drain()
        else:
            stub.send(f"run pos={chat.at} us=200 end=hang at=5")
            assert stub.reply(watch.drain) == {"hanging": True}
        watch.attachment.close()
        seen = watch.attachment.snapshot()
    assert steps(seen) == (10, 8, 0)
    chat.check(seen, "decode")


def test_a_library_that_comes_in_a_burst() -> None:
    """C02: its kernels have probes before its graphs are summed."""
    first, second = library(name="libggml-one.so"), library(name="libggml-two.so")
    with Engine(plain()) as stub:
        stub.order(f"load {first}")
        with Bursts(stub) as watch:
            watch.run("pos=0-5 out=5 us=200")
            watch.begin()
            watch.order(f"load {second}")
            wait_for(lambda: watch.tick() and len(watch.attachment._attached) == 2, "the second library")
            for i in range(9):
                watch.run(f"pos={i + 6} us=200")
            watch.end()
            seen = watch.snapshot()
    assert sum(g.sampled for g in seen.graphs) == 9
    assert all(g.uncovered == 0 for g in seen.graphs if g.sampled)


def test_two_targets_at_once() -> None:
    """Each has its own figures."""
    with ExitStack() as stack:
        stubs = [stack.enter_context(Engine(engine())) for _ in range(2)]
        watches = [stack.enter_context(Bursts(one)) for one in stubs]
        chats = [Chat(watch) for watch in watches]
        for watch in watches:
            watch.begin()
        for _ in range(5):
            for chat in chats:
                chat.prompt()
                chat.tokens(2)
        chats[0].tokens(5)
        for watch in watches:
            watch.end()
        for watch, chat, count in zip(watches, chats, (15, 10), strict=True):
            seen = watch.snapshot()
            assert steps(seen) == (count, count, 0)
            chat.check(seen, "decode", "prefill")


def test_levels_are_shed_and_come_back(stub: Engine) -> None:
    """D6: op, then graph, then token level; what stays is still counted, and busy time is seen."""
    with Bursts(stub) as watch:
        chat = Chat(watch)
        chat.tokens(3)
        watch.told.level = Level.TOKEN
        watch.drain()
        before = watch.stats()
        watch.told.loads.clear()
        chat.tokens(4)
        assert watch.stats()["hits_graph"] == before["hits_graph"]
        assert watch.stats()["hits_call"] == before["hits_call"] + 8
        assert sum(load.busy_s for load in watch.told.loads) in call_span(*chat.all["decode"][-4:])
        watch.told.level = Level.NOTHING
        watch.drain()
        chat.tokens(2)
        assert watch.stats()["hits_call"] == before["hits_call"] + 8
        watch.told.level = Level.OP
        watch.drain()
        watch.begin()
        chat.prompt()
        chat.tokens(8)
        watch.end()
        seen = watch.snapshot()
    assert steps(seen) == (3 + 8, 8, 0)
    assert sum(c.count for c in seen.calls) == 1 + 3 + 4 + 1 + 8
    chat.check(seen, "decode", "prefill")


def test_within_the_budget(stub: Engine) -> None:
    """C18, C19: the real controller on back-to-back traffic; the estimate keeps the budget, prompts
    are met, rings stay nearly empty and nothing is lost."""
    counters = Monotone()
    with Watch(stub, "auto", "sampled", budget=BudgetConfig(0.02)) as watch:
        chat = Chat(watch)
        begun = time.monotonic()
        met = False
        # Two periods of the controller and more; on a machine that has no time for it, until it had two.
        while (passed := time.monotonic() - begun) < 13 or (not met and passed < 120):
            chat.prompt()
            chat.tokens(10)
            told = counters.look(watch.snapshot())
            both = {c.phase for c in told.counters.graphs if c.sampled} if told.counters else set()
            met = told.budget is not None and told.budget.bursts >= 2 and both == {"decode", "prefill"}
        stats = watch.stats()
        watch.attachment.close()
        seen = counters.look(watch.attachment.snapshot())
    assert seen.budget is not None and seen.budget.bursts >= 2 and seen.budget.level == "op"
    assert seen.overhead.estimated_ratio is not None and seen.overhead.estimated_ratio <= 0.02
    for phase in ("decode", "prefill"):
        check_shares(seen, phase, chat.all[phase], sure=3.0)
        counted = next(c for c in seen.counters.graphs if c.phase == phase) if seen.counters else None
        assert counted is not None and 0 < counted.sampled < counted.count == len(chat.all[phase])
    assert seen.lost.total == 0 and stats["lost_ops"] == 0


@each_method
def test_nothing_is_left(stub: Engine, method: str) -> None:
    """No probe of a burst outlives it, and none of ours the attachment."""
    with Bursts(stub, method) as watch:
        (file,) = watch.attachment.info.files
        chat = Chat(watch)
        chat.tokens(1)
        quiet = code_of(stub.pid, file)[1]
        watch.begin()
        chat.tokens(1)
        assert code_of(stub.pid, file)[1] == quiet + 2
        watch.end()
        wait_for(lambda: watch.tick() and watch.driver._leaving is None, "the probes to go")
        assert code_of(stub.pid, file)[1] == quiet
        watch.begin()
        descriptor = os.dup(file.fd)
        watch.attachment.close()
    try:
        assert code_of(stub.pid, dataclasses.replace(file, fd=descriptor))[1] == 0
    finally:
        os.close(descriptor)
    assert links_of(os.getpid()) == set()
