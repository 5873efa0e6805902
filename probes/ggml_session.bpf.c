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
 *
 * And it keeps to one stack. The kernel takes the calls of a thread whose return it waits
 * for to be a stack: it drops those that lie below a function that is entered, and gives
 * the return address of the last one to whichever returns. A program that suspends a call
 * and makes another on a second stack (coroutines, a signal handler with a stack of its
 * own) would be killed. So while a call waits on one stack, none is followed on another.
 */
#include "ggml.bpf.c"

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

/* Whether a function of this thread waits on another stack than the one of `sp`. Frames that
 * only seem to, because they are not open any more, are dropped. */
static __always_inline bool waits_elsewhere(struct thread *t, __u64 sp, __u64 ts, __u32 level)
{
	struct frame *f = top_frame(t);
	__u64 outermost = 0;
	__u32 i;

	if (!f)
		return false;
	if (f->sp <= sp) {
		/* The outermost that lies below: if it was left, so were those inside it. */
		for (i = 0; i < MAX_FRAMES; i++) {
			if (i >= t->depth)
				break;
			outermost = t->frames[i].sp;
			if (outermost <= sp)
				break;
		}
		if (outermost == sp)
			return false;	/* its place is taken: worker_entry() drops it */
		if (still_open(outermost))
			return true;
		drop_frames(t, sp, ts, level, false);
		f = top_frame(t);
		if (!f)
			return false;
	}
	if (f->sp - sp <= ONE_STACK)
		return false;
	if (still_open(f->sp))
		return true;
	drop_frames(t, ~0ULL, ts, 0, false);
	return false;
}

SEC("uprobe.s")
int on_session(struct pt_regs *ctx)
{
	__u64 cookie = bpf_get_attach_cookie(ctx);
	__u32 tid = bpf_get_current_pid_tgid();
	__u64 ts = bpf_ktime_get_ns();
	struct thread *t;

	if (bpf_session_is_return()) {
		worker_return(ctx, cookie);
		return 0;
	}
	if (!return_address_is_code(ctx)) {
		count(ST_SKIPPED_RETURN);
		return 1;
	}
	t = bpf_map_lookup_elem(&threads, &tid);
	if (t && t->depth &&
	    waits_elsewhere(t, REG_SP(ctx) + cookie_moved(cookie), ts, cookie_level(cookie))) {
		count(ST_SKIPPED_RETURN);
		return 1;
	}
	return worker_entry(ctx, cookie) ? 0 : 1;
}
