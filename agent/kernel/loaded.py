# SPDX-License-Identifier: Apache-2.0
"""What loaders of BPF programs have in common once everything is in the kernel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from . import bpfsys
from .maps import Map


class LoadedProgram(Protocol):
    """A program; ``info`` raises LookupError when it is not loaded."""

    def info(self) -> bpfsys.ProgramInfo: ...


class LoadedObject(Protocol):
    """Maps and programs by name, however they got into the kernel."""

    @property
    def programs(self) -> Mapping[str, LoadedProgram]: ...
    def program_fd(self, name: str) -> int: ...
    def map(self, name: str) -> Map: ...
    def close(self) -> None: ...
