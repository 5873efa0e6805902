# SPDX-License-Identifier: Apache-2.0
"""The formats of ``profinferd export``, by name; a format's module is loaded when it is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import cast

from . import TraceExporter


@dataclass(frozen=True, slots=True)
class Format:
    """``suffix`` of the file that it makes by default; "" for a format that is a folder of files."""

    name: str
    about: str
    module: str
    exporter: str
    suffix: str

    def load(self) -> TraceExporter:
        """Its exporter."""
        found = getattr(import_module(f".{self.module}", __package__), self.exporter)
        return cast(TraceExporter, found())


FORMATS = {
    f.name: f
    for f in (
        Format("perfetto", "a timeline for ui.perfetto.dev", "perfetto", "PerfettoExporter", ".pftrace"),
        Format("chakra", "an execution trace (MLCommons Chakra)", "chakra", "ChakraExporter", ".et"),
        Format("dot", "one graph, in Graphviz's language", "graph_dot", "DotExporter", ".dot"),
        Format("svg", "one graph, drawn by Graphviz", "graph_dot", "SvgExporter", ".svg"),
        Format("graphml", "one graph, for networkx, Gephi, yEd", "graphml", "GraphmlExporter", ".graphml"),
        Format("folded", "stacks for flame graphs", "folded", "FoldedExporter", ".folded"),
        Format("stacks", "samples of CPU time (record --stacks)", "cpustacks", "StacksExporter", ".folded"),
        Format("flame", "a flame graph of them", "cpustacks", "FlameExporter", ".svg"),
        Format("parquet", "tables, a folder that grows", "parquet", "ParquetExporter", ""),
        Format("csv", "tables, one file each", "csv_export", "CsvExporter", ""),
        Format("json", "tables and summary in one object", "tables_json", "TablesJsonExporter", ".json"),
    )
}
