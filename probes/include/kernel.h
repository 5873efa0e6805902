/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-3-Clause) */
/*
 * The little of the kernel's world that the probes use, written by hand: the
 * objects build on any host, without kernel headers and without a generated
 * vmlinux.h. Saying that vmlinux.h is here keeps libbpf's headers from asking
 * for linux/types.h.
 */
#ifndef PROFINFER_KERNEL_H
#define PROFINFER_KERNEL_H
#define __VMLINUX_H__

typedef unsigned char __u8;
typedef unsigned short __u16;
typedef unsigned int __u32;
typedef unsigned long long __u64;
typedef signed char __s8;
typedef short __s16;
typedef int __s32;
typedef long long __s64;
typedef __u16 __be16;
typedef __u32 __be32;
typedef __u32 __wsum;
typedef _Bool bool;
#define true 1
#define false 0

enum {
	BPF_ANY = 0,
	BPF_NOEXIST = 1,
	BPF_RB_NO_WAKEUP = 1,
};

enum bpf_map_type {
	BPF_MAP_TYPE_HASH = 1,
	BPF_MAP_TYPE_ARRAY = 2,
	BPF_MAP_TYPE_PERCPU_HASH = 5,
	BPF_MAP_TYPE_PERF_EVENT_ARRAY = 4,
	BPF_MAP_TYPE_PERCPU_ARRAY = 6,
	BPF_MAP_TYPE_LRU_HASH = 9,
	BPF_MAP_TYPE_RINGBUF = 27,
};

#define BPF_F_MMAPABLE 1024

/*
 * User-space registers at a uprobe: plain UAPI layouts, outside CO-RE, so that
 * these programs load on kernels without BTF.
 */
#if defined(__TARGET_ARCH_x86)
struct pt_regs {
	unsigned long r15, r14, r13, r12, bp, bx, r11, r10, r9, r8;
	unsigned long ax, cx, dx, si, di, orig_ax, ip, cs, flags, sp, ss;
};
#define REG_ARG1(ctx) ((ctx)->di)
#define REG_ARG2(ctx) ((ctx)->si)
#define REG_ARG3(ctx) ((ctx)->dx)
#define REG_RET(ctx) ((ctx)->ax)
#define REG_SP(ctx) ((ctx)->sp)
#define RETURN_POPS 8	/* bytes of stack that a return takes: the return address */
/* A struct of more than 16 bytes is passed on the stack, above the return address. */
#define BATCH_ADDR(ctx, sp) ((sp) + 8)
#elif defined(__TARGET_ARCH_arm64)
struct pt_regs {
	unsigned long regs[31], sp, pc, pstate;
};
#define REG_ARG1(ctx) ((ctx)->regs[0])
#define REG_ARG2(ctx) ((ctx)->regs[1])
#define REG_ARG3(ctx) ((ctx)->regs[2])
#define REG_RET(ctx) ((ctx)->regs[0])
#define REG_SP(ctx) ((ctx)->sp)
#define RETURN_POPS 0
/* AAPCS64: a large struct is copied by the caller, its address is the argument. */
#define BATCH_ADDR(ctx, sp) ((ctx)->regs[1])
#else
#error "no register layout for this target"
#endif

#include <bpf/bpf_helpers.h>

#endif
