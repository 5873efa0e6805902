# SPDX-License-Identifier: Apache-2.0
"""A graph as GraphML, for networkx, Gephi, yEd: every node with its figures, every edge with its kind."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Iterable, Iterator

from ..agent.model.trace import Trace
from . import Choice
from .drawing import Drawing, draw
from .text import clean

_SPACE = "http://graphml.graphdrawing.org/xmlns"
_NODE_KEYS = {
    "kind": "string", "op": "string", "name": "string", "role": "string", "layer": "long", "type": "string",
    "shape": "string", "state": "string", "in_place": "boolean", "calls": "long", "seconds": "double",
}  # fmt: skip


class GraphmlExporter:
    """Implements :class:`profinferd.exporters.TraceExporter`."""

    def files(self, trace: Trace, choice: Choice) -> Iterator[tuple[str, Iterable[bytes]]]:
        """One file."""
        yield "", [graphml(draw(trace, choice))]


def graphml(drawing: Drawing) -> bytes:
    """The document. Nodes are n0, n1, … and leaves l0, l1, …; what is absent has no data element."""
    root = ET.Element("graphml", xmlns=_SPACE)
    for name, kind in _NODE_KEYS.items():
        ET.SubElement(root, "key", {"id": name, "for": "node", "attr.name": name, "attr.type": kind})
    ET.SubElement(root, "key", {"id": "flow", "for": "edge", "attr.name": "flow", "attr.type": "string"})
    graph = ET.SubElement(root, "graph", id=f"graph{drawing.graph}", edgedefault="directed")
    for box in drawing.boxes:
        _node(
            graph, f"n{box.index}", kind="node", op=box.op, name=box.name, role=box.role, layer=box.layer,
            type=box.dtype, shape=_shape(box.shape), state=box.state, in_place=box.in_place,
            calls=box.calls, seconds=box.seconds,
        )  # fmt: skip
    for leaf in drawing.inputs:
        _node(
            graph, f"l{leaf.index}", kind=leaf.kind, name=leaf.name, type=leaf.dtype, shape=_shape(leaf.shape)
        )
    for leaf in drawing.inputs:
        for reader in leaf.readers:
            _edge(graph, f"l{leaf.index}", f"n{reader}", "leaf")
    for arrow in drawing.arrows:
        _edge(graph, f"n{arrow.source}", f"n{arrow.target}", arrow.kind)
    ET.indent(root)
    document: bytes = ET.tostring(root, encoding="utf-8", xml_declaration=True)
    return document + b"\n"


def _node(graph: ET.Element, number: str, /, **data: str | float | bool | None) -> None:
    node = ET.SubElement(graph, "node", id=number)
    for key, value in data.items():
        if value is not None:
            text = str(value).lower() if isinstance(value, bool) else clean(str(value), 200)
            ET.SubElement(node, "data", key=key).text = text


def _edge(graph: ET.Element, source: str, target: str, flow: str) -> None:
    edge = ET.SubElement(graph, "edge", source=source, target=target)
    ET.SubElement(edge, "data", key="flow").text = flow


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(str(n) for n in shape)
