# SPDX-License-Identifier: Apache-2.0
"""Calls that are interrupted, left, forked, moved to other stacks: the target is unharmed.

And nothing is put to the wrong call: see :class:`.traced.Pairs` for the rules. The victim
checks every result itself.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from profinferd.agent import attach
from profinferd.agent.attach import Attachment
from profinferd.agent.errors import MachineError
from profinferd.agent.kernel import bpfsys
from profinferd.agent.kernel.check import check_machine, seccomp_mode

from .cases import wait_for
from .perf_uprobe import PerfUprobe
from .support import file_offset
from .traced import LEVELS, SANDBOX, Stir, code_of, links_of, stir, traced

MACHINE = check_machine()
WAYS = {"session": "uprobe_session", "multi": "uprobe_multi", "perf": "perf_uprobes"}
METHODS = [method for method, fact in WAYS.items() if MACHINE.has(fact)]
each_method = pytest.mark.parametrize("method", METHODS)


@each_method
@pytest.mark.parametrize(
    ("what", "count"), [("calls", 100), ("storm", 150), ("jump", 30), ("churn", 40), ("fork", 4)]
)
def test_disturbed_calls(what: str, count: int, method: str) -> None:
    """C21: signals that decode themselves, longjmp, threads that come and go, fork in a call."""
    with Stir() as victim, traced(victim, method) as one:
        (file,) = one.info.files
        assert code_of(victim.pid, file)[1] == len(file.hooks), "one breakpoint for each"
        answer = one.tell(what, count)
        assert answer.wrong == 0
        assert answer.finished > 0
        seen = one.pairs()
        assert not seen.unpaired
        assert seen.kinds["BEGIN/call"] == answer.finished + answer.left
        assert seen.kinds["END/call"] == answer.finished
        assert len(seen.open) <= len(LEVELS), "at most the call that was left last"
        if what == "calls":
            assert sum(len(ops) for ops in one.ops) == 4 * count
        one.detach()
        assert code_of(victim.pid, file)[1] == 0, "not a byte of it differs"


@each_method
@pytest.mark.parametrize(("what", "count"), [("storm", 300), ("churn", 60)])
def test_cycles_under_disturbance(what: str, count: int, method: str) -> None:
    """Probes come and go while signals nest calls and threads come and go."""
    with Stir() as victim, traced(victim, method) as one:
        wanted = 3 if method == "perf" else 15

        def cycle() -> None:
            for _ in range(wanted):
                one.detach()
                one.attach()

        with ThreadPoolExecutor(1) as pool:
            cycling = pool.submit(cycle)
            while not cycling.done():
                assert one.tell(what, count).wrong == 0
            cycling.result()
        assert one.pairs(whole=False).kinds["END/call"] > 0
        (file,) = one.info.files
        one.detach()
        assert code_of(victim.pid, file)[1] == 0


@pytest.mark.skipif("session" not in METHODS, reason="this kernel cannot leave out a single return probe")
@pytest.mark.parametrize(("what", "finished"), [("altstack", 100), ("swap", 60), ("cross", 40)])
def test_several_stacks(what: str, finished: int) -> None:
    """A call waits while another one runs on a second stack of the same thread.

    With a return probe on the second one the kernel would kill the process: it takes calls of
    a thread to be one stack. So the second one is not followed; the first is, to its end.
    """
    with Stir() as victim, traced(victim, "session") as one:
        answer = one.tell(what, finished if what == "altstack" else 20)
        assert answer.wrong == 0
        assert answer.finished >= finished
        seen, stats = one.pairs(), one.programs.stats()
        assert not seen.unpaired
        assert not seen.open
        assert seen.kinds["END/call"] == seen.kinds["BEGIN/call"] == (100 if what == "altstack" else 20)
        assert seen.kinds["ABANDONED/call"] == 0
        passed_over = answer.finished - seen.kinds["END/call"]
        assert stats["skipped_return"] == len(LEVELS) * passed_over > 0
        # It is not blind afterwards.
        one.events.clear()
        assert one.tell("calls", 10).wrong == 0
        assert one.pairs().kinds["END/call"] == 10


@each_method
def test_a_forked_child_gets_its_code_back(method: str) -> None:
    """It inherits the breakpoints of its parent, in the middle of a call, and loses them with it."""
    with Stir() as victim, traced(victim, method) as one:
        victim.start("twin", 1)
        child = int(victim.line())
        try:
            (file,) = one.info.files
            one.drain()
            assert {int(e["tgid"]) for e in one.pairs().begun.values()} == {victim.pid}
            if method == "perf":
                # Perf events take theirs out, one by one, as soon as the child runs into them.
                wait_for(lambda: code_of(child, file)[1] in (0, len(file.hooks)), "the breakpoints to go")
            else:
                assert code_of(child, file)[1] == len(file.hooks)
            one.detach()
            assert code_of(child, file)[1] == 0
            time.sleep(0.05)
            assert "Z" not in Path(f"/proc/{child}/stat").read_text().rpartition(")")[2][:3]
        finally:
            os.kill(child, 9)


@each_method
def test_another_tracer_on_the_same_functions(method: str) -> None:
    """Entry and return of the same functions, at their first byte as tracers do; both see all."""
    with Stir() as victim, contextlib.ExitStack() as stack:
        others = [
            stack.enter_context(PerfUprobe(stir(), file_offset(stir(), name), victim.pid, ret))
            for name in LEVELS
            for ret in (False, True)
        ]
        with traced(victim, method) as one:
            assert one.tell("calls", 50).wrong == 0
            assert one.tell("storm", 20).wrong == 0
            seen = one.pairs()
            count = seen.kinds["END/call"]
            assert count >= 70
            assert not seen.open
            assert not seen.unpaired
            assert [other.count() for other in others] == [count] * len(others)
        assert one.victim.process.poll() is None
        victim.start("calls", 30)
        assert victim.answer().wrong == 0
        assert [other.count() for other in others] == [count + 30] * len(others), "it goes on without us"


@each_method
@pytest.mark.parametrize(("what", "status"), [("exit", 7), ("exec", None)])
def test_the_process_ends_in_a_call(what: str, status: int | None, method: str) -> None:
    """Nothing stays open that a later thread of that number could be taken for."""
    with Stir() as victim, traced(victim, method) as one:
        victim.start(what, 1)
        if status is None:
            deadline = time.monotonic() + 60
            while os.readlink(f"/proc/{victim.pid}/exe") == str(stir()) and time.monotonic() < deadline:
                time.sleep(0.01)
            assert os.readlink(f"/proc/{victim.pid}/exe") != str(stir())
            assert victim.process.poll() is None
        else:
            assert victim.process.wait(60) == status
        one.drain()
        seen = one.pairs()
        assert seen.kinds["BEGIN/call"] == 1
        if status is not None:
            assert not seen.open
            assert seen.kinds["ABANDONED/call"] == 1


# ---- targets with a seccomp filter (D13) ------------------------------------------------


def sandboxed() -> Stir:
    return Stir([sys.executable, "-c", SANDBOX])


@each_method
def test_a_sandboxed_target(method: str) -> None:
    """Where the trial on a child of ours says that it is safe, it is."""
    with sandboxed() as victim:
        assert seccomp_mode(victim.pid) == 2
        with Attachment.open(victim.pid, method=method) as attachment:
            victim.start("calls", 50)
            while not victim.answered(0.01):
                attachment.poll(0)
            assert victim.answer().wrong == 0
            attachment.poll(0)
            assert sum(call.count for call in attachment.snapshot().calls) == 50


def test_a_kernel_that_would_kill_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The target is refused before anything is attached; others are not concerned."""

    def refuse() -> None:
        raise MachineError("this kernel kills processes with a seccomp filter at return probes", "update it")

    monkeypatch.setattr(attach, "returns_under_seccomp", refuse)
    with sandboxed() as victim:
        before = {link.id for link in bpfsys.links()}
        with pytest.raises(MachineError, match="seccomp"):
            Attachment.open(victim.pid)
        mine = {link.id for link in bpfsys.links()} - before
        assert not mine & own_links()
        victim.start("calls", 5)
        assert victim.answer().finished == 5
    with Stir() as plain:
        Attachment.open(plain.pid).close()


def own_links() -> set[int]:
    """The BPF links that this process holds."""
    return links_of(os.getpid())
