# SPDX-License-Identifier: Apache-2.0
"""``profinferd`` as it would be without two of its ideas: probing the functions of all operators
instead of the one that dispatches them, and each at its first byte.

Programs, records and sums are the product's own, so that the row shows what the choice of the
functions and of the instruction is worth, and nothing else.
"""

from __future__ import annotations

import dataclasses
import platform
import sys

import msgspec

from profinferd.agent.cli import main as command_line
from profinferd.agent.target import inspect
from profinferd.agent.target.catalogue import Catalogue, load_catalogue
from profinferd.agent.target.child import Child
from profinferd.agent.target.elf import ElfFile
from profinferd.agent.target.facts import FileInfo, HookSite, TargetInfo
from profinferd.agent.target.factscache import FactsCache
from profinferd.agent.target.process import Process
from profinferd.agent.target.sites import check_site


def _wildcard_only() -> Catalogue:
    """The catalogue with no other way to see operators than one function each."""
    catalogue = load_catalogue()
    engines = []
    for engine in catalogue.engines:
        kept = [s for s in engine.sources if s.level != "op" or any(h.pattern for h in s.hooks)]
        engines.append(msgspec.structs.replace(engine, sources=kept))
    return msgspec.structs.replace(catalogue, engines=engines)


def _at_first_byte(file: FileInfo) -> FileInfo:
    elf = ElfFile(file.fd, file.path)
    starts = elf.functions([h.symbol for h in file.hooks if h.level == "op"])
    hooks: list[HookSite] = []
    for hook in file.hooks:
        if hook.level != "op":
            hooks.append(hook)
            continue
        start = starts[hook.symbol][0].vaddr
        code = elf.read(start, 64)
        if check_site(code, start, 0, platform.machine(), start, False) is None:
            offset = hook.site.offset - (hook.site.vaddr - start)
            site = dataclasses.replace(hook.site, offset=offset, vaddr=start, moved=0)
            hooks.append(dataclasses.replace(hook, site=site))
    return dataclasses.replace(file, hooks=tuple(hooks))


def main() -> int:
    real, wildcard = inspect._look, _wildcard_only()

    def look(
        process: Process,
        child: Child | None,
        catalogue: Catalogue | None,
        timeout: float,
        cache: FactsCache | None,
    ) -> TargetInfo:
        info = real(process, child, wildcard, timeout, cache)
        info.files = tuple(_at_first_byte(file) for file in info.files)
        return info

    inspect._look = look  # what the attachment calls, with another answer
    return command_line()


if __name__ == "__main__":
    sys.exit(main())
