# SPDX-License-Identifier: Apache-2.0
"""The benchmark's page: what it claims, how operators are compared, in which order rows come."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from tests.bench.measure import Results, Sample
from tests.bench.report import Findings, page, percent, verdict
from tests.bench.rows import ROWS
from tests.bench.schedule import rounds
from tests.bench.stats import Estimate, estimate
from tests.bench.truthful import as_operators, rightly
from tests.bench.watchers import _LINE, Seen


def _interval(low: float, high: float, confidence: float = 0.96) -> Estimate:
    return Estimate((low + high) / 2, low, high, 8, confidence)


def test_a_limit_is_reached_only_where_the_interval_says_so() -> None:
    assert verdict(_interval(0.001, 0.004), 0.005) == "yes"
    assert verdict(_interval(0.006, 0.009), 0.005) == "no"
    assert verdict(_interval(0.001, 0.009), 0.005) == "undecided"
    assert verdict(_interval(0.001, 0.004, confidence=0.8), 0.005) == "undecided"
    assert verdict(_interval(-0.01, 0.01), 0.0) == "yes"  # no slowdown can be measured
    assert verdict(_interval(0.001, 0.01), 0.0) == "no"
    assert verdict(None, 0.005) == "–"


def test_percent_says_when_it_is_only_a_range() -> None:
    assert percent(_interval(0.01, 0.02)) == "1.50 % (1.00 to 2.00)"
    assert percent(_interval(0.01, 0.02, 0.5)).endswith("†")
    assert percent(estimate([-0.00001] * 8)) == "0.00 % (0.00 to 0.00)"


def test_share_of_time_given_to_the_right_operator() -> None:
    true = {"MUL_MAT": 85.0, "RMS_NORM": 10.0, "ADD": 5.0}
    assert rightly(true, true) == pytest.approx(1.0)
    assert rightly({k: 3 * v for k, v in true.items()}, true) == pytest.approx(1.0)
    # What FACTS of wildcards look like: the repacked matrix products are missed.
    assert rightly({"MUL_MAT": 10.0, "RMS_NORM": 60.0, "ADD": 30.0}, true) == pytest.approx(0.25)
    assert rightly({}, true) == 0.0


def test_functions_are_taken_for_the_operator_with_the_longest_common_name() -> None:
    operators = ("MUL", "MUL_MAT", "MUL_MAT_ID", "ADD", "RMS_NORM")
    functions = {
        "mul_mat": 5.0,
        "mul_mat_tiled": 1.0,
        "mul_mat_id": 2.0,
        "mul": 3.0,
        "add_non_quantized": 4.0,
        "rms_norm_mul_fused": 6.0,
        "geglu": 7.0,
    }
    expected = {"MUL_MAT": 6.0, "MUL_MAT_ID": 2.0, "MUL": 3.0, "ADD": 4.0, "RMS_NORM": 6.0, "GEGLU": 7.0}
    assert as_operators(functions, operators) == expected


def test_output_of_bpftrace_is_read() -> None:
    text = (
        "Attaching 4 probes...\n^C\n\n"
        "@ns[uretprobe:/a b/libggml-cpu.so.0:ggml_compute_forward_rms_norm]: 104\n"
        "@n[uprobe:/lib/x.so:ggml_compute_forward_mul_mat]: 7\n@s[412]: 99\n"
    )
    assert _LINE.findall(text) == [("ns", "rms_norm", "104"), ("n", "mul_mat", "7")]


def test_every_row_comes_as_often_as_it_should_and_in_changing_order() -> None:
    most = 12
    seen: Counter[tuple[int, str]] = Counter()
    orders = set()
    for order in itertools.islice(rounds(ROWS, seed=1), most):
        assert sorted(threads for threads, _ in order) == [1, 2]
        for threads, rows in order:
            seen.update((threads, row.key) for row in rows)
        orders.add(tuple(row.key for row in order[0][1]))
    for row in ROWS:
        for threads in (1, 2):
            assert seen[threads, row.key] == most // row.every
    assert len(orders) > most // 2


def _findings() -> Findings:
    results = Results()
    for threads in (1, 2):
        for i in range(8):
            seen = Seen(408.0 * threads, 402, 0, {"MUL_MAT": 1.0})
            sample = Sample(0.01 + i / 1e4, 0.0, 3e5, 0.009, 50 << 10, seen)
            results.samples["all", threads].append(sample)
            results.token_ns[threads].append(2e7)
    results.failed["bcc"].append("no headers")
    rows = [row for row in ROWS if row.key in ("all", "default", "bcc")]
    return Findings("make bench", "2026-01-01", 15.0, {"machine": "m"}, 2.0, 96, {1: 60, 2: 110}, rows,
                    {"default": "not here"}, results)  # fmt: skip


def test_page_holds_what_was_measured_and_says_what_was_not() -> None:
    text = page(_findings())
    assert "absent: not here" in text
    assert "failed: no headers" in text
    assert "1.01 / 1.01" in text  # hits a kernel and thread: threads do not count twice
    assert "735" in text  # 300 us over 408 hits
    assert "50.0 tokens/s" in text
    lines = [line for line in text.splitlines() if line.startswith("|")]
    for _, table in itertools.groupby(lines, key=lambda line: line.count("|")):
        assert list(table)
    line = next(line for line in lines if "`--ops all`, 1 thread" in line)
    assert line.endswith("| yes |")
