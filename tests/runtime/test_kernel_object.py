# SPDX-License-Identifier: Apache-2.0
"""Loading objects: options, maps, refused programs, kernels that lack something."""

from __future__ import annotations

import errno
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from profinferd.agent.errors import MachineError
from profinferd.agent.kernel import bpfsys
from profinferd.agent.kernel.arrays import MappedArray, read_array
from profinferd.agent.kernel.libbpf import BpfObject, LoadError, load_degrading
from profinferd.agent.kernel.links import attach_multi
from profinferd.agent.kernel.ring import Ring
from profinferd.agent.kernel.trial import VictimFunction

from .support import bpf_object

GOOD = ["on_entry", "on_return", "on_exit"]


def configure(obj: BpfObject) -> list[str]:
    """The test programs as multi uprobes."""
    for name in ("on_entry", "on_return", "refused"):
        obj.programs[name].as_uprobe("multi")
    return [*GOOD, "refused"]


@pytest.fixture
def loaded() -> Iterator[BpfObject]:
    with BpfObject(bpf_object("count")) as obj:
        configure(obj)
        obj.load_only(GOOD)
        obj.load()
        yield obj


def test_only_what_was_asked_for_is_loaded(loaded: BpfObject) -> None:
    assert all(loaded.program_fd(name) >= 0 for name in GOOD)
    with pytest.raises(LookupError, match="refused is not loaded"):
        loaded.program_fd("refused")
    with pytest.raises(LookupError, match="no program nonesuch"):
        loaded.load_only(["nonesuch"])


def test_read_only_data() -> None:
    """What is set is what the program runs with: seen in how it behaves and in its map."""
    with BpfObject(bpf_object("count")) as obj, VictimFunction() as victim:
        configure(obj)
        obj.load_only(GOOD)
        obj.set_rodata("discard_every", 2)
        obj.set_rodata("negative", -12345)
        with pytest.raises(LookupError, match="no read-only variable nonesuch"):
            obj.set_rodata("nonesuch", 1)
        with pytest.raises(ValueError, match="4 bytes, not 3"):
            obj.set_rodata("discard_every", b"abc")
        with pytest.raises(OverflowError):
            obj.set_rodata("discard_every", 1 << 32)
        obj.load()
        negative = obj.types().variables()["negative"]
        raw = obj.map(".rodata").lookup(bytes(4)) or b""
        assert struct.unpack_from("=h", raw, negative.offset) == (-12345,)
        records = obj.map("records")
        with (
            attach_multi(obj.program_fd("on_entry"), victim.path, [0], [0]),
            Ring(records.fd, records.max_entries, obj.types().dtype("op_hit")) as ring,
        ):
            for _ in range(10):
                victim.call()
            assert len(ring.drain()) == 5


def test_map_sizes_can_be_chosen() -> None:
    with BpfObject(bpf_object("count")) as obj:
        configure(obj)
        obj.load_only(GOOD)
        obj.set_max_entries("records", 1 << 20)
        obj.set_max_entries("table", 9)
        obj.load()
        assert (obj.map("records").max_entries, obj.map("table").max_entries) == (1 << 20, 9)
        with pytest.raises(LookupError, match="no map nonesuch"):
            obj.map("nonesuch")


def test_table(loaded: BpfObject) -> None:
    table = loaded.map("table")
    assert (table.key_size, table.value_size, table.max_entries) == (4, 8, 4)
    keys = [struct.pack("=I", n) for n in range(5)]
    for key in keys[:4]:
        table.update(key, key * 2)
    with pytest.raises(OSError, match="E2BIG") as error:  # C21: a full map says so
        table.update(keys[4], bytes(8))
    assert error.value.errno == errno.E2BIG
    assert table.lookup(keys[3]) == keys[3] * 2
    assert sorted(table.keys()) == sorted(keys[:4])
    assert table.delete(keys[3]) and not table.delete(keys[3])
    assert table.lookup(keys[3]) is None
    with pytest.raises(ValueError, match="4 and 8 bytes"):
        table.update(b"x", b"y")


def test_arrays(loaded: BpfObject, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = loaded.map("plain")
    for n in range(3):
        plain.update(struct.pack("=I", n), struct.pack("=Q", 100 + n))
    assert read_array(plain).tolist() == [100, 101, 102]
    assert read_array(plain, "i8").dtype == np.dtype("i8")
    with pytest.raises(ValueError, match="8 bytes, not 4"):
        read_array(plain, "u4")

    def too_old(*_: object) -> int:
        raise OSError(errno.EINVAL, "no batches")

    monkeypatch.setattr(bpfsys, "map_lookup_batch", too_old)
    assert read_array(plain).tolist() == [100, 101, 102], "kernels before 5.6: one by one"


def test_mapped_array(loaded: BpfObject) -> None:
    counts = loaded.map("counts")
    with MappedArray(counts, np.dtype("u8")) as live:
        before = live.read()
        counts.update(struct.pack("=I", 3), struct.pack("=Q", 77))
        assert live.read()[3] == 77
        assert before[3] == 0, "what was read is a copy"
    with pytest.raises(ValueError, match="8 bytes"):
        MappedArray(counts, np.dtype("u4"))
    with pytest.raises(MachineError, match="cannot be mapped"):
        MappedArray(loaded.map("plain"), np.dtype("u8"))


def test_refused_program_fails_with_the_verifiers_words() -> None:
    with BpfObject(bpf_object("count")) as obj:
        obj.load_only(configure(obj))
        with pytest.raises(LoadError) as error:
            obj.load()
    assert error.value.program == "refused"
    assert "map_value_or_null" in error.value.what
    assert "\n" not in str(error.value)
    assert len(error.value.log.splitlines()) > 3, "the whole log is kept"


def test_one_refused_program_disables_one_feature() -> None:
    """C30: a bad optional program is left out with its reason, the rest works."""
    obj, left_out = load_degrading(bpf_object("count"), configure, optional=["refused", "on_exit"])
    with obj:
        assert list(left_out) == ["refused"]
        assert "map_value_or_null" in left_out["refused"].what
        assert obj.program_fd("on_entry") >= 0
    with pytest.raises(LoadError):
        load_degrading(bpf_object("count"), configure, optional=["on_exit"])


@pytest.mark.parametrize("content", [b"", b"\x7fELF", b"not an object" * 100])
def test_files_that_are_no_objects(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "broken.o"
    path.write_bytes(content)
    with pytest.raises(LoadError, match=r"broken\.o cannot be opened as a BPF object"):
        BpfObject(path)
    with pytest.raises(LoadError, match="cannot be opened"):
        BpfObject(tmp_path / "absent.o")


def test_btf_path_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="--btf-path"):
        BpfObject(bpf_object("count"), btf_path=tmp_path / "absent")


def test_closing_unloads() -> None:
    obj = BpfObject(bpf_object("count"))
    configure(obj)
    obj.load_only(GOOD)
    obj.load()
    fd = obj.program_fd("on_entry")
    number = bpfsys.program_info(fd).id
    obj.close()
    obj.close()
    with pytest.raises(OSError, match=r"EBADF|EINVAL"):
        bpfsys.program_info(fd)
    assert number > 0
