# SPDX-License-Identifier: Apache-2.0
"""The check for machines with an NVIDIA device: run there, and all but the device elsewhere."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.gpu.check import check
from tests.runtime import cuda_stand_in
from tests.runtime.callvictims import ROOT

SCRIPT = ROOT / "tests" / "gpu" / "check.sh"
DEVICES = list(Path("/dev").glob("nvidia[0-9]*"))


def test_a_real_program_on_a_real_device() -> None:
    if not DEVICES:
        pytest.skip("no NVIDIA device on this machine")
    done = subprocess.run([SCRIPT], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_script_says_that_there_is_no_device() -> None:
    if DEVICES:
        pytest.skip("there is a device")
    done = subprocess.run([SCRIPT], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "skipped: no NVIDIA device on this machine\n")


def test_the_check_itself(capsys: pytest.CaptureFixture[str]) -> None:
    """Its program on the stand-in for the driver, whose memory is how often the kernel ran."""
    driver, runtime = cuda_stand_in.libraries()
    assert check(runtime, {"LD_LIBRARY_PATH": f"{driver.parent}:{runtime.parent}"}), capsys.readouterr().out
    assert capsys.readouterr().out.count("ok  ") == 10


def test_the_script_is_sound_shell() -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("no shellcheck on this machine (Debian: shellcheck)")
    done = subprocess.run(["shellcheck", SCRIPT], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout
