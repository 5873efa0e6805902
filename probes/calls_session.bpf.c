/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-3-Clause) */
/*
 * Calls of any engine for kernels with uprobe sessions (6.13 and later). Why an object of its
 * own, and why a return is only asked for on one stack at a time: ggml_session.bpf.c.
 */
#include "calls.bpf.c"
#include "onestack.h"

/* Whether a call of this thread waits on another stack than the one of `sp`. What only seems
 * to, because it was left, is dropped. */
static __always_inline bool waits_elsewhere(struct thread *t, __u64 sp)
{
	struct frame *f = frame_at(t, t->depth);

	if (!f || f->sp == sp || (f->sp > sp && f->sp - sp <= ONE_STACK))
		return false;
	if (still_open(f->sp))
		return true;
	t->depth = 0;
	count(CALL_ST_UNRETURNED);
	return false;
}

SEC("uprobe.s")
int on_session(struct pt_regs *ctx)
{
	__u64 cookie = bpf_get_attach_cookie(ctx);
	__u64 id = bpf_get_current_pid_tgid();
	__u32 tid = id, call = cookie & 0xffff;
	bool tail = false;
	struct call_conf *c;
	struct thread *t;
	struct frame *f;

	if (bpf_session_is_return()) {
		on_returned(ctx, cookie);
		return 0;
	}
	c = bpf_map_lookup_elem(&confs, &call);
	if (!c || !paid_for(c, id >> 32, cookie))
		return 1;
	if (!return_address_is_code(ctx)) {
		count(CALL_ST_SKIPPED_RETURN);
		return 1;
	}
	t = bpf_map_lookup_elem(&threads, &tid);
	if (t && waits_elsewhere(t, entry_sp(ctx, cookie))) {
		count(CALL_ST_SKIPPED_RETURN);
		return 1;
	}
	f = t ? frame_at(t, t->depth) : 0;
	if (f && f->sp == entry_sp(ctx, cookie))
		tail = still_open(f->sp);
	return on_entered(ctx, cookie, c, tail) ? 0 : 1;
}
