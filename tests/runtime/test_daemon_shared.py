# SPDX-License-Identifier: Apache-2.0
"""Probes belong to files: they stay when a file's last process has ended, and go when none comes back.

Truth: the ids of the links in the kernel, and the stub's own account of what it computed.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from pathlib import Path

import pytest

from profinferd.agent.daemon import shared as shared_module
from profinferd.agent.daemon.shared import SharedPrograms, TargetPrograms
from profinferd.agent.kernel.programs import Probe
from profinferd.agent.target.inspect import inspect_target
from profinferd.agent.target.process import open_process

from .cases import Engine, copied, engine, links, nothing_left, wait_for
from .daemons import Daemon
from .test_daemon import PREFILL, decode

NAME = f"pfi-shared-{os.getpid()}"
PATIENCE = 900.0


def test_probes_of_a_file_that_nobody_maps_any_more_go_and_come_back(tmp_path: Path) -> None:
    """They outlive the last process, for the next one's first token; they expire; the file is probed anew."""
    before = links()
    path = copied(engine(), tmp_path, NAME)
    watched = {"ops": "off", "sched": False, "faults": False}  # so that every uprobe is the file's
    with Daemon(tmp_path / "d", NAME, profile=watched, targets={"expire_after": "1h"}) as daemon:

        def ours() -> set[int]:
            return held(daemon.pid)

        daemon.scanned()
        assert not ours()
        with Engine(path) as stub:
            daemon.wait_for(stub.pid)
            first = ours()
            assert first and daemon.health()["files_probed"] == 1
        wait_for(lambda: daemon.target(stub.pid) is None, "the end to be noticed")
        assert ours() == first
        with Engine(path) as stub:
            stub.order(PREFILL)
            decode(stub, 4, 3)
            daemon.wait_for_tokens(stub.pid, 4, 3)
            assert ours() == first, "none was taken off, none was added"
            daemon.write({**daemon.config, "targets": {**daemon.config["targets"], "expire_after": "1s"}})
            daemon.reload()
            time.sleep(2.5)
            assert ours() == first, "it is mapped"
            decode(stub, 7, 2)
            daemon.wait_for_tokens(stub.pid, 4, 5)
        wait_for(lambda: daemon.health()["files_probed"] == 0, "the file to be let go")
        wait_for(lambda: not ours(), "its probes to go")
        with Engine(path) as stub:
            daemon.wait_for(stub.pid)
            second = ours()
            assert len(second) == len(first) and not second & first
            stub.order(PREFILL)
            decode(stub, 4, 4)
            daemon.wait_for_tokens(stub.pid, 4, 4)
        assert daemon.stop() == 0, daemon.log()
    nothing_left(before)


def held(pid: int) -> set[int]:
    """Ids of the links to uprobes that a process has open: not of the one on the end of threads, which
    is there as long as the programs are."""
    found = set()
    for path in Path(f"/proc/{pid}/fdinfo").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            text = path.read_text()
            if "raw_tracepoint" not in text:
                found |= {int(n) for n in re.findall(r"^link_id:\s*(\d+)", text, re.MULTILINE)}
    return found


@pytest.mark.parametrize("shed", [(), ("graphs",), ("calls", "graphs")])
def test_what_was_shed_does_not_keep_a_file(tmp_path: Path, shed: tuple[str, ...]) -> None:
    """Its last process ends after the budget had some levels, or all, taken off."""
    before = links()
    path = copied(engine(), tmp_path, NAME)
    shared = SharedPrograms.load("auto", None, 8)
    try:
        with Engine(path) as stub:
            view = shared.view(stub.pid, sums=False)
            info = shared.share_files(view, inspect_target(open_process(stub.pid)))
            (file,) = info.files
            levels = view.types.constants()
            attached: dict[str, set[int]] = {}
            for level, group in (("graph", "graphs"), ("call", "calls")):
                known = held(os.getpid())
                probes = [Probe(levels[h.event], h.site.offset, h.site.moved, h.ret)
                          for h in file.hooks if h.level == level and h.event != "LV_BACKEND"]  # fmt: skip
                view.attach(group, file.open_path, stub.pid, probes)
                attached[group] = held(os.getpid()) - known
                assert attached[group]
            for group in shed:
                view.detach(group)
                wait_for(lambda gone=attached[group]: not gone & links(), "the shed level's probes to go")  # type: ignore[misc]
            view.close()
        now = time.monotonic()
        shared.tidy(now + PATIENCE - 60, PATIENCE)
        assert shared.files == 1
        for group in attached.keys() - set(shed):
            assert attached[group] <= links()
        shared.tidy(now + PATIENCE + 60, PATIENCE)
        assert shared.files == 0
        wait_for(lambda: not set().union(*attached.values()) & links(), "its probes to go")
    finally:
        shared.close()
    nothing_left(before)


@pytest.mark.parametrize("short", ["_free_layouts", "_free_templates"])
def test_what_is_kept_for_the_next_process_makes_room(tmp_path: Path, short: str) -> None:
    """More builds of engines one after the other than may be watched at once: none is turned away. What
    is in use stays."""
    before = links()
    shared = SharedPrograms.load("auto", None, 8)
    try:
        del getattr(shared, short)[3:]
        levels = shared.programs.types.constants()
        remembered: list[int] = []

        def spare() -> bool:
            if remembered:
                shared.leave_layout(remembered.pop(0), "remembered")
                return True
            return False

        def begin(stub: Engine) -> TargetPrograms:
            view = shared.view(stub.pid, sums=False)
            info = shared.share_files(view, inspect_target(open_process(stub.pid)))
            (file,) = info.files
            probes = [Probe(levels[h.event], h.site.offset, h.site.moved, h.ret)
                      for h in file.hooks if h.level == "call"]  # fmt: skip
            view.attach("calls", file.open_path, stub.pid, probes)
            return view

        shared.spare_layout = spare
        with Engine(copied(engine(), tmp_path, f"{NAME}-stays")) as stays:
            first = begin(stays)
            for number in range(6):
                with Engine(copied(engine(), tmp_path, f"{NAME}-{number}")) as stub:
                    view = begin(stub)
                    if short == "_free_layouts":
                        remembered.append(view.layout)
                        shared.use_layout(view.layout, "remembered")
                    view.close()
                assert shared.files <= 3
            stays.order(PREFILL)
            _, _ = shared.drain(time.monotonic())
            assert first.waiting, "it is watched as before"
            first.close()
    finally:
        shared.close()
    nothing_left(before)


def test_what_a_process_did_that_was_not_attached_to_in_time_is_counted(tmp_path: Path) -> None:
    """It was seen before it was looked into, and is let go of before anything was taken: nobody's events."""
    path = copied(engine(), tmp_path, NAME)
    shared = SharedPrograms.load("auto", None, 8)
    try:
        levels = shared.programs.types.constants()
        with Engine(path) as known, Engine(path) as other:
            view = shared.view(known.pid, sums=False)
            (file,) = shared.share_files(view, inspect_target(open_process(known.pid))).files
            probes = [Probe(levels[h.event], h.site.offset, h.site.moved, h.ret)
                      for h in file.hooks if h.level == "call"]  # fmt: skip
            view.attach("calls", file.open_path, known.pid, probes)
            other.order("run pos=0-3 out=3 us=0 times=3")
            _, strangers = shared.drain(time.monotonic())
            assert strangers == {other.pid} and shared.foreign_events == 0
            late = shared.view(other.pid, sums=False)
            assert late.waiting
            late.close()
            late.close()
            assert shared.foreign_events == 2 * 3, "three calls have begun and ended"
            view.close()
    finally:
        shared.close()


def test_files_that_nobody_maps_are_not_kept_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those unused for longest go, though they have not expired."""
    monkeypatch.setattr(shared_module, "MAX_UNUSED_FILES", 2)
    shared = SharedPrograms.load("auto", None, 8)
    try:
        levels = shared.programs.types.constants()
        for number in range(4):
            with Engine(copied(engine(), tmp_path, f"{NAME}-{number}")) as stub:
                view = shared.view(stub.pid, sums=False)
                (file,) = shared.share_files(view, inspect_target(open_process(stub.pid))).files
                probes = [Probe(levels[h.event], h.site.offset, h.site.moved, h.ret)
                          for h in file.hooks if h.level == "call"]  # fmt: skip
                view.attach("calls", file.open_path, stub.pid, probes)
                view.close()
        ids = list(shared._files)
        assert len(ids) == 4
        shared.tidy(time.monotonic(), PATIENCE)
        assert list(shared._files) == ids[2:]
    finally:
        shared.close()
