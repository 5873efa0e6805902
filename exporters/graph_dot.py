# SPDX-License-Identifier: Apache-2.0
"""A graph in Graphviz's language, and drawn by it.

Layers are boxes around their nodes; the warmer a node, the more time it took; views are dashed,
fused nodes dotted, what was not seen is outlined in red, memory that is written again is a dashed
arrow.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Iterator

from ..agent.errors import MachineError
from ..agent.model.trace import Trace
from . import Choice
from .drawing import Box, Drawing, Input, draw
from .text import clean, seconds

_LIMIT_SECONDS = 300
_OUTLINE = {"not seen": ("solid", "red"), "view": ("dashed", "gray50"), "skipped": ("dashed", "gray50"),
            "fused": ("dotted", "black"), "unknown": ("solid", "red")}  # fmt: skip


class DotExporter:
    """Implements :class:`profinferd.exporters.TraceExporter`."""

    def files(self, trace: Trace, choice: Choice) -> Iterator[tuple[str, Iterable[bytes]]]:
        """One file."""
        yield "", [dot(draw(trace, choice)).encode()]


class SvgExporter:
    """Implements :class:`profinferd.exporters.TraceExporter`; needs Graphviz's program ``dot``."""

    def files(self, trace: Trace, choice: Choice) -> Iterator[tuple[str, Iterable[bytes]]]:
        """One file."""
        yield "", [_drawn(dot(draw(trace, choice)))]


def _drawn(text: str) -> bytes:
    try:
        done = subprocess.run(
            ["dot", "-Tsvg"], input=text.encode(), capture_output=True, check=True, timeout=_LIMIT_SECONDS
        )
    except FileNotFoundError as error:
        raise MachineError(
            "an SVG is drawn by Graphviz, which is not installed", "apt-get install graphviz, or --format dot"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise MachineError(
            "Graphviz did not finish within 5 minutes", "use --format dot or graphml"
        ) from error
    except subprocess.CalledProcessError as error:
        said = clean(error.stderr.decode("utf-8", "replace"), 200)
        raise MachineError(f"Graphviz failed: {said}", "use --format dot or graphml") from error
    return done.stdout


def dot(drawing: Drawing) -> str:
    """The text, nodes of a layer in a cluster of its own."""
    lines = [
        "digraph profinfer {",
        '  graph [rankdir=TB, compound=true, fontname="sans-serif"];',
        '  node [shape=box, style=filled, fontname="sans-serif", fontsize=10];',
    ]
    warmest = max((box.share for box in drawing.boxes if box.share), default=None)
    layer_of = {box.index: box.layer for box in drawing.boxes}
    # A weight lies in the layer that reads it: from outside, Graphviz would put all layers side by side.
    homes = {leaf.index: {layer_of.get(reader) for reader in leaf.readers} for leaf in drawing.inputs}
    for layer in sorted({box.layer for box in drawing.boxes}, key=lambda n: -1 if n is None else n):
        inside = [_node(box, warmest) for box in drawing.boxes if box.layer == layer]
        inside += [_leaf(leaf) for leaf in drawing.inputs if homes[leaf.index] == {layer}]
        if layer is None:
            lines += inside
        else:
            lines += [f"  subgraph cluster_{layer} {{", f'    label="layer {layer}"; color=gray70;']
            lines += [f"  {line}" for line in inside]
            lines.append("  }")
    for leaf in drawing.inputs:
        shared = len(homes[leaf.index]) != 1
        if shared:
            lines.append(_leaf(leaf))
        style = "color=gray70, constraint=false" if shared else "color=gray70"
        lines += [f"  l{leaf.index} -> n{reader} [{style}];" for reader in leaf.readers]
    for arrow in drawing.arrows:
        style = " [style=dashed, color=blue, constraint=false]" if arrow.kind == "memory" else ""
        lines.append(f"  n{arrow.source} -> n{arrow.target}{style};")
    return "\n".join([*lines, "}"]) + "\n"


def _leaf(leaf: Input) -> str:
    label = _quoted([leaf.name or leaf.kind, f"{leaf.dtype} {_shape(leaf.shape)}"])
    return f'  l{leaf.index} [label={label}, shape=ellipse, fillcolor="gray95", color=gray70];'


def _node(box: Box, warmest: float | None) -> str:
    heading = box.op if box.role is None else f"{box.op} {box.role}"
    parts = [heading, box.name or "", f"{box.dtype} {_shape(box.shape)}"]
    if box.seconds is not None and box.share is not None:
        parts.append(f"{seconds(box.seconds)}, {box.share * 100:.1f}%")
    if box.state != "executed":
        parts.append(box.state)
    if box.in_place:
        parts.append("in place")
    outline, color = _OUTLINE.get(box.state, ("solid", "black"))
    warm = 0.0 if box.share is None or not warmest else box.share / warmest
    # White to a light red, in HSV; text stays readable on it.
    fill = f"0.02 {0.55 * warm:.3f} 1.000"
    look = f'fillcolor="{fill}", style="filled,{outline}", color={color}'
    return f"  n{box.index} [label={_quoted(parts)}, {look}];"


def _shape(shape: tuple[int, ...]) -> str:
    sizes = list(shape)
    while len(sizes) > 1 and sizes[-1] == 1:
        sizes.pop()
    return "x".join(str(n) for n in sizes)


def _quoted(parts: list[str]) -> str:
    """A label of several lines; names come from the target, so nothing in them is syntax."""
    safe = [clean(part, 80).replace("\\", "\\\\").replace('"', '\\"') for part in parts if part]
    return '"' + "\\n".join(safe) + '"'
