# SPDX-License-Identifier: Apache-2.0
"""The shipped catalogue: every entry loads, means something, and bad files are refused with a place."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from profinferd.agent.errors import UsageError
from profinferd.agent.target import catalogue as c

FOLDER = Path(c.catalogue_folder())
SHIPPED = sorted(FOLDER.glob("*.yaml"))


def constants() -> dict[str, int]:
    """Names and numbers of the enums of events.h and causes.h, read as text."""
    text = "".join((FOLDER / name).read_text() for name in ("events.h", "causes.h"))
    return {name: int(value) for name, value in re.findall(r"\b([A-Z][A-Z0-9_]+) = (\d+),", text)}


def test_shipped_files_exist() -> None:
    assert [path.name for path in SHIPPED] == ["cuda.yaml", "ggml.yaml", "ggml_backend.yaml", "pjrt.yaml"]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_every_entry(path: Path) -> None:
    engine = c.load_engine(str(path))
    assert engine.engine == path.stem
    known = constants()
    hooks = [*engine.hooks, *(h for s in engine.sources for h in s.hooks)]
    assert hooks or engine.calls
    places = [call.place for call in engine.calls]
    assert len(set(places)) == len(places)
    # What a library of the engine always has contains a mark; the others are in it, too.
    assert not engine.calls or engine.table or any(m in p for m in engine.marks for p in places)
    for call in engine.calls:
        if call.slot is not None:
            assert engine.table is not None and call.slot in engine.table.slots
        else:
            assert call.symbol or call.pattern
        for machine in ("x86_64", "aarch64"):
            assert 0 <= call.arg_regs(machine) <= 8
    for hook in hooks:
        assert hook.event in known, f"{hook.event} is not in events.h"
        name = hook.symbol or hook.pattern or ""
        assert any(mark in name for mark in engine.marks), f"{name} would never be looked for"
        for machine in ("x86_64", "aarch64"):
            assert 0 <= hook.arg_regs(machine) <= 8
        assert len({a.name for a in hook.args}) == len(hook.args)
    for source in engine.sources:
        assert any(source.level in h.required_for for h in source.hooks), (
            "it would be chosen without any function"
        )


def test_what_the_engine_really_passes() -> None:
    """llama_batch is passed by value: on the stack on x86-64, by reference on arm64."""
    hooks = {h.symbol: h for h in c.load_catalogue().engine("ggml").hooks}
    decode = hooks["llama_decode"]
    assert decode.event == "LV_DECODE" and decode.probe == ["entry", "return"]
    assert decode.arg_regs("x86_64") == 1 and decode.stack_args("x86_64")
    assert decode.arg_regs("aarch64") == 2 and not decode.stack_args("aarch64")
    assert hooks["llama_process"].arg_regs("x86_64") == 2
    assert hooks["ggml_graph_compute"].required_for == ["op"]
    sources = [(s.name, s.complete) for s in c.load_catalogue().engine("ggml").sources]
    assert sources == [("dispatch", True), ("compute_forward", True), ("wildcard", False)]


def test_schema_is_that_of_the_types() -> None:
    """Written again by: python -c "...; print(schema_text())" (see the failure's text)."""
    shipped = (FOLDER / "catalogue.schema.json").read_text()
    assert json.loads(shipped) == c.schema(), "write catalogue.schema_text() to probes/catalogue.schema.json"


def minimal() -> dict[str, Any]:
    return {
        "schema": 1,
        "engine": "pjrt",
        "label": "a plugin",
        "marks": ["GetPjrtApi"],
        "hooks": [
            {
                "symbol": "GetPjrtApi", "label": "table", "level": "api", "event": "PJ_TABLE",
                "probe": ["entry"],
                "args": [{"name": "stream", "type": "pointer", "x86_64": "[rsp+16]", "aarch64": "x3"}],
            }
        ],
    }  # fmt: skip


def write(folder: Path, data: object) -> Path:
    path = folder / "engine.yaml"
    path.write_text(yaml.safe_dump(data))
    return path


def test_another_engine_is_only_data(tmp_path: Path) -> None:
    engine = c.load_engine(str(write(tmp_path, minimal())))
    assert engine.levels() == ["api"] and engine.hooks[0].stack_args("x86_64")
    assert engine.hooks[0].arg_regs("aarch64") == 4


def hook(**changes: object) -> dict[str, Any]:
    data = minimal()
    data["hooks"][0].update(changes)
    return {k: v for k, v in data.items() if v is not None}


@pytest.mark.parametrize(
    ("data", "place"),
    [
        ([], "object"),
        ({**minimal(), "schema": 2}, "schema"),
        ({**minimal(), "surprise": 1}, "surprise"),
        ({**minimal(), "marks": []}, "marks"),
        (hook(pattern="Get_Api*"), "either a symbol or a pattern"),
        (hook(symbol=None), "either a symbol or a pattern"),
        (hook(symbol="a-b"), "symbol"),
        (hook(symbol=None, pattern="*"), "pattern"),
        (hook(level="token"), "level"),
        (hook(probe=["return"]), "entry"),
        (hook(probe=[]), "probe"),
        (hook(args=[{"name": "a", "type": "pointer", "x86_64": "rax", "aarch64": "x0"}]), "x86_64"),
        (hook(args=[{"name": "a", "type": "pointer", "x86_64": "rdi", "aarch64": "x9"}]), "aarch64"),
    ],
)
def test_bad_files_name_their_place(tmp_path: Path, data: object, place: str) -> None:
    with pytest.raises(UsageError, match=re.escape(place)) as caught:
        c.load_engine(str(write(tmp_path, data)))
    assert "engine.yaml" in str(caught.value) and "\n" not in str(caught.value)


def test_bad_folders(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no probe catalogue"):
        c.load_catalogue(str(tmp_path))
    with pytest.raises(UsageError, match="no probe catalogue"):
        c.load_catalogue(str(tmp_path / "absent"))
    (tmp_path / "a.yaml").write_text("][")
    with pytest.raises(UsageError, match=r"a\.yaml"):
        c.load_catalogue(str(tmp_path))
    os.unlink(tmp_path / "a.yaml")
    for name in ("a.yaml", "b.yaml"):
        (tmp_path / name).write_text(yaml.safe_dump(minimal()))
    with pytest.raises(UsageError, match="again"):
        c.load_catalogue(str(tmp_path))


def test_registers() -> None:
    order = [
        c._register(r)
        for r in ("rdi", "esi", "rdx", "ecx", "r8", "r9d", "x0", "w7", "[x1+0]", "[rsp+8]", "[sp+0]")
    ]
    assert order == [0, 1, 2, 3, 4, 5, 0, 7, 1, -1, -1]


def test_engines_survive_their_own_json() -> None:
    engine = c.load_catalogue().engine("ggml")
    assert msgspec.json.decode(msgspec.json.encode(engine), type=c.Engine) == engine
    with pytest.raises(KeyError):
        c.load_catalogue().engine("none")


CALL = {"symbol": "npu_run", "call": "run", "kind": "compute"}
BAD_CALLS: dict[str, tuple[dict[str, Any], str]] = {
    "no expression": (
        {"fields": [{"name": "a", "arg": 0, "type": "text", "find": "(("}]},
        "regular expression",
    ),
    "no function": ({"symbol": None}, "one of symbol, pattern and slot"),
    "two places": ({"slot": "x"}, "one of symbol, pattern and slot"),
    "role without object": ({"fields": [{"name": "a", "arg": 0, "role": "awaits"}]}, "needs an object"),
    "unknown field": ({"fields": [{"name": "a", "arg": 0, "of": "b"}]}, "needs 'b', which comes before it"),
    "bits without by": ({"fields": [{"name": "a", "arg": 0, "bits": {1: 8}}]}, "belong together"),
    "argument 16": ({"fields": [{"name": "a", "arg": 16}]}, "<= 15"),
    "five steps": ({"fields": [{"name": "a", "arg": 0, "at": [0, 0, 0, 0, 0]}]}, "at"),
    "four sums": ({"fields": [{"name": n, "arg": 0, "sum": True} for n in "abcd"]}, "more than 3"),
    "find without a group": ({"fields": [{"name": "a", "arg": 0, "type": "text", "find": "x"}]}, "one group"),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_calls_are_refused(tmp_path: Path, name: str) -> None:
    change, message = BAD_CALLS[name]
    call = {key: value for key, value in {**CALL, **change}.items() if value is not None}
    path = tmp_path / "npu.yaml"
    engine = {"schema": 1, "engine": "npu", "label": "n", "marks": ["npu_"], "calls": [call]}
    path.write_text(yaml.dump(engine))
    with pytest.raises(UsageError, match=re.escape(message)):
        c.load_engine(str(path))


def test_arguments_lie_where_the_machine_passes_them() -> None:
    """The driver's launch has eleven arguments: the seventh is on the stack on x86-64 alone."""
    (launch,) = [e for e in c.load_catalogue().engine("cuda").calls if e.symbol == "cuLaunchKernel"]
    assert (launch.arg_regs("x86_64"), launch.stack_args("x86_64")) == (6, True)
    assert (launch.arg_regs("aarch64"), launch.stack_args("aarch64")) == (8, True)
