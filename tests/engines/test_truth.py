# SPDX-License-Identifier: Apache-2.0
"""The witness itself: what real engines execute for the synthetic models is what the sums on
paper say. The profiler has no part in this; it is what the other tests compare it with."""

from __future__ import annotations

from collections import Counter

import pytest

from . import facts, models, pysync, truth
from .fetch import Engines

SHAPE = tuple[str, str, tuple[int, ...]]


def _trim(ne: tuple[int, ...]) -> tuple[int, ...]:
    while len(ne) > 1 and ne[-1] == 1:
        ne = ne[:-1]
    return ne


def _executed(run: truth.GraphRun) -> Counter[SHAPE]:
    return Counter((op.node.op, op.role, _trim(op.node.ne)) for op in run.ops)


def _predicted(kernels: list[facts.Kernel]) -> Counter[SHAPE]:
    return Counter((k.op, k.role, _trim(k.ne)) for k in kernels)


def _of_llama(run: truth.GraphRun, spec: models.Spec, tokens: int, rows: int, positions: int) -> None:
    cells = next(t.ne[1] for t in run.description.tensors.values() if t.name == "cache_k_l0")
    kernels = facts.llama(spec, tokens, rows, facts.kv_padded(positions), cells)
    assert _executed(run) == _predicted(kernels)


LLAMA = [name for name, spec in models.SPECS.items() if spec.arch == "llama"]


@pytest.mark.parametrize("name", LLAMA)
def test_llama_runs_what_the_sums_say(name: str, engines: Engines, witness: truth.Witness) -> None:
    """C25: every kernel of prefill and decode, by op, role and shape; fused pairs once."""
    spec = models.SPECS[name]
    with pysync.PySync(pysync.Options(models.model(name), env=witness.env)) as victim:
        victim.ask("generate", context=0, prompt=models.words(9), n=3)
    prefill, *decodes = witness.runs()
    _of_llama(prefill, spec, 9, 1, 9)
    assert len(decodes) == 2
    for step, decode in enumerate(decodes):
        _of_llama(decode, spec, 1, 1, 10 + step)


def test_prefill_without_rows_ends_early(engines: Engines, witness: truth.Witness) -> None:
    """A prompt chunk nobody asks a row of: what follows the last attention is empty."""
    spec = models.SPECS["dense2-q8_0"]
    with pysync.PySync(pysync.Options(models.model(spec.name), env=witness.env)) as victim:
        victim.ask("call", context=0, tokens=models.words(5), pos=[*range(5)], seq=[0] * 5, out=[0] * 5)
    (run,) = witness.runs()
    _of_llama(run, spec, 5, 0, 5)


def _with_weights(run: truth.GraphRun, but: tuple[str, ...] = ()) -> Counter[SHAPE]:
    found = _executed(run)
    return Counter(
        {k: n for k, n in found.items() if k[1] and not k[1].startswith("kv_") and k[1] not in but}
    )


def test_t5_runs_what_the_sums_say(engines: Engines, witness: truth.Witness) -> None:
    """C50: an encoder graph and decoder graphs, roles with their side."""
    spec = models.SPECS["t5-f16"]
    with pysync.PySync(pysync.Options(models.model(spec.name), sequences=1, env=witness.env)) as victim:
        victim.ask("translate", context=0, source=models.words(12), n=3)
    encoder, *decoders = witness.runs()
    assert _with_weights(encoder, ("enc.attn_rel_b",)) == _predicted(facts.weights_t5(spec, "enc", 12, 12, 0))
    assert len(decoders) == 3
    for run in decoders:
        assert _with_weights(run, ("dec.attn_rel_b",)) == _predicted(facts.weights_t5(spec, "dec", 1, 1, 12))


@pytest.mark.parametrize("name", ["bert-f16", "nomic-f16"])
def test_embedding_runs_what_the_sums_say(name: str, engines: Engines, witness: truth.Witness) -> None:
    """C50: embedding models, with and without ROPE."""
    spec = models.SPECS[name]
    with pysync.PySync(pysync.Options(models.model(name), embedding=True, env=witness.env)) as victim:
        victim.ask("embed", context=0, tokens=models.words(20))
    (run,) = witness.runs()
    products = Counter({k: n for k, n in _executed(run).items() if k[0] == "MUL_MAT" and k[1]})
    assert products == _predicted(facts.matrices_bert(spec, 20))
    assert any(op.node.op == "ROPE" for op in run.ops) == (spec.arch == "nomic-bert")


def test_experts_are_seen(engines: Engines, witness: truth.Witness) -> None:
    """MUL_MAT_ID: one token uses its experts, several tokens at most all of them."""
    spec = models.SPECS["moe-q8_0"]
    with pysync.PySync(pysync.Options(models.model(spec.name), env=witness.env)) as victim:
        victim.ask("generate", context=0, prompt=models.words(9), n=2)
    prefill, decode = witness.runs()
    ids = [op for op in decode.ops if op.node.op == "MUL_MAT_ID"]
    assert [op.experts.bit_count() for op in ids] == [spec.experts_used] * 3 * spec.layers
    for op in (op for op in prefill.ops if op.node.op == "MUL_MAT_ID"):
        assert spec.experts_used <= op.experts.bit_count() <= spec.experts
        assert op.experts < 1 << spec.experts


def test_times_add_up(engines: Engines, witness: truth.Witness) -> None:
    """Setup and ops make the graph, exactly; the witness invents and loses no time."""
    with pysync.PySync(pysync.Options(models.model("dense24-q4_0"), env=witness.env)) as victim:
        victim.ask("generate", context=0, prompt=models.words(9), n=5)
    for run in witness.runs():
        assert run.setup_seconds + sum(op.seconds for op in run.ops) == pytest.approx(run.seconds, abs=1e-9)


def test_whole_and_stripped_libraries_answer_alike(engines: Engines) -> None:
    """Stripping a library, or the newer entry point, changes no token."""
    answers = []
    for stripped, api in ((False, "decode"), (True, "decode"), (False, "process")):
        options = pysync.Options(models.model("dense2-q4_k"), stripped=stripped, api=api)
        with pysync.PySync(options) as victim:
            answers.append(victim.ask("generate", context=0, prompt=models.words(9), n=12)["tokens"])
    assert answers[0] == answers[1] == answers[2]
    assert len(set(answers[0])) > 3
