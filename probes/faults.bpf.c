/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-3-Clause) */
/*
 * Page faults of watched processes, with the address: programs on the kernel's software
 * events, which every architecture has (the fault tracepoint is x86-64's alone and mixes
 * minor with major). The events are opened per CPU, so that threads which start later, and
 * further targets, need nothing more.
 *
 * Needs no BTF.
 */
#include "kernel.h"
#include "maps.h"
#include "events.h"
#include "causes.h"
#include "thread.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

/* Minor faults with a record, per second of about 1.07 s and process. */
const volatile __u64 max_per_second = 20000;

/* struct bpf_perf_event_data: the registers of user_pt_regs, then these two. */
struct perf_context {
#if defined(__TARGET_ARCH_x86)
	__u64 regs[21];
#else
	__u64 regs[34];
#endif
	__u64 sample_period;
	__u64 addr;
};

TARGETS;	/* that of ggml.bpf.o */
THREADS;	/* likewise */
SCHED_THREADS;	/* that of sched.bpf.o, where it was loaded */
MAP(LRU_HASH, fault_counts, 1024, __u32 /* tgid */, struct fault_count);

struct fault_counters {
	__u64 value[FS_COUNT];
};

MAP(PERCPU_ARRAY, fault_stats, 1, __u32, struct fault_counters);
RINGBUF(faults, 1 << 20);

/* So that the records' types and constants are in the object's BTF. */
const struct fault_rec *btf_fault_rec __attribute__((unused)) = 0;
const enum fault_kind btf_fault_kind __attribute__((unused)) = 0;
const enum fault_stat btf_fault_stat __attribute__((unused)) = 0;

static __always_inline void count(enum fault_stat which)
{
	__u32 zero = 0;
	struct fault_counters *c = bpf_map_lookup_elem(&fault_stats, &zero);

	if (c)
		__sync_fetch_and_add(&c->value[which], 1);
}

static __always_inline int on_fault(struct perf_context *ctx, __u32 kind)
{
	__u64 id = bpf_get_current_pid_tgid(), ts;
	__u32 tgid = id >> 32, tid = id;
	struct target *wanted = bpf_map_lookup_elem(&targets, &tgid);
	struct fault_count *c, fresh = {};
	struct sched_thread *t;
	struct thread *own;
	struct fault_rec *f;
	__u64 addr = ctx->addr;

	if (!wanted || (wanted->flags & (TG_IGNORED | TG_NO_FAULTS)))
		return 0;
	ts = bpf_ktime_get_ns();
	count(FS_FAULTS);
	c = bpf_map_lookup_elem(&fault_counts, &tgid);
	if (!c) {
		bpf_map_update_elem(&fault_counts, &tgid, &fresh, BPF_NOEXIST);
		c = bpf_map_lookup_elem(&fault_counts, &tgid);
		if (!c) {
			count(FS_MAP_FULL);
			return 0;
		}
	}
	__sync_fetch_and_add(&c->faults[kind & 1], 1);
	if (kind == FK_MINOR) {
		/* Two threads at the turn of a second may let a few more through. */
		if (c->second != ts >> 30) {
			c->second = ts >> 30;
			c->in_second = 0;
		}
		if (__sync_fetch_and_add(&c->in_second, 1) >= max_per_second) {
			__sync_fetch_and_add(&c->unrecorded[0], 1);
			count(FS_LIMITED);
			return 0;
		}
	}
	f = bpf_ringbuf_reserve(&faults, sizeof(*f), 0);
	if (!f) {
		__sync_fetch_and_add(&c->unrecorded[kind & 1], 1);
		__sync_fetch_and_add(&c->lost, 1);
		count(FS_LOST);
		return 0;
	}
	f->ts = ts;
	f->addr = addr;
	f->wait_ns = ~0ULL;
	f->tgid = tgid;
	f->tid = tid;
	f->seq = 0;
	f->node = ~0;
	f->kind = kind;
	f->cpu = bpf_get_smp_processor_id();
	f->reserved = 0;
	t = bpf_map_lookup_elem(&sched_threads, &tid);
	if (t && t->tgid == tgid) {
		f->wait_ns = t->page_ns;
		t->page_ns = 0;
	}
	own = bpf_map_lookup_elem(&threads, &tid);
	if (own && own->nodes) {
		f->seq = own->seq;
		f->node = own->accepted ? own->running : ~0;
	}
	bpf_ringbuf_submit(f, BPF_RB_NO_WAKEUP);
	return 0;
}

SEC("perf_event")
int on_minor(struct perf_context *ctx)
{
	return on_fault(ctx, FK_MINOR);
}

SEC("perf_event")
int on_major(struct perf_context *ctx)
{
	return on_fault(ctx, FK_MAJOR);
}
