/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-3-Clause) */
/*
 * What session programs ask before they have a return probed: does the stack pointer name a
 * return address, and has a function that was entered earlier returned since. For objects
 * that may declare kernel functions.
 */
#ifndef PROFINFER_ONESTACK_H
#define PROFINFER_ONESTACK_H

extern bool bpf_session_is_return(void) __ksym;

#if defined(__TARGET_ARCH_x86)
struct task_struct;
struct file;
struct vm_area_struct {
	unsigned long vm_flags;
	struct file *vm_file;
} __attribute__((preserve_access_index));

#define VM_EXEC 4

struct vma_answer {
	__u32 executable;
	__u32 of_a_file;
};

static long look_at_vma(struct task_struct *task, struct vm_area_struct *vma,
			struct vma_answer *answer)
{
	answer->executable = !!(vma->vm_flags & VM_EXEC);
	answer->of_a_file = !!vma->vm_file;
	return 0;
}

static __always_inline bool return_address_is_code(struct pt_regs *ctx)
{
	struct vma_answer answer = {};
	__u64 address = 0;
	long err;

	if (bpf_copy_from_user(&address, sizeof(address), (void *)REG_SP(ctx)))
		return false;
	err = bpf_find_vma(bpf_get_current_task_btf(), address, look_at_vma, &answer, 0);
	/* -EBUSY: another thread holds the address space. The site was checked
	 * before it was attached; not knowing is no reason to lose the return. */
	return err == -16 || (err == 0 && answer.executable);
}

/* Whether the function that was entered with this stack pointer has not returned yet: its
 * return address is still the kernel's, in executable memory that is of no file. What was
 * left by longjmp keeps that word, too, until it is overwritten: then a call is lost, which
 * is better than the target. */
static __always_inline bool still_open(__u64 sp)
{
	struct vma_answer answer = {};
	__u64 address = 0;
	long err;

	if (bpf_copy_from_user(&address, sizeof(address), (void *)sp))
		return false;
	err = bpf_find_vma(bpf_get_current_task_btf(), address, look_at_vma, &answer, 0);
	return err == -16 || (err == 0 && answer.executable && !answer.of_a_file);
}
#else
/* arm64 keeps the return address in the link register, not in memory. */
static __always_inline bool return_address_is_code(struct pt_regs *ctx)
{
	return true;
}

/* What the link register held is saved anywhere, or nowhere: not to be told. */
static __always_inline bool still_open(__u64 sp)
{
	return true;
}
#endif

/* A function and what it calls lie closer together, those of two stacks further apart. */
#define ONE_STACK (64 << 10)

#endif
