# SPDX-License-Identifier: Apache-2.0
"""Calibrations as JSON and as kept files, and the machine code that they are measured on."""

from __future__ import annotations

import dataclasses
import os
import platform
import re
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import capstone
import pytest
from hypothesis import given
from hypothesis import strategies as st

from profinferd.agent.cli.calibrate import table
from profinferd.agent.errors import MachineError
from profinferd.agent.kernel import calibrate, calibration, victim_code
from profinferd.agent.kernel.bench import Bench
from profinferd.agent.kernel.calibration import Calibration, Figure, HitCost, machine_name, median_figure
from profinferd.agent.kernel.watch import Seen
from profinferd.agent.target.sites import choose_site

MACHINES = {
    "x86_64": (capstone.CS_ARCH_X86, capstone.CS_MODE_64),
    "aarch64": (capstone.CS_ARCH_ARM64, capstone.CS_MODE_ARM),
}


@pytest.fixture
def figures() -> Calibration:
    try:
        digest = calibration.programs_digest("multi")
    except FileNotFoundError:
        pytest.skip("the BPF objects are not built")
    cost = Figure(1000.0, 900.0, 1100.5, 25)
    return Calibration(
        method="multi", kernel=platform.release(), machine=machine_name(), programs=digest,
        made_at=1.5e9, seconds=1.25, quick=False,
        ns_per_hit=(HitCost("op", "emulated", "trace", cost), HitCost("op", "emulated", "sum", cost),
                    HitCost("call", "stepped", "", cost)),
        ns_per_cycle_wait=cost, ns_per_cycle_stall=Figure(0.0, 0.0, 5.0, 5),
    )  # fmt: skip


# ---- figures ----------------------------------------------------------------------------------


@given(st.lists(st.floats(0, 1e9), min_size=1, max_size=200))
def test_the_interval_holds_the_median(values: list[float]) -> None:
    figure = median_figure(values)
    assert min(values) <= figure.low <= figure.ns <= figure.high <= max(values)
    assert figure.samples == len(values)


def test_intervals_are_those_of_the_sign_test() -> None:
    """25 values: the 8th and the 18th, 95.7 % (tables of the binomial distribution)."""
    figure = median_figure([float(v) for v in range(25, 0, -1)])
    assert (figure.low, figure.ns, figure.high) == (8, 13, 18)
    assert median_figure([3.0, -7.0]) == Figure(1.5, 0.0, 3.0, 2)


def test_figures_by_kind(figures: Calibration) -> None:
    assert figures.hit("op") is figures.ns_per_hit[0].cost
    assert figures.hit("op", mode="sum") is figures.ns_per_hit[1].cost
    assert figures.hit("call", site="stepped") is figures.ns_per_hit[2].cost
    assert figures.hit("call") is None


# ---- JSON and files -----------------------------------------------------------------------------


def test_json_comes_back(figures: Calibration) -> None:
    assert Calibration.from_json(figures.to_json()) == figures


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:-20],
        lambda text: "",
        lambda text: "[]",
        lambda text: "\0" * 100,
        lambda text: "[" * 100000,
        lambda text: text.replace("1000.0", '"many"'),
        lambda text: text.replace("1000.0", "-1.0"),
        lambda text: text.replace("1100.5", "1.0"),
        lambda text: text.replace("1100.5", "1e999"),
        lambda text: text.replace('"samples": 5', '"samples": 0'),
        lambda text: text.replace('"schema": 2', '"schema": 1'),
        lambda text: text.replace('"method"', '"way"'),
    ],
)  # fmt: skip
def test_what_is_no_calibration(figures: Calibration, tmp_path: Path, damage: object) -> None:
    text = figures.to_json()
    assert callable(damage)
    damaged = damage(text)
    assert damaged != text
    with pytest.raises(ValueError, match="calibration"):
        Calibration.from_json(damaged)
    calibration.store(tmp_path, figures)
    (tmp_path / "calibration-multi.json").write_text(damaged)
    assert calibration.load(tmp_path, "multi") is None


def test_kept_and_found_again(figures: Calibration, tmp_path: Path) -> None:
    folder = tmp_path / "state" / "profinferd"
    assert calibration.load(folder, "multi") is None
    calibration.store(folder, figures)
    calibration.store(folder, figures)  # over the old one
    assert [p.name for p in folder.iterdir()] == ["calibration-multi.json"]
    assert (folder / "calibration-multi.json").stat().st_mode & 0o777 == 0o600
    assert calibration.load(folder, "multi") == figures
    assert calibration.load(folder, "perf") is None


@pytest.mark.parametrize("field", ["kernel", "machine", "programs", "method"])
def test_figures_of_another_machine_do_not_hold(figures: Calibration, tmp_path: Path, field: str) -> None:
    calibration.store(tmp_path, figures)
    other = Calibration.from_json(figures.to_json().replace(f'"{getattr(figures, field)}"', '"another"', 1))
    assert getattr(other, field) == "another"
    (tmp_path / "calibration-multi.json").write_text(other.to_json())
    assert calibration.load(tmp_path, "multi") is None


def test_quick_figures_do_for_who_wants_no_more(figures: Calibration, tmp_path: Path) -> None:
    quick = dataclasses.replace(figures, quick=True, ns_per_cycle_wait=None, ns_per_cycle_stall=None)
    calibration.store(tmp_path, quick)
    assert calibration.load(tmp_path, "multi") is None
    assert calibration.load(tmp_path, "multi", quick=True) == quick
    calibration.store(tmp_path, figures)
    assert calibration.load(tmp_path, "multi", quick=True) == figures


def test_files_of_others_are_not_believed(figures: Calibration, tmp_path: Path) -> None:
    calibration.store(tmp_path, figures)
    path = tmp_path / "calibration-multi.json"
    path.chmod(0o666)
    assert calibration.load(tmp_path, "multi") is None
    path.chmod(0o600)
    assert calibration.load(tmp_path, "multi") is not None
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert calibration.load(tmp_path, "multi") is None
    path.unlink()
    os.mkfifo(path)
    assert calibration.load(tmp_path, "multi") is None
    path.unlink()
    path.mkdir()
    assert calibration.load(tmp_path, "multi") is None


def test_a_folder_that_cannot_be_written(figures: Calibration, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MachineError, match=r"cannot be kept in .*: ENOTDIR"):
        calibration.store(tmp_path / "file" / "folder", figures)


def test_the_machine_has_a_name(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("processor\t: 0\nmodel name\t: A \x1b[31mFast CPU\n\nprocessor\t: 1\nmodel name\t: B\n")
    assert machine_name(info).startswith("A [31mFast CPU, ")
    info.write_text("processor\t: 0\nCPU implementer\t: 0x41\nCPU variant\t: 0x1\nCPU part\t: 0xd0b\n")
    assert machine_name(info).startswith(f"{platform.machine()} 0x41 0x1 0xd0b, ")
    assert machine_name(tmp_path / "absent").startswith(f"{platform.machine()}, ")


def test_the_table_says_what_was_measured(figures: Calibration) -> None:
    text = table(figures)
    assert re.search(r"^operator, recorded +emulated +1,000 +900 to 1,100$", text, re.MULTILINE)
    assert "arming and disarming: 0.0 ms" in text
    quick = dataclasses.replace(figures, ns_per_cycle_wait=None, ns_per_cycle_stall=None)
    assert "arming and disarming: not measured\n" in table(quick)


# ---- the code -----------------------------------------------------------------------------------


@pytest.mark.parametrize("machine", MACHINES)
def test_the_bytes_are_what_the_listing_says(machine: str) -> None:
    """Read with capstone; jumps are relative to the function's start."""
    reader = capstone.Cs(*MACHINES[machine])
    for listing in victim_code.listings(machine).values():
        code = b"".join(raw for raw, _ in listing)
        read = [(bytes(i.bytes), f"{i.mnemonic} {i.op_str}".strip()) for i in reader.disasm(code, 0)]
        assert read == list(listing)
        assert len(code) <= victim_code.SLOT


@pytest.mark.parametrize("machine", MACHINES)
def test_sites_are_of_the_kind_that_they_are_measured_as(machine: str) -> None:
    image = victim_code.image(machine)
    for name in ("op", "run", "call", "armed", "armed_too"):
        at = victim_code.offset(name)
        site, _ = choose_site(image[at : at + victim_code.SLOT], at, victim_code.SLOT, machine, True, 2)
        assert site is not None
        assert (site.vaddr, site.moved, site.emulated, site.ret_ok) == (at, 0, True, True), name
    for name in ("op_stepped", "graph_stepped", "call_stepped"):
        # On x86-64 the rule would take the push behind; here the first byte is meant.
        at = victim_code.offset(name)
        code = image[at : at + victim_code.SLOT]
        site, _ = choose_site(code, at, victim_code.SLOT, machine, True, 2)
        assert site is None or site.vaddr != at or not site.emulated, name


def test_functions_that_are_armed_lie_on_pages_of_their_own() -> None:
    pages = {
        name: victim_code.offset(name) // os.sysconf("SC_PAGE_SIZE") for name in ("op", "armed", "armed_too")
    }
    assert len(set(pages.values())) == 3
    with pytest.raises(KeyError):
        victim_code.offset("nothing")
    with pytest.raises(KeyError):
        victim_code.image("riscv64")


class _Busy:
    """A machine whose hypervisor takes it away for a tenth of a second in every fourth cycle."""

    def __init__(self, victim: object = None) -> None:
        self._looks = 0
        self._seen = Seen(0, 0.0, 0)

    def __enter__(self) -> _Busy:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def look(self) -> Seen:
        cycle, armed = divmod(self._looks, 2)
        self._looks += 1
        still = (1e8 if cycle % 4 == 1 else 3e5) if armed else 0.0
        self._seen = Seen(self._seen.at + 10**7 + int(still), self._seen.still + still, 0)
        return self._seen


def test_a_busy_machine_is_asked_until_its_answer_is_plausible(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once 99 ms were kept as the price of a cycle that takes 0.3 ms: a budget of 1 % then pays for a
    burst in ten seconds at best."""
    bench = SimpleNamespace(victim=None, arm=lambda: None, disarm=lambda: None)
    monkeypatch.setattr(calibrate, "Watch", _Busy)
    monkeypatch.setattr(calibrate, "_IDLE", 0.0)
    for few in (2, 6):
        monkeypatch.setattr(calibrate, "CYCLES", few)
        _, stall = calibrate._cycles(cast(Bench, bench))
        assert 3e5 * 0.9 <= stall.high <= 3.1e5 and few < stall.samples <= calibrate.MOST_CYCLES
