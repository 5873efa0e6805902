# SPDX-License-Identifier: Apache-2.0
"""What a tensor is for: a label that is the same in every layer (design D11).

Weights say it in their names: ``blk.7.attn_q.weight`` is ``attn_q`` of layer 7. A node
takes the role of its weight; without a weight, that of the cache it works on, of the
weight that scales it afterwards (norms), of its own name, or of what it continues.
Roles never hold layer numbers, addresses or copies' decorations, so that they can be
label values; a hostile target can still invent names, hence the cap on their length.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from .tensors import FLAG_INPUT, UNKNOWN, LeafKind, Source, Tensor

MAX_ROLE = 48

NORM_OPS = frozenset({"NORM", "RMS_NORM", "L2_NORM", "GROUP_NORM"})

_COPIES = frozenset({"CONT", "CPY", "DUP"})

#: Sources that are weights by origin but only parameters of the op: rotary frequency
#: factors and attention sinks say nothing about what the op is for.
_PARAMETER_SLOTS = {("ROPE", 2), ("FLASH_ATTN_EXT", 4), ("SOFT_MAX", 2)}

# The scheduler names its copies "<backend>#<tensor>#<n>"; a full name may be cut.
_COPY = re.compile(r"[^#]*#([^#]+)(?:#\d*)?")
_DECORATION = re.compile(r" \((?:view|reshaped|permuted|transposed|cont|copy)(?: of .*)?\)?")
_CACHE = re.compile(r"(?:\w+_)?(?:cache_(?:\w+?_)?([kvrs])|state_(?:kv|score))_l(\d+)")
_WEIGHT = re.compile(r"\.(?:weight|bias|scale|input_scale)(?=\.|$)")
_LAYER = re.compile(r"(?:^|\.)(?:blk|layers?|blocks?|h)\.(\d+)(?=\.|$)")
_NODE_LAYER = re.compile(r"-(\d+)$")
_NUMBERED = re.compile(r"(?:_\d+)+$")
_BAD = re.compile(r"[^A-Za-z0-9_.()+-]+|0x[0-9a-fA-F]+|\d{4,}")
_NAMELESS = frozenset({"", "node", "leaf"})
_CACHE_ROLES = {"k": "kv_k", "v": "kv_v", "r": "state_r", "s": "state_s"}


@dataclass(frozen=True, slots=True)
class NodeRole:
    """Role and layer of a node, and the leaf index of its weight (None without)."""

    role: str
    layer: int | None
    weight: int | None


def plain_name(name: str) -> str:
    """The engine's name of the tensor: no backend copy, no "(view)"."""
    copy = _COPY.fullmatch(name)
    return _DECORATION.sub("", copy.group(1) if copy else name)


def clean(role: str) -> str:
    """Only characters and lengths that are safe in a label; may be empty."""
    return _BAD.sub("_", role)[:MAX_ROLE].strip("_.-")


def cache_role(plain: str) -> tuple[str, int | None] | None:
    """Role and layer of a cache by its plain name; None for all other names.

    Attention caches are ``cache_k_l3`` (perhaps with a tag before the k); recurrent ones
    keep ``r`` (convolution inputs) and ``s`` (the state).
    """
    found = _CACHE.fullmatch(plain)
    if not found:
        return None
    return _CACHE_ROLES[found.group(1) or "s"], _layer(found.group(2))


def leaf_kind(name: str, flags: int) -> LeafKind:
    """What a tensor without operator is: the engine's input, its cache, or a weight.

    Names of inputs drift between builds, so the INPUT flag decides; a scheduler's copy
    has lost the flag and is a weight only if its name says so.
    """
    plain = plain_name(name)
    if cache_role(plain):
        return LeafKind.CACHE
    if flags & FLAG_INPUT:
        return LeafKind.INPUT
    if _WEIGHT.search(plain):
        return LeafKind.WEIGHT
    if plain.startswith("inp_") or _COPY.fullmatch(name):
        return LeafKind.INPUT
    return LeafKind.WEIGHT


def leaf_role(name: str, kind: LeafKind) -> tuple[str, int | None]:
    """Role and layer of a leaf: ``kv_k`` and ``kv_v`` for the cache, else from the name."""
    plain = plain_name(name)
    if kind is LeafKind.CACHE:
        return cache_role(plain) or ("kv_k", None)
    if kind is LeafKind.INPUT:
        return stem_role(plain)[0] or "input", None
    return weight_role(plain)


def weight_role(name: str) -> tuple[str, int | None]:
    """``enc.blk.3.attn_q.weight`` -> ("enc.attn_q", 3). Prefixes enc., dec., v. stay."""
    plain = plain_name(name)
    found = _LAYER.search(plain)
    layer = _layer(found.group(1)) if found else None
    if found:
        plain = plain[: found.start()] + "." + plain[found.end() :]
    stem = _WEIGHT.sub("", plain)
    # Numbers that are left name an expert or a projection ("mm.0"): not a role.
    parts = [part for part in stem.split(".") if part and not part.isdecimal()]
    return clean(".".join(parts)) or "weight", layer


def op_role(op: str, leaf: str, slot: int) -> tuple[str, bool]:
    """Role of an op by the name of the leaf that is its source ``slot``, and whether that is a weight.

    "" where the leaf is an input, or only a parameter of the op.
    """
    kind = leaf_kind(leaf, 0)
    if kind is LeafKind.INPUT or (op, slot) in _PARAMETER_SLOTS:
        return "", False
    role, _ = leaf_role(leaf, kind)
    if op == "FLASH_ATTN_EXT":
        role = "attn"
    elif op == "MUL_MAT" and role == "token_embd":
        role = "output"  # a tied LM head
    return role, kind is LeafKind.WEIGHT


def stem_role(name: str) -> tuple[str, int | None]:
    """``ffn_geglu-3`` -> ("ffn_geglu", 3); "" when the name tells nothing (``node_12``)."""
    plain = plain_name(name)
    if _WEIGHT.search(plain):
        return weight_role(plain)
    cache = cache_role(plain)
    if cache:
        return cache
    layer = None
    found = _NODE_LAYER.search(plain)
    if found:
        layer = _layer(found.group(1))
        plain = plain[: found.start()]
    stem = clean(_NUMBERED.sub("", plain))
    return ("" if stem in _NAMELESS else stem), layer


def assign(
    nodes: Sequence[Tensor],
    sources: Sequence[Sequence[Source]],
    leaf_kinds: Sequence[LeafKind],
    leaf_roles: Sequence[tuple[str, int | None]],
) -> list[NodeRole]:
    """Role of every node of a graph, in one pass over nodes and one over norms.

    ``sources[i]`` belongs to ``nodes[i]``; leaves are given by what they are.
    """
    out: list[NodeRole] = []
    settled: list[bool] = []
    copies: dict[int, tuple[str, int | None]] = {}
    for index, (node, its) in enumerate(zip(nodes, sources, strict=True)):
        role = _by_weight(node, its, leaf_kinds, leaf_roles)
        if role is None:
            caches = [
                leaf_roles[s.base_leaf]
                for s in its
                if s.base_leaf is not None and leaf_kinds[s.base_leaf] is LeafKind.CACHE
            ]
            caches += [copies[s.base_node] for s in its if s.base_node in copies]
            role = _by_cache(node, caches)
            if role is not None and node.op in _COPIES:
                copies[index] = (role.role, role.layer)
        settled.append(role is not None)
        role = role or _by_name(index, node, its, out)
        out.append(NodeRole("attn", role.layer, None) if node.op == "FLASH_ATTN_EXT" else role)
    _name_norms(nodes, sources, out, settled)
    return out


def _by_weight(
    node: Tensor,
    sources: Sequence[Source],
    kinds: Sequence[LeafKind],
    roles: Sequence[tuple[str, int | None]],
) -> NodeRole | None:
    """By the first weight among the sources, if there is one."""
    for source in sources:
        leaf = source.base_leaf
        if leaf is None or kinds[leaf] is not LeafKind.WEIGHT:
            continue
        if (node.op, source.slot) in _PARAMETER_SLOTS:
            continue
        role, layer = roles[leaf]
        if node.op == "MUL_MAT" and role == "token_embd":
            role = "output"  # a tied LM head
        return NodeRole(role, layer, leaf)
    return None


def _by_cache(node: Tensor, caches: Sequence[tuple[str, int | None]]) -> NodeRole | None:
    """By the cache that it reads or writes, or reads a converted copy of."""
    if not caches:
        return None
    role, layer = caches[0]
    return NodeRole("attn" if {"kv_k", "kv_v"} <= {r for r, _ in caches} else role, layer, None)


def _by_name(index: int, node: Tensor, sources: Sequence[Source], before: Sequence[NodeRole]) -> NodeRole:
    """By its own name, else it continues its first source that a node computed."""
    role, layer = stem_role(node.name)
    if role:
        return NodeRole(role, layer, None)
    for source in sources:
        if source.node is not None and source.node < index:
            producer = before[source.node]
            return NodeRole(producer.role, producer.layer, None)
    return NodeRole(clean(node.op.lower()) or UNKNOWN, layer, None)


def _name_norms(
    nodes: Sequence[Tensor],
    sources: Sequence[Sequence[Source]],
    roles: list[NodeRole],
    settled: Sequence[bool],
) -> None:
    """A norm is called after the weight that multiplies its result, fused with it or not."""
    for index, its in enumerate(sources):
        if nodes[index].op != "MUL" or roles[index].weight is None:
            continue
        for source in its:
            norm = source.base_node
            if norm is None or nodes[norm].op not in NORM_OPS or settled[norm]:
                continue
            roles[norm] = NodeRole(roles[index].role, roles[index].layer, None)


def _layer(digits: str) -> int | None:
    """A layer number; None for one that no model has (a hostile name)."""
    return int(digits) if len(digits) <= 5 else None
