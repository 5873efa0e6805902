# SPDX-License-Identifier: Apache-2.0
"""Starts a real llama.cpp server on loopback and talks to it.

Two stock builds are tried in this order: the stripped ``llama-server`` with shared libraries
(skulk) and the static extension module inside Python (xllamacpp). A wheel is compiled for some
CPU; on another one it dies at the first instruction that is missing there, and nothing but
running it tells: :func:`usable` decodes a few tokens once and remembers that it died of that.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import os
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from .fetch import CACHE, Engines, fetch
from .processes import end, with_parent

HERE = Path(__file__).parent
ENGINES = ("skulk", "xllamacpp")
START_SECONDS = 300.0
REQUEST_SECONDS = 300.0
END_SECONDS = 10.0
"""A process that has ended its connections may take so long to end itself (a core dump is written)."""
PORTS = 5
"""So many ports are tried: between our look and the server's, another process may take a free one."""


class EngineDied(RuntimeError):
    """The server process ended by itself; the message holds the end of its log. ``status``: as Popen's."""

    def __init__(self, what: str, status: int | None = None) -> None:
        super().__init__(what)
        self.status = status


class EngineSlow(EngineDied):
    """It runs and does not answer in time, which says nothing of what its code needs."""


@dataclass(frozen=True)
class Options:
    """How to start a server. ``context`` is per slot, in tokens."""

    model: Path
    threads: int = 2
    slots: int = 1
    context: int = 2048
    ubatch: int = 512
    draft: Path | None = None
    draft_max: int = 4
    embedding: bool = False
    repack: bool = True
    warmup: bool = True
    unified: bool = False
    env: Mapping[str, str] = field(default_factory=dict)


def free_port() -> int:
    """A TCP port of loopback that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def listens(pid: int, port: int) -> bool:
    """Whether this very process, and no stranger, listens on the port."""
    sockets = set()
    with contextlib.suppress(OSError):  # it may end meanwhile
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                sockets.add(os.readlink(f"/proc/{pid}/fd/{name}"))
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    there = [f[9] for f in lines if f[3] == "0A" and int(f[1].rpartition(":")[2], 16) == port]
    return any(f"socket:[{inode}]" in sockets for inode in there)


def _skulk_command(engines: Engines, o: Options, port: int) -> tuple[list[str], dict[str, str]]:
    command = [str(engines.skulk_bin / "llama-server"), "-m", str(o.model)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--metrics", "--offline"]
    command += ["-t", str(o.threads), "-tb", str(o.threads), "-np", str(o.slots)]
    command += [
        "-c",
        str(o.context * o.slots),
        "-ub",
        str(o.ubatch),
        "-ngl",
        "0",
        "-dev",
        "none",
        "-cram",
        "0",
    ]
    command += [] if o.repack else ["--no-repack"]
    command += [] if o.warmup else ["--no-warmup"]
    command += ["--kv-unified"] if o.unified else []
    if o.embedding:
        command += ["--embeddings", "-b", str(o.ubatch)]
    if o.draft is not None:
        command += [
            "-md",
            str(o.draft),
            "--spec-type",
            "draft-simple",
            "--spec-draft-n-max",
            str(o.draft_max),
        ]
        command += ["-ngld", "0", "-devd", "none", "-td", str(o.threads), "-tbd", str(o.threads)]
    return command, {"LD_LIBRARY_PATH": str(engines.skulk_bin)}


def _xl_command(engines: Engines, o: Options, port: int) -> tuple[list[str], dict[str, str]]:
    options = {
        "model": str(o.model),
        "port": port,
        "context": o.context * o.slots,
        "slots": o.slots,
        "ubatch": o.ubatch,
        "unified": o.unified,
        "threads": o.threads,
        "repack": o.repack,
        "warmup": o.warmup,
        "embedding": o.embedding,
        "draft": str(o.draft) if o.draft else "",
        "draft_max": o.draft_max,
    }
    return [str(engines.python), str(HERE / "xl_server.py"), json.dumps(options)], {}


_COMMANDS: dict[str, Callable[[Engines, Options, int], tuple[list[str], dict[str, str]]]] = {
    "skulk": _skulk_command,
    "xllamacpp": _xl_command,
}


class Server:
    """A running server; a context manager that leaves nothing running.

    ``engine`` forces one of :data:`ENGINES`; by default the first usable one is taken.
    Raises :class:`EngineDied` when the process ends while starting, :class:`EngineSlow`
    when it is not ready in time.
    """

    start_seconds = START_SECONDS

    def __init__(self, options: Options, engine: str | None = None) -> None:
        self.options = options
        self.engine = engine or first_usable(options)
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None
        self.port = 0

    def command(self) -> tuple[list[str], dict[str, str]]:
        """What is run for :attr:`port`, and what its environment has besides ours."""
        return _COMMANDS[self.engine](fetch(), self.options, self.port)

    def __enter__(self) -> Self:
        for left in reversed(range(PORTS)):
            try:
                self._start()
            except EngineDied:
                if not left or not self._port_taken():
                    raise
            else:
                break
        return self

    def _port_taken(self) -> bool:
        """Whether somebody else listens on the port that we were to have."""
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # what has ended takes no port
            try:
                probe.bind(("127.0.0.1", self.port))
                probe.listen()
            except OSError:
                return True
        return False

    def _start(self) -> None:
        self.port = free_port()
        command, extra = self.command()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (until stop())
        self._process = subprocess.Popen(
            with_parent(command),
            env={**os.environ, "GGML_NO_BACKTRACE": "1", **extra, **self.options.env},
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=self._log,
        )
        try:
            self._wait()
        except BaseException:
            self.stop()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        if self._process is None:
            raise RuntimeError("the server was not started")
        return self._process.pid

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def log_tail(self, size: int = 1500) -> str:
        """The end of what the server wrote (names no prompt)."""
        if self._log is None:
            return ""
        end = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, end - size))
        return self._log.read().decode(errors="replace")

    def _wait(self) -> None:
        deadline = time.monotonic() + self.start_seconds
        while time.monotonic() < deadline:
            self.check_alive()
            if listens(self.pid, self.port) and self._healthy():
                return
            time.sleep(0.05)
        raise EngineSlow(f"{self.engine} did not become healthy: {self.log_tail()}")

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=30) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError, http.client.HTTPException):
            return False

    def check_alive(self, seconds: float = 0.0) -> None:
        """Raises :class:`EngineDied` when the process has ended, or does so within that time."""
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = self._process.wait(seconds)
                raise EngineDied(f"{self.engine} ended with {status}: {self.log_tail()}", status)

    def stop(self) -> None:
        """Ends this very process: politely, then for certain."""
        if self._process is not None:
            end(self._process)
        if self._log is not None and not self._log.closed:
            self._log.close()

    def post(self, path: str, **body: Any) -> Any:
        """The JSON answer to a POST. HTTP errors of the server are raised as they are."""
        request = urllib.request.Request(
            self.url + path, data=json.dumps(body).encode(), headers={"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=REQUEST_SECONDS) as answer:
                return json.load(answer)
        except urllib.error.HTTPError:
            raise
        except (urllib.error.URLError, ConnectionError, http.client.HTTPException):
            self.check_alive(END_SECONDS)  # its connections end before it does
            raise

    def completion(self, prompt: str | Sequence[int], n_predict: int, **more: Any) -> dict[str, Any]:
        """One request at temperature 0: ``content``, ``tokens`` and the server's ``timings``."""
        body = {"temperature": 0, "ignore_eos": True, "return_tokens": True, **more}
        answer = self.post("/completion", prompt=prompt, n_predict=n_predict, **body)
        assert isinstance(answer, dict)
        return answer

    def together(self, bodies: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Several completions at the same time, one thread each; answers in order."""
        with ThreadPoolExecutor(len(bodies)) as pool:
            return list(pool.map(lambda body: self.completion(**body), bodies))

    def embed(self, content: str | Sequence[int]) -> Any:
        return self.post("/embedding", content=content)

    def metrics(self) -> dict[str, float]:
        """``/metrics`` by name without the ``llamacpp:`` prefix."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=REQUEST_SECONDS) as answer:
            text = answer.read().decode()
        found = {}
        for line in text.splitlines():
            if line and not line.startswith("#"):
                name, value = line.rsplit(" ", 1)
                found[name.removeprefix("llamacpp:")] = float(value)
        return found


def _cpu_key(engines: Engines, engine: str, o: Options) -> str:
    cpu = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line[:5] in ("model", "flags")]
    wheel = sorted(p.name for p in engines.site.glob("*.dist-info") if p.name.startswith(engine[:5]))
    parts = [engine, *wheel, *sorted(set(cpu)), o.model.parent.name, o.model.name, str(o.repack)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:20]


def usable(engine: str, options: Options) -> str:
    """Nothing ("") when this engine runs this model here, else why not.

    The first time a few tokens are decoded. What is remembered, per CPU, wheel and model, is that this
    worked, or died of an instruction: kernels differ by weight type, and one build may run F16 and
    die of Q8_0. Other deaths may have causes that pass.
    """
    engines = fetch()
    verdict = CACHE / "verdicts" / _cpu_key(engines, engine, options)
    if verdict.exists():
        return verdict.read_text()
    plain = replace(options, draft=None, warmup=False, env={}, slots=1, context=256)
    reason, status = "", None
    try:
        with Server(plain, engine) as server:
            if options.embedding:
                server.embed([300, 301, 302])
            else:
                server.completion([300, 301, 302], 3)
    except EngineSlow:
        raise  # no verdict on this CPU
    except EngineDied as error:
        reason, status = str(error).split(":")[0], error.status
    if not reason or status == -signal.SIGILL:
        verdict.parent.mkdir(exist_ok=True)
        partial = verdict.with_name(f"{verdict.name}.{os.getpid()}")
        partial.write_text(reason)
        partial.replace(verdict)  # at once: half a verdict would read as none
    return reason


def first_usable(options: Options) -> str:
    """The first engine of :data:`ENGINES` that runs this model on this CPU."""
    reasons = {}
    for engine in ENGINES:
        reasons[engine] = usable(engine, options)
        if not reasons[engine]:
            return engine
    raise EngineDied(f"no stock server runs this model on this CPU: {reasons}")
