# SPDX-License-Identifier: Apache-2.0
"""The code that measures peaks, what it is measured on, and how peaks are kept."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import capstone
import numpy as np
import pytest

from profinferd.agent.cli.calibrate import table
from profinferd.agent.errors import MachineError
from profinferd.agent.kernel import calibration, peak_code, peaks
from profinferd.agent.model.peaks import Peak, Peaks

from .test_calibration import MACHINES

FEATURES = {
    "x86_64": [
        set[str](),
        {"avx2"},
        {"avx2", "fma"},
        {"avx2", "fma", "avx512f"},
        {"avx2", "fma", "avx512f", "avx512_vnni"},
    ],
    "aarch64": [{"asimd"}, {"asimd", "asimddp"}, {"asimd", "asimddp", "i8mm"}],
}
CHOICES = [(machine, features) for machine, some in FEATURES.items() for features in some]
HERE = [features for features in FEATURES[platform.machine()] if features <= peaks.cpu_features()]


@pytest.mark.parametrize("machine", MACHINES)
def test_the_bytes_are_what_the_listing_says(machine: str) -> None:
    reader = capstone.Cs(*MACHINES[machine])
    for name, listing in peak_code.listings(machine).items():
        code = b"".join(raw for raw, _ in listing)
        read = [(bytes(i.bytes), f"{i.mnemonic} {i.op_str}".strip()) for i in reader.disasm(code, 0)]
        assert read == list(listing), name
        assert len(code) <= peak_code.SLOT


def test_arm64_code_leaves_the_registers_of_its_caller_alone() -> None:
    """x19 and above, and the low halves of v8 to v15, belong to the caller."""
    for name, listing in peak_code.listings("aarch64").items():
        words = {word.strip("[],").split(".")[0] for _, text in listing for word in text.split()}
        owned = {f"x{n}" for n in range(18, 31)} | {f"{r}{n}" for n in range(8, 16) for r in "qvd"}
        assert not words & owned, name


@pytest.mark.parametrize(("machine", "features"), CHOICES)
def test_operations_of_a_round_are_those_of_its_instructions(machine: str, features: set[str]) -> None:
    """Counted from the loop's own text: lanes of the register times two operations."""
    choice = peak_code.choose(features, machine)
    listing = peak_code.listings(machine)
    lanes = {"zmm": 16, "ymm": 8, "xmm": 4, "v": 4}

    def count(name: str, each: dict[str, int]) -> int:
        total = 0
        for _, text in listing[name]:
            mnemonic, _, operands = text.partition(" ")
            if mnemonic in each:
                register = operands.split(",")[0].split(".")[0].rstrip("0123456789")
                total += each[mnemonic] * lanes[register]
        return total

    fma = {"vfmadd231ps": 2, "fmla": 2, "mulps": 1, "addps": 1}
    assert count(choice.functions["fma"], fma) == choice.fma_ops
    if choice.int8_ops is not None:
        # Per 32-bit lane: four products, and their sum into it. maddubs does all four products.
        int8 = {"vpdpbusd": 8, "sdot": 8, "smmla": 16, "vpmaddubsw": 8}
        assert count(choice.functions["int8"], int8) == choice.int8_ops


def test_no_code_for_other_machines() -> None:
    with pytest.raises(KeyError):
        peak_code.choose((), "riscv64")


def test_unknown_machine_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(MachineError, match="riscv64"):
        peaks.measure_peaks([1])


@pytest.mark.parametrize("features", HERE)
def test_the_code_does_what_it_says(features: set[str]) -> None:
    """Every variant that this processor can run: triad's result, and that all of it returns."""
    choice = peak_code.choose(features)
    image, where = peak_code.image(choice)
    fd = os.memfd_create("peaks")
    os.write(fd, image)
    code = mmap.mmap(fd, len(image), mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    os.close(fd)
    start = ctypes.addressof(ctypes.c_char.from_buffer(code))

    def function(name: str) -> Callable[..., None]:
        found: Callable[..., None] = ctypes.CFUNCTYPE(None, *[ctypes.c_uint64] * 4)(start + where[name])
        return found

    memory = mmap.mmap(-1, 3 * 8192)
    a, b, c = (np.frombuffer(memory, "f8", 1024, n * 8192) for n in range(3))
    a[:], b[:], c[:] = -1.0, np.arange(1024), np.arange(1024) ** 2 / 7
    # Half of it: what lies behind must stay as it was.
    function("triad")(a.ctypes.data, b.ctypes.data, c.ctypes.data, 4096)
    np.testing.assert_allclose(a[:512], b[:512] + 3 * c[:512], rtol=1e-15)
    assert (a[512:] == -1).all()
    function("read")(memory_at(memory), 3 * 8192 // 4 // 512 * 512, 2, 0)
    function("fma")(3, 0, 0, 0)
    if choice.int8_ops is not None:
        function("int8")(3, 0, 0, 0)
    assert (a[512:] == -1).all()


def memory_at(memory: mmap.mmap) -> int:
    """Where it lies."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


# ---- on what --------------------------------------------------------------------------------


def test_numbers_of_threads() -> None:
    assert [peaks.thread_counts(n) for n in (1, 2, 4, 6)] == [[1], [1, 2], [1, 2, 4], [1, 2, 4, 6]]


MIB = 1 << 20


def test_what_is_read_is_larger_than_the_caches() -> None:
    """Four times the caches, whatever is free; half of that where there is no room for it."""
    assert peaks.memory_size(32 * MIB, None) == (128 * MIB, None)
    assert peaks.memory_size(1 * MIB, None) == (24 * MIB, None)
    assert peaks.memory_size(None, None) == (128 * MIB, None)
    assert peaks.memory_size(32 * MIB, 100 * MIB) == (100 * MIB, None)
    assert peaks.memory_size(32 * MIB, 64 * MIB) == (64 * MIB, None)


def test_caches_are_not_taken_for_memory() -> None:
    """A server's caches under a service's limit: absent, with the reason and what to do."""
    for cache, room in ((32 * MIB, 64 * MIB - 1), (256 * MIB, 300 * MIB), (32 * MIB, 0), (2048 * MIB, None)):
        size, reason = peaks.memory_size(cache, room)
        assert size == 0
        assert f"{cache // MIB} MiB" in str(reason) and "profinferd calibrate" in str(reason)


def test_room_is_what_the_machine_and_the_group_leave() -> None:
    assert peaks.memory_room(400 * MIB, None) == 100 * MIB
    assert peaks.memory_room(4000 * MIB, 400 * MIB) == 300 * MIB
    assert peaks.memory_room(None, 400 * MIB) == 300 * MIB
    assert peaks.memory_room(4000 * MIB, 0) == 0
    assert peaks.memory_room(None, None) is None


def test_the_child_takes_no_more_than_it_is_told() -> None:
    """Its largest resident size, as the kernel counted it; arithmetic alone takes nothing."""
    assert 60 * MIB < largest_child(100 * MIB) < 130 * MIB
    assert largest_child(0) < 30 * MIB


def largest_child(room: int) -> int:
    """Bytes that the largest child of a measurement had, with caches of 30 MiB."""
    code = (
        "import resource\n"
        "from profinferd.agent.kernel import peaks\n"
        "peaks.cache_bytes = lambda: 30 << 20\n"
        "peaks.MEMORY_REPEATS = peaks.REPEATS = 1\n"
        f"found = peaks.measure_peaks([1, 2], room={room})\n"
        "assert len(found.by_threads) == 2\n"
        f"assert all((p.read_bytes_per_second is None) == ({room} == 0) for p in found.by_threads)\n"
        f"assert all((p.triad_bytes_per_second is None) == ({room} == 0) for p in found.by_threads)\n"
        "assert all(p.flops_per_second for p in found.by_threads)\n"
        f"assert (found.reason is None) == bool({room})\n"
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return int(done.stdout) << 10


def test_caches_from_a_made_up_sysfs(tmp_path: Path) -> None:
    """Two clusters: the last level of each counts once, whoever shares it."""
    for cpu, (levels, shared) in enumerate([((1, 2), "0"), ((1, 2, 3), "1-2"), ((1, 2, 3), "1-2")]):
        for index, level in enumerate(levels):
            folder = tmp_path / f"cpu{cpu}" / "cache" / f"index{index}"
            folder.mkdir(parents=True)
            (folder / "level").write_text(f"{level}\n")
            (folder / "size").write_text({1: "64K", 2: "512K", 3: "4M"}[level] + "\n")
            (folder / "shared_cpu_list").write_text((shared if level == levels[-1] else str(cpu)) + "\n")
    assert peaks.cache_bytes(tmp_path) == (512 << 10) + (4 << 20)
    assert peaks.cache_bytes(tmp_path / "nothing") is None


def test_features_of_both_kinds_of_cpuinfo(tmp_path: Path) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text("processor\t: 0\nflags\t\t: fpu avx2\n\nprocessor\t: 1\nflags\t\t: fpu\n")
    assert peaks.cpu_features(path) == {"fpu", "avx2"}
    path.write_text("processor\t: 0\nFeatures\t: fp asimd asimddp\n")
    assert peaks.cpu_features(path) == {"fp", "asimd", "asimddp"}
    assert peaks.cpu_features(tmp_path / "nothing") == set()


# ---- kept -----------------------------------------------------------------------------------


def kept() -> Peaks:
    """Peaks of this machine."""
    return Peaks((Peak(1, 1e10, 9e9, 8e10, None),), calibration.machine_name(), 1.5, "avx2")


def test_kept_and_found_again(tmp_path: Path) -> None:
    peaks.store_peaks(tmp_path / "state", kept())
    assert peaks.load_peaks(tmp_path / "state") == kept()
    assert (tmp_path / "state" / "peaks.json").stat().st_mode & 0o777 == 0o600


def test_what_does_not_hold_here_is_absent_with_a_reason(tmp_path: Path) -> None:
    file = tmp_path / "peaks.json"
    assert "profinferd calibrate" in str(peaks.load_peaks(tmp_path).reason)
    changes: tuple[tuple[Callable[[str], str], str], ...] = (
        (lambda text: text[:40], "cannot be read"),
        (lambda text: text.replace("10000000000.0", "-1.0"), "cannot be"),
        (lambda text: text.replace('"threads":1', '"threads":0'), "cannot be"),
        (lambda text: text.replace('"schema":2', '"schema":1'), "cannot be"),
        (lambda text: text.replace(" CPU", " QPU"), "another machine"),
    )
    for change, word in changes:
        peaks.store_peaks(tmp_path, kept())
        before = file.read_text()
        file.write_text(change(before))
        assert file.read_text() != before
        found = peaks.load_peaks(tmp_path)
        assert not found.by_threads
        assert word in str(found.reason)
    peaks.store_peaks(tmp_path, kept())
    file.chmod(0o666)  # somebody else may have written it
    assert not peaks.load_peaks(tmp_path).by_threads


def test_shown_to_people() -> None:
    figures = calibration.Calibration("multi", "6.1", "a machine", "ab", 1.5, 1.0, False, (), None, None)
    lines = table(figures, kept()).splitlines()
    at = lines.index("at most, with avx2")
    assert lines[at + 2].split() == ["1", "10.0", "9.0", "80", "-"]
    assert "not measured, no code" in table(figures, Peaks((), reason="no code for it"))
