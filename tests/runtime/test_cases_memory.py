# SPDX-License-Identifier: Apache-2.0
"""Memory that is not there when a probe reads it, rings that are full, and who is woken."""

from __future__ import annotations

import select
import threading
import time

import pytest

from profinferd.agent.kernel.programs import GgmlPrograms

from .cases import METHODS, Engine, Watch, check_ops, engine, kernels, kernels_seen


@pytest.mark.parametrize("method", METHODS)
def test_pages_that_are_not_present(method: str) -> None:
    """C10: every page of the graph was dropped from the page table: nodes, positions and rows are read."""
    with Engine(engine()) as stub, Watch(stub, method) as watch:
        replies = [watch.run("drop pos=0-99 out=99 us=50")]
        replies += [watch.run(f"drop fresh uid={n % 2} pos={n} out=0 us=50") for n in range(100, 106)]
        assert all(reply["present"] == 0 for reply in replies), "the stub did not drop its pages"
        snapshot = watch.snapshot()
        check_ops(snapshot, replies)
        assert (snapshot.tokens.prefill, snapshot.tokens.decode, snapshot.tokens.output_rows) == (100, 6, 7)
        assert snapshot.requests.started == 1 and snapshot.tokens.ambiguous == 0
        assert {op.op for op in snapshot.ops} == {op for op, _ in kernels(replies)}


def test_memory_that_is_nowhere() -> None:
    """C10: a node that cannot be read is counted as such: no node of zeros, and the next graph is whole."""
    with Engine(engine()) as stub, Watch(stub) as watch:
        good = watch.run("pos=0-3 out=3 us=50")
        broken = watch.run("hole pos=4 out=0 us=50")
        assert len(broken["kernels"]) < len(good["kernels"])
        after = watch.run("pos=5 out=0 us=50")
        snapshot = watch.snapshot()
        assert snapshot.lost.by_kind["fault_graph"] > 0
        assert sum(call.count for call in snapshot.calls) == 3
        names = {op.op for op in snapshot.ops}
        assert names <= {op for op, _ in kernels([good, broken, after])}
        seen = kernels_seen(snapshot)
        assert all(count <= seen[key] for key, count in kernels([good, after]).items())
        assert all(op.seconds > 0 for op in snapshot.ops)


@pytest.mark.parametrize("ring", ["ops", "events", "nodes", "ints"])
def test_a_full_ring(ring: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """C11: a ring of one page that nobody empties: what is lost is counted, and nobody else's time."""
    load = GgmlPrograms.load

    def tiny(method: str = "auto", **_: object) -> GgmlPrograms:
        return load(method, ring_bytes={ring: 4096})

    monkeypatch.setattr(GgmlPrograms, "load", tiny)
    with Engine(engine()) as stub, Watch(stub) as watch:
        assert stub.order("run pos=0-2 out=2 us=200")  # chooses the layout
        wait = 60
        while watch.attachment._layout is None and wait:
            watch.drain()
            wait -= 1
        assert watch.attachment._layout is not None
        first = [watch.run("pos=3 out=0 us=50")]
        # Nobody drains meanwhile. 30 x 29 op records of 24 bytes are 20 KiB, events 9 KiB.
        begun = time.monotonic()
        burst = stub.order("run pos=4 out=0 us=0 times=30")
        whole = time.monotonic() - begun  # some 20 ms, or as long as the machine stood still meanwhile
        stub.order("run pos=0-1999 out=1999 us=0 layers=5")
        watch.drain()
        lost = watch.stats()[f"lost_{ring}"]
        assert lost > 0, f"nothing was lost: {watch.stats()}"
        snapshot = watch.snapshot()
        assert snapshot.lost.by_kind[ring] >= lost and snapshot.lost.total >= lost
        # Nothing is invented, and no gap is given to a neighbour.
        expected = kernels([*first, *[burst] * 30])
        for key, calls in kernels_seen(snapshot).items():
            assert calls <= expected[key] + 80, key
        longest = max((end - begin for *_, begin, end in burst["kernels"]), default=0) / 1e9
        for op in snapshot.ops:
            if op.phase == "decode" and op.calls:
                assert op.seconds / op.calls < max(0.02, 5 * longest, whole), op
        counters = snapshot.counters
        assert counters is not None and counters.hits["op"] >= sum(expected.values())  # maps do not lose
        calm = [watch.run(f"pos={n} out=0 us=50 moe kv=512") for n in range(600, 603)]
        after = watch.snapshot()
        ids = {graph.id for graph in after.graphs} - {graph.id for graph in snapshot.graphs}
        new = [graph for graph in after.graphs if graph.id in ids and graph.nodes == calm[0]["nodes"]]
        if ring in ("ops", "events", "ints"):
            assert sum(graph.count for graph in new) == 3 and not any(graph.uncovered for graph in new)
        assert after.lost.total >= snapshot.lost.total


def test_aggregates_do_not_depend_on_a_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    """C11: hits are counted in maps: none is missing however much was lost in rings."""
    load = GgmlPrograms.load
    every = dict.fromkeys(("ops", "events", "nodes", "ints"), 4096)
    monkeypatch.setattr(GgmlPrograms, "load", lambda m="auto", **_: load(m, ring_bytes=every))
    with Engine(engine()) as stub, Watch(stub) as watch:
        reply = stub.order("run pos=0 out=0 us=0 times=100")
        counters = watch.snapshot().counters
        assert counters is not None
        assert counters.hits["op"] == 100 * len(reply["kernels"])
        assert counters.hits["token"] == 200 and counters.hits["graph"] == 400


def test_nobody_is_woken() -> None:
    """C19: a reader that sleeps on the rings stays asleep while records arrive."""
    with Engine(engine()) as stub, Watch(stub) as watch:
        watch.run("pos=0-3 out=3 us=50")
        names = ("events", "ops", "nodes", "ints")
        rings = {name: watch.attachment._programs._object.map(name).fd for name in names}
        woken: list[int] = []
        with select.epoll() as poll:
            for fd in rings.values():
                poll.register(fd, select.EPOLLIN)
            sleeper = threading.Thread(target=lambda: woken.extend(fd for fd, _ in poll.poll(1.0)))
            sleeper.start()
            stub.order("run pos=4 out=0 us=100 times=5")
            stub.order("run pos=0-99 out=99 us=100 moe")
            sleeper.join()
            assert woken == []
            # The records were there all the time: asking anew finds them.
            for fd in rings.values():
                poll.modify(fd, select.EPOLLIN)
            assert {fd for fd, _ in poll.poll(0)} == set(rings.values())
        assert watch.snapshot().tokens.prefill == 104
