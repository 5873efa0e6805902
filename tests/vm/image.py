# SPDX-License-Identifier: Apache-2.0
"""Root file systems to boot: a Debian of a given suite and architecture with its own kernel.

Made once with debootstrap and kept in ``.cache/vm``; nothing of it is written to by a test.
"""

from __future__ import annotations

import contextlib
import hashlib
import lzma
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CACHE = Path(__file__).resolve().parents[2] / ".cache" / "vm"
MIRROR = "http://deb.debian.org/debian"
SIZE = "2G"
PACKAGES = "systemd,systemd-sysv,{kernel},python3,libbpf1,busybox-static,procps,libgomp1"
KERNELS = {"amd64": "linux-image-cloud-amd64", "arm64": "linux-image-cloud-arm64"}
INTERPRETED = {"amd64": "x86_64", "arm64": "aarch64"}
BINFMT = Path("/proc/sys/fs/binfmt_misc")
MODULES = (
    "virtio",
    "virtio_ring",
    "virtio_pci_legacy_dev",
    "virtio_pci_modern_dev",
    "virtio_pci",
    "virtio_blk",
)
"""What the kernel needs before it sees its disk, in the order of loading; some are built in."""

INIT = """#!/bin/busybox sh
/bin/busybox mount -t devtmpfs none /dev
/bin/busybox mount -t proc none /proc
for module in {modules}; do /bin/busybox insmod /$module.ko; done
/bin/busybox mount -t ext4 /dev/vda /root && exec /bin/busybox switch_root /root /sbin/init
echo cannot mount the root file system
/bin/busybox poweroff -f
"""
SERVICE = """[Unit]
Description=Takes orders from the host
DefaultDependencies=yes
[Service]
ExecStartPre=-/sbin/modprobe virtio_console
ExecStartPre=/bin/mkdir -p /run/files
ExecStartPre=/bin/tar -C /run/files -xf /dev/vdb
ExecStart=/usr/bin/python3 -I /run/files/agent.py
StandardOutput=tty
StandardError=tty
[Install]
WantedBy=multi-user.target
"""


@dataclass(frozen=True, slots=True)
class Image:
    """A disk, the kernel that boots it, and the initial file system that finds the disk."""

    architecture: str
    suite: str
    disk: Path
    kernel: Path
    initrd: Path


def image(suite: str, architecture: str = "amd64") -> Image:
    """The image of that suite, made when it is not there (two to four minutes; arm64 takes longer)."""
    recipe = "\n".join((PACKAGES, SERVICE, INIT, SIZE))
    key = hashlib.sha256(recipe.encode()).hexdigest()[:12]
    folder = CACHE / f"{suite}-{architecture}-{key}"
    found = Image(architecture, suite, folder / "disk.img", folder / "vmlinuz", folder / "initrd")
    if not folder.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE, prefix="making-") as scratch:
            _make(suite, architecture, Path(scratch))
            (Path(scratch) / "out").rename(folder)
    return found


def _make(suite: str, architecture: str, scratch: Path) -> None:
    root, out = scratch / "root", scratch / "out"
    out.mkdir()
    packages = PACKAGES.format(kernel=KERNELS[architecture])
    # Programs of another architecture run through qemu-user; debootstrap's own stay native, which its
    # --foreign would not have (half an hour instead of minutes).
    with _interpreter(architecture) if architecture != host() else contextlib.nullcontext():
        subprocess.run(
            ["debootstrap", f"--arch={architecture}", "--variant=minbase", f"--include={packages}",
             suite, str(root), os.environ.get("DEBIAN_MIRROR", MIRROR)],
            check=True, stdout=subprocess.DEVNULL,
            # The initial file system is ours; Debian's takes minutes through qemu-user.
            env={**os.environ, "INITRD": "No"},
        )  # fmt: skip
    shutil.rmtree(root / "var/cache/apt/archives", ignore_errors=True)
    (root / "etc/systemd/system/agent.service").write_text(SERVICE)
    wants = root / "etc/systemd/system/multi-user.target.wants"
    wants.mkdir(exist_ok=True)
    (wants / "agent.service").symlink_to("/etc/systemd/system/agent.service")
    (root / "etc/hostname").write_text("guest\n")
    (root / "etc/fstab").write_text("")
    boot = next((root / "boot").glob("vmlinuz-*"))
    shutil.copy(boot, out / "vmlinuz")
    _initrd(root, boot.name.removeprefix("vmlinuz-"), scratch / "initrd", out / "initrd")
    for old in (root / "boot").iterdir():
        old.unlink()  # the kernel comes from outside
    subprocess.run(["mke2fs", "-q", "-t", "ext4", "-d", str(root), str(out / "disk.img"), SIZE], check=True)
    shutil.rmtree(root)


@contextlib.contextmanager
def _interpreter(architecture: str) -> Iterator[None]:
    """The kernel runs programs of that architecture through qemu-user. Where systemd or binfmt-support
    has not seen to that already, it is undone at the end."""
    name = f"qemu-{INTERPRETED[architecture]}"
    mounted = not (BINFMT / "register").exists()
    if mounted:
        subprocess.run(["mount", "-t", "binfmt_misc", "none", str(BINFMT)], check=True)
    registered = not (BINFMT / name).exists()
    if registered:
        # Debian's qemu-user-static says how; flag F: the interpreter is opened now, outside the root.
        (BINFMT / "register").write_text(Path(f"/usr/lib/binfmt.d/{name}.conf").read_text())
    try:
        yield
    finally:
        if registered:
            (BINFMT / name).write_text("-1")
        if mounted:
            subprocess.run(["umount", str(BINFMT)], check=True)


def _initrd(root: Path, release: str, folder: Path, target: Path) -> None:
    """A cpio of a static busybox and the modules that are not built in."""
    modules = []
    (folder / "bin").mkdir(parents=True)
    for name in ("dev", "proc", "root"):
        (folder / name).mkdir()
    shutil.copy(root / "usr/bin/busybox" if (root / "usr/bin/busybox").exists() else root / "bin/busybox",
                folder / "bin/busybox")  # fmt: skip
    for name in MODULES:
        for file in (root / "lib/modules" / release).rglob(f"{name}.ko*"):
            data = file.read_bytes()
            (folder / f"{name}.ko").write_bytes(lzma.decompress(data) if file.suffix == ".xz" else data)
            modules.append(name)
    (folder / "init").write_text(INIT.format(modules=" ".join(modules)))
    (folder / "init").chmod(0o755)
    names = sorted(str(p.relative_to(folder)) for p in folder.rglob("*"))
    with target.open("wb") as out:
        subprocess.run(["cpio", "-o", "-H", "newc", "--quiet"], cwd=folder, check=True, stdout=out,
                       input="\n".join(names).encode())  # fmt: skip


def host() -> str:
    return subprocess.run(
        ["dpkg", "--print-architecture"], check=True, capture_output=True, text=True
    ).stdout.strip()
