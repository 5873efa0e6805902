# SPDX-License-Identifier: Apache-2.0
"""Where the fields of ggml's structures lie, and the piece of a live graph that such a claim is tested on."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal


@dataclass(frozen=True, slots=True)
class Layout:
    """Byte offsets in ``ggml_cgraph`` (g_) and ``ggml_tensor`` (t_); None: there is no such field.

    ``name`` says which public version it is (of), ``source`` how it was found. ``t_op_params``
    is an array of 32-bit words, ``t_src`` one of ``n_src`` pointers, ``t_name`` one of ``name_size``
    bytes. ``t_size`` is the size of ``ggml_tensor``.
    """

    name: str
    source: Literal["dwarf", "accessors", "known"]
    g_n_nodes: int
    g_nodes: int
    g_uid: int | None
    t_type: int
    t_buffer: int | None
    t_ne: int
    t_nb: int
    t_op: int
    t_op_params: int
    t_flags: int | None
    t_src: int
    n_src: int
    t_view_src: int
    t_view_offs: int
    t_data: int
    t_name: int
    name_size: int
    t_extra: int
    t_size: int

    def offsets(self) -> dict[str, int | None]:
        """All numbers without ``name`` and ``source``: equal for two layouts that read alike."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("name", "source")}


@dataclass(frozen=True, slots=True)
class LiveGraph:
    """Bytes of a graph that is being executed, as read from the target.

    ``cgraph``: of its ``ggml_cgraph``. ``nodes``: for some indices in its list of nodes the
    address of the ``ggml_tensor`` and the bytes from there on (fewer than the structure has, where
    memory ends; more otherwise: what follows is not the tensor's).
    """

    cgraph: bytes
    nodes: dict[int, tuple[int, bytes]]
