# SPDX-License-Identifier: Apache-2.0
"""Defects of ours that meet one target: planted into the real daemon, for one program alone."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from tests.victims.build import build

from .cases import Engine, copied, engine, links, nothing_left, wait_for
from .daemons import Daemon
from .test_daemon import PREFILL, decode

NAME = f"pfi-defect-{os.getpid()}"
PLANTED = """
import os, sys
from profinferd.agent import attach
from profinferd.agent.daemon import retries
name, attempts, good_from, retries.AGAIN_S = {name!r}, {attempts!r}, {good_from}, {again!r}
real = getattr(attach.Attachment, name)
def planted(first, *rest, **more):
    process = getattr(first, "process", first)
    if process.exe.endswith("-bad"):
        with open(attempts, "a") as file:
            print("x", file=file)
        if os.stat(attempts).st_size < 2 * good_from:
            raise ZeroDivisionError("planted")
    return real(first, *rest, **more)
if name == "adopt":
    attach.Attachment.adopt = staticmethod(planted)
else:
    setattr(attach.Attachment, name, planted)
from profinferd.agent.cli import main
sys.exit(main(sys.argv[5:]))
"""
NEVER = 1 << 30


def planted(
    folder: Path, name: str, *, good_from: int = NEVER, again: tuple[float, ...] = (1e9,), expire: str = "1h"
) -> tuple[Daemon, Path]:
    """A daemon in which a method of attachments fails for programs whose names end in "-bad", but for
    the ``good_from``-th time and later ones; and the file with a line for each time."""
    attempts = folder / "attempts"
    attempts.touch()
    code = PLANTED.format(name=name, attempts=str(attempts), good_from=good_from, again=again)
    under = [sys.executable, "-c", code, "x"]
    return Daemon(folder / "daemon", f"{NAME}*", under=under, targets={"expire_after": expire}), attempts


@pytest.mark.parametrize("name", ["adopt", "poll", "observe", "snapshot"])
def test_a_defect_ends_one_target_and_no_other(tmp_path: Path, name: str) -> None:
    """The other one's tokens are counted, and the first is listed with the reason."""
    before = links()
    good, bad = (copied(engine(), tmp_path, f"{NAME}-{kind}") for kind in ("good", "bad"))
    daemon, _ = planted(tmp_path, name)
    with daemon, Engine(good) as one, Engine(bad) as other:
        daemon.scanned()
        daemon.wait_for(one.pid)
        for stub in (one, other):
            stub.order(PREFILL)
            decode(stub, 4, 3)
        seen = daemon.wait_for(other.pid, lambda t: t["state"] == "unprofiled")
        assert seen["reason"] == "internal error: ZeroDivisionError: planted"
        decode(one, 7, 2)
        daemon.wait_for_tokens(one.pid, 4, 5)
        daemon.wait_for_sample(0, "profinfer_target_state", target=f"{NAME}-bad", reason="internal")
        decode(other, 7, 2)
        assert daemon.stop() == 0, daemon.log()
    nothing_left(before)


@pytest.mark.parametrize("name", ["poll", "observe", "snapshot"])
def test_a_target_that_failed_holds_nothing(tmp_path: Path, name: str) -> None:
    """Its file's probes go once nobody maps it: it is no user of theirs any more."""
    bad = copied(engine(), tmp_path, f"{NAME}-bad")
    daemon, _ = planted(tmp_path, name, expire="1s")
    with daemon:
        with Engine(bad) as stub:
            daemon.scanned()
            daemon.wait_for(stub.pid, lambda t: True)
            stub.order(PREFILL)
            daemon.wait_for(stub.pid, lambda t: t["state"] == "unprofiled")
        wait_for(lambda: daemon.target(stub.pid) is None, "the end to be noticed")
        wait_for(lambda: daemon.health()["files_probed"] == 0, "the probes to go")
        assert daemon.stop() == 0, daemon.log()


def test_it_is_not_tried_again_with_every_library(tmp_path: Path) -> None:
    """Each library that it loads has it looked at; of what failed there is one attempt and one line."""
    path = copied(engine(), tmp_path, f"{NAME}-bad")
    library = build("int nothing_of_an_engine;\n", shared=True, name="nothing.so")
    daemon, attempts = planted(tmp_path, "adopt")
    with daemon, Engine(path) as stub:
        daemon.scanned()
        daemon.wait_for(stub.pid, lambda t: t["state"] == "unprofiled")
        since = daemon.target(stub.pid)
        for number in range(5):
            known = daemon.health()["files_known"]
            stub.order(f"load {shutil.copy(library, tmp_path / f'nothing-{number}.so')}")
            wait_for(lambda known=known: daemon.health()["files_known"] > known, "the library to be seen")  # type: ignore[misc]
        daemon.reload()
        wait_for(lambda: daemon.health()["files_known"] > 0, "the daemon to answer")
        assert attempts.read_text() == "x\n"
        assert daemon.log().count("target cannot be profiled") == 1
        now = daemon.target(stub.pid)
        assert since is not None and now is not None
        assert now["state"] == "unprofiled" and now["since_seconds"] >= since["since_seconds"]
        daemon.wait_for_sample(0, "profinfer_target_state", target=f"{NAME}-bad", reason="internal")


def test_what_passes_is_tried_again_by_itself(tmp_path: Path) -> None:
    """Nobody maps anything: the third attempt comes, and it is watched from then on."""
    path = copied(engine(), tmp_path, f"{NAME}-bad")
    daemon, attempts = planted(tmp_path, "adopt", good_from=3, again=(0.2, 0.4, 1e9))
    with daemon, Engine(path) as stub:
        daemon.wait_for(stub.pid)
        assert attempts.read_text() == "x\n" * 3
        assert daemon.log().count("target cannot be profiled") == 1
        assert daemon.log().count("target found") == 1
        stub.order(PREFILL)
        decode(stub, 4, 3)
        daemon.wait_for_tokens(stub.pid, 4, 3)
