# SPDX-License-Identifier: Apache-2.0
"""The header read as text gives what the compiler makes of it, or an error."""

from __future__ import annotations

import pytest

from profinferd.agent.kernel.btf import BtfError, load_types
from profinferd.agent.kernel.header import HeaderTypes, load_header
from profinferd.agent.model.causes import Cause
from profinferd.probes.build import HERE, find_object


def test_the_same_as_the_compilers() -> None:
    """Every structure and every enumeration of the header, against the BTF of the built object."""
    header, built = load_header(HERE / "events.h"), load_types(find_object("ggml"))
    assert {"event", "op_hit", "node_desc", "int_chunk", "raw_chunk", "layout"} <= set(header.structs())
    for name in header.structs():
        ours, theirs = header.dtype(name), built.dtype(name)
        assert ours.itemsize == theirs.itemsize, name
        assert dict(ours.fields or {}) == dict(theirs.fields or {}), name
    constants = built.constants()
    assert {name: constants[name] for name in header.constants()} == header.constants()
    for name in ("event_kind", "event_level", "stat", "op_flag", "layout_state"):
        assert header.enum(name) == built.enum(name)


def test_the_header_of_causes() -> None:
    """As above: every record and map value against the object whose programs write it."""
    header = load_header(HERE / "causes.h")
    objects = {name: load_types(find_object(name)) for name in ("ggml", "sched", "faults", "barrier")}
    where = {
        "sched_span": "sched",
        "sched_thread": "sched",
        "graph_clock": "ggml",
        "fault_rec": "faults",
        "fault_count": "faults",
        "barrier_rec": "barrier",
    }
    assert set(header.structs()) == set(where)
    for name, built in where.items():
        ours, theirs = header.dtype(name), objects[built].dtype(name)
        assert dict(ours.fields or {}) == dict(theirs.fields or {}), name
    for name, built in {"wait_cause": "sched", "thread_state": "sched", "fault_kind": "faults"}.items():
        assert header.enum(name) == objects[built].enum(name)
    causes = {name.removeprefix("WC_"): number for name, number in header.enum("wait_cause").items()}
    assert causes == {cause.name: cause.value for cause in Cause}


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("struct a { __u32 x; __u64 y; };", "holes"),
        ("struct a { int x; };", "not understood"),
        ("struct a { __u32 x : 3; };", "not understood"),
        ("struct a { __u32 x[N]; };", "no constant"),
        ("enum a { A = B + 1 };", "not understood"),
    ],
)
def test_what_it_does_not_know(text: str, what: str) -> None:
    with pytest.raises(BtfError, match=what):
        HeaderTypes(text)


def test_what_is_not_there() -> None:
    types = HeaderTypes("enum a { A = 1 << 4, B, C = 0x10 };")
    assert types.enum("a") == {"A": 16, "B": 17, "C": 16}
    with pytest.raises(BtfError):
        types.dtype("a")
    with pytest.raises(BtfError):
        types.enum("b")
