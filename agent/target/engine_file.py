# SPDX-License-Identifier: Apache-2.0
"""What one ELF file holds of an engine: its functions, where to probe them, its tables.

Every function is treated on its own: one that is missing or cannot be probed is reported
and hides no other. Of several ways to see a level (the catalogue's sources) the first one
that this file has is taken.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from .elf import ElfFile
from .elf_types import Symbol
from .facts import HookRefusal, HookSite
from .layout_types import Layout
from .names import Tables

MAX_CODE = 256 << 10
SHORT_CODE = 64
MAX_EVIDENCE = 96 << 20
MAX_PLACES = 8
MAX_HOOKS = 1024
CALL, TABLE = "call:", "table:"
"""Events of functions that are calls (followed by their number), and that give a table."""
IN_MEMORY = "memory"
"""``source`` of a function whose address was found in memory, not in a table of symbols."""
HookData = dict[str, Any]
"""A catalogue Hook as JSON (no msgspec in the child: it costs 25 ms to import)."""
_Chosen = tuple[HookData, Symbol]


@dataclass(slots=True)
class FileFacts:
    """The child's answer for one file; see :class:`.facts.FileInfo` for the meaning of the fields."""

    engine: str
    build_id: str
    machine: str
    soname: str
    needed: list[str]
    symbols: str
    hooks: list[HookSite] = field(default_factory=list)
    refused: list[HookRefusal] = field(default_factory=list)
    op_source: str | None = None
    complete: bool = False
    tables: Tables | None = None
    layouts: list[Layout] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    table: str | None = None


def preload() -> None:
    """Import what is slow to import."""
    from . import layout_accessors, sites  # noqa: F401


def mentions(elf: ElfFile, marks: list[str]) -> bool:
    """Whether the names in the file contain one of the marks (a search at memory speed)."""
    needles = [os.fsencode(mark) for mark in marks]
    for table in elf.tables():
        for _, piece in table.elf.blocks(table.strings, table.strings_size, 64):
            if any(needle in piece for needle in needles):
                return True
    return False


def speaks_of(elf: ElfFile, strings: list[str]) -> bool:
    """Whether the file's loaded data contains one of the texts."""
    needles = [os.fsencode(text) for text in strings]
    budget = MAX_EVIDENCE
    for segment in elf.segments:
        if segment.type == 1 and segment.filesz:
            for _, piece in elf.blocks(segment.offset, min(segment.filesz, budget), 64):
                if any(needle in piece for needle in needles):
                    return True
            budget -= min(segment.filesz, budget)
    return False


def inspect_engine(
    elf: ElfFile, engine: dict[str, Any], slots: dict[str, int] | None = None
) -> FileFacts | None:
    """Facts of this file for one engine; None when it holds none of its functions.

    ``slots``: offsets in the file of functions that a table in memory names.
    """
    sources: list[dict[str, Any]] = engine["sources"]
    hooks: list[HookData] = engine["hooks"]
    names = {h["symbol"] for h in hooks} | {h["symbol"] for s in sources for h in s["hooks"]}
    found = elf.functions([n for n in names if n], clones=True)
    chosen: list[_Chosen] = [(h, symbol) for h in hooks for symbol in found.get(h["symbol"], [])]
    for hook in hooks:
        if hook["level"] == "api" and hook["pattern"]:
            chosen += [(hook, symbol) for symbol in elf.matching(hook["pattern"][:-1])]
        name = hook.get("slot") or (hook["symbol"] if hook["level"] == "api" else None) or ""
        place = (slots or {}).get(name)
        vaddr = None if place is None else elf.offset_to_vaddr(place)
        if vaddr is not None:
            chosen.append((hook, Symbol(name, vaddr, 0, IN_MEMORY)))
    facts = FileFacts(engine["engine"], elf.build_id(), elf.machine(), elf.soname(), elf.needed(), "")
    for level in dict.fromkeys(s["level"] for s in sources):
        missing = [h["symbol"] for h in hooks if level in h["required_for"] and h["symbol"] not in found]
        for source in (s for s in sources if s["level"] == level):
            if missing and any(h["pattern"] for h in source["hooks"]):
                continue  # names like these mean nothing in a file that does not run operators
            picked = _pick(elf, source, found)
            if picked and missing:
                facts.problems.append(f"no {level} level: {' and '.join(missing)} not found in this file")
            elif picked:
                chosen += picked
                facts.op_source, facts.complete = source["name"], source["complete"]
            if picked:
                break
    if not chosen and not facts.problems:
        return None
    _place(elf, chosen[:MAX_HOOKS], facts)
    _check_source(facts, sources)
    facts.symbols = "+".join(dict.fromkeys(symbol.source for _, symbol in chosen))
    _names_and_layouts(elf, facts)
    return facts


def _check_source(facts: FileFacts, sources: list[dict[str, Any]]) -> None:
    """A source whose required function cannot be probed is no source: better none than half."""
    for source in (s for s in sources if s["name"] == facts.op_source):
        needed = {h["event"] for h in source["hooks"] if source["level"] in h["required_for"]}
        if needed - {h.event for h in facts.hooks}:
            facts.problems.append(f"no {source['level']} level: its function cannot be probed")
            facts.hooks = [h for h in facts.hooks if h.level != source["level"]]
            facts.op_source, facts.complete = None, False


def _pick(elf: ElfFile, source: dict[str, Any], found: dict[str, list[Symbol]]) -> list[_Chosen]:
    """The functions of one source, or nothing when a required one is not there."""
    picked: list[_Chosen] = []
    for hook in source["hooks"]:
        symbols = elf.matching(hook["pattern"][:-1]) if hook["pattern"] else found.get(hook["symbol"], [])
        if not symbols and source["level"] in hook["required_for"]:
            return []
        picked += [(hook, symbol) for symbol in symbols]
    return picked


def _place(elf: ElfFile, chosen: list[_Chosen], facts: FileFacts) -> None:
    """Choose the site of each function, each address once."""
    from . import sites  # the disassembler, only where there is something to disassemble

    taken: dict[tuple[int, bool], str] = {}
    go_text = _go_text(elf)
    for hook, symbol in chosen:
        place = (symbol.vaddr, hook["level"] == "api")
        if place in taken:
            other = taken[place]
            if other != symbol.name and not hook["pattern"] and hook["level"] != "api":
                facts.refused.append(_refusal(hook, symbol, f"its code is that of {other} too"))
            continue
        taken[place] = symbol.name
        if not symbol.exact and hook["reads"]:
            why = "only a compiler's clone is there, whose arguments may differ"
            facts.refused.append(_refusal(hook, symbol, why))
            continue
        offset = elf.vaddr_to_offset(symbol.vaddr)
        code = elf.read(symbol.vaddr, min(symbol.size, MAX_CODE) or SHORT_CODE)
        if offset is None or not code:
            facts.refused.append(_refusal(hook, symbol, "its code is not in the file"))
            continue
        in_go = go_text is not None and go_text[0] <= symbol.vaddr < go_text[1]
        wants = "return" in hook["probe"] and not in_go
        places: list[Any] = []
        site = None
        for with_return in (True, False) if wants else (False,):
            site, refusals = sites.choose_site(
                code, symbol.vaddr, symbol.size, elf.machine(), with_return, hook["arg_regs"][elf.machine()],
                file_offset=offset, stack_args=hook["stack_args"][elf.machine()],
            )  # fmt: skip
            places = places or refusals[:MAX_PLACES]
            if site is not None:
                break
        if site is None:
            facts.refused.append(_refusal(hook, symbol, "no place in it may be probed", places))
            continue
        ret = wants and site.ret_ok
        facts.hooks.append(
            HookSite(symbol.name, hook["event"], hook["level"], hook["label"], site, True, ret, symbol.exact,
                     symbol.source)
        )  # fmt: skip
        if "return" in hook["probe"] and not ret:
            why = "it is Go code, whose stacks move" if in_go else "no place in it is safe for a return probe"
            facts.refused.append(_refusal(hook, symbol, f"no return: {why}", places))


def _refusal(hook: HookData, symbol: Symbol, why: str, places: list[Any] | None = None) -> HookRefusal:
    return HookRefusal(symbol.name, hook["event"], why, tuple(places or ()))


def _go_text(elf: ElfFile) -> tuple[int, int] | None:
    """Addresses of Go's own text; everything when a Go program does not say where it is."""
    if not elf.is_go():
        return None
    found = elf.functions(["runtime.text", "runtime.etext"])
    if len(found) == 2:
        return found["runtime.text"][0].vaddr, found["runtime.etext"][0].vaddr
    return 0, 1 << 64


def _names_and_layouts(elf: ElfFile, facts: FileFacts) -> None:
    """Names and layouts are of use where graphs and operators are seen, not for calls alone."""
    if any(hook.level in ("graph", "op") for hook in facts.hooks):
        from . import layout, names

        facts.tables = names.read_tables(elf)
        facts.layouts = layout.candidates(elf)
