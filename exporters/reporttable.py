# SPDX-License-Identifier: Apache-2.0
"""A recording for people at a terminal: figures, verdicts, operators, layers, roles, threads, memory.

Built from :class:`rich.text.Text`, never from markup; what the target named is cleaned.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Sequence

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from ..agent.model import profile
from ..agent.model import roofline as roofs
from ..agent.model.profile import Row
from ..agent.model.trace import Trace
from . import placementtable, text
from .headline import figures, level, title, verdicts
from .html.memory import of_trace, resident
from .reportparts import grid, heading, in_bytes, memory_rows, sum_or_none, tone, value
from .summary import PhaseOps, phase_ops
from .verdicts import verdict_lines

WIDE = 100
"""From this width on, tables have all their columns."""
ROWS = 14
"""Rows of a table; the page and the JSON have all."""
_BAR = 24
_PLAIN = {ord("·"): "-", ord("…"): "."}
"""Of our own characters those that not every terminal has."""


class ReportExporter:
    """Writes a trace as text.

    ``width`` in columns; ``color`` writes ANSI colours; ``ascii_only`` keeps to characters of
    any terminal; ``rows`` of the tables of operators, at most.
    """

    def __init__(
        self, width: int = 80, color: bool = False, ascii_only: bool = False, rows: int = ROWS
    ) -> None:
        self._width = width
        self._rows = rows
        self._color = color
        self._ascii = ascii_only

    def render(self, trace: Trace) -> str:
        """The report, ending in a newline."""
        out = io.StringIO()
        console = Console(
            file=out, width=self._width, force_terminal=self._color,
            color_system="standard" if self._color else None, no_color=not self._color, highlight=False,
            markup=False, emoji=False, legacy_windows=False, _environ={},
        )  # fmt: skip
        console.print(self._report(trace))
        made = out.getvalue()
        if self._ascii:
            made = made.translate(_PLAIN)
        lines = (line.rstrip() for line in made.splitlines())
        return "\n".join(lines) + "\n"

    def _report(self, trace: Trace) -> RenderableType:
        rows = profile.rows(trace)
        parts: list[RenderableType] = [*self._head(trace), *self._verdicts(trace)]
        whole = {part.phase: part for part in phase_ops(trace.snapshot)}
        for phase in sorted(whole.values(), key=lambda p: -(p.seconds or 0.0))[:2]:
            parts += self._phase(phase, [row for row in rows if row.phase == phase.phase])
        if trace.snapshot.offload is not None:
            parts += heading("Where the time went, with several backends")
            parts += list(placementtable.offloaded(trace.snapshot.offload))[1:]
        if trace.snapshot.placement:
            parts += heading("Where operators ran")
            parts += list(placementtable.section(trace.snapshot.placement, self._width, ROWS))[1:]
        parts += [*self._wasted(trace, rows), *self._threads(trace), *self._memory(trace), *self._foot(trace)]
        return Group(*parts)

    # ---- what and how fast ---------------------------------------------------------------

    def _head(self, trace: Trace) -> Iterator[RenderableType]:
        yield Text(title(trace.snapshot), "bold")
        yield Text(level(trace), "dim")
        yield Text()
        table = grid(("", "left"), ("", "right"), ("", "left"))
        table.show_header = False
        for figure in figures(trace):
            table.add_row(
                Text(figure.label, "dim"), Text(value(figure), tone(figure)), Text(figure.sub, "dim")
            )
        yield table

    def _verdicts(self, trace: Trace) -> Iterator[RenderableType]:
        found = verdicts(trace)
        yield Text()
        if found:
            yield from verdict_lines(found)
        else:
            yield Text("too little was seen to say why tokens take the time they take", "dim")

    # ---- where the time goes ---------------------------------------------------------------

    def _phase(self, phase: PhaseOps, rows: Sequence[Row]) -> Iterator[RenderableType]:
        seconds = phase.seconds or 0.0
        per = f", {text.seconds(seconds / phase.units)} a {phase.per}" if phase.units else ""
        graphs = "1 graph" if phase.graphs == 1 else f"{text.count(phase.graphs)} graphs"
        yield from heading(f"{phase.phase}: {text.seconds(seconds)} in {graphs}{per}")
        yield self._grouped(("op", "dtype", "role"), rows, phase, lambda r: (r.op, r.dtype, r.role))
        yield Text()
        yield self._grouped(("role",), rows, phase, lambda r: (r.role,), limit=8)
        layers = [row for row in rows if row.layer is not None]
        if layers:
            yield Text()
            yield self._layers(layers, phase)

    def _grouped(
        self, names: tuple[str, ...], rows: Iterable[Row], phase: PhaseOps,
        key: Callable[[Row], tuple[str, ...]], limit: int | None = None,
    ) -> RenderableType:  # fmt: skip
        sums: dict[tuple[str, ...], list[Row]] = {}
        for row in rows:
            sums.setdefault(key(row), []).append(row)
        order = sorted(sums.items(), key=lambda item: -sum(r.seconds for r in item[1]))
        wide = self._width >= WIDE
        columns = [
            ("share", "right"), *((name, "left") for name in names), ("time", "right"), ("kernels", "right"),
            ("us each", "right"), ("GB/s", "right"),
        ]  # fmt: skip
        table = grid(*columns, *([("GFLOP/s", "right"), ("wasted", "right")] if wide else []))
        room = 20 if wide else 15
        for cells, its in order[: limit or self._rows]:
            seconds, calls = sum(r.seconds for r in its), sum(r.calls for r in its)
            moved, flops = sum_or_none(r.bytes for r in its), sum_or_none(r.flops for r in its)
            each, speed = text.ratio(seconds, calls), text.ratio(moved, seconds)
            work = text.ratio(flops, seconds)
            more = [
                text.number(None if work is None else work / 1e9),
                text.seconds(text.total([sum_or_none(r.wasted_seconds for r in its)])),
            ]
            table.add_row(
                Text(text.percent(text.ratio(seconds, phase.seconds)), "bold"),
                Text(text.clean(cells[0], room) or text.MISSING, "cyan"),
                *(text.clean(cell, room - 1) or text.MISSING for cell in cells[1:]),
                text.seconds(seconds), text.count(calls),
                text.number(None if each is None else each * 1e6),
                text.number(None if speed is None else speed / 1e9),
                *(more if wide else []),
            )  # fmt: skip
        rest = order[limit or self._rows :]
        if rest:
            seconds = sum(r.seconds for _, its in rest for r in its)
            table.add_row(text.percent(text.ratio(seconds, phase.seconds)), Text(f"{len(rest)} more", "dim"))
        for what, part in (("setup", phase.setup), ("untimed", phase.untimed)):
            if part:
                table.add_row(text.percent(text.ratio(part, phase.seconds)), Text(what, "dim"))
        return table

    def _layers(self, rows: Sequence[Row], phase: PhaseOps) -> RenderableType:
        sums: dict[int, float] = {}
        for row in rows:
            if row.layer is not None:
                sums[row.layer] = sums.get(row.layer, 0.0) + row.seconds
        most = max(sums.values(), default=0.0)
        table = grid(("layer", "right"), ("share", "right"), ("time", "right"), ("", "left"))
        shown = sorted(sums)
        if len(shown) > 2 * ROWS:
            # Of many, those that took most; in their order.
            shown = sorted(sorted(sums, key=lambda layer: -sums[layer])[: 2 * ROWS])
        for layer in shown:
            seconds = sums[layer]
            table.add_row(
                str(layer), text.percent(text.ratio(seconds, phase.seconds)), text.seconds(seconds),
                Text(self._bar(seconds, most), "green"),
            )  # fmt: skip
        return table

    def _bar(self, value: float, most: float) -> str:
        eighths = round((text.ratio(value, most) or 0.0) * _BAR * 8)
        if self._ascii:
            return "#" * round(eighths / 8)
        return "█" * (eighths // 8) + (" ▏▎▍▌▋▊▉"[eighths % 8] if eighths % 8 else "")

    def _wasted(self, trace: Trace, rows: Sequence[Row]) -> Iterator[RenderableType]:
        why = roofs.absent_because(profile.peaks_of(trace))
        if not rows:
            return
        yield from heading("Wasted: time beyond what the machine's peaks would need")
        if why is not None:
            yield Text(f"absent: {why}")
            return
        kinds: dict[tuple[str, str, str, str], list[Row]] = {}
        for row in rows:
            kinds.setdefault((row.phase, row.op, row.dtype, row.role), []).append(row)
        found = []
        for key, its in kinds.items():
            wasted = sum_or_none(r.wasted_seconds for r in its)
            if wasted is not None:
                found.append((wasted, sum(r.seconds for r in its), key))
        found.sort(key=lambda item: -item[0])
        table = grid(("wasted", "right"), ("of its time", "right"), ("phase", "left"), ("op", "left"),
                      ("dtype", "left"), ("role", "left"))  # fmt: skip
        for wasted, seconds, key in found[:8]:
            table.add_row(
                Text(text.seconds(wasted), "bold"), text.percent(text.ratio(wasted, seconds)),
                *(text.clean(cell, 18) for cell in key),
            )  # fmt: skip
        yield table

    # ---- threads and memory ----------------------------------------------------------------

    def _threads(self, trace: Trace) -> Iterator[RenderableType]:
        threads = getattr(trace.snapshot, "threads", None)
        faults = getattr(trace.snapshot, "faults", None)
        if threads is not None:
            yield from heading("Threads, while graphs ran")
            causes = sorted({c for one in threads.threads for c, s in one.seconds.items() if s > 0})
            table = grid(
                ("thread", "right"),
                ("running", "right"),
                *((c, "right") for c in causes),
                ("migrations", "right"),
            )
            for one in threads.threads[:ROWS]:
                table.add_row(
                    f"{one.tid}{'*' if one.leader else ''}", text.seconds(one.work_run_seconds),
                    *(text.seconds(one.seconds.get(c)) for c in causes), text.count(one.migrations),
                )  # fmt: skip
            yield table
            if any(one.leader for one in threads.threads[:ROWS]):
                yield Text("* calls the engine; the others compute with it", "dim")
            for taker in threads.takers[:4]:
                who = f"{text.clean(taker.comm, 32)} (pid {taker.pid})"
                if taker.own:
                    who = "another thread of its own"
                elif taker.watcher:
                    who = "profinferd itself"
                times = "once" if taker.preemptions == 1 else f"{text.count(taker.preemptions)} times"
                yield Text(f"{who} took the core {times}: {text.seconds(taker.seconds)} of waiting")
        if faults is not None and any(c.count for c in faults.counts):
            yield from heading("Page faults")
            for one in faults.counts:
                if one.count:
                    waited = "" if one.seconds is None else f", {text.seconds(one.seconds)} of waiting"
                    yield Text(f"{text.count(one.count)} {one.kind} in {one.mapping}{waited}")

        cpu, events = trace.snapshot.cpu_time, trace.snapshot.hardware
        if cpu is not None and cpu.parts:
            yield from heading(f"CPU time, by {text.count(cpu.samples)} samples")
            table = grid(("share", "right"), ("part", "left"), ("time", "right"))
            for part in cpu.parts:
                table.add_row(
                    f"{100 * part.share:.1f}%", text.clean(part.part, 24), text.seconds(part.seconds)
                )
            yield table
        if events is not None and events.events:
            yield from heading("Performance events")
            for event in events.events:
                told = text.MISSING if event.value is None else text.count(round(event.value))
                why = f" ({text.clean(event.reason, 200)})" if event.reason else ""
                yield Text(f"{text.clean(event.event, 40)} {told}{why}")

    def _memory(self, trace: Trace) -> Iterator[RenderableType]:
        found = of_trace(trace)
        if not found.weights and found.cache is None and found.scratch is None:
            return
        yield from heading("Memory")
        table = grid(("", "left"), ("", "right"), ("", "left"))
        table.show_header = False
        for label, size, note in memory_rows(found):
            table.add_row(Text(label, "dim"), Text(in_bytes(size), "bold"), Text(note, "dim"))
        process = resident(trace)
        if process is not None:
            faults = f"{text.count(process.major_faults)} major faults while recording"
            table.add_row(
                Text("anonymous", "dim"),
                Text(in_bytes(process.anonymous), "bold"),
                Text("of the process", "dim"),
            )
            table.add_row(Text("of files", "dim"), Text(in_bytes(process.file), "bold"), Text(faults, "dim"))
        yield table

    def _foot(self, trace: Trace) -> Iterator[RenderableType]:
        facts, lost = trace.facts, trace.snapshot.lost
        yield from heading("This recording")
        if lost.total:
            kinds = ", ".join(
                f"{text.clean(k)} {text.count(n)}" for k, n in sorted(lost.by_kind.items()) if n
            )
            records = "record was" if lost.total == 1 else "records were"
            said = f"{text.count(lost.total)} {records} lost ({kinds}); their time is in no operator"
            yield Text(said, "bold red")
        else:
            yield Text("nothing was lost")
        if len(trace.gaps):
            yield Text(f"{text.count(len(trace.gaps))} gaps")
        if not facts.finished:
            yield Text("its recorder ended before its time: the last seconds may be missing", "yellow")
        for note in [*facts.notes, *trace.snapshot.notes][:40]:
            yield Padding(Text(f"- {text.clean(note, 400)}", "dim"), (0, 0, 0, 0))
