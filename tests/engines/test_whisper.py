# SPDX-License-Identifier: Apache-2.0
"""Another program on ggml: whisper.cpp, whose copy of ggml has other file names.

Truth is the architecture: each run encodes once, and the encoder begins with two convolutions.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from profinferd.agent.attach import Attachment
from tests.engines import whisper
from tests.engines.compare import missed
from tests.engines.fetch import Engines
from tests.runtime.callvictims import Told

RUNS = 2


def test_operators_of_a_vendored_ggml(engines: Engines, tmp_path: Path) -> None:
    try:
        folder = whisper.fetch()
    except RuntimeError as error:
        pytest.skip(f"no whisper.cpp to test with: {error}")
    model = tmp_path / "empty.bin"
    whisper.write_model(model)
    try:
        victim = Told([engines.python, Path(whisper.__file__), folder, model], env={"OMP_NUM_THREADS": "1"})
    except AssertionError as error:
        pytest.skip(f"this wheel does not run on this CPU: {error}")
    with victim, Attachment.open(victim.pid, ops="all") as watched:
        assert [victim.tell("run") for _ in range(RUNS)] == ["0"] * RUNS
        seen = watched.snapshot()
        for _ in range(100):
            before = sum(op.calls for op in seen.ops)
            watched.poll(0.1)
            seen = watched.snapshot()
            if before and sum(op.calls for op in seen.ops) == before:
                break
    assert seen.target.engine == "ggml"
    files = {Path(library.path).name for library in seen.target.libraries}
    assert any(re.fullmatch(r"libggml-cpu-[0-9a-f]{8}\.so.*", name) for name in files), files
    convolutions = sum(op.calls for op in seen.ops if op.op == "IM2COL")
    assert convolutions == RUNS * whisper.CONVOLUTIONS
    assert {"MUL_MAT", "FLASH_ATTN_EXT"} <= {op.op for op in seen.ops}
    assert not any(graph.uncovered for graph in seen.graphs)
    # No function of llama.cpp is there: said, not shown as no tokens.
    assert not seen.calls and any("call level is not available" in note for note in seen.notes)
    assert not missed(seen.lost.by_kind)
