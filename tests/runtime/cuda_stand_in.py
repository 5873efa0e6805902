# SPDX-License-Identifier: Apache-2.0
"""The stand-in for CUDA, built: driver, runtime, and the program that uses them."""

from __future__ import annotations

from pathlib import Path

from tests.victims.build import build


def libraries() -> tuple[Path, Path]:
    """Driver and runtime."""
    soname = "-Wl,-soname,libcuda.so.1"
    driver = build("fake_cuda.c", cflags=("-DDRIVER", soname), shared=True, strip=True, name="libcuda.so.1")
    runtime = build(
        "fake_cuda.c", shared=True, strip=True, name="libcudart.so.12",
        cflags=("-DRUNTIME", "-Wl,-soname,libcudart.so.12", str(driver)),
    )  # fmt: skip
    return driver, runtime


def program() -> Path:
    """The program; it finds its libraries by itself."""
    driver, runtime = libraries()
    paths = [f"-Wl,-rpath,{path.parent}" for path in (driver, runtime)]
    return build("fake_cuda.c", cflags=("-DPROGRAM", str(driver), str(runtime), *paths), name="cuda_program")
