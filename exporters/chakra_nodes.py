# SPDX-License-Identifier: Apache-2.0
"""Messages of a Chakra execution trace. Field numbers of et_def.proto, package ChakraProtoMsg, 1.0.0.

A test reads what comes out of here with mlc-chakra's own classes and tools.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .wire import Message

VERSION = "1.0.0"
MEM_LOAD, COMP, COMM_SEND, COMM_RECV = 2, 4, 5, 6  # NodeType

# Which arm of AttributeProto.value: readers look into one only, by the attribute's name.
_BOOL, _INT32, _INT64, _UINT64, _STRING, _INT64_LIST = 27, 7, 9, 13, 29, 10
_ARMS = {
    "is_cpu_op": _BOOL,
    "num_ops": _INT64,
    "tensor_size": _UINT64,
    "comm_type": _INT64,
    "comm_priority": _INT32,
    "comm_src": _INT32,
    "comm_dst": _INT32,
    "comm_tag": _INT32,
    "comm_size": _INT64,
    "pg_name": _STRING,
}

Value = bool | int | str | Sequence[int] | None


class Hole:
    """An int64 attribute whose value comes later."""


HOLE = Hole()


@dataclass(frozen=True, slots=True)
class Tensor:
    """Shape and type of an input or output, for IOInfo."""

    shape: tuple[int, ...]
    type: str


def metadata(attributes: Mapping[str, Value]) -> bytes:
    """The first message of the file."""
    message = Message().text(1, VERSION)
    _attributes(message, 2, attributes)
    return Message().delimited(message).encoded()


def node(
    name: str,
    kind: int,
    deps: int,
    attributes: Mapping[str, Value | Hole],
    *,
    times: bool,
    inputs: Sequence[Tensor] = (),
    outputs: Sequence[Tensor] = (),
) -> Message:
    """One node with its length in front. Its holes, in order: id, ``deps`` data dependencies,
    start and duration in microseconds (with ``times``), then attributes that are holes."""
    message = Message().uint_hole(1).text(2, name).uint(3, kind).packed_holes(5, deps)
    if times:
        message.uint_hole(6).uint_hole(7)
    for field, tensors in ((8, inputs), (9, outputs)):
        if tensors:
            shapes = "[" + ", ".join(str(list(t.shape)) for t in tensors) + "]"
            types = "[" + ", ".join(f"'{t.type}'" for t in tensors) + "]"
            message.message(field, Message().text(1, "[]").text(2, shapes).text(3, types))
    _attributes(message, 10, attributes)
    return Message().delimited(message)


def _attributes(message: Message, field: int, attributes: Mapping[str, Value | Hole]) -> None:
    for name, value in attributes.items():
        if value is not None:
            message.message(field, _attribute(name, value))


def _attribute(name: str, value: bool | int | str | Sequence[int] | Hole) -> Message:
    message = Message().text(1, name)
    if isinstance(value, Hole):
        return message.uint_hole(_ARMS.get(name, _INT64))
    if isinstance(value, str):
        return message.text(_ARMS.get(name, _STRING), value)
    if isinstance(value, bool):
        return message.uint(_ARMS.get(name, _BOOL), int(value))
    if isinstance(value, int):
        return message.uint(_ARMS.get(name, _INT64), value)
    numbers = Message()
    for number in value:
        numbers.uint(1, number)
    return message.message(_INT64_LIST, numbers)
