# SPDX-License-Identifier: Apache-2.0
"""Calls as the catalogue describes them, and what the probe is told about each.

A call is a function of an engine that is counted and timed; its fields say what is read of
its arguments, by number, so that one description serves every machine. How to write one:
``docs/adding-an-engine.md``. Everything here becomes numbers for ``probes/calls.bpf.c``;
no engine needs code of its own.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import msgspec

Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,199}$")]
Text = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
Offset = Annotated[int, msgspec.Meta(ge=0, le=1 << 20)]

MAX_FIELDS = 10
MAX_SUMS = 3
MAX_STEPS = 4
TABLE_VALUES = 64
REGISTERS = {"x86_64": 6, "aarch64": 8}
"""Integer arguments that are passed in registers; the rest lie on the stack."""
_STACK_BASE = {"x86_64": 8, "aarch64": 0}  # x86-64: the return address comes first

_SIZES = {
    "int8": (1, True), "uint8": (1, False), "int16": (2, True), "uint16": (2, False),
    "int32": (4, True), "uint32": (4, False), "int64": (8, True), "uint64": (8, False),
    "pointer": (8, False), "code": (8, False), "library": (8, False),
    "text": (8, False), "inline_text": (8, False), "place": (8, False),
}  # fmt: skip

Role = Literal[
    "begins", "subject", "same_as", "pends", "yields", "awaits", "ends", "opens", "within", "closes",
    "holds", "takes", "sets", "held", "belongs", "first", "switches",
]  # fmt: skip
_ROLES = {
    "begins": "CU_BIND", "subject": "CU_SUBJECT", "same_as": "CU_ALIAS", "pends": "CU_PENDS",
    "yields": "CU_PENDS", "awaits": "CU_AWAITS", "ends": "CU_FORGET", "opens": "CU_OPENS",
    "within": "CU_WITHIN", "closes": "CU_CLOSES", "holds": "CU_HOLDS", "takes": "CU_TAKES",
    "sets": "CU_SETS", "held": "CU_HELD", "belongs": "CU_OWNER",
    "first": "CU_FIRST", "switches": "CU_SWITCH",
}  # fmt: skip


class CallField(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One value that is read of a call.

    ``arg``: number of the argument, from 0 (only integers and pointers count), "return", or "around":
    1 inside a call that is ``around`` others, else 0.
    ``at``: offsets to follow from there: ``[24]`` is the word 24 bytes into what the argument
    points to, ``[16, 8]`` follows the pointer at 16 first. ``type``: of the value; "text" is a
    pointer to characters, "inline_text" characters at the place itself, "place" its address, "code" an
    address of a function, shown as file and offset, "library" only as the file. ``after``: read when the
    call returns (results).
    ``sized``: each structure on the way begins with its own size, and what lies beyond it is
    absent (``sized_first``: only the argument's own structure does). ``high``: the upper half
    of a 64-bit word.

    ``label``: calls are told apart by it (``values``: names of its values). ``sum``: it is
    added up. ``length``: the field that holds a text's length; ``find``: a regular expression
    whose first group is the name in the text; nothing else of it is kept. ``times``: the value is multiplied
    by that of the other field. ``product``: the value is the
    address of that many lengths (``of``, or ``factors``), to be multiplied, times ``bits`` by the value of
    the field ``by``, in bytes.

    ``object``: it is the address of an object of that kind, and ``role`` says what the call
    does to it; ``of`` is the other field that this needs. begins: a new one, which remembers
    the value of ``of``. subject: calls are told apart by it. same_as: another address of the
    object in ``of``. pends: this call is done when the object is (``of``: the address is that
    of so many objects); yields: the same, and they belong to the object in the field ``by``.
    awaits: it is done when this call returns. ends: it is gone; what it remembered is the
    value. opens, within, closes: calls on it are recorded, not executed, in between, and the
    object in ``of`` then remembers how many. holds: what it remembers is the value. takes:
    the same for the ``of`` objects at that address, and they forget. sets: all addresses of
    the object remember the value of ``of``; held: which is the value. belongs: the value is
    the object of kind ``owner`` that this one was yielded by. first: 1 the first time since it began
    while we looked, else 0. switches: 1 where another object of that kind had this role last, else 0.
    ``else_one``: of pends and yields, one object, where ``of`` is not known.

    ``only_if``: a field that must not be 0 for this one to be read. ``last``: of a sum, the
    last value counts. ``function``: the call's text names the function at this address, which
    is probed as that function, too; a name: as the function of that name. ``device``: it is a
    backend of ggml, whose name is looked up in
    the process for the object in ``of``.
    """

    name: Name
    arg: Annotated[int, msgspec.Meta(ge=0, le=15)] | Literal["return", "around"]
    at: Annotated[list[Offset], msgspec.Meta(max_length=MAX_STEPS)] = []
    type: Literal[
        "pointer", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "code",
        "library", "text", "inline_text", "place",
    ] = "int64"  # fmt: skip
    after: bool = False
    sized: bool = False
    sized_first: bool = False
    high: bool = False
    label: bool = False
    sum: bool = False
    values: dict[int, str] = {}
    length: Name | None = None
    find: Annotated[str, msgspec.Meta(min_length=1, max_length=200)] | None = None
    product: bool = False
    by: Name | None = None
    bits: dict[int, int] = {}
    object: Name | None = None
    role: Role | None = None
    of: Name | None = None
    times: Name | None = None
    factors: Annotated[int, msgspec.Meta(ge=1, le=8)] | None = None
    owner: Name | None = None
    only_if: Name | None = None
    last: bool = False
    function: bool | Name = False
    else_one: bool = False
    device: bool = False
    nonzero: bool = False
    failed_too: bool = False

    def __post_init__(self) -> None:
        if self.role is not None and self.object is None:
            raise ValueError(f"field {self.name!r}: a role needs an object")
        if (self.role == "belongs") != (self.owner is not None):
            raise ValueError(f"field {self.name!r}: role belongs needs an owner")
        if self.role in ("same_as", "closes", "sets", "takes", "yields") and self.of is None:
            raise ValueError(f"field {self.name!r}: role {self.role} needs `of`")
        if self.find is not None:
            try:
                groups = re.compile(self.find).groups
            except (re.error, RecursionError, OverflowError) as error:
                raise ValueError(f"field {self.name!r}: find is no regular expression ({error})") from error
            if groups != 1:
                raise ValueError(f"field {self.name!r}: find needs one group, the name")
        if self.product and (self.of is None) == (self.factors is None):
            raise ValueError(f"field {self.name!r}: a product needs `of` or factors: how many there are")
        if self.times is not None and self.role is not None:
            raise ValueError(f"field {self.name!r}: what is multiplied is no object")
        if any(not 0 <= value < TABLE_VALUES or not 0 < bits < 256 for value, bits in self.bits.items()):
            raise ValueError(f"field {self.name!r}: bits are 1 to 255, for values 0 to {TABLE_VALUES - 1}")
        if bool(self.bits) != (self.by is not None) and self.role != "yields":
            raise ValueError(f"field {self.name!r}: bits and by belong together")


class CallEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One function (``symbol``), every function whose name matches (``pattern``), or one of the
    engine's table of functions (``slot``).

    ``call``: what it is called in figures; several functions may share it. ``kind``: what it
    does; ``ok``: which return value means success (void: none is looked at). ``fields``: what
    is read of its arguments. ``around``: a call of what the engine works for; calls inside it still
    count as outermost, and may say that they are inside (``arg: around``).
    """

    call: Name
    kind: Literal["compute", "copy", "wait", "memory", "compile", "other"]
    symbol: Name | None = None
    pattern: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_]{3,199}\*$")] | None = None
    slot: Name | None = None
    ok: Literal["void", "zero", "null", "nonnull", "not_negative"] = "void"
    fields: Annotated[list[CallField], msgspec.Meta(max_length=MAX_FIELDS)] = []
    entry_only: bool = False
    around: bool = False

    def __post_init__(self) -> None:
        if sum(place is not None for place in (self.symbol, self.pattern, self.slot)) != 1:
            raise ValueError(f"call {self.call!r} needs one of symbol, pattern and slot")
        if sum(field.sum for field in self.fields) > MAX_SUMS:
            raise ValueError(f"call {self.call!r} adds up more than {MAX_SUMS} fields")
        if sum(field.type in ("text", "inline_text") for field in self.fields) > 1:
            raise ValueError(f"call {self.call!r} reads more than one text")
        seen: list[str] = []
        for field in self.fields:
            for other in (field.of, field.length, field.by, field.only_if, field.times):
                if other is not None and other not in seen:
                    raise ValueError(
                        f"call {self.call!r}: {field.name} needs {other!r}, which comes before it"
                    )
            if field.name in seen:
                raise ValueError(f"call {self.call!r} has two fields {field.name!r}")
            seen.append(field.name)

    @property
    def place(self) -> str:
        """The name that its functions are found by."""
        return self.symbol or self.pattern or self.slot or ""

    def sums(self) -> list[str]:
        """Names of the fields that are added up, in the order of their sums."""
        return [field.name for field in self.fields if field.sum]

    def arg_regs(self, machine: str) -> int:
        """How many argument registers must be intact where the probe sits."""
        numbers = [f.arg for f in self.fields if isinstance(f.arg, int)]
        return min(max((n + 1 for n in numbers), default=0), REGISTERS[machine])

    def stack_args(self, machine: str) -> bool:
        """Whether an argument is found from the stack pointer."""
        return any(isinstance(f.arg, int) and f.arg >= REGISTERS[machine] for f in self.fields)


class Watch(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """At first only the functions of ``call`` are probed; the engine's others once its field
    ``field`` has had two values: where there is only one, they would tell nothing."""

    call: Name
    field: Name


class FunctionTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A structure of function pointers that a library holds and exports no names of.

    ``header``: its first bytes: 64-bit words, None where they may be anything; the first is
    its size. ``slots``: names of the functions in order; ``first`` is the offset of the first.
    ``returned_by``: the exported function that gives the table.
    """

    returned_by: Name
    first: Offset
    inner_size_at: Offset
    inner_size: int
    slots: Annotated[list[Name], msgspec.Meta(min_length=1, max_length=512)]


def encode(
    entry: CallEntry, machine: str, constants: dict[str, int], kinds: dict[str, int],
    group: int, tables: list[dict[int, int]],
) -> dict[str, Any]:  # fmt: skip
    """The call as fields of ``struct call_conf``.

    ``kinds``: numbers of kinds of objects, and ``tables`` the scales of all calls; both grow.
    """
    numbers = {field.name: i + 1 for i, field in enumerate(entry.fields)}
    slots = {name: i for i, name in enumerate(entry.sums())}
    rows = [_field(f, entry, machine, constants, kinds, tables, numbers, slots) for f in entry.fields]
    width = 4 if entry.ok in ("zero", "not_negative") else 8
    ok = constants["CO_" + entry.ok.upper()]
    has = 0
    for row in rows:
        has |= constants["CH_RETURN" if row["when"] == constants["CW_RETURN"] else "CH_ENTRY"]
        has |= constants["CH_PENDS"] if row["use"] & constants["CU_PENDS"] else 0
        has |= constants["CH_TEXT"] if row["use"] & constants["CU_TEXT"] else 0
    return {"n_fields": len(rows), "ok": ok, "group": group, "ok_width": width, "has": has, "fields": rows}


def _field(
    field: CallField, entry: CallEntry, machine: str, constants: dict[str, int], kinds: dict[str, int],
    tables: list[dict[int, int]], numbers: dict[str, int], slots: dict[str, int],
) -> dict[str, Any]:  # fmt: skip
    size, signed = _SIZES[field.type]
    flags, use = 0, 0
    for wanted, flag in (
        (signed, "CF_SIGNED"), (field.sized, "CF_SIZED"), (field.sized_first, "CF_SIZED_FIRST"),
        (field.last, "CF_LAST"), (field.type in ("inline_text", "place"), "CF_INLINE"),
        (field.failed_too, "CF_ALWAYS"), (field.nonzero, "CF_NONZERO"),
        (field.else_one, "CF_ELSE_ONE"),
    ):  # fmt: skip
        flags |= constants[flag] if wanted else 0
    for wanted, bit in (
        (field.label, "CU_LABEL"), (field.sum, "CU_SUM"), (field.product, "CU_PRODUCT"),
        (field.times is not None, "CU_TIMES"),
        (field.type in ("text", "inline_text"), "CU_TEXT"),
    ):  # fmt: skip
        use |= constants[bit] if wanted else 0
    slot = slots.get(field.name, 0)
    if field.role is not None:
        use |= constants[_ROLES[field.role]]
        other = next((f for f in entry.fields if f.name == field.of), None)
        if field.role in ("same_as", "closes") and other is not None:
            slot = _kind(kinds, other.object or field.object or "")
    table = 0
    if field.bits:
        if field.bits not in tables:
            tables.append(field.bits)
        table = tables.index(field.bits) + 1
    source = constants["CS_AROUND" if field.arg == "around" else "CS_RETURN"]
    stack = field.factors or 0
    if isinstance(field.arg, int):
        source = field.arg
        if field.arg >= REGISTERS[machine]:
            source = constants["CS_STACK"]
            stack = _STACK_BASE[machine] + 8 * (field.arg - REGISTERS[machine])
    return {
        "use": use, "source": source, "size": size, "steps": len(field.at), "flags": flags,
        "when": constants["CW_RETURN" if field.after or field.arg == "return" else "CW_ENTRY"],
        "shift": 32 if field.high else 0, "slot": slot, "table": table, "stack": stack,
        "other": numbers.get(field.times or field.of or field.length or "", 0),
        "scale": numbers.get(field.by or "", 0),
        "kind": _kind(kinds, field.object) if field.object else 0,
        "only_if": numbers.get(field.only_if or "", 0),
        "step": [*field.at, *[0] * (MAX_STEPS - len(field.at))],
    }  # fmt: skip


def _kind(kinds: dict[str, int], name: str) -> int:
    return kinds.setdefault(name, len(kinds) + 1)
