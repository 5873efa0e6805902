# SPDX-License-Identifier: Apache-2.0
"""Stacks of CPU time as folded text and as a flame graph: one SVG file, no script, no font fetched."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from xml.sax.saxutils import escape

from ..agent.model.eventdata import CpuTime
from .text import clean

WIDTH = 1200
ROW = 18
MARGIN = 10
TOP = 46
LEAST = 0.4
"""Pixels: narrower boxes are not drawn."""
CHARACTER = 6.6
COLORS = {
    "kernels": "#e8743b", "barrier": "#bcbcbc", "engine": "#f0b94b", "tokenizer": "#6f9fd8",
    "sampler": "#5fb28c", "http": "#9a7fc7", "system": "#c65b5b", "other": "#d9c7a0", "unknown": "#e0e0e0",
}  # fmt: skip


def folded(cpu: CpuTime) -> str:
    """One stack a line, root first, and its samples: what flame graph tools read."""
    return "".join(f"{stack} {count}\n" for stack, count in cpu.folded)


@dataclass(slots=True)
class _Box:
    name: str
    count: int = 0
    below: dict[str, _Box] = field(default_factory=dict)


def flame_graph(cpu: CpuTime, title: str) -> str:
    """The SVG: the root on top, callees below, widths by samples, colours by part of the program."""
    root = _tree(cpu.folded)
    depth = _depth(root)
    height = TOP + ROW * depth + 40
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" font-family="monospace" font-size="11">',
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
        f'<text x="{MARGIN}" y="18" font-size="14" font-weight="bold">{escape(clean(title, 120))}</text>',
        f'<text x="{MARGIN}" y="36" fill="#555">{_summary(cpu)}</text>',
    ]
    if root.count:
        lines += _boxes(root, MARGIN, TOP, (WIDTH - 2 * MARGIN) / root.count, root.count, "other")
    x = float(MARGIN)
    for part in cpu.parts:
        label = f"{part.part} {part.share * 100:.1f} %"
        color = COLORS.get(part.part, "#ddd")
        lines.append(
            f'<rect x="{x:.0f}" y="{height - 24}" width="11" height="11" fill="{color}"/>'
            f'<text x="{x + 15:.0f}" y="{height - 14}">{escape(label)}</text>'
        )
        x += 15 + CHARACTER * len(label) + 18
    return "\n".join([*lines, "</svg>"]) + "\n"


def _summary(cpu: CpuTime) -> str:
    text = f"{cpu.samples:,} samples at {cpu.hertz} a second, {cpu.sampled_seconds:.2f} s of CPU time"
    return text if not cpu.lost else f"{text}, {cpu.lost:,} samples lost"


def _tree(stacks: Sequence[tuple[str, int]]) -> _Box:
    root = _Box("all")
    for stack, count in stacks:
        box = root
        box.count += count
        for name in stack.split(";"):
            box = box.below.setdefault(name, _Box(name))
            box.count += count
    # What everything has in common is the root itself.
    return next(iter(root.below.values())) if len(root.below) == 1 else root


def _depth(box: _Box) -> int:
    return 1 + max((_depth(b) for b in box.below.values()), default=0)


def _boxes(box: _Box, x: float, y: int, scale: float, whole: int, part: str) -> Iterator[str]:
    width = box.count * scale
    if width < LEAST:
        return
    if box.name.startswith("(") and box.name.strip("()") in COLORS:
        part = box.name.strip("()")
    share = f"{box.count / whole * 100:.1f} %"
    name = clean(box.name, 200)
    room = int((width - 6) / CHARACTER)
    label = name if len(name) <= room else name[: max(room - 1, 0)] + "…" if room > 3 else ""
    yield (
        f"<g><title>{escape(f'{name}: {box.count:,} samples, {share}')}</title>"
        f'<rect x="{x:.1f}" y="{y}" width="{max(width - 0.5, 0.3):.1f}" height="{ROW - 1}" rx="1" '
        f'fill="{COLORS[part]}"/><text x="{x + 3:.1f}" y="{y + 13}">{escape(label)}</text></g>'
    )
    for below in sorted(box.below.values(), key=lambda b: (-b.count, b.name)):
        yield from _boxes(below, x, y + ROW, scale, whole, part)
        x += below.count * scale
