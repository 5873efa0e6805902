# SPDX-License-Identifier: Apache-2.0
"""Capabilities that this process holds, and giving up those that it can do without.

The kernel keeps them per thread: they are given up before there are others, which inherit
what is left, as every program does that is started later.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

from ..errors import ProfinferError
from . import bpfsys, links
from .mmapwatch import MmapWatch
from .reasons import CAPABILITIES
from .trial import Counter, VictimFunction

_VERSION_3 = 0x20080522  # of linux/capability.h: two words for each set
_ADMIN = "CAP_SYS_ADMIN"


@dataclass(frozen=True, slots=True)
class Held:
    """Sets of this thread, as bits."""

    effective: int
    permitted: int
    inheritable: int


def held() -> Held:
    """What this thread has now. Raises OSError."""
    words = (ctypes.c_uint32 * 6)()
    _call("capget", words)
    return Held(*(words[n] | words[n + 3] << 32 for n in range(3)))


def _set(sets: Held) -> None:
    halves = [sets.effective, sets.permitted, sets.inheritable]
    words = [half & 0xFFFFFFFF for half in halves] + [half >> 32 for half in halves]
    _call("capset", (ctypes.c_uint32 * 6)(*words))


def _call(name: str, words: ctypes.Array[ctypes.c_uint32]) -> None:
    header = (ctypes.c_uint32 * 2)(_VERSION_3, 0)
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(ctypes.byref(header), ctypes.byref(words)):
        number = ctypes.get_errno()
        raise OSError(number, bpfsys.strerror(number))


def _bits(names: Iterable[str]) -> int:
    return sum(1 << CAPABILITIES[name] for name in names)


def drop(names: Iterable[str]) -> None:
    """Give these up for good: they cannot be had back. Raises OSError.

    Ambient capabilities, which a program started later would have, go with the permitted ones.
    """
    now, bits = held(), ~_bits(names)
    _set(Held(now.effective & bits, now.permitted & bits, now.inheritable & bits))


@contextmanager
def without(names: Iterable[str]) -> Iterator[None]:
    """As if these were not held, until the end of the block."""
    before = held()
    _set(replace(before, effective=before.effective & ~_bits(names)))
    try:
        yield
    finally:
        _set(before)


def drop_admin(method: str = "auto") -> bool:
    """Give up CAP_SYS_ADMIN where profiling goes without it; returns whether that was done.

    Found out by trying: a probe of ours in one link, and an event on each processor. Perf
    uprobes, the only ones on older kernels, need it for every process that is found later.
    """
    with suppress(OSError, ProfinferError):
        if method == "perf" or not held().permitted & _bits([_ADMIN]):
            return False
        with without([_ADMIN]):
            MmapWatch().close()
            _try_multi()
        drop([_ADMIN])
        return True
    return False


def _try_multi() -> None:
    """Raises OSError or ProfinferError when it does not work."""
    with VictimFunction() as victim, Counter(bpfsys.ATTACH_UPROBE_MULTI) as counter:
        with links.attach_multi(counter.fd, victim.path, [0], [0], pid=os.getpid()):
            victim.call()
        if counter.hits() != 1:
            raise OSError("a probe of our own was not hit")
