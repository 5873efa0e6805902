# SPDX-License-Identifier: Apache-2.0
"""What a probe costs on this machine, in the words of the budget's controller."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from .kernel.calibrate import calibrate
from .kernel.calibration import Calibration
from .model.budget import Prices

STATE = Path("/var/lib/profinferd")
"""Where calibrations are kept: measured once per machine, kernel, method and build."""

COLD = 1.5
"""An engine that reads its weights between two hits finds the kernel's lines gone: there a hit
cost 1.2 to 1.8 times what calibration finds, least with one thread (docs/benchmarks.md)."""

_CAUSES = {
    "wait_ns": "wait",
    "wait_record_ns": "wait_record",
    "other_switch_ns": "other_switch",
    "fault_ns": "fault",
}
ASSUMED = Prices(0, 0, 0, 0, wait_ns=1500, wait_record_ns=300, other_switch_ns=400, fault_ns=600)
"""Of waits and page faults, where the kernel does not time its programs for us (that takes CAP_SYS_ADMIN):
some more than on the machine that this was written on."""

WORST_CYCLE_NS = 10e6
"""What arming and disarming two sites takes at most: 0.3 to 0.7 ms were measured, 5 ms with a hundred
sites (design D5). A calibration on a machine with five times as much to do as it has cores said 4 s,
and no burst would ever be paid for."""


def prices_here(
    method: str,
    mode: str,
    btf_path: str | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> Prices:
    """Calibrated prices for ``method``; measured now (1-3 s) if this machine has none yet.

    ``mode``: what an op hit does, ``trace`` (a record) or ``sum``.
    """
    return prices_of(calibrate(STATE, method, btf_path=btf_path, progress=progress), mode)


def prices_of(found: Calibration, mode: str) -> Prices:
    """Prices per hit in ns, in an engine at work. A call or a graph is a pair of hits in the calibration."""

    def ns(kind: str, mode: str | None = None) -> float:
        figure = found.hit(kind, mode=mode) if mode else found.hit(kind)
        if figure is None:
            raise ValueError(f"the calibration has no price for {kind}")
        return figure.ns * COLD

    return Prices(
        call_ns=ns("call") / 2,
        graph_ns=ns("graph") / 2,
        op_ns=ns("op", mode),
        # The median of a stall can hide in noise; its upper end cannot.
        cycle_ns=min(found.ns_per_cycle_stall.high, WORST_CYCLE_NS) if found.ns_per_cycle_stall else 1e6,
        walk_ns=ns("walk"),
        **{name: ns(kind) if found.hit(kind) else getattr(ASSUMED, name) for name, kind in _CAUSES.items()},
    )
