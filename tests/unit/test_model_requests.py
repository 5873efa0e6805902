# SPDX-License-Identifier: Apache-2.0
"""Tokens, phases and requests from positions: the patterns that the engine shows (design D10)."""

from __future__ import annotations

import pytest

from profinferd.agent.model.session import Session
from profinferd.agent.model.snapshot import Snapshot

from .streams import START, Step, Stream, decode, prompt, session, verify


def phases(snapshot: Snapshot) -> dict[str, int]:
    return {call.phase: call.count for call in snapshot.calls if call.status == 0}


def identities(snapshot: Snapshot) -> None:
    """Over successful calls without speculation or embeddings (design D10)."""
    tokens, requests = snapshot.tokens, snapshot.requests
    assert tokens.prefill is not None and tokens.decode is not None and tokens.output_rows is not None
    assert requests.started == requests.first_rows
    # processed = prompt + generated - requests; each request's first token comes from its prompt
    assert tokens.decode == tokens.output_rows - (requests.first_rows or 0)


def generate(stream: Stream, first: int, tokens: int) -> None:
    """What follows a prompt that ended before ``first``: the last token is never decoded."""
    for position in range(first, first + tokens - 1):
        stream.call(decode(position), think=100_000)


def test_a_prompt_split_by_the_server_is_one_request() -> None:
    """FACTS: 6 prompt tokens, 4 generated: graphs 2/0, 4/1, 1/1, 1/1, 1/1."""
    stream, to = Stream(), session()
    begin = stream.now
    stream.call(prompt(0, 2, row=False))
    stream.call(prompt(2, 4))
    first_row = stream.now
    generate(stream, 6, 4)
    seen = stream.snapshot(to)
    assert (seen.tokens.prefill, seen.tokens.decode, seen.tokens.output_rows) == (6, 3, 4)
    assert (seen.requests.started, seen.requests.first_rows) == (1, 1)
    assert phases(seen) == {"prefill": 2, "decode": 3}
    identities(seen)
    ttft = seen.latency_seconds.time_to_first_token
    assert ttft.count == 1 and ttft.mean == pytest.approx((first_row - begin) / 1e9, rel=1e-9)
    inter = seen.latency_seconds.inter_token
    assert inter.count == 3 and inter.mean == pytest.approx((stream.now - first_row) / 3e9, rel=1e-9)
    # The rest of it are the calls themselves.
    between = seen.latency_seconds.between_calls
    assert between.count == 3 and between.mean == pytest.approx(100e-6, rel=1e-9)
    decoding = next(call.seconds for call in seen.calls if call.phase == "decode")
    assert inter.mean == pytest.approx(decoding / 3 + 100e-6, rel=1e-9)


def test_a_long_prompt_is_one_call_of_several_graphs() -> None:
    """FACTS: 1,100 tokens give 512/0, 512/0, 76/1; positions beyond eight come as chunks."""
    stream, to = Stream(), session()
    stream.call(prompt(0, 512, row=False), prompt(512, 512, row=False), prompt(1024, 76))
    generate(stream, 1100, 5)
    seen = stream.snapshot(to)
    assert (seen.tokens.prefill, seen.tokens.decode, seen.tokens.output_rows) == (1100, 4, 5)
    assert seen.requests.started == 1 and phases(seen) == {"prefill": 1, "decode": 4}
    identities(seen)
    assert seen.lost.total == 0


def test_a_warm_prefix() -> None:
    """C14, FACTS: a cached prefix may leave a single 1/0 graph; only processed tokens count."""
    stream, to = Stream(), session()
    stream.call(prompt(0, 10))
    generate(stream, 10, 3)
    stream.call(prompt(6, 1, row=False))
    stream.call(prompt(7, 3))
    generate(stream, 10, 3)
    seen = stream.snapshot(to)
    assert (seen.tokens.prefill, seen.tokens.decode, seen.tokens.output_rows) == (14, 4, 6)
    assert seen.requests.started == 2 and seen.latency_seconds.time_to_first_token.count == 2
    identities(seen)


def test_a_prompt_that_is_cached_but_for_its_last_token() -> None:
    """C14: 1/1 at a position that continues nothing is a prompt, not a decode."""
    stream, to = Stream(), session()
    stream.call(prompt(0, 10))
    generate(stream, 10, 6)
    stream.call(decode(9))
    generate(stream, 10, 2)
    seen = stream.snapshot(to)
    assert (seen.tokens.prefill, seen.tokens.decode, seen.requests.started) == (11, 6, 2)
    identities(seen)


def test_the_tail_of_a_prompt_may_be_one_token() -> None:
    """Nothing was sampled after a chunk without a row: what follows is prompt."""
    stream, to = Stream(), session()
    stream.call(prompt(0, 5, row=False))
    stream.call(decode(5))
    generate(stream, 6, 2)
    seen = stream.snapshot(to)
    assert (seen.tokens.prefill, seen.tokens.decode, seen.requests.started) == (6, 1, 1)
    identities(seen)


def test_the_next_turn_in_the_same_slot_is_a_new_request() -> None:
    """It starts where the generation ended: the last sampled token is part of the prompt."""
    stream, to = Stream(), session()
    stream.call(prompt(0, 10))
    generate(stream, 10, 4)
    stream.now += 5_000_000_000
    stream.call(prompt(13, 7))
    generate(stream, 20, 2)
    seen = stream.snapshot(to)
    assert seen.requests.started == 2 and seen.latency_seconds.time_to_first_token.count == 2
    # The five seconds between the turns are nobody's latency.
    assert seen.latency_seconds.inter_token.count == seen.latency_seconds.between_calls.count == 4
    p99 = seen.latency_seconds.inter_token.p99
    assert p99 is not None and p99 < 1
    identities(seen)


def test_one_decode_and_a_prompt_together() -> None:
    """FACTS: 10/1 ... told apart only by positions (8 0 1 2 ... 8); time counts once (C06)."""
    stream, to = Stream(), session()
    stream.call(prompt(0, 8))
    both = stream.call(Step([8, *range(9)], [0, 9]))
    stream.call(decode(9, 9))
    seen = stream.snapshot(to)
    assert (seen.tokens.prefill, seen.tokens.decode, seen.tokens.output_rows) == (17, 3, 5)
    assert phases(seen) == {"prefill": 1, "mixed": 1, "decode": 1}
    (mixed,) = (call for call in seen.calls if call.phase == "mixed")
    assert mixed.seconds == pytest.approx(both / 1e9, rel=1e-9)
    assert seen.latency_seconds.inter_token.count == 3
    # Two tokens waited for the last call, but the program was out of its calls once.
    assert seen.latency_seconds.between_calls.count == 2
    identities(seen)


def test_a_decode_and_a_prompt_chunk_without_a_row() -> None:
    """FACTS: 10/1: the only row is that of the decode."""
    stream, to = Stream(), session()
    stream.call(prompt(0, 8))
    stream.call(Step([8, *range(9)], [0]))
    stream.call(Step([9, *range(9, 12)], [0, 3]))
    seen = stream.snapshot(to)
    assert (seen.tokens.prefill, seen.tokens.decode, seen.tokens.output_rows) == (20, 2, 4)
    assert seen.requests.started == 2
    identities(seen)


def test_four_slots_with_the_same_prompt() -> None:
    """C06: one call for four sequences; each has its own interval, the time counts once."""
    stream, to = Stream(), session()
    stream.call(Step([*range(6)] * 4, [5, 11, 17, 23]))
    total = sum(stream.call(decode(*[p] * 4), think=1000) for p in range(6, 16))
    seen = stream.snapshot(to)
    assert (seen.tokens.prefill, seen.tokens.decode, seen.tokens.output_rows) == (24, 40, 44)
    assert seen.requests.started == 4 and seen.latency_seconds.inter_token.count == 40
    (decoding,) = (call for call in seen.calls if call.phase == "decode")
    assert decoding.count == 10 and decoding.seconds == pytest.approx(total / 1e9, rel=1e-9)
    identities(seen)


def test_slots_at_neighbouring_positions_are_not_a_verification() -> None:
    """Positions 8 9 10 with a row each may be three slots."""
    stream, to = Stream(), session()
    stream.call(prompt(0, 8), prompt(0, 9), prompt(0, 10))
    stream.call(decode(8, 9, 10))
    stream.call(decode(9, 10, 11))
    seen = stream.snapshot(to)
    assert phases(seen) == {"prefill": 1, "decode": 2}
    assert (seen.tokens.decode, seen.tokens.verify) == (6, 0)
    identities(seen)


def test_a_decode_beside_a_warm_prompt() -> None:
    """A slot at 8 in front of a prompt that starts at 9 looks like one stretch."""
    stream, to = Stream(), session()
    stream.call(prompt(0, 8))
    stream.call(Step(range(8, 21), [0, 12]))
    seen = stream.snapshot(to)
    assert (seen.tokens.prefill, seen.tokens.decode, seen.requests.started) == (20, 1, 2)
    identities(seen)


def test_verification() -> None:
    """FACTS: a 23-token verify is 23/23; its rows are not generated tokens (D10)."""
    stream, to = Stream(), session()
    stream.call(prompt(0, 8))
    stream.call(verify(8, 23))
    stream.call(verify(20, 23))  # 12 of the first were kept
    stream.call(decode(43))  # and all 23 of the second
    seen = stream.snapshot(to)
    assert phases(seen) == {"prefill": 1, "verify": 2, "decode": 1}
    tokens = seen.tokens
    assert (tokens.prefill, tokens.decode, tokens.output_rows) == (8, 1, 2)
    assert (tokens.verify, tokens.verify_rows, tokens.verify_accepted) == (46, 46, 12 + 23)
    assert seen.requests.started == 1 and seen.latency_seconds.inter_token.count == 3
    assert any("verify" in note for note in seen.notes)


def test_a_verification_inside_the_end_of_the_last_one() -> None:
    """Where the rolled-back sequence ended lies inside the next stretch, and must not cut it."""
    stream, to = Stream(), session()
    stream.call(prompt(0, 8))
    stream.call(verify(8, 5))
    stream.call(verify(12, 3))
    assert stream.snapshot(to).tokens.verify == 8


def test_a_draft_context_is_told_from_its_target() -> None:
    """C15: two contexts; the draft's tokens are nobody's tokens."""
    stream, to = Stream(), session()
    target, draft = 0xA0, 0xD0
    stream.call(prompt(0, 8), ctx=target)
    stream.call(prompt(0, 8), ctx=draft)
    early = stream.snapshot(to)
    assert early.tokens.prefill == 16
    position = 8
    for kept in (4, 2):
        for step in range(3):
            stream.call(decode(position + step), ctx=draft)
        stream.call(verify(position, 4), ctx=target)
        position += kept
    seen = stream.snapshot(to)
    assert [c.role for c in sorted(seen.contexts, key=lambda c: c.context)] == ["target", "draft"]
    assert (seen.tokens.prefill, seen.tokens.decode, seen.tokens.output_rows) == (8, 0, 1)
    assert seen.tokens.verify == 8 and seen.tokens.verify_accepted == 4
    assert seen.requests.started == 1 and seen.latency_seconds.time_to_first_token.count == 1
    assert any("drafts" in note for note in seen.notes)
    # Counters that had shown the draft's tokens do not go back.
    assert early.counters and seen.counters and early.histograms and seen.histograms
    assert seen.counters.prompt_tokens == early.counters.prompt_tokens == 16
    assert seen.histograms.time_to_first_token.count == 2
    # Time is spent whoever drafts.
    assert sum(call.count for call in seen.calls) == 2 + 8


def _on(stream: Stream, tid: int) -> Stream:
    stream.tid = tid
    return stream


def test_a_draft_on_another_thread() -> None:
    """C15: a server that drafts on a thread of its own."""
    stream, to = Stream(), session()
    target, draft = 0xA0, 0xD0
    _on(stream, 7).call(prompt(0, 8), ctx=target)
    _on(stream, 9).call(prompt(0, 8), ctx=draft)
    position = 8
    for kept in (4, 2, 4):
        for step in range(3):
            _on(stream, 9).call(decode(position + step), ctx=draft)
        _on(stream, 7).call(verify(position, 4), ctx=target)
        position += kept
    seen = stream.snapshot(to)
    assert [c.role for c in sorted(seen.contexts, key=lambda c: c.context)] == ["target", "draft"]
    assert (seen.tokens.prefill, seen.tokens.decode, seen.tokens.output_rows) == (8, 0, 1)


def test_another_context_at_about_the_same_positions_is_no_draft() -> None:
    """Of another thread, which decodes one token more between two verifications, or one less."""
    stream, to = Stream(), session()
    target, other = 0xA0, 0xB0
    _on(stream, 7).call(prompt(0, 8), ctx=target)
    _on(stream, 9).call(prompt(0, 8), ctx=other)
    at = position = 8
    for kept, made in ((4, 4), (3, 2), (4, 4), (3, 4), (4, 2)):
        for _ in range(made):
            _on(stream, 9).call(decode(at), ctx=other)
            at += 1
        _on(stream, 7).call(verify(position, 4), ctx=target)
        position += kept
    seen = stream.snapshot(to)
    assert [c.role for c in sorted(seen.contexts, key=lambda c: c.context)] == ["target", None]
    assert seen.tokens.decode == 16


def test_two_contexts_without_speculation_are_both_counted() -> None:
    stream, to = Stream(), session()
    for ctx in (0xA0, 0xB0):
        stream.call(prompt(0, 6), ctx=ctx)
    for position in range(6, 9):
        for ctx in (0xA0, 0xB0):
            stream.call(decode(position), ctx=ctx)
    seen = stream.snapshot(to)
    assert (seen.tokens.prefill, seen.tokens.decode, seen.requests.started) == (12, 6, 2)
    assert [c.role for c in seen.contexts] == [None, None]
    identities(seen)


def warm() -> tuple[Stream, Session]:
    return Stream(), session(age_seconds=1.0)


def test_warm_up_at_start() -> None:
    """FACTS: server start adds two graphs of 2/1."""
    stream, to = warm()
    stream.call(prompt(0, 2))
    stream.call(prompt(0, 2))
    assert stream.snapshot(to).requests.started == 0
    stream.call(prompt(0, 6))
    generate(stream, 6, 3)
    seen = stream.snapshot(to)
    assert (seen.tokens.prefill, seen.tokens.decode, seen.tokens.warmup) == (6, 2, 4)
    assert phases(seen) == {"other": 2, "prefill": 1, "decode": 2}
    assert sum(g.warmup for g in seen.graphs) == 2
    identities(seen)


def test_a_real_prompt_of_two_tokens_is_no_warm_up() -> None:
    stream, to = warm()
    stream.call(prompt(0, 2))
    generate(stream, 2, 4)
    seen = stream.snapshot(to)
    assert (seen.tokens.prefill, seen.tokens.decode, seen.tokens.warmup) == (2, 3, 0)
    assert phases(seen) == {"prefill": 1, "decode": 3}
    assert seen.latency_seconds.time_to_first_token.count == 1
    identities(seen)


def test_a_first_call_without_a_second_is_decided_in_the_end() -> None:
    stream, to = warm()
    stream.call(prompt(0, 2))
    held = stream.snapshot(to)
    assert held.calls == () and any("warm-up" in note for note in held.notes)
    to.finish(stream.now)
    done = to.snapshot(stream.now)
    assert done.tokens.warmup == 2 and phases(done) == {"other": 1}


def test_attached_in_mid_generation() -> None:
    """A lone token right after attaching continues what began before; later it is a prompt."""
    stream, to = Stream(), session()
    stream.now = START + 1000
    for position in range(57, 61):
        stream.call(decode(position))
    seen = stream.snapshot(to)
    assert (seen.tokens.prefill, seen.tokens.decode, seen.tokens.output_rows) == (0, 4, 4)
    assert seen.requests.started == 0 and seen.latency_seconds.time_to_first_token.count == 0
    assert seen.latency_seconds.inter_token.count == 3


def test_attached_to_an_idle_target() -> None:
    """The same first token is a cached prompt if nothing was under way, or came much later."""
    for busy, at in ((False, START + 1000), (None, START + 10**9), (True, START + 10**10)):
        stream, to = Stream(), session(busy=busy)
        stream.now = at
        stream.call(decode(57))
        assert stream.snapshot(to).requests.started == 1
    stream, to = Stream(), session(busy=True)
    stream.now = START + 400_000_000
    stream.call(decode(57))
    assert stream.snapshot(to).requests.started == 0


def test_keys_shifted_to_lower_positions() -> None:
    """D10: a K-shift graph is "other", and the generation goes on further down."""
    from .graphs import Builder

    stream, to = Stream(), session()
    b = Builder()
    shift = b.leaf("leaf_0", "i32", 4096, flags=1)
    cache = b.leaf("cache_k_l0", "f16", 128, 4096)
    view = b.view("VIEW", cache, 64, 2, 4096, name="cache_k_l0 (view)")
    b.op("ROPE", "f16", (64, 2, 4096), view, shift, view_src=cache, params=(0, 64, 2), name="k_shifted")
    stream.call(prompt(0, 100))
    generate(stream, 100, 3)
    stream.call(Step([0] * 8, graph=b, hash=99, n_pos=4096), decode(60), batch=1)
    stream.call(decode(61))
    seen = stream.snapshot(to)
    assert (seen.tokens.prefill, seen.tokens.decode, seen.requests.started) == (100, 4, 1)
    assert seen.latency_seconds.inter_token.count == 4
    (graph,) = (g for g in seen.graphs if g.id == f"{99:016x}")
    assert graph.phase == "other"
    assert phases(seen) == {"prefill": 1, "decode": 4}
    identities(seen)


def test_lost_positions_do_not_make_requests() -> None:
    """C11: chunks lost: the call is classified by shape, flagged, and its slot goes on."""
    stream, to = Stream(), session()
    stream.call(Step([*range(9)], [8]), Step(range(9, 40), [30], no_chunks=True))
    generate(stream, 40, 3)
    seen = stream.snapshot(to, ST_LOST_INTS=1)
    assert seen.tokens.prefill == 40 and seen.tokens.decode == 2
    assert seen.tokens.ambiguous == 31 and seen.lost.by_kind == {"ints": 1, "positions": 1}
    assert any("shape" in note for note in seen.notes)


def test_many_sequences_are_bounded() -> None:
    stream, to = Stream(), session()
    for start in range(600):
        stream.call(prompt(start * 50, 3), levels=(8,))
        if start % 100 == 99:
            stream.drain(to)
    seen = stream.snapshot(to)
    assert seen.requests.started == 600 and seen.tokens.prefill == 1800
    (context,) = to.contexts.all()
    assert len(context.tracker.sequences) == 256


def test_two_slots_at_the_same_position() -> None:
    """One generates and one is in its prompt: each goes on with what fits it."""
    stream, to = Stream(), session()
    stream.call(prompt(0, 5))
    stream.call(prompt(0, 5, row=False))
    stream.call(decode(5))  # only the first can have sampled a token
    stream.call(prompt(5, 4))
    seen = stream.snapshot(to)
    assert phases(seen) == {"prefill": 3, "decode": 1}
    assert (seen.tokens.prefill, seen.tokens.decode, seen.requests.started) == (14, 1, 2)
    identities(seen)


def test_a_slot_that_is_done_does_not_cut_a_verification() -> None:
    stream, to = Stream(), session()
    stream.call(prompt(0, 10))
    stream.call(prompt(0, 8))
    stream.call(decode(8))
    stream.call(verify(9, 3))  # over position 10, where the first slot ended
    seen = stream.snapshot(to)
    assert phases(seen) == {"prefill": 2, "decode": 1, "verify": 1} and seen.tokens.verify == 3


def test_the_first_call_of_an_old_process_is_a_request() -> None:
    """Its warm-up was long before; a prompt of two tokens that generates one is no warm-up."""
    stream, to = Stream(), session(age_seconds=3600.0)
    stream.call(prompt(0, 2))
    stream.call(prompt(0, 9))
    seen = stream.snapshot(to)
    assert (seen.tokens.prefill, seen.tokens.warmup, seen.requests.started) == (11, 0, 2)
    identities(seen)
