# SPDX-License-Identifier: Apache-2.0
"""Which function means what, for which engine: the data in ``probes/*.yaml``.

One file describes one engine. Everything that differs between engines is in there, so
that adding one is adding data: which functions to look for, what happens when they are
entered and left, where their arguments lie, what memory the probe follows from them.
The files are checked against the types below when they are loaded; the same types as a
JSON schema lie beside the data (``probes/catalogue.schema.json``) for editors.
"""

from __future__ import annotations

import json
import os
from typing import Annotated, Any, Literal

import msgspec

from ..errors import UsageError
from .calldata import CallEntry, FunctionTable, Watch

Level = Literal["call", "graph", "op", "barrier", "api"]
Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,199}$")]
Text = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
X86_REGISTERS = ("rdi", "rsi", "rdx", "rcx", "r8", "r9")
_X86_NARROW = {"edi": 0, "esi": 1, "edx": 2, "ecx": 3, "r8d": 4, "r9d": 5}
_X86_PLACE = r"^(r(di|si|dx|cx|8|9)|e(di|si|dx|cx)|r[89]d|\[r(sp|di|si|dx|cx|8|9)\+[0-9]+\])$"
_ARM_PLACE = r"^([xw][0-7]|\[(sp|x[0-7])\+[0-9]+\])$"
MAX_CATALOGUE_FILE = 1 << 20
OWN_FOLDER = "/etc/profinferd/engines"
"""Descriptions of engines that we do not know (docs/adding-an-engine.md)."""
OWN_VARIABLE = "PROFINFERD_ENGINES"
"""Environment variable that names one more such folder."""


class Argument(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where an argument lies at the function's entry, per machine.

    A register name, or ``[register+N]`` for what lies N bytes after the address in it
    (``[rsp+8]`` is the first argument passed on the stack on x86-64).
    """

    name: Name
    type: Literal["pointer", "int32", "int64", "size"]
    x86_64: Annotated[str, msgspec.Meta(pattern=_X86_PLACE)]
    aarch64: Annotated[str, msgspec.Meta(pattern=_ARM_PLACE)]


class Hook(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One function (``symbol``) or every function whose name matches (``pattern``: a prefix and ``*``).

    ``event``: name in ``probes/events.h`` that the probe's records carry. ``probe``: where.
    ``required_for``: levels that do not work in a file without this function. ``reads``:
    structures of the target that the probe follows from the arguments; where it reads
    any, a compiler's clone of the function (whose arguments may differ) will not do.
    """

    label: Text
    level: Level
    event: Annotated[str, msgspec.Meta(pattern=r"^[A-Z][A-Z0-9_]{1,63}$")]
    probe: Annotated[list[Literal["entry", "return"]], msgspec.Meta(min_length=1, max_length=2)]
    symbol: Name | None = None
    pattern: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_]{3,199}\*$")] | None = None
    required_for: list[Level] = []
    args: Annotated[list[Argument], msgspec.Meta(max_length=8)] = []
    reads: list[Name] = []

    def __post_init__(self) -> None:
        if (self.symbol is None) == (self.pattern is None):
            raise ValueError(f"hook {self.label!r} needs either a symbol or a pattern")
        if "entry" not in self.probe:
            raise ValueError(f"hook {self.label!r} needs a probe at the entry")

    def arg_regs(self, machine: str) -> int:
        """How many of the first argument registers must be intact where the probe sits."""
        return max((_register(getattr(a, machine)) + 1 for a in self.args), default=0)

    def stack_args(self, machine: str) -> bool:
        """Whether an argument is found from the stack pointer."""
        return any(getattr(a, machine).startswith(("[rsp", "[sp")) for a in self.args)


class Source(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One way to see a level; of several, the first that a file has is used in that file.

    ``complete``: every event of the level is seen this way.
    """

    name: Name
    level: Level
    complete: bool
    hooks: Annotated[list[Hook], msgspec.Meta(min_length=1)]


class Engine(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One engine. ``marks``: byte strings one of which the names of its functions contain;
    ``strings``: texts that tell a build of it from other programs when all names are gone.
    ``calls``: functions that are counted and timed, without code for this engine. ``table``:
    where functions without a name are found. ``watch``: which call tells whether the others
    are worth their cost. ``beneath``: others compute with it; a process
    that has one of those, too, is called by the other's name."""

    schema: Literal[1]
    engine: Name
    label: Text
    marks: Annotated[list[Text], msgspec.Meta(min_length=1, max_length=16)]
    strings: Annotated[list[Text], msgspec.Meta(max_length=16)] = []
    hooks: list[Hook] = []
    sources: list[Source] = []
    calls: Annotated[list[CallEntry], msgspec.Meta(max_length=256)] = []
    table: FunctionTable | None = None
    watch: Watch | None = None
    beneath: bool = False

    def gives_table(self, symbol: str | None) -> bool:
        """Whether the function gives the table of the engine's functions."""
        return self.table is not None and symbol == self.table.returned_by

    def levels(self) -> list[str]:
        """Levels that this engine has, outermost first."""
        found = {h.level for h in self.hooks} | {s.level for s in self.sources}
        found |= {"api"} if self.calls else set()
        return [level for level in ("call", "api", "graph", "op") if level in found]


class Catalogue(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Every engine that is known."""

    engines: list[Engine]

    def engine(self, name: str) -> Engine:
        """The engine of that name; KeyError when there is none."""
        for engine in self.engines:
            if engine.engine == name:
                return engine
        raise KeyError(name)


def _register(place: str) -> int:
    """Index of the argument register that a place uses, -1 for the stack pointer."""
    name = place.strip("[]").partition("+")[0]
    if name in X86_REGISTERS:
        return X86_REGISTERS.index(name)
    if name in _X86_NARROW:
        return _X86_NARROW[name]
    return int(name[1:]) if name[1:].isdigit() else -1


def catalogue_folder() -> str:
    """Where the shipped files lie: the probes room beside ours."""
    agent = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    return os.path.join(os.path.dirname(agent), "probes")


def load_catalogue(folder: str | None = None) -> Catalogue:
    """All ``*.yaml`` of the folder, in order of their names.

    Default: the shipped ones, then those of :data:`OWN_FOLDER` and of the folder that the
    environment names (:data:`OWN_VARIABLE`). Raises UsageError for a file that is not a valid
    description, naming file and place.
    """
    engines: list[Engine] = []
    for place in [folder] if folder is not None else _folders():
        try:
            names = sorted(n for n in os.listdir(place) if n.endswith(".yaml"))
        except OSError as error:
            raise UsageError(
                f"no probe catalogue at {place}: {error.strerror}", "install profinferd again"
            ) from error
        for name in names:
            engine = load_engine(os.path.join(place, name))
            if any(engine.engine == other.engine for other in engines):
                raise UsageError(f"{name} describes engine {engine.engine} again", "remove one of the files")
            engines.append(engine)
    if not engines:
        raise UsageError(f"no probe catalogue at {folder or catalogue_folder()}", "install profinferd again")
    return Catalogue(engines=engines)


def _folders() -> list[str]:
    own = [OWN_FOLDER] if os.path.isdir(OWN_FOLDER) else []
    named = os.environ.get(OWN_VARIABLE)
    return [catalogue_folder(), *own, *([named] if named else [])]


def load_engine(path: str) -> Engine:
    """One file of the catalogue; UsageError when it is not valid."""
    try:
        with open(path, "rb") as file:
            text = file.read(MAX_CATALOGUE_FILE)
        return msgspec.yaml.decode(text, type=Engine)
    except OSError as error:
        raise UsageError(f"cannot read {os.path.basename(path)}: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise UsageError(f"{os.path.basename(path)} is not a valid catalogue: {error}") from error


def schema() -> dict[str, Any]:
    """The JSON schema of one file, as it is shipped."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **msgspec.json.schema(Engine)}


def schema_text() -> str:
    """The text of ``probes/catalogue.schema.json``."""
    return json.dumps(schema(), indent=1, sort_keys=True) + "\n"
