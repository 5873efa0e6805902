# SPDX-License-Identifier: Apache-2.0
"""Machine code that finds out what this machine can do at most: listings, and what they count.

Four functions, each in the instructions that processors of this kind have:

``read(start, quarter, passes)``     loads four times ``quarter`` bytes, from four places at a
                                     time, and stores nothing
``triad(a, b, c, bytes)``            a = b + 3 c, of doubles (STREAM's triad)
``fma(rounds)``                      multiply-adds of float32 in independent chains
``int8(rounds)``                     the same of 8-bit integers, summed into 32 bits

``bytes`` and ``quarter`` are multiples of :data:`BLOCK`, every address one of 64.
"""

from __future__ import annotations

import platform
from collections.abc import Collection, Mapping
from dataclasses import dataclass

SLOT = 256
"""Bytes; every function begins at a multiple."""
BLOCK = 512


@dataclass(frozen=True, slots=True)
class Choice:
    """The listings for one processor, by function. ``fma_ops`` and ``int8_ops``: operations in
    one round of ``fma`` and ``int8``. ``name``: of the instructions, for people."""

    name: str
    functions: Mapping[str, str]
    fma_ops: int
    int8_ops: int | None


def choose(features: Collection[str], machine: str | None = None) -> Choice:
    """The widest instructions among ``features``, as /proc/cpuinfo spells them.

    KeyError for a machine that there is no code for.
    """
    machine, has = machine or platform.machine(), set(features)
    if machine == "x86_64":
        vnni = {"avx512f", "avx512_vnni"} <= has
        int8 = "int8_avx512" if vnni else "int8_avx2" if "avx2" in has else None
        wide = "avx512" if "avx512f" in has else "avx2" if {"avx2", "fma"} <= has else "sse2"
        functions = {kind: f"{kind}_{wide}" for kind in ("read", "triad", "fma")}
        fma = {"avx512": 384, "avx2": 192, "sse2": 48}[wide]
    elif machine == "aarch64":
        int8 = "int8_mm" if "i8mm" in has else "int8_dot" if "asimddp" in has else None
        functions, fma = {kind: kind for kind in ("read", "triad", "fma")}, 96
        wide = "neon"
    else:
        raise KeyError(machine)
    if int8 is None:
        return Choice(wide, functions, fma, None)
    ops = {"int8_avx512": 1536, "int8_avx2": 256, "int8_mm": 768, "int8_dot": 384}[int8]
    return Choice(f"{wide}, {_NAMES[int8]}", {**functions, "int8": int8}, fma, ops)


_NAMES = {
    "int8_avx512": "avx512_vnni",
    "int8_avx2": "avx2 integer multiply-adds",
    "int8_mm": "i8mm",
    "int8_dot": "dot product",
}

_LISTINGS: dict[str, dict[str, str]] = {
    "x86_64": {
        "read_avx512": """
            4889f8                mov rax, rdi
            488d0c37              lea rcx, [rdi + rsi]
            4c8d0476              lea r8, [rsi + rsi*2]
            62f1fd48eb00          vporq zmm0, zmm0, zmmword ptr [rax]
            62f1f548eb4801        vporq zmm1, zmm1, zmmword ptr [rax + 0x40]
            62f1ed48eb1430        vporq zmm2, zmm2, zmmword ptr [rax + rsi]
            62f1e548eb5c3001      vporq zmm3, zmm3, zmmword ptr [rax + rsi + 0x40]
            62f1dd48eb2470        vporq zmm4, zmm4, zmmword ptr [rax + rsi*2]
            62f1d548eb6c7001      vporq zmm5, zmm5, zmmword ptr [rax + rsi*2 + 0x40]
            62b1cd48eb3400        vporq zmm6, zmm6, zmmword ptr [rax + r8]
            62b1c548eb7c0001      vporq zmm7, zmm7, zmmword ptr [rax + r8 + 0x40]
            480580000000          add rax, 0x80
            4839c8                cmp rax, rcx
            72bb                  jb 0xb
            48ffca                dec rdx
            75ab                  jne 0
            c5f877                vzeroupper
            c3                    ret
        """,
        "read_avx2": """
            4889f8                mov rax, rdi
            488d0c37              lea rcx, [rdi + rsi]
            4c8d0476              lea r8, [rsi + rsi*2]
            c5fc5600              vorps ymm0, ymm0, ymmword ptr [rax]
            c5f4564820            vorps ymm1, ymm1, ymmword ptr [rax + 0x20]
            c5ec561430            vorps ymm2, ymm2, ymmword ptr [rax + rsi]
            c5e4565c3020          vorps ymm3, ymm3, ymmword ptr [rax + rsi + 0x20]
            c5dc562470            vorps ymm4, ymm4, ymmword ptr [rax + rsi*2]
            c5d4566c7020          vorps ymm5, ymm5, ymmword ptr [rax + rsi*2 + 0x20]
            c4a14c563400          vorps ymm6, ymm6, ymmword ptr [rax + r8]
            c4a144567c0020        vorps ymm7, ymm7, ymmword ptr [rax + r8 + 0x20]
            4883c040              add rax, 0x40
            4839c8                cmp rax, rcx
            72cb                  jb 0xb
            48ffca                dec rdx
            75bb                  jne 0
            c5f877                vzeroupper
            c3                    ret
        """,
        "read_sse2": """
            4889f8                mov rax, rdi
            488d0c37              lea rcx, [rdi + rsi]
            4c8d0476              lea r8, [rsi + rsi*2]
            0f5600                orps xmm0, xmmword ptr [rax]
            0f564810              orps xmm1, xmmword ptr [rax + 0x10]
            0f561430              orps xmm2, xmmword ptr [rax + rsi]
            0f565c3010            orps xmm3, xmmword ptr [rax + rsi + 0x10]
            0f562470              orps xmm4, xmmword ptr [rax + rsi*2]
            0f566c7010            orps xmm5, xmmword ptr [rax + rsi*2 + 0x10]
            420f563400            orps xmm6, xmmword ptr [rax + r8]
            420f567c0010          orps xmm7, xmmword ptr [rax + r8 + 0x10]
            4883c020              add rax, 0x20
            4839c8                cmp rax, rcx
            72d3                  jb 0xb
            48ffca                dec rdx
            75c3                  jne 0
            c3                    ret
        """,
        "triad_avx512": """
            48b80000000000000840  movabs rax, 0x4008000000000000
            6272fd487cc0          vpbroadcastq zmm8, rax
            31c0                  xor eax, eax
            62f1fd48280402        vmovapd zmm0, zmmword ptr [rdx + rax]
            62f2bd48a80406        vfmadd213pd zmm0, zmm8, zmmword ptr [rsi + rax]
            62f1fd48290407        vmovapd zmmword ptr [rdi + rax], zmm0
            62f1fd48284c0201      vmovapd zmm1, zmmword ptr [rdx + rax + 0x40]
            62f2bd48a84c0601      vfmadd213pd zmm1, zmm8, zmmword ptr [rsi + rax + 0x40]
            62f1fd48294c0701      vmovapd zmmword ptr [rdi + rax + 0x40], zmm1
            62f1fd4828540202      vmovapd zmm2, zmmword ptr [rdx + rax + 0x80]
            62f2bd48a8540602      vfmadd213pd zmm2, zmm8, zmmword ptr [rsi + rax + 0x80]
            62f1fd4829540702      vmovapd zmmword ptr [rdi + rax + 0x80], zmm2
            62f1fd48285c0203      vmovapd zmm3, zmmword ptr [rdx + rax + 0xc0]
            62f2bd48a85c0603      vfmadd213pd zmm3, zmm8, zmmword ptr [rsi + rax + 0xc0]
            62f1fd48295c0703      vmovapd zmmword ptr [rdi + rax + 0xc0], zmm3
            480500010000          add rax, 0x100
            4839c8                cmp rax, rcx
            7298                  jb 0x12
            c5f877                vzeroupper
            c3                    ret
        """,
        "triad_avx2": """
            48b80000000000000840  movabs rax, 0x4008000000000000
            c461f96ec0            vmovq xmm8, rax
            c4427d59c0            vpbroadcastq ymm8, xmm8
            31c0                  xor eax, eax
            c5fd280402            vmovapd ymm0, ymmword ptr [rdx + rax]
            c4e2bda80406          vfmadd213pd ymm0, ymm8, ymmword ptr [rsi + rax]
            c5fd290407            vmovapd ymmword ptr [rdi + rax], ymm0
            c5fd284c0220          vmovapd ymm1, ymmword ptr [rdx + rax + 0x20]
            c4e2bda84c0620        vfmadd213pd ymm1, ymm8, ymmword ptr [rsi + rax + 0x20]
            c5fd294c0720          vmovapd ymmword ptr [rdi + rax + 0x20], ymm1
            c5fd28540240          vmovapd ymm2, ymmword ptr [rdx + rax + 0x40]
            c4e2bda8540640        vfmadd213pd ymm2, ymm8, ymmword ptr [rsi + rax + 0x40]
            c5fd29540740          vmovapd ymmword ptr [rdi + rax + 0x40], ymm2
            c5fd285c0260          vmovapd ymm3, ymmword ptr [rdx + rax + 0x60]
            c4e2bda85c0660        vfmadd213pd ymm3, ymm8, ymmword ptr [rsi + rax + 0x60]
            c5fd295c0760          vmovapd ymmword ptr [rdi + rax + 0x60], ymm3
            480580000000          add rax, 0x80
            4839c8                cmp rax, rcx
            72ac                  jb 0x16
            c5f877                vzeroupper
            c3                    ret
        """,
        "triad_sse2": """
            48b80000000000000840  movabs rax, 0x4008000000000000
            664c0f6ec0            movq xmm8, rax
            66450f6cc0            punpcklqdq xmm8, xmm8
            31c0                  xor eax, eax
            660f280402            movapd xmm0, xmmword ptr [rdx + rax]
            66410f59c0            mulpd xmm0, xmm8
            660f580406            addpd xmm0, xmmword ptr [rsi + rax]
            660f290407            movapd xmmword ptr [rdi + rax], xmm0
            660f284c0210          movapd xmm1, xmmword ptr [rdx + rax + 0x10]
            66410f59c8            mulpd xmm1, xmm8
            660f584c0610          addpd xmm1, xmmword ptr [rsi + rax + 0x10]
            660f294c0710          movapd xmmword ptr [rdi + rax + 0x10], xmm1
            660f28540220          movapd xmm2, xmmword ptr [rdx + rax + 0x20]
            66410f59d0            mulpd xmm2, xmm8
            660f58540620          addpd xmm2, xmmword ptr [rsi + rax + 0x20]
            660f29540720          movapd xmmword ptr [rdi + rax + 0x20], xmm2
            660f285c0230          movapd xmm3, xmmword ptr [rdx + rax + 0x30]
            66410f59d8            mulpd xmm3, xmm8
            660f585c0630          addpd xmm3, xmmword ptr [rsi + rax + 0x30]
            660f295c0730          movapd xmmword ptr [rdi + rax + 0x30], xmm3
            4883c040              add rax, 0x40
            4839c8                cmp rax, rcx
            729e                  jb 0x16
            c3                    ret
        """,
        "fma_avx512": """
            62f17d48efc0          vpxord zmm0, zmm0, zmm0
            62f17548efc9          vpxord zmm1, zmm1, zmm1
            62f16d48efd2          vpxord zmm2, zmm2, zmm2
            62f16548efdb          vpxord zmm3, zmm3, zmm3
            62f15d48efe4          vpxord zmm4, zmm4, zmm4
            62f15548efed          vpxord zmm5, zmm5, zmm5
            62f14d48eff6          vpxord zmm6, zmm6, zmm6
            62f14548efff          vpxord zmm7, zmm7, zmm7
            62513d48efc0          vpxord zmm8, zmm8, zmm8
            62513548efc9          vpxord zmm9, zmm9, zmm9
            62512d48efd2          vpxord zmm10, zmm10, zmm10
            62512548efdb          vpxord zmm11, zmm11, zmm11
            62511d48efe4          vpxord zmm12, zmm12, zmm12
            62511548efed          vpxord zmm13, zmm13, zmm13
            62d21d48b8c5          vfmadd231ps zmm0, zmm12, zmm13
            62d21d48b8cd          vfmadd231ps zmm1, zmm12, zmm13
            62d21d48b8d5          vfmadd231ps zmm2, zmm12, zmm13
            62d21d48b8dd          vfmadd231ps zmm3, zmm12, zmm13
            62d21d48b8e5          vfmadd231ps zmm4, zmm12, zmm13
            62d21d48b8ed          vfmadd231ps zmm5, zmm12, zmm13
            62d21d48b8f5          vfmadd231ps zmm6, zmm12, zmm13
            62d21d48b8fd          vfmadd231ps zmm7, zmm12, zmm13
            62521d48b8c5          vfmadd231ps zmm8, zmm12, zmm13
            62521d48b8cd          vfmadd231ps zmm9, zmm12, zmm13
            62521d48b8d5          vfmadd231ps zmm10, zmm12, zmm13
            62521d48b8dd          vfmadd231ps zmm11, zmm12, zmm13
            48ffcf                dec rdi
            75b3                  jne 0x54
            c5f877                vzeroupper
            c3                    ret
        """,
        "fma_avx2": """
            c5fc57c0              vxorps ymm0, ymm0, ymm0
            c5f457c9              vxorps ymm1, ymm1, ymm1
            c5ec57d2              vxorps ymm2, ymm2, ymm2
            c5e457db              vxorps ymm3, ymm3, ymm3
            c5dc57e4              vxorps ymm4, ymm4, ymm4
            c5d457ed              vxorps ymm5, ymm5, ymm5
            c5cc57f6              vxorps ymm6, ymm6, ymm6
            c5c457ff              vxorps ymm7, ymm7, ymm7
            c4413c57c0            vxorps ymm8, ymm8, ymm8
            c4413457c9            vxorps ymm9, ymm9, ymm9
            c4412c57d2            vxorps ymm10, ymm10, ymm10
            c4412457db            vxorps ymm11, ymm11, ymm11
            c4411c57e4            vxorps ymm12, ymm12, ymm12
            c4411457ed            vxorps ymm13, ymm13, ymm13
            c4c21db8c5            vfmadd231ps ymm0, ymm12, ymm13
            c4c21db8cd            vfmadd231ps ymm1, ymm12, ymm13
            c4c21db8d5            vfmadd231ps ymm2, ymm12, ymm13
            c4c21db8dd            vfmadd231ps ymm3, ymm12, ymm13
            c4c21db8e5            vfmadd231ps ymm4, ymm12, ymm13
            c4c21db8ed            vfmadd231ps ymm5, ymm12, ymm13
            c4c21db8f5            vfmadd231ps ymm6, ymm12, ymm13
            c4c21db8fd            vfmadd231ps ymm7, ymm12, ymm13
            c4421db8c5            vfmadd231ps ymm8, ymm12, ymm13
            c4421db8cd            vfmadd231ps ymm9, ymm12, ymm13
            c4421db8d5            vfmadd231ps ymm10, ymm12, ymm13
            c4421db8dd            vfmadd231ps ymm11, ymm12, ymm13
            48ffcf                dec rdi
            75bf                  jne 0x3e
            c5f877                vzeroupper
            c3                    ret
        """,
        "fma_sse2": """
            0f57c0                xorps xmm0, xmm0
            0f57c9                xorps xmm1, xmm1
            0f57d2                xorps xmm2, xmm2
            0f57db                xorps xmm3, xmm3
            0f57e4                xorps xmm4, xmm4
            0f57ed                xorps xmm5, xmm5
            0f57f6                xorps xmm6, xmm6
            0f57ff                xorps xmm7, xmm7
            450f57c0              xorps xmm8, xmm8
            450f57c9              xorps xmm9, xmm9
            450f57d2              xorps xmm10, xmm10
            450f57db              xorps xmm11, xmm11
            450f57e4              xorps xmm12, xmm12
            450f57ed              xorps xmm13, xmm13
            410f59c4              mulps xmm0, xmm12
            410f58f5              addps xmm6, xmm13
            410f59cc              mulps xmm1, xmm12
            410f58fd              addps xmm7, xmm13
            410f59d4              mulps xmm2, xmm12
            450f58c5              addps xmm8, xmm13
            410f59dc              mulps xmm3, xmm12
            450f58cd              addps xmm9, xmm13
            410f59e4              mulps xmm4, xmm12
            450f58d5              addps xmm10, xmm13
            410f59ec              mulps xmm5, xmm12
            450f58dd              addps xmm11, xmm13
            48ffcf                dec rdi
            75cb                  jne 0x30
            c3                    ret
        """,
        "int8_avx512": """
            62f17d48efc0          vpxord zmm0, zmm0, zmm0
            62f17548efc9          vpxord zmm1, zmm1, zmm1
            62f16d48efd2          vpxord zmm2, zmm2, zmm2
            62f16548efdb          vpxord zmm3, zmm3, zmm3
            62f15d48efe4          vpxord zmm4, zmm4, zmm4
            62f15548efed          vpxord zmm5, zmm5, zmm5
            62f14d48eff6          vpxord zmm6, zmm6, zmm6
            62f14548efff          vpxord zmm7, zmm7, zmm7
            62513d48efc0          vpxord zmm8, zmm8, zmm8
            62513548efc9          vpxord zmm9, zmm9, zmm9
            62512d48efd2          vpxord zmm10, zmm10, zmm10
            62512548efdb          vpxord zmm11, zmm11, zmm11
            62511d48efe4          vpxord zmm12, zmm12, zmm12
            62511548efed          vpxord zmm13, zmm13, zmm13
            62d21d4850c5          vpdpbusd zmm0, zmm12, zmm13
            62d21d4850cd          vpdpbusd zmm1, zmm12, zmm13
            62d21d4850d5          vpdpbusd zmm2, zmm12, zmm13
            62d21d4850dd          vpdpbusd zmm3, zmm12, zmm13
            62d21d4850e5          vpdpbusd zmm4, zmm12, zmm13
            62d21d4850ed          vpdpbusd zmm5, zmm12, zmm13
            62d21d4850f5          vpdpbusd zmm6, zmm12, zmm13
            62d21d4850fd          vpdpbusd zmm7, zmm12, zmm13
            62521d4850c5          vpdpbusd zmm8, zmm12, zmm13
            62521d4850cd          vpdpbusd zmm9, zmm12, zmm13
            62521d4850d5          vpdpbusd zmm10, zmm12, zmm13
            62521d4850dd          vpdpbusd zmm11, zmm12, zmm13
            48ffcf                dec rdi
            75b3                  jne 0x54
            c5f877                vzeroupper
            c3                    ret
        """,
        "int8_avx2": """
            c5fc57c0              vxorps ymm0, ymm0, ymm0
            c5f457c9              vxorps ymm1, ymm1, ymm1
            c5ec57d2              vxorps ymm2, ymm2, ymm2
            c5e457db              vxorps ymm3, ymm3, ymm3
            c5dc57e4              vxorps ymm4, ymm4, ymm4
            c5d457ed              vxorps ymm5, ymm5, ymm5
            c5cc57f6              vxorps ymm6, ymm6, ymm6
            c5c457ff              vxorps ymm7, ymm7, ymm7
            c4413c57c0            vxorps ymm8, ymm8, ymm8
            c4413457c9            vxorps ymm9, ymm9, ymm9
            c4412c57d2            vxorps ymm10, ymm10, ymm10
            c4412457db            vxorps ymm11, ymm11, ymm11
            c4411c57e4            vxorps ymm12, ymm12, ymm12
            c4411457ed            vxorps ymm13, ymm13, ymm13
            c4c21d04e5            vpmaddubsw ymm4, ymm12, ymm13
            c4c21d04ed            vpmaddubsw ymm5, ymm12, ymm13
            c4c21d04f5            vpmaddubsw ymm6, ymm12, ymm13
            c4c21d04fd            vpmaddubsw ymm7, ymm12, ymm13
            c4c15df5e4            vpmaddwd ymm4, ymm4, ymm12
            c4c155f5ec            vpmaddwd ymm5, ymm5, ymm12
            c4c14df5f4            vpmaddwd ymm6, ymm6, ymm12
            c4c145f5fc            vpmaddwd ymm7, ymm7, ymm12
            c5fdfec4              vpaddd ymm0, ymm0, ymm4
            c5f5fecd              vpaddd ymm1, ymm1, ymm5
            c5edfed6              vpaddd ymm2, ymm2, ymm6
            c5e5fedf              vpaddd ymm3, ymm3, ymm7
            48ffcf                dec rdi
            75c3                  jne 0x3e
            c5f877                vzeroupper
            c3                    ret
        """,
    },
    "aarch64": {
        "read": """
            e90300aa              mov x9, x0
            0a00018b              add x10, x0, x1
            4b01018b              add x11, x10, x1
            6c01018b              add x12, x11, x1
            ed030aaa              mov x13, x10
            200540ad              ldp q0, q1, [x9]
            220d41ad              ldp q2, q3, [x9, #0x20]
            441540ad              ldp q4, q5, [x10]
            461d41ad              ldp q6, q7, [x10, #0x20]
            704540ad              ldp q16, q17, [x11]
            724d41ad              ldp q18, q19, [x11, #0x20]
            945540ad              ldp q20, q21, [x12]
            965d41ad              ldp q22, q23, [x12, #0x20]
            29010191              add x9, x9, #0x40
            4a010191              add x10, x10, #0x40
            6b010191              add x11, x11, #0x40
            8c010191              add x12, x12, #0x40
            3f010deb              cmp x9, x13
            63feff54              b.lo #0x14
            420400f1              subs x2, x2, #1
            81fdff54              b.ne #0
            c0035fd6              ret
        """,
        "triad": """
            10f5006f              fmov v16.2d, #3.00000000
            e9031faa              mov x9, xzr
            2a00098b              add x10, x1, x9
            4b00098b              add x11, x2, x9
            0c00098b              add x12, x0, x9
            400540ad              ldp q0, q1, [x10]
            420d41ad              ldp q2, q3, [x10, #0x20]
            641540ad              ldp q4, q5, [x11]
            661d41ad              ldp q6, q7, [x11, #0x20]
            80cc704e              fmla v0.2d, v4.2d, v16.2d
            a1cc704e              fmla v1.2d, v5.2d, v16.2d
            c2cc704e              fmla v2.2d, v6.2d, v16.2d
            e3cc704e              fmla v3.2d, v7.2d, v16.2d
            800500ad              stp q0, q1, [x12]
            820d01ad              stp q2, q3, [x12, #0x20]
            29010191              add x9, x9, #0x40
            3f0103eb              cmp x9, x3
            23feff54              b.lo #8
            c0035fd6              ret
        """,
        "fma": """
            00e4006f              movi v0.2d, #0000000000000000
            01e4006f              movi v1.2d, #0000000000000000
            02e4006f              movi v2.2d, #0000000000000000
            03e4006f              movi v3.2d, #0000000000000000
            04e4006f              movi v4.2d, #0000000000000000
            05e4006f              movi v5.2d, #0000000000000000
            06e4006f              movi v6.2d, #0000000000000000
            07e4006f              movi v7.2d, #0000000000000000
            10e4006f              movi v16.2d, #0000000000000000
            11e4006f              movi v17.2d, #0000000000000000
            12e4006f              movi v18.2d, #0000000000000000
            13e4006f              movi v19.2d, #0000000000000000
            14e4006f              movi v20.2d, #0000000000000000
            15e4006f              movi v21.2d, #0000000000000000
            80ce354e              fmla v0.4s, v20.4s, v21.4s
            81ce354e              fmla v1.4s, v20.4s, v21.4s
            82ce354e              fmla v2.4s, v20.4s, v21.4s
            83ce354e              fmla v3.4s, v20.4s, v21.4s
            84ce354e              fmla v4.4s, v20.4s, v21.4s
            85ce354e              fmla v5.4s, v20.4s, v21.4s
            86ce354e              fmla v6.4s, v20.4s, v21.4s
            87ce354e              fmla v7.4s, v20.4s, v21.4s
            90ce354e              fmla v16.4s, v20.4s, v21.4s
            91ce354e              fmla v17.4s, v20.4s, v21.4s
            92ce354e              fmla v18.4s, v20.4s, v21.4s
            93ce354e              fmla v19.4s, v20.4s, v21.4s
            000400f1              subs x0, x0, #1
            61feff54              b.ne #0x38
            c0035fd6              ret
        """,
        "int8_dot": """
            00e4006f              movi v0.2d, #0000000000000000
            01e4006f              movi v1.2d, #0000000000000000
            02e4006f              movi v2.2d, #0000000000000000
            03e4006f              movi v3.2d, #0000000000000000
            04e4006f              movi v4.2d, #0000000000000000
            05e4006f              movi v5.2d, #0000000000000000
            06e4006f              movi v6.2d, #0000000000000000
            07e4006f              movi v7.2d, #0000000000000000
            10e4006f              movi v16.2d, #0000000000000000
            11e4006f              movi v17.2d, #0000000000000000
            12e4006f              movi v18.2d, #0000000000000000
            13e4006f              movi v19.2d, #0000000000000000
            14e4006f              movi v20.2d, #0000000000000000
            15e4006f              movi v21.2d, #0000000000000000
            8096954e              sdot v0.4s, v20.16b, v21.16b
            8196954e              sdot v1.4s, v20.16b, v21.16b
            8296954e              sdot v2.4s, v20.16b, v21.16b
            8396954e              sdot v3.4s, v20.16b, v21.16b
            8496954e              sdot v4.4s, v20.16b, v21.16b
            8596954e              sdot v5.4s, v20.16b, v21.16b
            8696954e              sdot v6.4s, v20.16b, v21.16b
            8796954e              sdot v7.4s, v20.16b, v21.16b
            9096954e              sdot v16.4s, v20.16b, v21.16b
            9196954e              sdot v17.4s, v20.16b, v21.16b
            9296954e              sdot v18.4s, v20.16b, v21.16b
            9396954e              sdot v19.4s, v20.16b, v21.16b
            000400f1              subs x0, x0, #1
            61feff54              b.ne #0x38
            c0035fd6              ret
        """,
        "int8_mm": """
            00e4006f              movi v0.2d, #0000000000000000
            01e4006f              movi v1.2d, #0000000000000000
            02e4006f              movi v2.2d, #0000000000000000
            03e4006f              movi v3.2d, #0000000000000000
            04e4006f              movi v4.2d, #0000000000000000
            05e4006f              movi v5.2d, #0000000000000000
            06e4006f              movi v6.2d, #0000000000000000
            07e4006f              movi v7.2d, #0000000000000000
            10e4006f              movi v16.2d, #0000000000000000
            11e4006f              movi v17.2d, #0000000000000000
            12e4006f              movi v18.2d, #0000000000000000
            13e4006f              movi v19.2d, #0000000000000000
            14e4006f              movi v20.2d, #0000000000000000
            15e4006f              movi v21.2d, #0000000000000000
            80a6954e              smmla v0.4s, v20.16b, v21.16b
            81a6954e              smmla v1.4s, v20.16b, v21.16b
            82a6954e              smmla v2.4s, v20.16b, v21.16b
            83a6954e              smmla v3.4s, v20.16b, v21.16b
            84a6954e              smmla v4.4s, v20.16b, v21.16b
            85a6954e              smmla v5.4s, v20.16b, v21.16b
            86a6954e              smmla v6.4s, v20.16b, v21.16b
            87a6954e              smmla v7.4s, v20.16b, v21.16b
            90a6954e              smmla v16.4s, v20.16b, v21.16b
            91a6954e              smmla v17.4s, v20.16b, v21.16b
            92a6954e              smmla v18.4s, v20.16b, v21.16b
            93a6954e              smmla v19.4s, v20.16b, v21.16b
            000400f1              subs x0, x0, #1
            61feff54              b.ne #0x38
            c0035fd6              ret
        """,
    },
}
_TRAP = {"x86_64": "cc", "aarch64": "000020d4"}  # int3, brk #0: what lies between functions


def listings(machine: str | None = None) -> dict[str, tuple[tuple[bytes, str], ...]]:
    """(bytes, text) of each instruction by listing. KeyError: no code for this machine."""
    return {
        name: tuple(
            (bytes.fromhex(line.split()[0]), " ".join(line.split()[1:])) for line in text.strip().splitlines()
        )
        for name, text in _LISTINGS[machine or platform.machine()].items()
    }


def image(choice: Choice, machine: str | None = None) -> tuple[bytes, dict[str, int]]:
    """A file's content, and where each function of ``choice`` begins in it."""
    machine = machine or platform.machine()
    trap = bytes.fromhex(_TRAP[machine])
    content = bytearray(trap * (4096 // len(trap)))
    code, where = listings(machine), {}
    for number, (function, listing) in enumerate(choice.functions.items()):
        raw = b"".join(one for one, _ in code[listing])
        where[function] = number * SLOT
        content[number * SLOT : number * SLOT + len(raw)] = raw
    return bytes(content), where
