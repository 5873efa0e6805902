# SPDX-License-Identifier: Apache-2.0
"""Places of tensors in GGUF files, against the format's own library; and files that are none."""

from __future__ import annotations

import os
import struct
import tempfile
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from profinferd.agent.target.gguf import FileTensor, GgufError, read_tensors


def written(folder: Path, alignment: int | None) -> Path:
    path = folder / "model.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    writer.add_array("tokenizer.ggml.tokens", ["<unk>", "ä", "x" * 300])
    writer.add_array("numbers", [1, 2, 3])
    writer.add_float32("scale", 0.5)
    for n, size in enumerate((7, 64, 1)):
        writer.add_tensor(f"blk.{n}.weight", np.ones((2, size), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def read(path: Path) -> list[FileTensor]:
    fd = os.open(path, os.O_RDONLY)
    try:
        return read_tensors(fd)
    finally:
        os.close(fd)


@pytest.mark.parametrize("alignment", [None, 32, 4096])
def test_against_the_library(tmp_path: Path, alignment: int | None) -> None:
    path = written(tmp_path, alignment)
    found = {t.name: (t.offset, t.end) for t in read(path)}
    truth = {t.name: (int(t.data_offset), int(t.n_bytes)) for t in gguf.GGUFReader(path).tensors}
    assert set(found) == set(truth)
    for name, (offset, size) in truth.items():
        assert found[name][0] == offset
        assert offset + size <= found[name][1] <= offset + size + (alignment or 32)


@pytest.mark.parametrize(
    ("head", "why"),
    [
        (b"ELF!" + bytes(40), "not a GGUF"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0), "more tensors"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1 << 62), "larger"),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 0) + struct.pack("<I", 99),
            "unknown type",
        ),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<QIIQ", 0, 9, 9, 1 << 40), "too long"),
        (b"GGUF" + struct.pack("<IQ", 3, 5), "ends"),
        (b"", "ends"),
    ],
)
def test_what_is_refused(tmp_path: Path, head: bytes, why: str) -> None:
    path = tmp_path / "x"
    path.write_bytes(head)
    with pytest.raises(GgufError, match=why):
        read(path)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_damaged_files(data: st.DataObject) -> None:
    """Whatever bytes are wrong: tensors inside the file, or a refusal."""
    with tempfile.TemporaryDirectory() as folder:
        path = written(Path(folder), None)
        raw = bytearray(path.read_bytes())
        for _ in range(data.draw(st.integers(1, 4))):
            raw[data.draw(st.integers(0, min(len(raw), 900) - 1))] = data.draw(st.integers(0, 255))
        path.write_bytes(bytes(raw[: data.draw(st.integers(0, len(raw)))]))
        try:
            tensors = read(path)
        except GgufError:
            return
        assert all(0 < t.offset < t.end for t in tensors)
