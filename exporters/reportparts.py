# SPDX-License-Identifier: Apache-2.0
"""Pieces of the terminal report: how figures, sizes and tables are written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ..agent.model import memory as memories
from . import text
from .headline import Figure


def memory_rows(found: memories.Memory) -> Iterator[tuple[str, int | None, str]]:
    """(what, bytes, remark) of a model's memory."""
    dtypes: dict[str, int] = {}
    for one in found.weights:
        dtypes[one.dtype] = dtypes.get(one.dtype, 0) + one.bytes
    mix = ", ".join(
        f"{name} {in_bytes(size)}" for name, size in sorted(dtypes.items(), key=lambda i: -i[1])[:5]
    )
    yield "weights", found.weight_bytes, mix
    if found.repacked_bytes:
        yield "rearranged", found.repacked_bytes, "of them, in anonymous memory"
    cache = found.cache
    if cache is not None:
        yield (
            "KV cache",
            cache.bytes,
            f"{cache.layers} layers, K {cache.k_type or '-'}, V {cache.v_type or '-'}",
        )
    yield "scratch", found.scratch, "intermediate results of the biggest graph"


def value(figure: Figure) -> str:
    """A headline figure in its unit."""
    if figure.value is None:
        return text.MISSING
    if figure.unit == "s":
        return text.seconds(figure.value)
    if figure.unit == "B/s":
        return f"{text.number(figure.value / 1e9)} GB/s"
    if figure.unit == "ratio":
        return f"{figure.value * 100:.2f}%"
    if figure.unit == "1":
        return text.count(figure.value)
    return f"{text.number(figure.value)} {figure.unit}"


def tone(figure: Figure) -> str:
    """The style that a headline figure is written in."""
    return "bold red" if figure.tone == "bad" else "bold"


def in_bytes(value: int | None) -> str:
    """A size in bytes as people read it."""
    if value is None:
        return text.MISSING
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if value >= size:
            return f"{text.number(value / size)} {unit}"
    return f"{value} B"


def heading(words: str) -> Iterator[RenderableType]:
    """A title with an empty line before it."""
    yield Text()
    yield Text(words, "bold")


def sum_or_none(values: Iterable[Any]) -> Any:
    """The sum; None where one of them is absent."""
    whole: Any = 0
    for value in values:
        if value is None:
            return None
        whole += value
    return whole


def grid(*columns: tuple[str, str]) -> Table:
    """A table of (title, left or right) columns without lines."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_edge=False, header_style="dim")
    for name, side in columns:
        table.add_column(
            name, justify="right" if side == "right" else "left", no_wrap=True, overflow="ellipsis"
        )
    return table
