# SPDX-License-Identifier: Apache-2.0
"""Parts of an engine by the names in its stacks, and stacks as text and picture."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from profinferd.agent.model.cpuparts import Frame, cpu_time, part_of
from profinferd.exporters.flamegraph import flame_graph, folded


def frames(*names: str | None, file: str = "libggml-base.so") -> list[Frame]:
    """From the innermost outwards."""
    return [Frame(name, file) for name in names]


@pytest.mark.parametrize(
    ("stack", "part"),
    [
        (frames("ggml_vec_dot_q4_K_q8_K"), "kernels"),
        (frames("void gemv_q4_b32_8x8_q8_0_lut_avx<block<4, 8> >(int, float*)"), "kernels"),
        (frames("(anonymous namespace)::tinyBLAS<16, float>::matmul(long, long)"), "kernels"),
        (frames(None, file="libggml-cpu-haswell.so"), "kernels"),
        (frames("ggml_barrier", "ggml_graph_compute_thread"), "barrier"),
        (frames(None, file="libgomp.so.1.0.0"), "barrier"),
        (frames("__memcpy_avx512", file="libc.so.6") + frames("ggml_compute_forward_dup"), "kernels"),
        (frames("__expf_fma", file="libm.so.6") + frames("ggml_graph_compute_thread"), "kernels"),
        (frames("llm_tokenizer_bpe_session::tokenize(std::string)", "llama_tokenize"), "tokenizer"),
        (frames("llama_sampler_top_k_apply"), "sampler"),
        (frames("common_sampler_sample(common_sampler*)"), "sampler"),
        (frames("httplib::Server::process_request()"), "http"),
        (frames("malloc", file="libc.so.6") + frames("nlohmann::json::parse()"), "http"),
        (frames("llama_kv_cache::find_slot()"), "engine"),
        (frames(None, file="libllama.so.0"), "engine"),
        (frames("main", file="chat"), "other"),
        ([Frame(None, None)], "unknown"),
        ([], "unknown"),
    ],
)
def test_parts(stack: list[Frame], part: str) -> None:
    assert part_of(False, stack) == part
    assert part_of(True, stack) == "system"


def test_sums_shares_and_stacks() -> None:
    """60 samples at 20 a second are 3 s; 45 of them in kernels."""
    dot = frames("ggml_vec_dot", "ggml_graph_compute_thread", "main;evil name")
    cpu = cpu_time(
        [(False, dot, 45), (True, frames("read", file="libc.so.6"), 10), (False, [], 5)],
        hertz=20, lost=2, seconds=3.1, root="server",
    )  # fmt: skip
    assert [(p.part, p.samples, p.seconds, p.share) for p in cpu.parts] == [
        ("kernels", 45, 2.25, 0.75), ("system", 10, 0.5, pytest.approx(1 / 6)),
        ("unknown", 5, 0.25, pytest.approx(1 / 12)),
    ]  # fmt: skip
    assert (cpu.samples, cpu.sampled_seconds, cpu.lost) == (60, 3.0, 2)
    assert folded(cpu).splitlines() == [
        "server;(kernels);main evil name;ggml_graph_compute_thread;ggml_vec_dot 45",
        "server;(system);read;[kernel] 10",
        "server;(unknown) 5",
    ]


def test_no_samples_at_all() -> None:
    cpu = cpu_time([], hertz=99)
    assert (cpu.samples, cpu.parts, folded(cpu)) == (0, (), "")
    ElementTree.fromstring(flame_graph(cpu, "nothing"))


def test_the_number_of_stacks_is_bounded() -> None:
    cpu = cpu_time(((False, frames(f"f{n}"), 1 + (n < 10)) for n in range(6000)), hertz=99)
    assert len(cpu.folded) == 5001
    assert sum(count for _, count in cpu.folded) == cpu.samples == 6010


def test_the_flame_graph_is_a_picture_of_the_stacks() -> None:
    """Widths by samples; names of the target cannot leave their place."""
    cpu = cpu_time(
        [(False, frames("ggml_vec_dot<float>", "<script>&\x1b"), 30), (True, frames("read"), 10)],
        hertz=10, root="a",
    )  # fmt: skip
    root = ElementTree.fromstring(flame_graph(cpu, "<b>\x1b"))
    space = "{http://www.w3.org/2000/svg}"
    boxes = {
        str(g.findtext(f"{space}title")).partition(":")[0]: g.find(f"{space}rect")
        for g in root.iter(f"{space}g")
    }
    widths = {name: float(box.attrib["width"]) for name, box in boxes.items() if box is not None}
    assert widths["a"] == pytest.approx(1179.5)
    assert widths["ggml_vec_dot<float>"] == pytest.approx(1180 * 0.75 - 0.5, abs=0.1)
    assert widths["read"] == pytest.approx(1180 * 0.25 - 0.5, abs=0.1)
    assert not any("\x1b" in text for text in root.itertext())
    assert not list(root.iter(f"{space}script"))
