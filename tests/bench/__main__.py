# SPDX-License-Identifier: Apache-2.0
"""``make bench``: what watching an engine costs, beside other ways to watch it, on one page."""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from profinferd.agent.kernel.calibration import machine_name
from profinferd.agent.version import version
from tests.engines.fetch import GEMMA_NOTICE, ROOT, fetch

from . import extras, measure, report, usage
from .rows import KEYS, ROWS, Row, absent
from .schedule import THREADS
from .target import PREFILL, Target
from .truthful import shares_right

PAGE = ROOT / "docs" / "benchmarks.md"
_FULL = {"minutes": 15.0, "seconds": 2.0, "attach": 10}
_QUICK = {"minutes": 3.0, "seconds": 1.0, "attach": 4}
_BUSY = 0.2


def say(text: str) -> None:
    """Progress, on stderr."""
    print(f"bench: {text}", file=sys.stderr, flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="3 minutes: figures with wide intervals")
    parser.add_argument("--rows", default="", help=f"only these, by name: {' '.join(KEYS)}")
    parser.add_argument("--minutes", type=float, help="how long all of it may take")
    parser.add_argument("--seconds", type=float, help="decoding in one window")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the order of the windows")
    parser.add_argument("-o", "--output", type=Path, help=f"default: {PAGE.relative_to(ROOT)} when whole")
    given = parser.parse_args()
    wanted = given.rows.replace(",", " ").split()
    unknown = sorted(set(wanted) - set(KEYS))
    if unknown:
        parser.error(f"no row {' '.join(unknown)}: there are {' '.join(KEYS)}")
    given.rows = [row for row in ROWS if not wanted or row.key in wanted]
    return given


def main() -> int:
    """Measures, prints the page, and writes it when everything was measured."""
    given = _arguments()
    if os.geteuid() != 0:
        say("please run as root: probes need it")
        return 1
    begun = time.monotonic()
    size = _QUICK if given.quick else _FULL
    minutes, seconds = given.minutes or size["minutes"], given.seconds or size["seconds"]
    whole = not given.quick and len(given.rows) == len(ROWS)
    found = report.Findings(
        command=_command(),
        date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        minutes=0.0,
        facts=_facts(),
        seconds=seconds,
        prefill=PREFILL,
        window_tokens={},
        rows=given.rows,
        absent={row.key: reason for row in given.rows if (reason := absent(row))},
    )
    for key, reason in found.absent.items():
        say(f"{key} is absent: {reason}")
    _warn_if_busy()
    rows = [row for row in given.rows if row.key not in found.absent]
    _measure(found, rows, begun + 60 * minutes, seconds, int(size["attach"]), given.seed)
    found.minutes = (time.monotonic() - begun) / 60
    text = report.page(found)
    print(text)
    output = given.output or (PAGE if whole else None)
    if output is not None and found.results.rounds:
        output.parent.mkdir(exist_ok=True)
        output.write_text(text)
        say(f"written: {output}")
    return 0


def _measure(
    found: report.Findings, rows: list[Row], until: float, seconds: float, attach_times: int, seed: int
) -> None:
    """The figures without pairs first, then rounds until the time is over."""
    ops = [row for row in rows if row.sees_ops]
    say("draining rings")
    found.drained = extras.drained_a_second()
    with tempfile.TemporaryDirectory() as folder:
        say("calibration")
        found.calibration = extras.calibration(Path(folder))
    with Target(seconds) as target:
        found.window_tokens = {threads: target.tokens(threads) for threads in THREADS}
        say(f"tokens in a window: {found.window_tokens} (by threads)")
        names: list[str] = []
        if any(row.kind in ("bpftrace", "published") for row in rows):
            say("which functions the model calls (a minute the first time)")
            found.functions = extras.functions_called(target)
            names = sorted(found.functions)
        say(f"attaching {attach_times} times")
        attach = next((row for row in rows if row.kind == "attach"), None)
        if attach is not None:
            options = next((r.options for r in rows if r.key in ("default", "all")), attach.options)
            found.attach = extras.attach_seconds(target, attach_times, options)
            found.attach_times = attach_times
        if ops:
            say("operators against the witness")
            found.shares = shares_right(ops, names, seconds, say)
        # The last round may last a little longer than there is time.
        found.results = measure.run(target, rows, names, until, seed, say)


def _command() -> str:
    return os.environ.get("BENCH_COMMAND") or " ".join(["python", "-m", "tests.bench", *sys.argv[1:]])


def _facts() -> dict[str, str]:
    engines = fetch()
    wheel = next((p.name for p in engines.site.glob("llama_cpp_py_sync-*.dist-info")), "unknown")
    git = subprocess.run(
        ["git", "-C", str(ROOT), "describe", "--always", "--dirty"],
        capture_output=True,
        text=True,
        check=False,
    )
    versions = [
        f"profinferd {version()} ({git.stdout.strip() or 'no git'})",
        f"Python {platform.python_version()}",
    ]
    try:
        tracer = subprocess.run(["bpftrace", "--version"], capture_output=True, text=True, check=False)
        versions.append(tracer.stdout.strip())
    except FileNotFoundError:
        pass
    return {
        "machine": f"{machine_name()}, Linux {platform.release()}",
        "versions": ", ".join(versions),
        "engine": wheel.removesuffix(".dist-info").replace("_", "-") + ", stripped, on the CPU",
        "model": f"{engines.gemma.name} ({GEMMA_NOTICE})",
    }


def _warn_if_busy() -> None:
    before = usage.Machine.now()
    time.sleep(1.0)
    busy = usage.Machine.now().busy - before.busy
    if busy > _BUSY:
        say(f"others use {100 * busy:.0f} % of a core: the figures will be noisy")


if __name__ == "__main__":
    sys.exit(main())
