# SPDX-License-Identifier: Apache-2.0
"""Design D13: nothing of a target is ever loaded into profinferd, whatever the engine.

Truth is the kernel's own list of what its processes map, read all the while: of the program that
attaches and of the short-lived ones that it starts.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tests.engines import pjrt
from tests.engines.fetch import CACHE, Engines
from tests.engines.models import model
from tests.engines.servers import EngineDied, Options, usable
from tests.engines.test_backends import Offloading
from tests.runtime import cuda_stand_in
from tests.runtime.callvictims import ROOT, Told
from tests.tries import in_one_of, timed

ATTEMPTS = 6

File = tuple[str, int]
"""Device and inode, as /proc/PID/maps has them."""


def mapped(pid: int) -> dict[File, str]:
    """Files that a process maps to execute; none when it is gone."""
    found: dict[File, str] = {}
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return found
    for line in lines:
        fields = line.split(None, 5)
        if "x" in fields[1] and len(fields) == 6 and fields[4] != "0":
            found[fields[3], int(fields[4])] = fields[5]
    return found


def family(pid: int) -> Iterator[int]:
    """The process and what it has started."""
    yield pid
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                yield from family(int(child))
    except (FileNotFoundError, ProcessLookupError):
        return


class Witness:
    """Reads what a process and its children map until told to stop."""

    def __init__(self, pid: int) -> None:
        self.seen: dict[File, str] = {}
        self.processes: set[int] = set()
        self._pid, self._over = pid, threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()

    def _look(self) -> None:
        while not self._over.wait(0.005):
            for pid in family(self._pid):
                self.processes.add(pid)
                self.seen |= mapped(pid)

    def stop(self) -> None:
        self._over.set()
        self._thread.join()


@contextmanager
def attached(pid: int) -> Iterator[Witness]:
    """``profinferd attach``, watched from its first moment to its end."""
    command = [sys.executable, "-m", "profinferd.agent", "attach", "-p", str(pid), "--ops", "off"]
    watcher = subprocess.Popen(
        [*command, "--budget", "100%"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=dict(os.environ),
    )  # fmt: skip
    witness = Witness(watcher.pid)
    try:
        assert watcher.stderr is not None
        for line in watcher.stderr:
            if "attached to process" in line:
                break
        yield witness
        watcher.send_signal(2)
        out, err = watcher.communicate(timeout=240)
        assert watcher.returncode == 0, out + err
    finally:
        witness.stop()
        if watcher.poll() is None:
            watcher.kill()
            watcher.wait()


def expect_nothing_of(pid: int, words: tuple[str, ...], work: Callable[[], object]) -> None:
    """None of the files with these words in their names, which the target does map, nor any other
    that it has of its own."""
    its = {file: path for file, path in mapped(pid).items() if any(word in path for word in words)}
    assert len(its) >= len(words), f"the target maps {list(mapped(pid).values())}"
    in_one_of(ATTEMPTS, lambda: nothing_of(pid, words, work, set(its)))


def nothing_of(pid: int, words: tuple[str, ...], work: Callable[[], object], its: set[File]) -> None:
    with attached(pid) as witness:
        work()
    assert any("python" in path for path in witness.seen.values())
    assert not set(witness.seen) & its
    assert not [path for path in witness.seen.values() if any(word in path for word in words)]
    # It lives for a moment: on a busy machine nobody may look in time.
    timed(len(witness.processes) > 1, "the process that looks into files was never seen")


def test_pjrt() -> None:
    try:
        stock = pjrt.fetch()
    except RuntimeError as error:
        pytest.skip(f"no PJRT plugin to test with: {error}")
    victim = ROOT / "tests" / "engines" / "pjrt_victim.py"
    with Told([stock.python, victim, stock.site, stock.plugin], env={"OMP_NUM_THREADS": "1"}) as told:
        told.tell("load")

        def work() -> None:
            told.tell("compile one 64")
            told.tell("run one 3")

        expect_nothing_of(told.pid, ("pjrt_c_api_cpu_plugin",), work)


def test_cuda() -> None:
    with Told([cuda_stand_in.program()]) as told:

        def work() -> None:
            told.tell("names")
            told.tell("driver 5")
            told.tell("runtime 5")

        expect_nothing_of(told.pid, ("libcuda.so", "libcudart.so"), work)


def test_vulkan(engines: Engines) -> None:
    cache = {"GGML_VK_VISIBLE_DEVICES": "0", "MESA_SHADER_CACHE_DIR": str(CACHE / "mesa")}
    options = replace(Options(model("dense2-f16"), threads=1, warmup=False), env=cache)
    if reason := usable("skulk", options):
        pytest.skip(f"the only stock build with Vulkan does not run here: {reason}")
    try:
        with Offloading(options, engines, "-ngl", "2", "-dev", "Vulkan0") as server:
            words = ("libggml-vulkan", "libvulkan.so", "libvulkan_lvp", "libllama")
            expect_nothing_of(server.pid, words, lambda: server.completion([300, 301], 3))
    except EngineDied as error:
        pytest.skip(f"no llvmpipe here (Debian: mesa-vulkan-drivers): {error}")
