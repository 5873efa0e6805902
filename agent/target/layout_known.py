# SPDX-License-Identifier: Apache-2.0
"""Layouts of ggml's structures in its public history, from November 2023 on (64-bit, little endian).

Facts of the public headers (ggml.h, ggml-impl.h) by the date at which a field came or went:

    2023-10-30  ggml_cgraph begins size, n_nodes, n_leafs, nodes (before: arrays inside it)
    2023-11-03  op_params 64 bytes; 6 sources; n_dims before ne; performance counters before view_src
    2023-12-13  10 sources
    2023-12-22  n_dims gone
    2024-02-11  is_param became flags, in place
    2024-06-26  performance counters gone
    2024-11-16  grad gone
    2025-01-07  backend gone (padding is in its place)
    2026-04-16  ggml_cgraph ends with uid

``GGML_MAX_NAME`` is 64 unless a project that includes ggml sets it (stable-diffusion.cpp: 128).
"""

from __future__ import annotations

from .layout_types import Layout

NAME_SIZES = (64, 128)
_OP_PARAMS = 64
_COUNTERS = 24  # int runs (and padding), int64_t cycles, int64_t time_us
_POINTER = 8
_UID = 88
_PADDING = 12  # explicit, in the versions with n_dims
_ALIGN = 16  # every version is padded to a multiple of this


def _layout(
    version: str,
    name_size: int,
    *,
    uid: bool = False,
    n_dims: bool = False,
    n_src: int = 10,
    flags: bool = True,
    grad: bool = False,
    counters: bool = False,
) -> Layout:
    ne = 24 if n_dims else 16
    op = ne + 64
    flags_at = op + 4 + _OP_PARAMS
    src = _round(flags_at + 4, 8) + (_POINTER if grad else 0)
    view_src = src + n_src * _POINTER + (_COUNTERS if counters else 0)
    data = view_src + 16
    name = data + _POINTER
    extra = name + name_size
    return Layout(
        name=version if name_size == NAME_SIZES[0] else f"{version}, names of {name_size} bytes",
        source="known",
        g_n_nodes=4,
        g_nodes=16,
        g_uid=_UID if uid else None,
        t_type=0,
        t_buffer=8,
        t_ne=ne,
        t_nb=ne + 32,
        t_op=op,
        t_op_params=op + 4,
        t_flags=flags_at if flags else None,
        t_src=src,
        n_src=n_src,
        t_view_src=view_src,
        t_view_offs=view_src + 8,
        t_data=data,
        t_name=name,
        name_size=name_size,
        t_extra=extra,
        t_size=_round(extra + _POINTER + (_PADDING if n_dims else 0), _ALIGN),
    )


def _round(value: int, to: int) -> int:
    return (value + to - 1) // to * to


def known(name_size: int) -> list[Layout]:
    """Every known version with names of ``name_size`` bytes, newest first."""
    return [
        _layout("ggml 2026-04", name_size, uid=True),
        _layout("ggml 2024-11", name_size),
        _layout("ggml 2024-06", name_size, grad=True),
        _layout("ggml 2024-02", name_size, grad=True, counters=True),
        _layout("ggml 2023-12-22", name_size, grad=True, counters=True, flags=False),
        _layout("ggml 2023-12-13", name_size, grad=True, counters=True, flags=False, n_dims=True),
        _layout("ggml 2023-11", name_size, grad=True, counters=True, flags=False, n_dims=True, n_src=6),
    ]


KNOWN: tuple[Layout, ...] = tuple(layout for size in NAME_SIZES for layout in known(size))
"""All of them: newest first, the usual length of names before the unusual one."""
