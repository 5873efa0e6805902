# SPDX-License-Identifier: Apache-2.0
"""Record types and constants from the text of ``probes/events.h``, where no object was built.

The header keeps to what is read here: constants, enumerations, and structures of a fixed size
with natural alignment and without holes, which may hold earlier ones. Anything else is an error,
not a guess; a test holds the result against the BTF of the built object.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import numpy as np

from .btf import BtfError, Types

_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
_DEFINE = re.compile(r"^#define[ \t]+(\w+)[ \t]+([0-9][0-9a-fxA-FX]*)[ \t]*$", re.MULTILINE)
_BLOCK = re.compile(r"\b(struct|enum)\s+(\w+)\s*\{([^{}]*)\}\s*;")
_MEMBER = re.compile(r"^(__[us](?:8|16|32|64)|char|struct\s+\w+)\s+(.+)$", re.DOTALL)
_FIELD = re.compile(r"^(\w+)(?:\[(\w+)\])?$")
_VALUE = re.compile(r"^(?:(\d+)u?\s*<<\s*)?(0x[0-9a-fA-F]+|\d+)$")


class HeaderTypes(Types):
    """The same as :class:`.btf.Types`, from the text of the header."""

    def __init__(self, text: str) -> None:
        """Raises :class:`.btf.BtfError` for what is not understood."""
        text = _COMMENT.sub(" ", text)
        self._numbers = {name: int(value, 0) for name, value in _DEFINE.findall(text)}
        self._enums: dict[str, dict[str, int]] = {}
        self._structs: dict[str, np.dtype[Any]] = {}
        for kind, name, body in _BLOCK.findall(text):
            if kind == "enum":
                self._enums[name] = self._values(name, body)
            else:
                self._structs[name] = self._record(name, body)

    @staticmethod
    def _values(name: str, body: str) -> dict[str, int]:  # type: ignore[override]
        values: dict[str, int] = {}
        following = 0
        for item in filter(None, (part.strip() for part in body.split(","))):
            word, given, text = (part.strip() for part in item.partition("="))
            if given:
                number = _VALUE.match(text)
                if number is None:
                    raise BtfError(f"enum {name} has a value that is not understood: {item}")
                following = int(number[1]) << int(number[2], 0) if number[1] else int(number[2], 0)
            values[word] = following
            following += 1
        return values

    def _record(self, name: str, body: str) -> np.dtype[Any]:
        fields: list[tuple[str, Any]] = []
        for line in filter(None, (part.strip() for part in body.split(";"))):
            member = _MEMBER.match(line)
            found = [_FIELD.match(one.strip()) for one in member[2].split(",")] if member else [None]
            for field in found:
                if member is None or field is None:
                    raise BtfError(f"struct {name} has a member that is not understood: {line}")
                count = self._count(field[2]) if field[2] else 0
                if member[1] == "char":
                    fields.append((field[1], f"S{count or 1}"))
                    continue
                kind: Any
                if member[1].startswith("struct"):
                    kind = self.dtype(member[1].split()[1])  # one that came before
                else:
                    kind = f"<{'i' if member[1][2] == 's' else 'u'}{int(member[1][3:]) // 8}"
                fields.append((field[1], (kind, (count,)) if count else kind))
        packed, aligned = np.dtype(fields), np.dtype(fields, align=True)
        if packed.itemsize != aligned.itemsize:
            raise BtfError(f"struct {name} has holes")
        return packed

    def _count(self, text: str) -> int:
        if text in self._numbers:
            return self._numbers[text]
        if not text.isdecimal():
            raise BtfError(f"an array of {text} elements: that is no constant of the header")
        return int(text)

    def dtype(self, name: str) -> np.dtype[Any]:
        """As :meth:`.btf.Types.dtype`."""
        if name not in self._structs:
            raise BtfError(f"struct {name} is not in the header")
        return self._structs[name]

    def structs(self) -> list[str]:
        """As :meth:`.btf.Types.structs`."""
        return list(self._structs)

    def enum(self, name: str) -> dict[str, int]:
        """As :meth:`.btf.Types.enum`."""
        if name not in self._enums:
            raise BtfError(f"enum {name} is not in the header")
        return self._enums[name]

    def constants(self) -> dict[str, int]:
        """As :meth:`.btf.Types.constants`."""
        return {name: number for values in self._enums.values() for name, number in values.items()}


def load_header(path: str | os.PathLike[str]) -> HeaderTypes:
    """The types of the header at ``path``."""
    return HeaderTypes(Path(path).read_text(encoding="utf-8"))
