# SPDX-License-Identifier: Apache-2.0
"""The wheel and the source distribution hold what they must, and need no compiler to install."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("agent", "probes", "exporters")
OBJECTS = {
    f"{name}.{machine}.bpf.o"
    for name in ("barrier", "counters", "faults", "ggml", "ggml_session", "sched")
    for machine in ("x86_64", "aarch64")
}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what the repository holds, with the objects that `make` built."""
    copy = tmp_path_factory.mktemp("package") / "tree"
    copy.mkdir()
    junk = shutil.ignore_patterns("__pycache__", "*.pyc", "node_modules")
    for name in (*ROOMS, "LICENSES", "tests", ".ci"):
        shutil.copytree(ROOT / name, copy / name, ignore=junk)
    for name in (
        "setup.py",
        "pyproject.toml",
        "MANIFEST.in",
        "README.md",
        "LICENSE",
        "CHANGELOG.md",
        "Makefile",
    ):
        shutil.copy2(ROOT / name, copy)
    return copy


def setup_py(tree: Path, *arguments: str, path: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PATH": path if path is not None else os.environ["PATH"]}
    command = [sys.executable, "setup.py", "-q", *arguments]
    return subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def wheel(tree: Path) -> Iterator[zipfile.ZipFile]:
    done = setup_py(tree, "bdist_wheel")
    assert done.returncode == 0, done.stderr
    (path,) = (tree / "dist").glob("*.whl")
    assert path.name.endswith("-py3-none-any.whl"), "one wheel for every architecture"
    with zipfile.ZipFile(path) as archive:
        yield archive


def test_wheel_holds_every_module(wheel: zipfile.ZipFile) -> None:
    """A new sub-package cannot be forgotten."""
    modules = {
        f"profinferd/{path.relative_to(ROOT)}" for room in ROOMS for path in (ROOT / room).rglob("*.py")
    }
    assert len(modules) > 30
    assert modules <= set(wheel.namelist())


def test_wheel_holds_the_data(wheel: zipfile.ZipFile) -> None:
    names = {name.removeprefix("profinferd/probes/") for name in wheel.namelist()}
    assert names >= {*OBJECTS, "events.h", "catalogue.schema.json", "bcc/ggml_bcc.c", "py.typed"}
    assert {path.name for path in (ROOT / "probes").glob("*.yaml")} <= names
    assert "profinferd/exporters/html/page.html" in wheel.namelist()
    assert "profinferd/exporters/livepage.html" in wheel.namelist()
    for room in ROOMS:
        assert f"profinferd/{room}/py.typed" in wheel.namelist()


def test_wheel_holds_nothing_else(wheel: zipfile.ZipFile) -> None:
    """No tests, no sources of the BPF programs, no path of the machine that built it."""
    for name in wheel.namelist():
        assert name.startswith(("profinferd/", "profinferd-")), name
        assert not name.endswith((".bpf.c", ".pyc")), name
        if name.endswith(".bpf.o"):
            assert str(ROOT).encode() not in wheel.read(name), name


def test_wheel_says_how_it_is_called(wheel: zipfile.ZipFile) -> None:
    (entry,) = (name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    assert "profinferd = profinferd.agent.cli:main" in wheel.read(entry).decode()
    licences = {Path(name).name for name in wheel.namelist() if "/licenses/" in name}
    assert {"LICENSE", "BSD-3-Clause.txt", "GPL-2.0-only.txt", "report-page.txt"} <= licences


def test_source_distribution_needs_no_clang(tree: Path, tmp_path: Path) -> None:
    """It holds sources and objects; a wheel is built from it where there is no clang."""
    done = setup_py(tree, "sdist")
    assert done.returncode == 0, done.stderr
    (path,) = (tree / "dist").glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
        archive.extractall(tmp_path)  # our own: Debian 12's Python has no filters
    assert {f"probes/{name}" for name in OBJECTS} <= names
    assert {"exporters/html/page.html", "exporters/html/page/src/main.tsx"} <= names
    assert not [name for name in names if "node_modules" in name]
    assert {"probes/ggml.bpf.c", "probes/include/kernel.h", "Makefile", ".ci/run", "LICENSE"} <= names
    (unpacked,) = tmp_path.iterdir()
    done = setup_py(unpacked, "bdist_wheel", path="/nonexistent")
    assert done.returncode == 0, done.stderr
    assert list((unpacked / "dist").glob("*.whl"))


def test_no_clang_and_no_objects_is_one_line(tree: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(tree, bare, ignore=shutil.ignore_patterns("*.bpf.o", "build", "dist", "*.egg-info"))
    done = setup_py(bare, "bdist_wheel", path="/nonexistent")
    assert done.returncode
    lines = [line for line in done.stderr.splitlines() if "clang" in line]
    first = min(OBJECTS).partition(".")[0]
    assert lines == [f"error: clang is needed to compile {first}.bpf.c: apt install clang, or use a wheel"]
    assert "Traceback" not in done.stderr


def test_no_npm_and_no_page_is_one_line(tree: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(tree, bare, ignore=shutil.ignore_patterns("page.html", "build", "dist", "*.egg-info"))
    done = setup_py(bare, "bdist_wheel", path="/nonexistent")
    assert done.returncode
    lines = [line for line in done.stderr.splitlines() if "npm" in line]
    assert lines == [
        "error: npm is needed to build the page of the HTML report: apt install npm, or use a wheel"
    ]
    assert "Traceback" not in done.stderr
