# SPDX-License-Identifier: Apache-2.0
"""The rows of the benchmark: ways to watch the same engine do the same work."""

from __future__ import annotations

import os
import platform
import shutil
from dataclasses import dataclass
from pathlib import Path

from profinferd.agent.kernel.bcc_loader import BCC
from tests.engines import profiler
from tests.engines.fetch import CACHE
from tests.runtime.headers import merged_tree

_NO_PID = str((1 << 22) + 1)  # beyond the largest that the kernel gives
_USAGE = 2


@dataclass(frozen=True, slots=True)
class Row:
    """``kind``: nothing, attach (the command line), record, firstbyte, published, bpftrace.

    ``options`` of ``profinferd attach``. ``every``: in every so many rounds; what is slow to
    start and costs tens of percent needs few. ``at_least``: seconds of decoding in a window.
    """

    key: str
    title: str
    kind: str = "attach"
    options: tuple[str, ...] = ()
    every: int = 1
    at_least: float = 0.0

    @property
    def sees_ops(self) -> bool:
        """Whether it says anything about operators."""
        return self.kind != "nothing" and "off" not in self.options


ROWS = (
    Row("nothing", "nothing (the noise floor)", "nothing"),
    Row("tokens", "tokens and graphs: `--ops off`", options=("--ops", "off")),
    Row(
        "bare",
        "the same without scheduler and page faults: `--no-sched --no-faults`",
        options=("--ops", "off", "--no-sched", "--no-faults"),
        every=2,
    ),
    # A burst every 5 to 5.5 s: a window holds two periods, and begins between bursts.
    Row("default", "**default**: `--ops sampled`", options=("--ops", "sampled"), at_least=10.5),
    Row("all", "**every operator**: `--ops all`", options=("--ops", "all")),
    Row("record", "every operator into a file: `profinferd record`", "record", ("--ops", "all"), every=2),
    Row(
        "perf",
        "the same by perf uprobes: `--attach-method perf`",
        options=("--ops", "all", "--attach-method", "perf"),
        every=2,
    ),
    Row("bcc", "the same by BCC: `--loader bcc`", options=("--ops", "all", "--loader", "bcc"), every=3),
    Row(
        "firstbyte",
        "our programs at the first byte of every `ggml_compute_forward_*`",
        "firstbyte",
        ("--ops", "all"),
        every=3,
    ),
    Row(
        "published",
        "ProfInfer as published (BCC, Python, every function's entry and return)",
        "published",
        every=4,
    ),
    Row("bpftrace", "bpftrace, sum per `ggml_compute_forward_*`, entry and return", "bpftrace", every=4),
)
KEYS = tuple(row.key for row in ROWS)


def absent(row: Row) -> str:
    """Why a row cannot be measured here, or nothing."""
    if row.kind == "bpftrace" and shutil.which("bpftrace") is None:
        return "bpftrace is not installed"
    if (row.kind == "published" or "bcc" in row.options) and (reason := bcc_absent()):
        return reason
    if row.kind in ("attach", "record"):
        # The command line itself says whether it knows the options: a wrong pid comes later.
        code, _, err = profiler.run(row.kind, "--pid", _NO_PID, *row.options)
        if code == _USAGE:
            return err.strip().removeprefix("profinferd: ")
    return ""


def bcc_absent() -> str:
    """Why BCC cannot compile here, or nothing. Of another kernel's headers a tree is made for it."""
    if not Path(f"{BCC}/__init__.py").exists():
        return "python3-bpfcc is not installed"
    here = Path("/lib/modules") / platform.release()
    if "BCC_KERNEL_SOURCE" in os.environ or any(
        (here / n / "include/linux").is_dir() for n in ("build", "source")
    ):
        return ""
    tree = merged_tree(CACHE / "bench-bcc")
    if tree is None:
        return "no kernel headers are installed (linux-headers-amd64)"
    os.environ["BCC_KERNEL_SOURCE"] = str(tree)
    return ""
