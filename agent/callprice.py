# SPDX-License-Identifier: Apache-2.0
"""What one watched call costs the process that makes it, measured on a function of our own."""

from __future__ import annotations

import contextlib
import os
import time

from .errors import ProfinferError
from .kernel.callprograms import UNLIMITED, CallLimit, CallPrices, CallProbe, CallPrograms
from .kernel.trial import VictimFunction
from .prices import COLD
from .target.calldata import CallEntry, CallField, encode

ASSUMED = CallPrices(watched=3000.0, stepped=25_000.0, over=800.0, over_stepped=22_000.0)
"""Where it cannot be measured: what it was on the machine that this was written on (2.7 us), and of a
function whose first instruction the kernel has to step over (20 to 30 us there)."""
CALLS, ROUNDS = 500, 4
_NUMBER = 511  # the last one, which no description takes
_SET = _FAMILY = (1 << 16) - 1
_GROUP = "price"


def price_of_call(programs: CallPrograms, *, stepped: bool = False) -> tuple[float, float]:
    """Nanoseconds of the calling thread's CPU time per call with six values, entry and return, that is
    watched, and per call that is over the limit; in an engine at work, which needs the caches for itself.

    ``stepped``: of a function where only an instruction can be probed that the kernel does not emulate.
    """
    try:
        watched, over = _measured(programs, stepped=stepped)
    except (OSError, ProfinferError):  # no executable memory file, or no probe on one
        return (ASSUMED.stepped, ASSUMED.over_stepped) if stepped else (ASSUMED.watched, ASSUMED.over)
    # One that is watched does all that one over the limit does: where it seems to be cheaper, the
    # machine had something else to do meanwhile.
    return max(watched, over, 100.0) * COLD, max(over, 100.0) * COLD


def _measured(programs: CallPrograms, *, stepped: bool) -> tuple[float, float]:
    """What a call costs that is watched, and one over the limit; of the best of some rounds."""
    fields = [CallField(name=f"f{i}", arg=i, type="uint32", label=True) for i in range(6)]
    entry = CallEntry(call="price", kind="other", symbol="price", ok="zero", fields=fields)
    conf = encode(entry, os.uname().machine, programs.constants, {}, 255, [])
    pid = os.getpid()
    with VictimFunction(stepped=stepped) as victim:
        programs.describe(_NUMBER, {**conf, "set": _SET, "family": _FAMILY})
        plain = _spent(victim)
        programs.set_target(pid, [_NUMBER])
        try:
            programs.watch_family(pid, _FAMILY, watched=True)
            programs.set_limit(pid, _SET, CallLimit(UNLIMITED, UNLIMITED, ASSUMED))
            programs.attach(_GROUP, victim.path, pid, [CallProbe(_NUMBER, 0, 0, True)])
            watched = _spent(victim)
            programs.set_limit(pid, _SET, CallLimit(0, 0, ASSUMED))
            over = _spent(victim)
        finally:
            programs.detach(_GROUP)
            with contextlib.suppress(OSError):
                programs.forget_target(pid)
    return watched - plain, over - plain


def _spent(victim: VictimFunction) -> float:
    best = float("inf")
    for _ in range(ROUNDS):
        begun = time.thread_time_ns()
        for _ in range(CALLS):
            victim.call()
        best = min(best, (time.thread_time_ns() - begun) / CALLS)
    return best
