/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-3-Clause) */
/*
 * When each thread is done with its part of an op: a thread's work ends when it last arrives
 * at the barrier before its next op (kernels pass barriers inside, too). Trace level: two
 * more hits per op and thread.
 *
 * What it waited for meanwhile comes from the sums of sched.bpf.c, read at both ends.
 */
#include "kernel.h"
#include "maps.h"
#include "events.h"
#include "causes.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

struct waited {
	__u64 ready, paging, blocked;
};

struct barrier_thread {
	__u64 begin, arrived, tensor;
	struct waited at_begin, at_arrived;
	__u32 tgid;
	__u32 arrivals;
	__u32 cpu;
	__u32 pad;
};

TARGETS;	/* that of ggml.bpf.o */
SCHED_THREADS;	/* that of sched.bpf.o */
MAP(LRU_HASH, barrier_threads, 4096, __u32 /* tid */, struct barrier_thread);

struct barrier_counters {
	__u64 value[BS_COUNT];
};

MAP(PERCPU_ARRAY, barrier_stats, 1, __u32, struct barrier_counters);
RINGBUF(barriers, 4 << 20);

/* So that the records' types and constants are in the object's BTF. */
const struct barrier_rec *btf_barrier_rec __attribute__((unused)) = 0;
const enum barrier_stat btf_barrier_stat __attribute__((unused)) = 0;
const enum barrier_probe btf_barrier_probe __attribute__((unused)) = 0;

static __always_inline void count(enum barrier_stat which)
{
	__u32 zero = 0;
	struct barrier_counters *c = bpf_map_lookup_elem(&barrier_stats, &zero);

	if (c)
		__sync_fetch_and_add(&c->value[which], 1);
}

static __always_inline void look(struct waited *w, __u32 tid)
{
	struct sched_thread *t = bpf_map_lookup_elem(&sched_threads, &tid);

	w->ready = w->paging = w->blocked = 0;
	if (!t)
		return;
	w->ready = t->wait_ns[WC_PREEMPTED] + t->wait_ns[WC_YIELDED] +
		   t->wait_ns[WC_THROTTLED] + t->wait_ns[WC_WAKEUP];
	w->paging = t->wait_ns[WC_FAULT];
	w->blocked = t->wait_ns[WC_FUTEX] + t->wait_ns[WC_IO] + t->wait_ns[WC_SLEEP] +
		     t->wait_ns[WC_OTHER];
}

static __always_inline void send(const struct barrier_thread *b, const struct waited *now,
				 __u64 ts, __u32 tid)
{
	struct barrier_rec *r = bpf_ringbuf_reserve(&barriers, sizeof(*r), 0);

	if (!r) {
		count(BS_LOST);
		return;
	}
	count(BS_RECORDS);
	r->begin = b->begin;
	r->arrived = b->arrived;
	r->end = ts;
	r->tensor = b->tensor;
	r->ready_ns = b->at_arrived.ready - b->at_begin.ready;
	r->paging_ns = b->at_arrived.paging - b->at_begin.paging;
	r->blocked_ns = now->blocked - b->at_arrived.blocked;
	r->late_ns = now->ready - b->at_arrived.ready;
	r->tgid = b->tgid;
	r->tid = tid;
	r->arrivals = b->arrivals;
	r->cpu = b->cpu;
	r->reserved = 0;
	bpf_ringbuf_submit(r, BPF_RB_NO_WAKEUP);
}

SEC("uprobe")
int on_op(struct pt_regs *ctx)
{
	__u64 ts = bpf_ktime_get_ns(), id = bpf_get_current_pid_tgid();
	struct barrier_thread *b, fresh = {};
	__u32 tgid = id >> 32, tid = id;

	if (!bpf_map_lookup_elem(&targets, &tgid))
		return 0;
	count(BS_HITS);
	b = bpf_map_lookup_elem(&barrier_threads, &tid);
	look(&fresh.at_begin, tid);
	fresh.begin = ts;
	fresh.tensor = REG_ARG2(ctx);
	fresh.tgid = tgid;
	if (!b) {
		if (bpf_map_update_elem(&barrier_threads, &tid, &fresh, BPF_ANY))
			count(BS_MAP_FULL);
		return 0;
	}
	if (b->tgid == tgid && b->arrived)
		send(b, &fresh.at_begin, ts, tid);
	*b = fresh;
	return 0;
}

SEC("uprobe")
int on_arrive(struct pt_regs *ctx)
{
	__u64 ts = bpf_ktime_get_ns(), id = bpf_get_current_pid_tgid();
	__u32 tgid = id >> 32, tid = id;
	struct barrier_thread *b;

	if (!bpf_map_lookup_elem(&targets, &tgid))
		return 0;
	count(BS_HITS);
	b = bpf_map_lookup_elem(&barrier_threads, &tid);
	if (!b || b->tgid != tgid)
		return 0;
	b->arrived = ts;
	b->arrivals++;
	b->cpu = bpf_get_smp_processor_id();
	look(&b->at_arrived, tid);
	return 0;
}
