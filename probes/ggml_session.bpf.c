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
#include "onestack.h"

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
	struct target want;
	struct thread *t;

	if (bpf_session_is_return()) {
		worker_return(ctx, cookie);
		return 0;
	}
	if (!wanted_here(bpf_get_current_pid_tgid() >> 32, cookie, &want))
		return 1;
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
