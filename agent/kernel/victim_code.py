# SPDX-License-Identifier: Apache-2.0
"""Machine code that behaves like an engine, for measuring what probes cost on this machine.

Each function is a listing, a line per instruction: its bytes, and what they say. The code
lies in a file of :data:`PAGES` pages, at places that :func:`offset` knows:

``plain``           a function that saves its frame and returns; its first instruction is of
                    the kind that the kernel emulates (where a probe of ours lies)
``plain_stepped``   likewise, with a first instruction that the kernel must single-step
``run``             ``run(cgraph, op)``: calls ``op(0, cgraph->nodes[i])`` for every other node
``repeat``          ``repeat(function, a, b, n)``: calls ``function(a, b)`` n times
``clock``           the clock of the processor
``watch``           ``watch(words, f, g)``: calls both, again and again, looks at that clock
                    each time and adds up how long it stood still (see ``Watch``)
"""

from __future__ import annotations

import mmap
import platform

PAGES = 3
SLOT = 128  # bytes; every function begins at a multiple

# What lies where in the file: (page, function), in this order from the start of the page.
# The probed functions have names of their own, the code of all is that of a listing.
_PLACES: tuple[tuple[int, str, str], ...] = (
    (0, "plain", "plain"),
    (0, "op", "plain"),
    (0, "call", "plain"),
    (0, "plain_stepped", "plain_stepped"),
    (0, "op_stepped", "plain_stepped"),
    (0, "graph_stepped", "plain_stepped"),
    (0, "call_stepped", "plain_stepped"),
    (0, "run", "run"),
    (0, "plain_run", "run"),
    (0, "repeat", "repeat"),
    (0, "clock", "clock"),
    (0, "watch", "watch"),
    # Two functions that are armed and disarmed, far enough apart to lie on pages of their
    # own as those of an engine do, and beside each one that is called meanwhile.
    (1, "armed", "plain"),
    (1, "beside_armed", "plain"),
    (2, "armed_too", "plain"),
    (2, "beside_armed_too", "plain"),
)

_LISTINGS: dict[str, dict[str, str]] = {
    "x86_64": {
        "plain": """
            55              push rbp
            5d              pop rbp
            c3              ret
        """,
        "plain_stepped": """
            f30f1efa        endbr64
            55              push rbp
            5d              pop rbp
            c3              ret
        """,
        "run": """
            55              push rbp
            53              push rbx
            4154            push r12
            4989f4          mov r12, rsi
            8b4704          mov eax, dword ptr [rdi + 4]
            488b5f10        mov rbx, qword ptr [rdi + 0x10]
            488d2cc3        lea rbp, [rbx + rax*8]
            488b33          mov rsi, qword ptr [rbx]
            31ff            xor edi, edi
            41ffd4          call r12
            4883c310        add rbx, 0x10
            4839eb          cmp rbx, rbp
            72ef            jb 0x12
            31c0            xor eax, eax
            415c            pop r12
            5b              pop rbx
            5d              pop rbp
            c3              ret
        """,
        "repeat": """
            53              push rbx
            4154            push r12
            4155            push r13
            4156            push r14
            4157            push r15
            4989fc          mov r12, rdi
            4989f5          mov r13, rsi
            4989d6          mov r14, rdx
            4889cb          mov rbx, rcx
            4c89ef          mov rdi, r13
            4c89f6          mov rsi, r14
            41ffd4          call r12
            48ffcb          dec rbx
            75f2            jne 0x15
            415f            pop r15
            415e            pop r14
            415d            pop r13
            415c            pop r12
            5b              pop rbx
            c3              ret
        """,
        "clock": """
            0f31            rdtsc
            48c1e220        shl rdx, 0x20
            4809d0          or rax, rdx
            c3              ret
        """,
        "watch": """
            53              push rbx
            4154            push r12
            4155            push r13
            4156            push r14
            4157            push r15
            4889fb          mov rbx, rdi
            4989f4          mov r12, rsi
            4989d6          mov r14, rdx
            4531ff          xor r15d, r15d
            0f31            rdtsc
            48c1e220        shl rdx, 0x20
            4809d0          or rax, rdx
            4989c5          mov r13, rax
            41ffd4          call r12
            41ffd6          call r14
            0f31            rdtsc
            48c1e220        shl rdx, 0x20
            4809d0          or rax, rdx
            4889c1          mov rcx, rax
            4c29e9          sub rcx, r13
            4989c5          mov r13, rax
            48894308        mov qword ptr [rbx + 8], rax
            483b4b10        cmp rcx, qword ptr [rbx + 0x10]
            7608            jbe 0x4b
            48014b18        add qword ptr [rbx + 0x18], rcx
            48ff4320        inc qword ptr [rbx + 0x20]
            49ffc7          inc r15
            4c3b3b          cmp r15, qword ptr [rbx]
            72ce            jb 0x21
            415f            pop r15
            415e            pop r14
            415d            pop r13
            415c            pop r12
            5b              pop rbx
            c3              ret
        """,
    },
    "aarch64": {
        "plain": """
            01000014        b #4
            c0035fd6        ret
        """,
        "plain_stepped": """
            e90309aa        mov x9, x9
            c0035fd6        ret
        """,
        "run": """
            01000014        b #4
            fd7bbda9        stp x29, x30, [sp, #-0x30]!
            f35301a9        stp x19, x20, [sp, #0x10]
            f51300f9        str x21, [sp, #0x20]
            f50301aa        mov x21, x1
            090440b9        ldr w9, [x0, #4]
            130840f9        ldr x19, [x0, #0x10]
            740e098b        add x20, x19, x9, lsl #3
            610641f8        ldr x1, [x19], #0x10
            e0031faa        mov x0, xzr
            a0023fd6        blr x21
            7f0214eb        cmp x19, x20
            83ffff54        b.lo #0x20
            e0031f2a        mov w0, wzr
            f51340f9        ldr x21, [sp, #0x20]
            f35341a9        ldp x19, x20, [sp, #0x10]
            fd7bc3a8        ldp x29, x30, [sp], #0x30
            c0035fd6        ret
        """,
        "repeat": """
            fd7bbda9        stp x29, x30, [sp, #-0x30]!
            f35301a9        stp x19, x20, [sp, #0x10]
            f55b02a9        stp x21, x22, [sp, #0x20]
            f40300aa        mov x20, x0
            f50301aa        mov x21, x1
            f60302aa        mov x22, x2
            f30303aa        mov x19, x3
            e00315aa        mov x0, x21
            e10316aa        mov x1, x22
            80023fd6        blr x20
            730600f1        subs x19, x19, #1
            81ffff54        b.ne #0x1c
            f55b42a9        ldp x21, x22, [sp, #0x20]
            f35341a9        ldp x19, x20, [sp, #0x10]
            fd7bc3a8        ldp x29, x30, [sp], #0x30
            c0035fd6        ret
        """,
        "clock": """
            40e03bd5        mrs x0, cntvct_el0
            c0035fd6        ret
        """,
        "watch": """
            fd7bbca9        stp x29, x30, [sp, #-0x40]!
            f35301a9        stp x19, x20, [sp, #0x10]
            f55b02a9        stp x21, x22, [sp, #0x20]
            f76303a9        stp x23, x24, [sp, #0x30]
            f30300aa        mov x19, x0
            f40301aa        mov x20, x1
            f50302aa        mov x21, x2
            f6031faa        mov x22, xzr
            57e03bd5        mrs x23, cntvct_el0
            80023fd6        blr x20
            a0023fd6        blr x21
            49e03bd5        mrs x9, cntvct_el0
            2a0117cb        sub x10, x9, x23
            f70309aa        mov x23, x9
            690600f9        str x9, [x19, #8]
            6b3241a9        ldp x11, x12, [x19, #0x10]
            5f010beb        cmp x10, x11
            a9000054        b.ls #0x58
            8c010a8b        add x12, x12, x10
            6d1240f9        ldr x13, [x19, #0x20]
            ad050091        add x13, x13, #1
            6cb601a9        stp x12, x13, [x19, #0x18]
            d6060091        add x22, x22, #1
            6e0240f9        ldr x14, [x19]
            df020eeb        cmp x22, x14
            03feff54        b.lo #0x24
            f76343a9        ldp x23, x24, [sp, #0x30]
            f55b42a9        ldp x21, x22, [sp, #0x20]
            f35341a9        ldp x19, x20, [sp, #0x10]
            fd7bc4a8        ldp x29, x30, [sp], #0x40
            c0035fd6        ret
        """,
    },
}
_TRAP = {"x86_64": "cc", "aarch64": "000020d4"}  # int3, brk #0: what lies between functions


def listings(machine: str | None = None) -> dict[str, tuple[tuple[bytes, str], ...]]:
    """(bytes, text) of each instruction by function; ``machine`` as ``platform.machine()`` says.

    KeyError for a machine that there is no code for.
    """
    return {
        name: tuple(
            (bytes.fromhex(line.split()[0]), " ".join(line.split()[1:])) for line in text.strip().splitlines()
        )
        for name, text in _LISTINGS[machine or platform.machine()].items()
    }


def offset(name: str) -> int:
    """Where the function ``name`` lies in the file; KeyError when there is none."""
    places = [(page, place) for page, place, _ in _PLACES]
    for page, place in places:
        if place == name:
            return page * mmap.PAGESIZE + SLOT * [n for p, n in places if p == page].index(name)
    raise KeyError(name)


def image(machine: str | None = None) -> bytes:
    """The whole file. KeyError for a machine that there is no code for."""
    machine = machine or platform.machine()
    trap = bytes.fromhex(_TRAP[machine])
    content = bytearray(trap * (PAGES * mmap.PAGESIZE // len(trap)))
    code = {name: b"".join(raw for raw, _ in listing) for name, listing in listings(machine).items()}
    for _, place, function in _PLACES:
        at = offset(place)
        content[at : at + len(code[function])] = code[function]
    return bytes(content)
