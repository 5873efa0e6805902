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
from tests.engines.models import LARGE, SPECS
from tests.engines.models import model as synthetic

from . import causes, extras, measure, report, usage
from .programs import time_by_program
from .rows import KEYS, ROWS, Row, absent
from .schedule import THREADS
from .steady import steady
from .target import PREFILL, Target
from .truthful import shares_right

PAGE = ROOT / "docs" / "benchmarks.md"
_FULL = {"minutes": 22.0, "seconds": 2.0, "attach": 10, "steady": 45.0}
_QUICK = {"minutes": 3.0, "seconds": 1.0, "attach": 4, "steady": 8.0}
_STEADY = (("default", 1), ("default", 2), ("all", 1), ("record", 1))
"""Rows that are watched for longer, and with how many threads."""
_BUSY = 0.2
_PROGRAMS_SECONDS = 12.0


def say(text: str) -> None:
    """Progress, on stderr."""
    print(f"bench: {text}", file=sys.stderr, flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="3 minutes: figures with wide intervals")
    parser.add_argument("--rows", default="", help=f"only these, by name: {' '.join(KEYS)}")
    parser.add_argument(
        "--model", type=_model, help=f"a GGUF file, or one of {', '.join([*SPECS, *LARGE])} (random weights)"
    )
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


def _model(name: str) -> Path:
    """A file that is there, or a model of tests/engines/models.py."""
    if name in SPECS or name in LARGE:
        say(f"writing {name}, if it is not there")
        return synthetic(name)
    if not Path(name).is_file():
        raise argparse.ArgumentTypeError(f"no such file: {name}")
    return Path(name).resolve()


def main() -> int:
    """Measures, prints the page, and writes it when everything was measured."""
    given = _arguments()
    if os.geteuid() != 0:
        say("please run as root: probes need it")
        return 1
    begun = time.monotonic()
    size = _QUICK if given.quick else _FULL
    minutes, seconds = given.minutes or size["minutes"], given.seconds or size["seconds"]
    whole = not given.quick and len(given.rows) == len(ROWS) and given.model is None
    found = report.Findings(
        command=_command(),
        date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        minutes=0.0,
        facts=_facts(given.model),
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
    until = begun + 60 * minutes
    _measure(found, rows, until, seconds, int(size["attach"]), size["steady"], given.seed, given.model)
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
    found: report.Findings,
    rows: list[Row],
    until: float,
    seconds: float,
    attach_times: int,
    steady_seconds: float,
    seed: int,
    model: Path | None,
) -> None:
    """The figures without pairs first, then rounds until the time is over."""
    ops = [row for row in rows if row.sees_ops]
    say("draining rings")
    found.drained = extras.drained_a_second()
    with tempfile.TemporaryDirectory() as folder:
        say("calibration")
        found.calibration = extras.calibration(Path(folder))
    with Target(seconds, model=model) as target:
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
            say("programs of the scheduler and of page faults")
            found.causes = causes.cost(target)
        for row in (row for row in rows if row.key in ("default", "all")):
            say(f"time of the programs: {row.key}")
            found.programs[row.key] = time_by_program(target, 1, row.options, _PROGRAMS_SECONDS)
        for row in rows:
            for threads in (count for key, count in _STEADY if key == row.key):
                say(f"{row.key} for {steady_seconds:.0f} s, {threads} thread{'s' * (threads > 1)}")
                found.steady.append(steady(target, row, threads, steady_seconds))
        if ops:
            say("operators against the witness")
            found.shares = shares_right(ops, names, seconds, say, model)
        # The last round may last a little longer than there is time.
        found.results = measure.run(target, rows, names, until, seed, say)


def _command() -> str:
    return os.environ.get("BENCH_COMMAND") or " ".join(["python", "-m", "tests.bench", *sys.argv[1:]])


def _facts(model: Path | None) -> dict[str, str]:
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
        "model": model.name if model else f"{engines.gemma.name} ({GEMMA_NOTICE})",
    }


def _warn_if_busy() -> None:
    before = usage.Machine.now()
    time.sleep(1.0)
    busy = usage.Machine.now().busy - before.busy
    if busy > _BUSY:
        say(f"others use {100 * busy:.0f} % of a core: the figures will be noisy")


if __name__ == "__main__":
    sys.exit(main())
