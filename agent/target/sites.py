# SPDX-License-Identifier: Apache-2.0
"""Choose the instruction of a function to probe, and say why others are refused.

The kernel single-steps a probed instruction (20-30 us a hit) unless it emulates it (about 1 us),
and a return probe replaces whatever lies at the stack pointer. So the site is the first emulated
instruction that every call passes exactly once, before anything that the probe needs has changed.
"""

from __future__ import annotations

from .site import MOVED_UNKNOWN, Refusal, Site

__all__ = ["MOVED_UNKNOWN", "Refusal", "Site", "check_site", "choose_site"]


def choose_site(
    code: bytes,
    vaddr: int,
    size: int,
    machine: str,
    want_return: bool,
    arg_regs: int,
    *,
    file_offset: int = 0,
    stack_args: bool = False,
) -> tuple[Site | None, list[Refusal]]:
    """The site to probe in one function, and every place that was refused before it, with the reason.

    ``code``: the function's bytes, read from the very file that is attached, from its start on;
    ``size``: its size, 0 when unknown (then only its very first instructions qualify).
    ``machine``: 'x86_64' or 'aarch64'. ``want_return``: the same place must carry a return
    probe. ``arg_regs``: how many integer argument registers must be unchanged. ``stack_args``:
    arguments are read from the stack, so the distance it moved must be known.
    ``file_offset``: of the function's start in the file.
    """
    if machine == "x86_64":
        from . import sites_x86  # one architecture at a time: importing a disassembler takes 10-40 ms

        function = sites_x86.Function(code, vaddr, size, arg_regs, file_offset)
        return sites_x86.choose(function, want_return, stack_args)
    if machine == "aarch64":
        from . import sites_arm64

        arm = sites_arm64.Function(code, vaddr, size, arg_regs, file_offset)
        return sites_arm64.choose(arm, want_return, stack_args)
    return None, [Refusal(vaddr, f"no probe sites are known for machine {machine}")]


def check_site(
    code: bytes,
    vaddr: int,
    size: int,
    machine: str,
    site_vaddr: int,
    want_return: bool,
    *,
    arg_regs: int = 0,
    stack_args: bool = False,
) -> Refusal | None:
    """Why ``site_vaddr`` must not be probed, or None when it may be; arguments as :func:`choose_site`."""
    at = site_vaddr - vaddr
    if machine == "x86_64":
        from . import sites_x86

        reason = sites_x86.Function(code, vaddr, size, arg_regs).check(at, want_return, stack_args)
    elif machine == "aarch64":
        from . import sites_arm64

        reason = sites_arm64.Function(code, vaddr, size, arg_regs).check(at, want_return, stack_args)
    else:
        reason = f"no probe sites are known for machine {machine}"
    return None if reason is None else Refusal(site_vaddr, reason)
