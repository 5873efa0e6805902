# SPDX-License-Identifier: Apache-2.0
"""A thousand times armed and disarmed under load: the target's bytes and answers are the same."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from profinferd.agent.kernel.check import check_machine
from profinferd.agent.kernel.programs import Probe

from .bursting import Bursts, check_shares
from .cases import Engine, engine
from .test_sampled import Chat, steps
from .traced import Answer, Stir, Traced, code_of, traced

MACHINE = check_machine()
WAYS = {"session": "uprobe_session", "multi": "uprobe_multi", "perf": "perf_uprobes"}
METHODS = [method for method, fact in WAYS.items() if MACHINE.has(fact)]
AT_ONCE = 10
"""Cycles that go on at the same time: what each takes is the kernel's waiting."""
EACH = {"session": 100, "multi": 50, "perf": 5}
"""So many each: 1,000 in all, 500 with plain links, 50 with perf uprobes, which take longest."""
CALLS = 300
LOAD, SECONDS = 6, 600.0
"""Answers of the victim meanwhile, at least, of which something was seen; how long that may take."""
SIZES = 17


def _cycle(one: Traced, who: int, times: int, loaded: threading.Event) -> None:
    """So many times, and until it has worked enough meanwhile."""
    levels = one.programs.types.constants()
    (file,) = one.info.files
    probes = [
        Probe(levels[h.event], h.site.offset, h.site.moved, h.ret) for h in file.hooks if h.level == "op"
    ]
    while times > 0 or not loaded.is_set():
        times -= 1
        one.programs.attach(f"ops {who}", file.open_path, one.victim.pid, probes)
        one.programs.detach(f"ops {who}")


def _unwatched(times: int) -> list[Answer]:
    with Stir() as victim:
        answers = []
        for _ in range(times):
            victim.start("calls", CALLS)
            answers.append(victim.answer())
    return answers


@pytest.mark.parametrize("method", METHODS)
def test_cycles_under_load(method: str) -> None:
    """C18: answers as of a target that nobody watches, and not a byte of its code differs."""
    with Stir() as victim, traced(victim, method) as one:
        (file,) = one.info.files
        one.programs.detach("ops")
        quiet = code_of(victim.pid, file)[1]
        for size in range(SIZES):
            one.programs.give_spare(victim.pid, 0, size, 0, 0, 64)
        mode = one.programs.types.constants()["OPS_SUM"]
        one.programs.set_target(victim.pid, layout=0, mode=mode)
        answers, loaded, until = [], threading.Event(), time.monotonic() + SECONDS
        with ThreadPoolExecutor(AT_ONCE) as pool:
            try:
                cycling = [pool.submit(_cycle, one, who, EACH[method], loaded) for who in range(AT_ONCE)]
                while not all(one_of_them.done() for one_of_them in cycling):
                    answers.append(one.tell("calls", CALLS))
                    assert time.monotonic() < until, "nothing was seen of it"
                    if len(answers) >= LOAD and one.programs.sums(0, 64)["calls"].sum():
                        loaded.set()
            finally:
                loaded.set()
            for future in cycling:
                future.result()
        assert answers == _unwatched(len(answers))
        assert code_of(victim.pid, file)[1] == quiet, "no op probe is left"
        assert one.programs.owned_slots() == []
        sums = one.programs.sums(0, 64)
        assert int(sums["calls"].sum()) == int(np.asarray(sums["bucket"]).sum()) > 0
        one.detach()
        assert code_of(victim.pid, file)[1] == 0


def test_bursts_one_after_the_other() -> None:
    """Fifty bursts of a few graphs: every one of these graphs is in the sums, and right."""
    with Engine(engine()) as stub, Bursts(stub) as watch:
        chat = Chat(watch, us=50)
        for _ in range(50):
            watch.begin()
            chat.tokens(2)
            watch.end()
            chat.tokens(1)
        seen = watch.snapshot()
    assert steps(seen) == (150, 100, 0)
    check_shares(seen, "decode", chat.all["decode"], sure=3.0)
