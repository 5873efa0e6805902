# SPDX-License-Identifier: Apache-2.0
"""One budget for all targets of a daemon: both are sampled, and together they cost what one may (C18)."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

from .cases import Engine, copied, engine
from .daemons import Daemon

NAME = f"pfi-budget-{os.getpid()}"
BUDGET = 0.01
LIMIT_S = 240.0


def test_two_targets_share_one_budget(tmp_path: Path) -> None:
    """Two engines decode without a pause, until each has had two bursts."""
    for name in ("a", "b"):
        copied(engine(), tmp_path, f"{NAME}-{name}")
    with Daemon(tmp_path, f"{NAME}*") as daemon:
        daemon.scanned()
        with Engine(tmp_path / f"{NAME}-a") as a, Engine(tmp_path / f"{NAME}-b") as b:
            over = threading.Event()

            def decode(stub: Engine) -> None:
                position = 0
                while not over.is_set():
                    stub.order(f"run pos={position} out=0 us=3000 times=20")
                    position += 20

            workers = [threading.Thread(target=decode, args=(stub,)) for stub in (a, b)]
            for worker in workers:
                worker.start()
            begun = time.monotonic()
            try:
                while True:
                    reports = [daemon.target(stub.pid) for stub in (a, b)]
                    budgets = [r["report"]["budget"] for r in reports if r is not None and r.get("report")]
                    if len(budgets) == 2 and all(b is not None and b["bursts"] >= 2 for b in budgets):
                        break
                    assert time.monotonic() - begun < LIMIT_S, budgets
                    time.sleep(0.25)
                elapsed = time.monotonic() - begun
            finally:
                over.set()
                for worker in workers:
                    worker.join()
    spent = [sum(one["spent_seconds"].values()) for one in budgets]
    assert all(seconds > 0 for seconds in spent)
    # What a burst may overshoot, and what the first one may cost before anything is known, is a
    # part of one period's budget (5 s).
    assert sum(spent) <= BUDGET * (elapsed + 5.0), (spent, elapsed)
