# SPDX-License-Identifier: Apache-2.0
"""whisper.cpp inside Python, from the package index, and a model for it without any weights.

A program of its own when run: transcribes two seconds of silence as often as it is told. A
model file without tensors is what whisper.cpp takes for its own tests: it computes with zeros.
"""

from __future__ import annotations

import struct
import sys
from pathlib import Path

PACKAGE = "pywhispercpp>=1.3,<2"
LAYERS = 4
CONVOLUTIONS = 2  # that the encoder begins with


def fetch() -> Path:
    """The folder to import from. Raises RuntimeError when the index does not deliver."""
    from .fetch import CACHE, _locked, install, say

    folder = CACHE / "whisper"
    with _locked():
        stamp = folder / "stamp"
        if not stamp.exists() or stamp.read_text() != PACKAGE:
            say("fetching whisper.cpp (5 MB), once")
            install(sys.executable, "--no-deps", "--upgrade", "--target", str(folder), PACKAGE)
            stamp.write_text(PACKAGE)
    return folder


def write_model(path: Path) -> None:
    """The header of a small English model: sizes, a filter of zeros, words; no tensor follows."""
    state, words = 128, 50257
    fixed = {0: b" ", 1: b" -", 2: b" '"}  # whisper.cpp looks these up
    with path.open("wb") as file:
        file.write(struct.pack("<I", 0x67676D6C))
        file.write(struct.pack("<11i", 51864, 1500, state, 2, LAYERS, 448, state, 2, LAYERS, 80, 1))
        file.write(struct.pack("<ii", 80, 201) + bytes(4 * 80 * 201))
        file.write(struct.pack("<i", words))
        for number in range(words):
            word = fixed.get(number, f"w{number}".encode())
            file.write(struct.pack("<I", len(word)) + word)


def main(folder: str, model: str) -> None:
    """Answers each line with the status."""
    sys.path.insert(0, folder)
    import _pywhispercpp as pw
    import numpy as np

    context = pw.whisper_init_from_file_with_params(model, pw.whisper_context_default_params())
    options = pw.whisper_full_default_params(pw.whisper_sampling_strategy.WHISPER_SAMPLING_GREEDY)
    options.n_threads, options.print_progress = 1, False
    silence = np.zeros(2 * 16000, dtype=np.float32)
    print("ready", flush=True)
    for _ in sys.stdin:
        print(pw.whisper_full(context, options, silence, silence.size), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:3])
