# SPDX-License-Identifier: Apache-2.0
"""What says why: peaks of the machine, clocks of its cores, CPU time by part, and the verdicts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .errors import MachineError
from .kernel.bpfsys import strerror
from .kernel.clocks import ClockWatch
from .kernel.counters import Counters
from .kernel.peaks import load_peaks
from .kernel.perfsys import EventSpec
from .kernel.sampler import Sampler
from .model.cpuparts import Frame, cpu_time
from .model.eventdata import Events
from .model.snapshot import Snapshot
from .model.verdict import judge
from .prices import STATE
from .target.facts import TargetInfo
from .target.process import FileId, Process, cpu_seconds
from .target.symbolize import Mappings, symbolize

LOOK_SECONDS = 0.5
"""How often the clocks and the samples are looked at."""


@dataclass(frozen=True, slots=True)
class WhyOptions:
    """What costs something and has to be asked for. ``hertz``: samples of CPU time a second, 0: none;
    ``events``: performance events to count by op."""

    hertz: int = 0
    events: tuple[EventSpec, ...] = ()


class Whys:
    """For one process: everything about it that is not in the records of its probes."""

    def __init__(
        self,
        process: Process,
        options: WhyOptions = WhyOptions(),
        info: TargetInfo | None = None,
        method: str = "multi",
    ) -> None:
        """``info`` and ``method``: where and how ops are probed, needed for ``options.events``.

        Raises TargetError or MachineError when what is asked for cannot be had at all.
        """
        self._process = process
        self._peaks = load_peaks(STATE)
        self._clocks = ClockWatch(process.pid)
        self._next_look = 0.0
        self._mappings = Mappings()
        self._sampler = Sampler(process.pid, options.hertz) if options.hertz else None
        if self._sampler is not None:
            self._before = cpu_seconds(process.pid)
            self._sampler.look()
            if self._sampler.refused is not None and not self._sampler.threads:
                self._sampler.close()
                why = strerror(self._sampler.refused.errno or 0)
                raise MachineError(f"CPU time cannot be sampled: {why}", "run as root")

        self._info = info
        self._counters: Counters | None = None
        self._counted: set[FileId] = set()
        if options.events and info is not None:
            self._counters = Counters(process.pid, options.events, method)
            try:
                self._counters.look()
                self._count_in(info)
            except BaseException:
                self.close()
                raise

    def look_into(self, info: TargetInfo) -> None:
        """What the process has loaded since: operators in it are counted, too. Raises as the constructor."""
        self._info = info
        self._count_in(info)

    def _count_in(self, info: TargetInfo) -> None:
        counters = self._counters
        if counters is None:
            return
        for file in info.files:
            if file.file_id in self._counted:
                continue
            self._counted.add(file.file_id)
            hooks = [h for h in file.hooks if h.level == "op"]
            ops = [h.site.offset for h in hooks if h.event != "OPP_FUSED2"]
            fused = [h.site.offset for h in hooks if h.event == "OPP_FUSED2"]
            graphs = [h.site.offset for h in file.hooks if h.event == "LV_CPU" and h.ret]
            counters.attach(file.open_path, ops, fused, graphs)

    def set_layout(self, fields: Mapping[str, int]) -> None:
        """The layout of the target's structures is known."""
        if self._counters is not None:
            self._counters.set_layout(fields)

    def _events(self) -> Events | None:
        if self._counters is None:
            return None
        self._counters.look()
        tables = self._info.tables if self._info is not None else None
        types = [t.name if t is not None else "" for t in tables.types or ()] if tables else []
        return self._counters.events(tables.ops if tables else (), types)

    def tick(self, now: float) -> None:
        """Look at what changes; call it often, ``now`` in seconds."""
        if now >= self._next_look:
            self._next_look = now + LOOK_SECONDS
            self._clocks.look()
            if self._sampler is not None:
                self._sampler.look()
                self._mappings.look(self._process.pid)
            if self._counters is not None:
                self._counters.look()

    def describe(self, snapshot: Snapshot) -> Snapshot:
        """The snapshot with what is known here, and with its verdicts. Last of all: they need the rest."""
        whole = dataclasses.replace(
            snapshot,
            peaks=self._peaks,
            clocks=self._clocks.clocks(),
            hardware=self._events(),
        )
        return dataclasses.replace(whole, verdicts=judge(whole))

    def finish(self, snapshot: Snapshot) -> Snapshot:
        """The last snapshot with named samples. It takes seconds, so probes should be gone; the
        process should be there, for only it can tell its names."""
        sampler = self._sampler
        self.close()
        if sampler is None:
            return snapshot
        used = cpu_seconds(self._process.pid)
        self._mappings.look(self._process.pid)
        addresses = sorted({address for _, chain in sampler.stacks for address in chain})
        frames, note = symbolize(self._process.pid, addresses, self._mappings)
        cpu = cpu_time(
            ((kernel, _code(chain, frames), count) for (kernel, chain), count in sampler.stacks.items()),
            hertz=sampler.hertz,
            lost=sampler.lost,
            # A process that is gone has no account any more.
            seconds=used - self._before if used >= self._before and used > 0 else None,
            root=self._process.exe.rpartition("/")[2] or "process",
        )
        notes = snapshot.notes if note is None else (*snapshot.notes, f"cpu_time: {note}")
        whole = dataclasses.replace(snapshot, cpu_time=cpu, notes=notes)
        return dataclasses.replace(whole, verdicts=judge(whole))  # samples tell more

    def close(self) -> None:
        """Stop looking. May be called twice."""
        if self._counters is not None:
            self._counters.close()
            self._counters = None
        if self._sampler is not None:
            self._sampler.close()
            self._sampler = None


def _code(chain: Sequence[int], frames: dict[int, Frame]) -> list[Frame]:
    """Frames up to the first that is no code: what lies behind it was followed by chance."""
    found: list[Frame] = []
    for address in chain:
        if found and frames[address].file is None:
            break
        found.append(frames[address])
    return found
