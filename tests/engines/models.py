# SPDX-License-Identifier: Apache-2.0
"""Small synthetic GGUF models with random weights, and what they must cost.

Speed and graph of a model depend on its shapes, not on what it has learnt, so these run at
true speed and their sums can be done by hand. :func:`model` writes one below ``.cache`` (the
same bytes every time); :mod:`tests.engines.facts` holds the sums.

The vocabulary is that of a minimal SentencePiece-like tokenizer: three special tokens, the
256 byte tokens and then words ``w259``, ``w260``, ... Prompts are given as token ids. The rows
of the output matrix that belong to the first 259 tokens are zero, so that greedy decoding
never ends a request early and never produces half a character.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

from .fetch import MODELS

F32 = gguf.GGMLQuantizationType.F32
TYPES = {
    "f16": gguf.GGMLQuantizationType.F16,
    "q8_0": gguf.GGMLQuantizationType.Q8_0,
    "q4_0": gguf.GGMLQuantizationType.Q4_0,
    "q4_K": gguf.GGMLQuantizationType.Q4_K,
}
FIRST_WORD, WORDS_END = 259, 1024
"""The words that every vocabulary has: the engine refuses a prompt with a token it has not."""

Weights = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Spec:
    """The hyperparameters. ``type`` is the engine's own name of the weight type."""

    name: str
    arch: str = "llama"
    layers: int = 2
    decoder_layers: int = 0
    embd: int = 512
    ff: int = 1536
    heads: int = 8
    kv_heads: int = 2
    vocab: int = 2048
    type: str = "q8_0"
    experts: int = 0
    experts_used: int = 0
    tied: bool = False
    context: int = 4096
    seed: int = 1
    late_scale: float = 1.0  # of what layers after the first add to the residual stream

    def __post_init__(self) -> None:
        if self.vocab < WORDS_END:
            raise ValueError(f"{self.name}: a vocabulary of {self.vocab} lacks words of prompts")

    @property
    def head(self) -> int:
        return self.embd // self.heads


def _dense(name: str, type: str, **more: int) -> Spec:
    return Spec(name=name, type=type, **more)  # type: ignore[arg-type]


_DEEP = {"layers": 24, "embd": 256, "ff": 768, "heads": 8, "kv_heads": 2, "vocab": 1024}
_MOE = {"experts": 8, "experts_used": 2, "embd": 512, "ff": 768}

SPECS: dict[str, Spec] = {
    s.name: s
    for s in (
        *(_dense(f"dense2-{t.lower()}", t) for t in TYPES),
        _dense("dense24-q4_0", "q4_0", **_DEEP),
        _dense("dense12-f16", "f16", layers=12),
        # 200 MB for each token: more than caches hold, with little arithmetic for each byte
        _dense("wide2-f16", "f16", embd=2048, ff=8192, heads=16, kv_heads=4, vocab=1024),
        # kernels of a microsecond: with two threads most of it is waiting at barriers
        _dense("thin24-f16", "f16", layers=24, embd=64, ff=128, heads=2, kv_heads=1, vocab=1024),
        Spec("tied24-q8_0", type="q8_0", tied=True, **_DEEP),  # type: ignore[arg-type]
        Spec("moe-q8_0", type="q8_0", **_MOE),  # type: ignore[arg-type]
        Spec("moe-q4_k", type="q4_K", **_MOE),  # type: ignore[arg-type]
        Spec(
            "t5-f16",
            arch="t5",
            type="f16",
            layers=3,
            decoder_layers=2,
            kv_heads=8,
            ff=1024,
            vocab=1024,
            embd=256,
        ),
        Spec("bert-f16", arch="bert", type="f16", kv_heads=8, ff=1024, vocab=1024, embd=256, context=512),
        Spec(
            "nomic-f16", arch="nomic-bert", type="f16", kv_heads=8, ff=1024, vocab=1024, embd=256, context=512
        ),
        # the draft is the target without its second layer, which adds little: most guesses agree
        Spec("target-q8_0", type="q8_0", late_scale=0.1, seed=7),
        Spec("draft-q8_0", type="q8_0", layers=1, seed=7),
    )
}

LARGE: dict[str, Spec] = {
    # The shape of a model of a billion weights, as boards run them.
    "billion16-q4_k": Spec(
        "billion16-q4_k",
        type="q4_K",
        layers=16,
        embd=2048,
        ff=8192,
        heads=32,
        kv_heads=8,
        vocab=32000,
        tied=True,
    ),
}
"""For benchmarks alone: half a minute to write."""


def _random(spec: Spec, name: str, rows: int, columns: int) -> Weights:
    digest = hashlib.sha256(f"{spec.seed}/{name}".encode()).digest()
    rng = np.random.default_rng(int.from_bytes(digest[:8], "little"))
    out = rng.standard_normal((rows, columns), dtype=np.float32)
    out /= np.float32(np.sqrt(columns))
    return out


def _q4_k_blocks(weights: Weights) -> npt.NDArray[np.uint8]:
    """Random but valid Q4_K blocks (144 bytes for 256 weights); all-zero rows stay zero.

    A block is d and dmin (half floats), 12 bytes of 6-bit scales and mins, 128 bytes of
    4-bit values; a weight is d*scale*q - dmin*min. Random scales average 31.5 and values
    7.5, so dmin = 7.5 d centres them, and d is chosen for the deviation wanted.
    """
    rows, columns = weights.shape
    blocks = columns // 256
    seed = int.from_bytes(hashlib.sha256(weights[:, :8].tobytes()).digest()[:8], "little")
    rng = np.random.default_rng(seed)
    out = rng.integers(0, 256, (rows, blocks, 144), dtype=np.uint8)
    d = np.float16(1 / np.sqrt(columns) / 180)
    out[:, :, 0:2] = np.frombuffer(d.tobytes(), np.uint8)
    out[:, :, 2:4] = np.frombuffer(np.float16(7.5 * float(d)).tobytes(), np.uint8)
    out[~weights.any(axis=1)] = 0
    return out.reshape(rows, blocks * 144)


def _encode(weights: Weights, kind: gguf.GGMLQuantizationType) -> npt.NDArray[np.generic]:
    if kind == F32:
        return weights
    if kind == gguf.GGMLQuantizationType.F16:
        return weights.astype(np.float16)
    if kind == gguf.GGMLQuantizationType.Q4_K:
        return _q4_k_blocks(weights)
    return np.asarray(gguf.quants.quantize(weights, kind))


class _Writer:
    def __init__(self, spec: Spec, path: Path) -> None:
        self.spec = spec
        self.gguf = gguf.GGUFWriter(str(path), spec.arch)

    def matrix(self, name: str, columns: int, rows: int, scale: float = 1.0) -> None:
        weights = _random(self.spec, name, rows, columns) * np.float32(scale)
        if name in ("output.weight", "token_embd.weight"):
            weights[:FIRST_WORD] = 0
        self._add(name, weights, TYPES[self.spec.type])

    def experts(self, name: str, columns: int, rows: int) -> None:
        count = self.spec.experts
        kind = TYPES[self.spec.type]
        data = _encode(_random(self.spec, name, rows * count, columns), kind)
        shaped = data.reshape(count, rows, data.shape[-1])
        self.gguf.add_tensor(name, shaped, raw_dtype=kind)

    def plain(self, name: str, rows: int, columns: int, scale: float = 1.0) -> None:
        self._add(name, _random(self.spec, name, rows, columns) * np.float32(scale), F32)

    def vector(self, name: str, size: int, value: float = 1.0) -> None:
        self.gguf.add_tensor(name, np.full(size, value, np.float32), raw_dtype=F32)

    def norm_with_bias(self, name: str, size: int) -> None:
        self.vector(f"{name}.weight", size)
        self.vector(f"{name}.bias", size, 0.0)

    def _add(self, name: str, weights: Weights, kind: gguf.GGMLQuantizationType) -> None:
        self.gguf.add_tensor(name, _encode(weights, kind), raw_dtype=kind)


def _metadata(writer: _Writer) -> None:
    spec, out = writer.spec, writer.gguf
    out.add_name(spec.name)
    out.add_context_length(spec.context)
    out.add_embedding_length(spec.embd)
    out.add_block_count(spec.layers)
    out.add_feed_forward_length(spec.ff)
    out.add_head_count(spec.heads)
    out.add_head_count_kv(spec.kv_heads)
    out.add_vocab_size(spec.vocab)
    if spec.arch in ("bert", "nomic-bert"):
        out.add_layer_norm_eps(1e-5)
        out.add_causal_attention(False)
        out.add_pooling_type(gguf.PoolingType.MEAN)
        out.add_token_type_count(2)
    else:
        out.add_layer_norm_rms_eps(1e-5)
    if spec.arch in ("llama", "nomic-bert"):
        out.add_rope_dimension_count(spec.head)
        out.add_rope_freq_base(10000.0)
    if spec.experts:
        out.add_expert_count(spec.experts)
        out.add_expert_used_count(spec.experts_used)
    if spec.arch == "t5":
        out.add_key_length(spec.head)
        out.add_value_length(spec.head)
        out.add_relative_attn_buckets_count(32)
        out.add_decoder_block_count(spec.decoder_layers)
        out.add_decoder_start_token_id(0)
    _vocabulary(writer)


def _vocabulary(writer: _Writer) -> None:
    kinds = gguf.TokenType
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    types = [kinds.UNKNOWN, kinds.CONTROL, kinds.CONTROL, *[kinds.BYTE] * 256]
    words = range(FIRST_WORD, writer.spec.vocab)
    tokens += [f"\u2581w{i}" for i in words]
    types += [kinds.NORMAL] * len(words)
    out = writer.gguf
    out.add_tokenizer_model("llama")
    out.add_tokenizer_pre("default")
    out.add_token_list(tokens)
    out.add_token_scores([0.0 if i < FIRST_WORD else -float(i) for i in range(len(tokens))])
    out.add_token_types([int(t) for t in types])
    out.add_bos_token_id(1)
    out.add_eos_token_id(2)
    out.add_unk_token_id(0)
    out.add_add_bos_token(False)
    out.add_add_eos_token(False)
    out.add_add_space_prefix(False)


def _attention(writer: _Writer, prefix: str, layer: int) -> None:
    spec = writer.spec
    scale = 1.0 if layer == 0 else spec.late_scale
    writer.matrix(f"{prefix}_q.weight", spec.embd, spec.heads * spec.head)
    writer.matrix(f"{prefix}_k.weight", spec.embd, spec.kv_heads * spec.head)
    writer.matrix(f"{prefix}_v.weight", spec.embd, spec.kv_heads * spec.head)
    out = "_o" if spec.arch == "t5" else "_output"
    writer.matrix(f"{prefix}{out}.weight", spec.heads * spec.head, spec.embd, scale)


def _feed_forward(writer: _Writer, block: str, layer: int, gated: bool) -> None:
    spec = writer.spec
    scale = 1.0 if layer == 0 else spec.late_scale
    if gated:
        writer.matrix(f"{block}.ffn_gate.weight", spec.embd, spec.ff)
    writer.matrix(f"{block}.ffn_up.weight", spec.embd, spec.ff)
    writer.matrix(f"{block}.ffn_down.weight", spec.ff, spec.embd, scale)


def _llama(writer: _Writer) -> None:
    spec = writer.spec
    writer.matrix("token_embd.weight", spec.embd, spec.vocab)
    writer.vector("output_norm.weight", spec.embd)
    if not spec.tied:
        writer.matrix("output.weight", spec.embd, spec.vocab)
    for i in range(spec.layers):
        block = f"blk.{i}"
        writer.vector(f"{block}.attn_norm.weight", spec.embd)
        _attention(writer, f"{block}.attn", i)
        writer.vector(f"{block}.ffn_norm.weight", spec.embd)
        if spec.experts:
            writer.plain(f"{block}.ffn_gate_inp.weight", spec.experts, spec.embd)
            writer.experts(f"{block}.ffn_gate_exps.weight", spec.embd, spec.ff)
            writer.experts(f"{block}.ffn_up_exps.weight", spec.embd, spec.ff)
            writer.experts(f"{block}.ffn_down_exps.weight", spec.ff, spec.embd)
        else:
            _feed_forward(writer, block, i, gated=True)


def _t5(writer: _Writer) -> None:
    spec = writer.spec
    writer.matrix("token_embd.weight", spec.embd, spec.vocab)
    writer.matrix("output.weight", spec.embd, spec.vocab)
    for side, layers in (("enc", spec.layers), ("dec", spec.decoder_layers)):
        writer.vector(f"{side}.output_norm.weight", spec.embd)
        for i in range(layers):
            block = f"{side}.blk.{i}"
            writer.vector(f"{block}.attn_norm.weight", spec.embd)
            _attention(writer, f"{block}.attn", i)
            if i == 0:
                writer.plain(f"{block}.attn_rel_b.weight", 32, spec.heads, 0.1)
            if side == "dec":
                writer.vector(f"{block}.cross_attn_norm.weight", spec.embd)
                _attention(writer, f"{block}.cross_attn", i)
            writer.vector(f"{block}.ffn_norm.weight", spec.embd)
            _feed_forward(writer, block, i, gated=True)


def _bert(writer: _Writer) -> None:
    spec = writer.spec
    writer.matrix("token_embd.weight", spec.embd, spec.vocab)
    writer.plain("token_types.weight", 2, spec.embd)
    writer.norm_with_bias("token_embd_norm", spec.embd)
    if spec.arch == "bert":
        writer.plain("position_embd.weight", spec.context, spec.embd)
    for i in range(spec.layers):
        block = f"blk.{i}"
        _attention(writer, f"{block}.attn", i)
        writer.norm_with_bias(f"{block}.attn_output_norm", spec.embd)
        _feed_forward(writer, block, i, gated=spec.arch == "nomic-bert")
        writer.norm_with_bias(f"{block}.layer_output_norm", spec.embd)


_ARCHITECTURES = {"llama": _llama, "t5": _t5, "bert": _bert, "nomic-bert": _bert}


def model(name: str) -> Path:
    """The GGUF file of ``SPECS[name]`` or ``LARGE[name]``, written on first use.

    The file name carries a hash of this module, so that a changed recipe is never served
    from an old file.
    """
    spec = SPECS[name] if name in SPECS else LARGE[name]
    recipe = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:10]
    path = MODELS / recipe / f"{name}.gguf"
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}.partial")
    writer = _Writer(spec, partial)
    _metadata(writer)
    _ARCHITECTURES[spec.arch](writer)
    writer.gguf.write_header_to_file()
    writer.gguf.write_kv_data_to_file()
    writer.gguf.write_tensors_to_file()
    writer.gguf.close()
    partial.replace(path)
    return path


def words(count: int, seed: int = 0) -> list[int]:
    """``count`` token ids of plain words that every synthetic vocabulary has; never the same
    prefix for two seeds."""
    rng = np.random.default_rng(1000 + seed)
    ids = rng.integers(FIRST_WORD, WORDS_END, count)
    return [int(i) for i in ids]


if __name__ == "__main__":
    for one in SPECS:
        written = model(one)
        print(f"{one:14} {written.stat().st_size / 1e6:6.1f} MB")
