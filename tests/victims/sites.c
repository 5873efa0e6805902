/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Functions whose prologues are right and wrong places for a probe, and a caller that
 * notices damage: it fills every callee-saved register before each call and compares
 * registers and result afterwards.
 *
 * Usage: sites COUNT NAME...   Waits for a line on standard input, then calls each function COUNT
 * times and prints "NAME calls=N wrong=N registers=N", one line each.
 * Every function returns 3 * a + b (a: first argument, b: second), a from 1 to 6.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define FUNCTION(name, body)                                                                       \
	long name(long, long, long);                                                               \
	asm(".pushsection .text\n.balign 16\n.globl " #name "\n.type " #name ",@function\n" #name  \
	    ":\n" body "\n.size " #name ",.-" #name "\n.popsection\n")

#define RESULT "lea (%rdi,%rdi,2),%rax\n add %rsi,%rax\n"

FUNCTION(push_first, "push %rbp\n mov %rsp,%rbp\n" RESULT "pop %rbp\n ret\n");
FUNCTION(push_after_endbr, "endbr64\n push %r13\n mov %rdi,%r13\n push %r12\n mov %rsi,%r12\n"
	 "lea (%r13,%r13,2),%rax\n add %r12,%rax\n pop %r12\n pop %r13\n ret\n");
FUNCTION(five_pushes, "endbr64\n push %r15\n mov %rdi,%r15\n push %r14\n push %r13\n push %r12\n push %rbx\n"
	 "mov %rsi,%rbx\n lea (%r15,%r15,2),%rax\n add %rbx,%rax\n"
	 "pop %rbx\n pop %r12\n pop %r13\n pop %r14\n pop %r15\n ret\n");
FUNCTION(branch_after_pushes, "push %rbp\n push %rbx\n test %rdi,%rdi\n je 1f\n"
	 "mov %rdi,%rbx\n lea (%rbx,%rbx,2),%rax\n add %rsi,%rax\n 1: pop %rbx\n pop %rbp\n ret\n");
FUNCTION(realigns, "endbr64\n lea 8(%rsp),%r10\n and $-64,%rsp\n push -8(%r10)\n push %rbp\n mov %rsp,%rbp\n"
	 "push %r10\n" RESULT "pop %r10\n pop %rbp\n lea -8(%r10),%rsp\n ret\n");
FUNCTION(loop_head_first, "sub $1,%rdx\n lea (%rdi),%r8\n jg loop_head_first\n" RESULT "ret\n");
FUNCTION(loop_head_jump, "endbr64\n 1: cmp $0,%rdx\n je 2f\n dec %rdx\n jmp 1b\n 2:" RESULT "ret\n");
FUNCTION(loop_head_far, "endbr64\n 1: test %rdx,%rdx\n jz 2f\n dec %rdx\n .skip 200,0x90\n jmp 1b\n 2:" RESULT "ret\n");
FUNCTION(branch_first, "endbr64\n test %rdi,%rdi\n je 1f\n" RESULT "ret\n 1: mov %rsi,%rax\n ret\n");
FUNCTION(call_first, "call 1f\n" RESULT "ret\n 1: ret\n");
FUNCTION(jump_first, "jmp 1f\n .byte 0x06\n 1:" RESULT "ret\n");
FUNCTION(nop_first, ".byte 0x0f,0x1f,0x44,0,0\n" RESULT "ret\n");
FUNCTION(nop_after_endbr, "endbr64\n .byte 0x0f,0x1f,0x44,0,0\n" RESULT "ret\n");
FUNCTION(red_zone_nop, "mov %rdi,-8(%rsp)\n .byte 0x0f,0x1f,0x44,0,0\n mov -8(%rsp),%rdi\n" RESULT "ret\n");
FUNCTION(mov_first, "mov %rdi,%rax\n add %rdi,%rax\n add %rdi,%rax\n add %rsi,%rax\n ret\n");
FUNCTION(argument_gone, "lea (%rdi,%rdi,2),%rax\n xchg %rax,%rdi\n push %rbp\n mov %rdi,%rax\n add %rsi,%rax\n"
	 "pop %rbp\n ret\n");
FUNCTION(argument_gone_low, "lea (%rdi,%rdi,2),%rax\n mov $1,%dil\n push %rbp\n add %rsi,%rax\n pop %rbp\n ret\n");
FUNCTION(sub_then_branch, "sub $24,%rsp\n test %rdi,%rdi\n jne 1f\n 1:" RESULT "add $24,%rsp\n ret\n");
FUNCTION(table, "endbr64\n mov %rdi,%rcx\n lea 3f(%rip),%r8\n test %rdi,%rdi\n js 2f\n and $1,%ecx\n"
	 "movslq (%r8,%rcx,4),%r9\n add %r8,%r9\n jmp *%r9\n 2: ud2\n 1:" RESULT "ret\n"
	 ".pushsection .rodata\n .balign 4\n 3: .long 1b-3b\n .long 1b-3b\n .popsection\n");
FUNCTION(table_of_addresses, "endbr64\n mov %rdi,%rcx\n lea 3f(%rip),%r8\n test %rdi,%rdi\n js 2f\n and $1,%ecx\n"
	 "mov (%r8,%rcx,8),%r9\n jmp *%r9\n 2: ud2\n 1:" RESULT "ret\n"
	 ".pushsection .data\n .balign 8\n 3: .quad 1b\n .quad 1b\n .popsection\n");
FUNCTION(calls_last, "endbr64\n test %rdi,%rdi\n js 2f\n lea 3f(%rip),%r8\n mov 8(%r8),%rax\n test %rax,%rax\n je 2f\n"
	 "jmp *%rax\n 2: ud2\n"
	 ".pushsection .data\n .balign 8\n 3: .quad 0\n .quad mov_first\n .popsection\n");
FUNCTION(looks_like_a_jump, "endbr64\n push %rbp\n mov %rsp,%rbp\n mov %rsi,-0x16(%rbp)\n movl $0xf0ebeb75,-0x30(%rbp)\n"
	 RESULT "pop %rbp\n ret\n");
FUNCTION(vector_first, ".byte 0xc4,0xe1,0xf9,0x6e,0xcf\n" RESULT "ret\n");
FUNCTION(breakpoint_first, "int3\n" RESULT "ret\n");
FUNCTION(locked_first, "lock addl $0,(%rsp)\n" RESULT "ret\n");

asm(".pushsection .text\n.globl checked\nchecked:\n"
    "push %rbx\n push %rbp\n push %r12\n push %r13\n push %r14\n push %r15\n push %r8\n"
    "mov %rdi,%rax\n mov %rsi,%rdi\n mov %rdx,%rsi\n mov %rcx,%rdx\n"
    "mov $0x1111111111111111,%rbx\n mov $0x2222222222222222,%rbp\n mov $0x3333333333333333,%r12\n"
    "mov $0x4444444444444444,%r13\n mov $0x5555555555555555,%r14\n mov $0x6666666666666666,%r15\n"
    "call *%rax\n"
    "mov (%rsp),%r8\n mov %rbx,(%r8)\n mov %rbp,8(%r8)\n mov %r12,16(%r8)\n mov %r13,24(%r8)\n"
    "mov %r14,32(%r8)\n mov %r15,40(%r8)\n"
    "pop %r8\n pop %r15\n pop %r14\n pop %r13\n pop %r12\n pop %rbp\n pop %rbx\n ret\n.popsection\n");
long checked(void *function, long a, long b, long c, unsigned long *registers);

#define ENTRY(name) { #name, (void *)name }
static const struct { const char *name; void *function; } functions[] = {
	ENTRY(push_first), ENTRY(push_after_endbr), ENTRY(five_pushes), ENTRY(branch_after_pushes),
	ENTRY(realigns), ENTRY(loop_head_first), ENTRY(loop_head_jump), ENTRY(loop_head_far), ENTRY(branch_first),
	ENTRY(call_first), ENTRY(jump_first), ENTRY(nop_first), ENTRY(nop_after_endbr), ENTRY(red_zone_nop),
	ENTRY(mov_first), ENTRY(argument_gone), ENTRY(argument_gone_low), ENTRY(sub_then_branch), ENTRY(table),
	ENTRY(table_of_addresses), ENTRY(calls_last),
	ENTRY(looks_like_a_jump), ENTRY(vector_first), ENTRY(locked_first),
};

static void run(const char *name, void *function, long count)
{
	long wrong = 0, damaged = 0;

	for (long i = 0; i < count; i++) {
		unsigned long registers[6], bad = 0;
		long a = 1 + i % 6, b = i * 7;

		wrong += checked(function, a, b, 3, registers) != 3 * a + b;
		for (int r = 0; r < 6; r++)
			bad |= registers[r] ^ (0x1111111111111111UL * (r + 1));
		damaged += bad != 0;
	}
	printf("%s calls=%ld wrong=%ld registers=%ld\n", name, count, wrong, damaged);
	fflush(stdout);
}

int main(int argc, char **argv)
{
	char line[16];

	if (argc < 2 || !fgets(line, sizeof line, stdin))
		return 2;
	for (int i = 2; i < argc; i++)
		for (size_t f = 0; f < sizeof functions / sizeof *functions; f++)
			if (!strcmp(argv[i], functions[f].name))
				run(argv[i], functions[f].function, atol(argv[1]));
	return 0;
}
