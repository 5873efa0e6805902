# SPDX-License-Identifier: Apache-2.0
"""What is known of files stays known; what could not be looked into is tried again, not taken for nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from profinferd.agent.daemon import scout as scout_module
from profinferd.agent.daemon.scout import Scout
from profinferd.agent.target import factscache
from profinferd.agent.target.catalogue import load_catalogue
from profinferd.agent.target.child import Child
from profinferd.agent.target.factscache import AGAIN_S, FactsCache
from profinferd.agent.target.inspect import start_child
from profinferd.agent.target.process import FileId, MappedFile, executable_files

from ..runtime.cases import Engine, engine

SILENT = ["sleep", "100"]
KILLED = ["sh", "-c", "kill -KILL $$"]
DEAD_AT_ONCE = ["sh", "-c", "kill -SEGV $$"]
DEAD_AT_THE_FIRST = ["sh", "-c", "echo '{\"start\": 0}'; kill -SEGV $$"]
PATIENCE = 0.3
"""With a child that says nothing."""
LONG = 60.0
"""With one that has to come to it, on whatever machine."""


class Bench:
    """A cache whose clock stands, and whose children are what the test says."""

    def __init__(self, stub: Engine) -> None:
        self.now = 0.0
        self.cache = FactsCache(lambda: self.now)
        self.pid = stub.pid
        mapped = [f for f in executable_files(stub.pid) if f.inode]
        self.engine = next(f for f in mapped if f.path == os.path.realpath(engine()))
        self.other = next(f for f in mapped if f is not self.engine)
        self.asked = 0

    def learn(self, timeout: float = LONG) -> None:
        """The engine's file first."""
        files: list[MappedFile] = self.cache.unknown([self.engine, self.other])
        self.asked += len(files)
        self.cache.learn([(file, f"/proc/{self.pid}/root") for file in files], load_catalogue(), timeout)

    def verdicts(self) -> tuple[bool | None, bool | None]:
        return self.cache.verdict(name(self.engine)), self.cache.verdict(name(self.other))


def name(file: MappedFile) -> FileId:
    return file.dev, file.inode


@pytest.fixture
def bench() -> Iterator[Bench]:
    with Engine(engine()) as stub:
        yield Bench(stub)


def children(monkeypatch: pytest.MonkeyPatch, *commands: list[str]) -> None:
    """The next children; after them come real ones."""
    left = list(commands)
    monkeypatch.setattr(factscache, "start_child", lambda: Child(left.pop(0)) if left else start_child())


@pytest.mark.parametrize("command", [SILENT, KILLED, DEAD_AT_ONCE])
def test_a_machine_without_time_or_memory(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    """An engine that nobody could look into is no file without an engine: it is found later."""
    children(monkeypatch, command)
    bench.learn(PATIENCE if command is SILENT else LONG)
    assert bench.verdicts() == (None, None)
    assert bench.cache.again_s([name(bench.engine)]) == AGAIN_S[0]
    bench.now = AGAIN_S[0] - 0.1
    bench.learn()
    assert bench.asked == 2, "not before its time"
    bench.now = AGAIN_S[0]
    bench.learn()
    assert bench.asked == 4
    assert bench.verdicts() == (True, False)
    assert bench.cache.again_s([name(bench.engine), name(bench.other)]) is None
    bench.now += 1e6
    bench.learn()
    assert bench.asked == 4


def test_it_is_tried_ever_less_often(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    children(monkeypatch, *[SILENT] * (len(AGAIN_S) + 2))
    waits = []
    for _ in range(len(AGAIN_S) + 2):
        bench.learn(0.05)
        at = bench.cache.again_s([name(bench.engine)])
        assert at is not None
        waits.append(at - bench.now)
        bench.now = at
    assert waits == [*AGAIN_S, AGAIN_S[-1], AGAIN_S[-1]]


def test_a_file_that_takes_too_long_is_tried_three_times(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its CPU time is the file's, or the hypervisor's: nobody can tell, so neither is believed."""
    children(monkeypatch, *[["sh", "-c", "echo '{\"start\": 0}'; kill -XCPU $$"]] * 3)
    for times in range(1, 4):
        bench.learn()
        assert bench.cache.verdict(name(bench.engine)) is (None if times < 3 else False)
        bench.now += 1e5
    bench.learn()
    assert bench.cache.again_s([name(bench.engine)]) is None


def test_each_file_has_cpu_time_of_its_own() -> None:
    """What earlier files of the same request took does not count."""
    code = (
        "import resource, time\n"
        "from profinferd.agent.target import inspect_child\n"
        "inspect_child.limit_ourselves(); inspect_child.allow_a_file()\n"
        "first = resource.getrlimit(resource.RLIMIT_CPU)\n"
        "until = time.process_time() + 2.2\n"
        "while time.process_time() < until: pass\n"
        "inspect_child.allow_a_file(); second = resource.getrlimit(resource.RLIMIT_CPU)\n"
        "assert second[0] - first[0] in (1, 2, 3), (first, second)\n"
        "assert first[1] == second[1] == inspect_child.ALL_CPU_SECONDS > second[0]\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_file_that_kills_whoever_looks_is_left_alone(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is to blame, and the others with it are not."""
    children(monkeypatch, DEAD_AT_THE_FIRST)
    bench.learn()
    assert bench.verdicts() == (False, None)
    assert bench.cache.again_s([name(bench.engine)]) is None
    bench.now = AGAIN_S[0]
    bench.learn()
    assert bench.asked == 3
    assert bench.verdicts() == (False, False)


def test_the_scout_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process whose engine could not be looked into is looked at again, without anybody's saying so."""
    now = 0.0
    children(monkeypatch, SILENT)
    monkeypatch.setattr(scout_module, "TIMEOUT", PATIENCE)
    scout = Scout(lambda: None, 1e9)
    scout.cache = FactsCache(lambda: now)
    scout._next_scan = scout._next_all = 1e9
    with Engine(engine()) as stub:
        scout._look([stub.pid])
        assert scout.poll(0.0, frozenset()) == ([], [])
        monkeypatch.setattr(scout_module, "TIMEOUT", LONG)
        scout.poll(AGAIN_S[0] - 0.1, frozenset())
        assert not scout._queue
        now = AGAIN_S[0] + 3
        scout.poll(now, frozenset())
        assert list(scout._queue) == [stub.pid]
        scout._look([scout._queue.popitem()[0]])
        (found,), _ = scout.poll(now, frozenset())
        assert found.process.pid == stub.pid and found.info is not None
        found.info.close()
        assert not scout._again
    scout.close()
