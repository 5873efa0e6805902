# SPDX-License-Identifier: Apache-2.0
"""Which part of an engine a stack belongs to, by the names of its functions and files. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from .eventdata import CpuPart, CpuTime

KERNEL_FRAME = "[kernel]"
MAX_FOLDED = 5000


class Frame(NamedTuple):
    """``name``: function, demangled where possible, None: not known; ``file``: its mapped file's
    name, None: none is mapped there."""

    name: str | None
    file: str | None


# The first that fits the innermost frame decides; then the next frame outwards is asked. The
# names are those of the engines' own functions, whole words of their API.
_RULES: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("barrier", re.compile(r"ggml_barrier|ggml_thread_cpu_relax|ggml_graph_compute_(?:poll|check)"
                           r"|GOMP_barrier|gomp_(?:team_)?barrier|gomp_thread_start|__kmp_.*barrier")),
    ("tokenizer", re.compile(r"tokeni[sz]e|llm_tokenizer|llama_vocab|token_to_piece|unicode_", re.I)),
    ("sampler", re.compile(r"(?:llama|common)_sampl|sampler", re.I)),
    ("http", re.compile(r"httplib|nlohmann|json|server_(?:context|queue|response|http|task|slot)", re.I)),
    ("kernels", re.compile(
        r"ggml_(?:compute_forward|vec_|gemm|gemv|cpu_|fp(?:16|32)_|quantize_mat|silu|gelu)"
        r"|(?:^|::)(?:de)?quantize_row|tinyBLAS|llamafile_sgemm|mul_mat|tensor_traits|forward_mul"
        r"|ops::|_MNK_|gem[mv]_")),
    ("engine", re.compile(r"^(?:llama|ggml|gguf|common)_|llama_(?:context|model|kv|memory|graph)|llm_|gguf")),
)  # fmt: skip
_FILES: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("barrier", re.compile(r"^lib(?:g|i)?omp")),
    ("kernels", re.compile(r"^libggml-(?:cpu|blas)")),
    ("engine", re.compile(r"^lib(?:llama|ggml|mtmd)")),
)


def part_of(in_kernel: bool, frames: Sequence[Frame]) -> str:
    """One of the parts that :class:`CpuPart` lists; ``frames`` from the innermost outwards."""
    if in_kernel:
        return "system"
    if not frames or all(f.name is None and f.file is None for f in frames):
        return "unknown"
    part = _named(frames)
    # Only kernels compute exponentials; the frame between is lost where code keeps no frame pointer.
    return "kernels" if part == "engine" and (frames[0].file or "").startswith("libm.") else part


def _named(frames: Sequence[Frame]) -> str:
    for frame in frames:
        for part, pattern in _RULES:
            if frame.name is not None and pattern.search(frame.name):
                return part
        for part, pattern in _FILES:
            if frame.file is not None and pattern.search(frame.file):
                return part
    return "other"


def cpu_time(
    stacks: Iterable[tuple[bool, Sequence[Frame], int]],
    *,
    hertz: int,
    lost: int = 0,
    seconds: float | None = None,
    root: str = "process",
) -> CpuTime:
    """Sums of stacks with their samples. ``root``: what folded stacks begin with."""
    parts: Counter[str] = Counter()
    folded: Counter[str] = Counter()
    for in_kernel, frames, count in stacks:
        part = part_of(in_kernel, frames)
        parts[part] += count
        names = [root, f"({part})", *(_shown(f) for f in reversed(frames))]
        if in_kernel:
            names.append(KERNEL_FRAME)
        folded[";".join(names)] += count
    samples = sum(parts.values())
    kept = folded.most_common(MAX_FOLDED)
    rest = samples - sum(count for _, count in kept)
    if rest:
        kept.append((f"{root};(rare stacks)", rest))
    return CpuTime(
        hertz=hertz,
        samples=samples,
        lost=lost,
        seconds=seconds,
        sampled_seconds=samples / hertz,
        parts=tuple(
            CpuPart(part, count, count / hertz, count / samples) for part, count in parts.most_common()
        ),
        folded=tuple(sorted(kept)),
    )


def _shown(frame: Frame) -> str:
    if frame.name is None:
        return f"[{frame.file}]" if frame.file else "[unknown]"
    # What separates frames and counts in the format must not be in a name.
    return re.sub(r"[;\s]+", " ", frame.name).strip()[:200] or "[unknown]"
