/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-3-Clause) */
/*
 * The same programs for kernels with uprobe sessions (6.13 and later): one link and
 * one program for entry and return of a call or graph.
 *
 * An object of its own, because its kernel functions change their prototypes in 7.0
 * and an object with an unknown one fails as a whole, whatever is loaded of it. Where
 * it does not load, ggml.bpf.o does the same with two links.
 *
 * What a session adds is safety: a return probe overwrites the word that the stack
 * pointer names at the probed instruction. The sites are chosen so that this is the
 * return address; here the entry half looks, and asks for no return unless the word
 * points into executable memory.
 */
#include "ggml.bpf.c"

extern bool bpf_session_is_return(void) __ksym;

#if defined(__TARGET_ARCH_x86)
struct task_struct;
struct vm_area_struct {
	unsigned long vm_flags;
} __attribute__((preserve_access_index));

#define VM_EXEC 4

struct vma_answer {
	__u32 executable;
};

static long look_at_vma(struct task_struct *task, struct vm_area_struct *vma,
			struct vma_answer *answer)
{
	answer->executable = !!(vma->vm_flags & VM_EXEC);
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
#else
/* arm64 keeps the return address in the link register, not in memory. */
static __always_inline bool return_address_is_code(struct pt_regs *ctx)
{
	return true;
}
#endif

SEC("uprobe.s")
int on_session(struct pt_regs *ctx)
{
	__u64 cookie = bpf_get_attach_cookie(ctx);

	if (bpf_session_is_return()) {
		worker_return(ctx, cookie);
		return 0;
	}
	if (!return_address_is_code(ctx)) {
		count(ST_SKIPPED_RETURN);
		return 1;
	}
	worker_entry(ctx, cookie);
	return 0;
}
