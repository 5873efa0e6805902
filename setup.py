# SPDX-License-Identifier: Apache-2.0
"""What pyproject.toml cannot say: the rooms as packages, and the BPF objects.

The folders ``agent``, ``probes`` and ``exporters`` are the packages ``profinferd.agent``,
``profinferd.probes`` and ``profinferd.exporters``. Sub-packages are found, not listed, so
that a new one cannot be forgotten in the wheel.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

from setuptools import Command, find_packages, setup
from setuptools.command.build import build
from setuptools.command.sdist import sdist
from setuptools.errors import ExecError

HERE = Path(__file__).resolve().parent
ROOMS = ("agent", "probes", "exporters")


def probes_build() -> ModuleType:
    """``probes/build.py``, before anything of ours can be imported."""
    spec = importlib.util.spec_from_file_location("probes_build", HERE / "probes" / "build.py")
    if spec is None or spec.loader is None:
        raise ExecError("probes/build.py is not there")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class BuildBpf(Command):
    """Compiles the BPF objects of every architecture beside their sources."""

    description = "compile the BPF objects (needs clang unless they are there and up to date)"
    user_options: list[tuple[str, str | None, str]] = []  # noqa: RUF012

    def initialize_options(self) -> None: ...

    def finalize_options(self) -> None: ...

    def run(self) -> None:
        builder = probes_build()
        try:
            builder.compile_all()
        except builder.BuildError as error:
            raise ExecError(str(error)) from None


class Build(build):
    """Objects first: build_py copies them as package data."""

    sub_commands = [("build_bpf", None), *build.sub_commands]  # noqa: RUF012


class Sdist(sdist):
    """A source distribution holds the objects, so that installing it needs no clang."""

    def run(self) -> None:
        self.run_command("build_bpf")
        super().run()


setup(
    packages=[
        name
        for room in ROOMS
        for name in (f"profinferd.{room}", *(f"profinferd.{room}.{sub}" for sub in find_packages(room)))
    ],
    package_dir={f"profinferd.{room}": room for room in ROOMS},
    include_package_data=False,  # what a wheel holds is what is said here, not MANIFEST.in
    package_data={
        "": ["py.typed"],
        "profinferd.probes": ["*.bpf.o", "*.yaml", "*.schema.json", "events.h", "bcc/*.c"],
    },
    cmdclass={"build_bpf": BuildBpf, "build": Build, "sdist": Sdist},
)
