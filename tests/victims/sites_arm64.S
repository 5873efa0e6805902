/* SPDX-License-Identifier: Apache-2.0 */
/* arm64 prologues, right and wrong places for a probe; never run, only looked at. */
	.arch armv8.5-a
	.text
	.macro FUNCTION name
	.globl \name
	.type \name, %function
\name:
	.endm
	.macro END name
	.size \name, . - \name
	.endm

FUNCTION main
	ret
END main
FUNCTION plain
	stp x29, x30, [sp, #-32]!
	mov x29, sp
	cbz x0, 1f
	add x0, x0, x1
1:	ldp x29, x30, [sp], #32
	ret
END plain
FUNCTION signed
	bti c
	paciasp
	stp x29, x30, [sp, #-16]!
	cbz x0, 1f
	nop
1:	ldp x29, x30, [sp], #16
	autiasp
	ret
END signed
FUNCTION leaf_branch
	bti c
	cmp w0, #3
	b.eq 1f
	add x0, x0, x1
1:	ret
END leaf_branch
FUNCTION saves_lr
	mov x9, x30
	tbz x0, #3, 1f
1:	ret
END saves_lr
FUNCTION thunk
	b main
END thunk
FUNCTION argument_gone
	mov w1, #5
	cbnz x0, 1f
1:	ret
END argument_gone
FUNCTION loop_first
1:	subs x0, x0, #1
	b.ne 1b
	ret
END loop_first
FUNCTION loop_head
	bti c
1:	sub x0, x0, #1
	cbnz x0, 1b
	ret
END loop_head
FUNCTION loop_scratch
	bti c
1:	sub x9, x9, #1
	cbnz x9, 1b
	ret
END loop_scratch
FUNCTION swapped
	swp x3, x1, [x2]
	cbnz x9, 1f
1:	ret
END swapped
FUNCTION table
	bti c
	sub sp, sp, #32
	tbnz x0, #63, 1f
	adr x3, 1f
	br x3
1:	add sp, sp, #32
	ret
END table
FUNCTION frame
	sub sp, sp, #1, lsl #12
	sub sp, sp, #32
	cbz x0, 1f
1:	add sp, sp, #32
	add sp, sp, #1, lsl #12
	ret
END frame
FUNCTION literal_first
	ldr x3, 1f
	ret
	.balign 8
1:	.quad 5
END literal_first
FUNCTION exclusive_first
	ldxr x3, [x0]
	ret
END exclusive_first
FUNCTION system_first
	mrs x3, tpidr_el0
	ret
END system_first
FUNCTION tls_first
	mrs x8, tpidr_el0
	add x8, x8, #16
	stp x29, x30, [sp, #-16]!
	ldr w0, [x8]
	ldp x29, x30, [sp], #16
	ret
END tls_first
FUNCTION tls_argument_gone
	mrs x0, tpidr_el0
	add x0, x0, #16
	ldr w0, [x0]
	ret
END tls_argument_gone
FUNCTION tls_exclusive
	mrs x8, tpidr_el0
1:	ldxr x3, [x8]
	add x3, x3, #1
	stxr w4, x3, [x8]
	cbnz w4, 1b
	ret
END tls_exclusive
FUNCTION hint_first
	wfe
	ret
END hint_first
FUNCTION trap_first
	brk #1
	ret
END trap_first
FUNCTION signed_return
	retaa
END signed_return
	.section .note.GNU-stack, "", %progbits
