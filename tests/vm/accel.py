# SPDX-License-Identifier: Apache-2.0
"""What the emulator may use of this machine: KVM where it works, else its own translation (TCG)."""

from __future__ import annotations

import os
import subprocess
from functools import cache

from .image import Image, host

EMULATORS = {
    "amd64": ("qemu-system-x86_64", "-machine", "q35"),
    "arm64": ("qemu-system-aarch64", "-machine", "virt"),
}
CONSOLE = {"amd64": "ttyS0", "arm64": "ttyAMA0"}
TRANSLATED = {"amd64": "max", "arm64": "max,pauth-impdef=on"}
NATIVE = {"amd64": ("host", "host,-arch-capabilities"), "arm64": ("host",)}
"""Tried in this order. Inside another virtual machine the CPU may name MSRs (those that the
arch-capabilities flag stands for) which the outer hypervisor then refuses to set."""
TRIAL_SECONDS = 20.0


@cache
def accelerator(image: Image) -> tuple[tuple[str, ...], str]:
    """The emulator's arguments for the CPU, and in words why these. VM_ACCEL=tcg: no trial of KVM."""
    slow = ("-accel", "tcg", "-cpu", TRANSLATED[image.architecture])
    if os.environ.get("VM_ACCEL") == "tcg":
        return slow, "TCG, as VM_ACCEL asks"
    if image.architecture != host():
        return slow, f"TCG: this machine is {host()}"
    if not os.access("/dev/kvm", os.R_OK | os.W_OK):
        return slow, "TCG: /dev/kvm cannot be opened"
    why = ""
    for cpu in NATIVE[image.architecture]:
        found = ("-accel", "kvm", "-cpu", cpu)
        why = _trial(image, found)
        if not why:
            return found, f"KVM, -cpu {cpu}"
    return slow, f"TCG: KVM does not work here: {why}"


def _trial(image: Image, cpu: tuple[str, ...]) -> str:
    """Boot the kernel without a disk, until it gives up and restarts; returns what went wrong.

    Only a kernel's own start shows it: a KVM without the processor's help (PVM) opens, makes a CPU
    and runs the firmware, and then never comes to the end of a kernel that was not made for it.
    """
    try:
        done = subprocess.run(
            [*EMULATORS[image.architecture], *cpu, "-m", "256", "-nodefaults", "-no-user-config",
             "-display", "none", "-serial", "stdio", "-no-reboot", "-kernel", str(image.kernel),
             "-append", f"console={CONSOLE[image.architecture]} panic=-1"],
            stdin=subprocess.DEVNULL, capture_output=True, timeout=TRIAL_SECONDS,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"-cpu {cpu[-1]}: a kernel does not boot in {TRIAL_SECONDS:.0f} s"
    if done.returncode or b"Kernel panic" not in done.stdout:
        words = (done.stderr or done.stdout).decode(errors="replace").strip().splitlines()
        return f"-cpu {cpu[-1]}: {words[-1] if words else f'exit code {done.returncode}'}"
    return ""
