# SPDX-License-Identifier: Apache-2.0
"""Looking into a target and loading the programs that will watch it, side by side."""

from __future__ import annotations

import dataclasses
import mmap
from concurrent.futures import ThreadPoolExecutor

from .causes import CauseOptions, Causes
from .kernel.programs import GgmlPrograms
from .target.facts import TargetInfo
from .target.inspect import inspect_target, start_child
from .target.process import Process

KEPT_RINGS = {"events": 4 << 20, "ops": 8 << 20, "ints": 4 << 20}
"""Sizes of rings where every record is kept. On a machine whose cores are all busy, we who give way may not
run for seconds, and each record that finds no room is a hole in the file."""
KEPT_ROOM = 8
"""Times the usual size of the rings for waits, page faults and barriers, for the same reason."""


def look_and_load(
    process: Process,
    *,
    method: str,
    btf_path: str | None,
    loader: str,
    ops: str,
    causes: CauseOptions | None,
    kept: bool,
) -> tuple[TargetInfo, GgmlPrograms, Causes]:
    """Look into the target while the kernel verifies the programs: both take a tenth of a second.

    Arguments as those of :meth:`.attach.Attachment.open`. Raises TargetError, TargetEnded or
    MachineError; nothing is left open then.
    """
    kind: type[GgmlPrograms] = GgmlPrograms
    if loader == "bcc":
        from .kernel.bcc_loader import BccPrograms

        kind = BccPrograms
    # Only a full trace has records for every kernel; a ring counts twice in our memory.
    rings = dict(KEPT_RINGS) if kept else {}
    if ops != "all":
        rings["ops"] = mmap.PAGESIZE
    if kept:
        causes = dataclasses.replace(causes or CauseOptions(), room=KEPT_ROOM)

    def load() -> tuple[GgmlPrograms, Causes]:
        programs = kind.load(method, btf_path=btf_path, ring_bytes=rings)
        try:
            return programs, Causes.load(programs, causes, btf_path)
        except BaseException:
            programs.close()
            raise

    child = start_child()
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(load)
        try:
            info = inspect_target(process, child=child)
        except BaseException:
            if loading.exception() is None:
                for part in reversed(loading.result()):
                    part.close()
            raise
        try:
            return info, *loading.result()
        except BaseException:
            info.close()
            raise
