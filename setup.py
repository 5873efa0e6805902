# SPDX-License-Identifier: Apache-2.0
"""What pyproject.toml cannot say: the rooms as packages, the BPF objects, and the report's page.

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


def builder_at(path: str) -> ModuleType:
    """A file that builds something, before anything of ours can be imported."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, HERE / path)
    if spec is None or spec.loader is None:
        raise ExecError(f"{path} is not there")
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
        builder = builder_at("probes/build.py")
        try:
            builder.compile_all()
        except builder.BuildError as error:
            raise ExecError(str(error)) from None


class BuildPage(Command):
    """Bundles the page of the HTML report beside its sources."""

    description = "build the page of the HTML report (needs npm unless it is there)"
    user_options: list[tuple[str, str | None, str]] = []  # noqa: RUF012

    def initialize_options(self) -> None: ...

    def finalize_options(self) -> None: ...

    def run(self) -> None:
        builder = builder_at("exporters/html/buildpage.py")
        try:
            builder.build()
        except builder.BuildError as error:
            raise ExecError(str(error)) from None


class Build(build):
    """Objects and page first: build_py copies them as package data."""

    sub_commands = [("build_bpf", None), ("build_page", None), *build.sub_commands]  # noqa: RUF012


class Sdist(sdist):
    """A source distribution holds objects and page, so that installing it needs no clang and no npm."""

    def run(self) -> None:
        self.run_command("build_bpf")
        self.run_command("build_page")
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
        "profinferd.exporters": ["livepage.html"],
        "profinferd.exporters.html": ["page.html"],
        "profinferd.probes": ["*.bpf.o", "*.yaml", "*.schema.json", "events.h", "bcc/*.c"],
    },
    cmdclass={"build_bpf": BuildBpf, "build_page": BuildPage, "build": Build, "sdist": Sdist},
)
