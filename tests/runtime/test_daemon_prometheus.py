# SPDX-License-Identifier: Apache-2.0
"""A real Prometheus scrapes the daemon; the queries of docs/queries.md give what the stub did."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

from .cases import Engine, copied, engine, wait_for
from .daemons import Daemon
from .test_daemon import PREFILL, decode

NAME = f"pfi-prom-{os.getpid()}"
DOCS = Path(__file__).resolve().parents[2] / "docs" / "queries.md"


class Prometheus:
    """Debian's, with one target that is scraped every 0.5 s."""

    def __init__(self, folder: Path, port: int) -> None:
        program = shutil.which("prometheus")
        assert program is not None, "make installs Debian's prometheus for the tests"
        config = folder / "prometheus.yml"
        job = {"job_name": "profinferd", "static_configs": [{"targets": [f"127.0.0.1:{port}"]}]}
        config.write_text(
            json.dumps(
                {"global": {"scrape_interval": "500ms", "scrape_timeout": "500ms"}, "scrape_configs": [job]}
            )
        )
        self._log_path = folder / "prometheus.log"
        self._log = self._log_path.open("wb")
        self.process = subprocess.Popen(
            [
                program,
                f"--config.file={config}",
                f"--storage.tsdb.path={folder / 'data'}",
                "--web.listen-address=127.0.0.1:0",
            ],
            stdout=self._log,
            stderr=self._log,
        )
        self._port = 0

    @property
    def port(self) -> int:
        """The one that the kernel has chosen. Raises OSError as long as it does not listen."""
        if not self._port:
            found = re.search(r'msg="Listening on" address=127\.0\.0\.1:(\d+)', self._log_path.read_text())
            if found is None:
                assert self.process.poll() is None, f"it ended: {self._log_path.read_text()}"
                raise ConnectionRefusedError("it does not listen yet")
            self._port = int(found[1])
        return self._port

    def query(self, text: str) -> list[dict[str, Any]]:
        """The result of an instant query: [{"metric": labels, "value": [time, text]}]."""
        url = f"http://127.0.0.1:{self.port}/api/v1/query?" + urllib.parse.urlencode({"query": text})
        with urllib.request.urlopen(url, timeout=60) as answer:
            found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
            return found

    def value(self, text: str) -> float:
        """Of a query that gives one number; NaN when it gives none."""
        found = self.query(text)
        return float(found[0]["value"][1]) if len(found) == 1 else math.nan

    def answer(self, text: str, right: Callable[[list[dict[str, Any]]], bool] = bool) -> list[dict[str, Any]]:
        """The first result that is right. A scrape that comes too late for Prometheus leaves no series
        at all until the next one."""
        found: list[dict[str, Any]] = []

        def there() -> bool:
            nonlocal found
            try:
                found = self.query(text)
            except OSError:
                return False  # it is still starting
            return right(found)

        wait_for(there, f"an answer to {text}", 240)
        return found

    def wait(self, text: str, value: float) -> None:
        """Until the query gives this value."""
        self.answer(text, lambda found: len(found) == 1 and float(found[0]["value"][1]) == value)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.wait()
        self._log.close()


def documented() -> dict[str, str]:
    """Heading -> query of docs/queries.md."""
    found = re.findall(r"^## (.+?)\n.*?```promql\n(.*?)```", DOCS.read_text(), re.MULTILINE | re.DOTALL)
    return {title: query.strip() for title, query in found}


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copied(engine(), tmp_path_factory.mktemp("programs"), f"{NAME}-a")


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    with Daemon(tmp_path / "d", f"{NAME}*") as made:
        made.scanned()
        yield made


def test_queries_and_restarts(daemon: Daemon, program: Path, tmp_path: Path) -> None:
    """Counters before and after a target's restart add up; documented queries parse and are right."""
    selector = f'{{target="{NAME}-a"}}'
    generated = f"profinfer_generation_tokens_total{selector}"
    with Prometheus(tmp_path, daemon.port) as prometheus:
        calls: list[tuple[int, int]] = []
        with Engine(program) as stub:
            daemon.wait_for(stub.pid)
            prometheus.wait(f"profinfer_target_info{selector}", 1)
            prometheus.wait(generated, 0)
            stub.order(PREFILL)
            for position in range(4, 44):
                reply = stub.order(f"run pos={position} out=0 us=2000")
                calls.append((reply["call"][0], reply["call"][1]))
            daemon.wait_for_tokens(stub.pid, 4, 40)
            prometheus.wait(generated, 41)
        prometheus.wait(f'profinfer_target_state{{target="{NAME}-a", reason="ended"}}', 0)
        prometheus.wait(generated, 41)
        with Engine(program) as stub:
            stub.order(PREFILL)
            decode(stub, 4, 20)
            daemon.wait_for_tokens(stub.pid, 4, 20)
            prometheus.wait(generated, 62)
            window = "1h"  # everything
            # From 0 to 62 without a reset between. By how much Prometheus extrapolates is a matter of when
            # it came to scrape: not below what it saw, and on a quiet machine by a scrape or two.
            assert prometheus.value(f"min_over_time({generated}[{window}])") == 0
            assert prometheus.value(f"max_over_time({generated}[{window}])") == 62
            assert prometheus.value(f"increase({generated}[{window}])") >= 60
            assert prometheus.value(f"resets({generated}[{window}])") == 0
            # Time to return, by the stub's own clock, against histogram and sums.
            decode_s = sum(end - start for start, end in calls) / 1e9
            selected = f'profinfer_call_seconds_total{{target="{NAME}-a", phase="decode", status="0"}}'
            seen = prometheus.value(f"last_over_time({selected}[{window}])")
            assert decode_s <= seen * 1.05 and seen < 20 * decode_s
            for title, query in documented().items():
                answer = prometheus.query(query.replace("[5m]", f"[{window}]"))
                assert isinstance(answer, list), title
            # Whatever the machine was busy with: some of its operators are timed before it goes on.
            queries = {t: q.replace("[5m]", f"[{window}]") for t, q in documented().items()}
            until, position = time.monotonic() + 240, 24
            while not prometheus.query(queries["Top operators per token"]):
                assert time.monotonic() < until, daemon.target(stub.pid)
                stub.order(f"run pos={position} out=0 us=2000")
                position += 1
            check_documented(prometheus, queries)


def check_documented(prometheus: Prometheus, queries: dict[str, str]) -> None:
    """Values of the documented queries, as far as they are known."""

    def of(title: str) -> dict[str, Any]:
        def ours(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
            return [r for r in found if r["metric"].get("target") == f"{NAME}-a"]

        return ours(prometheus.answer(queries[title], lambda found: bool(ours(found))))[0]

    assert float(of("Decode tokens per second")["value"][1]) > 0
    gaps = float(of("Inter-token latency, 99th percentile")["value"][1])
    assert 0.001 <= gaps <= 10
    assert 0 < float(of("Time to first token, 99th percentile")["value"][1]) <= 10
    top = prometheus.answer(queries["Top operators per token"])
    assert {r["metric"]["op"] for r in top} & {"MUL_MAT", "FLASH_ATTN_EXT", "RMS_NORM"}, top
    assert float(of("Records lost")["value"][1]) == 0
    assert 0 <= float(of("Overhead")["value"][1]) < 0.5


def test_a_target_that_cannot_be_profiled(daemon: Daemon, tmp_path: Path) -> None:
    """The documented query names it with its reason."""
    bare = copied(engine("-DHIDE", strip=True, dynamic=False), tmp_path, f"{NAME}-bare")
    with Prometheus(tmp_path, daemon.port) as prometheus, Engine(bare) as stub:
        daemon.wait_for(stub.pid, lambda t: t["state"] == "unprofiled")
        query = documented()["Targets that cannot be profiled, and why"]
        found = [r["metric"] for r in prometheus.answer(query)]
        assert {"target": f"{NAME}-bare", "reason": "no_symbols"}.items() <= next(
            m for m in found if m["target"] == f"{NAME}-bare"
        ).items()
