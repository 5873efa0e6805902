/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-3-Clause) */
/*
 * Where the time of a target's compute threads goes that they do not run, and who had their
 * core meanwhile.
 *
 * Sums are kept of every thread of a watched process (map "targets"), in the kernel; a record
 * is made only for compute threads, only for waits while a graph ran, and of the short sleeps
 * of a barrier not even then. A compute thread is one that has entered a call or graph itself,
 * or that wants a core for a quarter of the time that graphs run.
 *
 * State 0 at switch-out means that the thread was preempted, or gave way, and can still run:
 * it waits for a core. Any other state means that it is blocked until it is woken, and waits
 * for a core from then on.
 *
 * BTF tracepoints: no tracefs is needed, and kernel structures are read directly. A kernel
 * without BTF has all the rest of profinferd and not this.
 */
#include "kernel.h"
#include "maps.h"
#include "events.h"
#include "causes.h"
#include "thread.h"
#include <bpf/bpf_core_read.h>

char LICENSE[] SEC("license") = "Dual BSD/GPL";

#if defined(__TARGET_ARCH_x86)
#define NR_SCHED_YIELD 24
#define NR_NANOSLEEP 35
#define NR_FUTEX 202
#define NR_CLOCK_NANOSLEEP 230
#else
#define NR_SCHED_YIELD 124
#define NR_NANOSLEEP 101
#define NR_FUTEX 98
#define NR_CLOCK_NANOSLEEP 115
#endif

#define STATE_UNINTERRUPTIBLE 2
#define STATE_DEAD 0x80
#define WANTED_NS 1000000

const volatile __u64 min_blocked_ns = 200000;	/* shorter sleeps are in the sums alone */
const volatile __u64 min_wakeup_ns = 20000;

struct cfs_rq {
	int throttle_count;
} __attribute__((preserve_access_index));

struct sched_entity {
	unsigned long long sum_exec_runtime;
	struct cfs_rq *cfs_rq;
} __attribute__((preserve_access_index));

struct task_struct {
	int pid;
	int tgid;
	char comm[16];
	struct sched_entity se;
	unsigned int in_iowait : 1;
	bool throttled;		/* Linux 6.18 and later */
} __attribute__((preserve_access_index));

TARGETS;	/* that of ggml.bpf.o */
THREADS;	/* likewise */
GRAPH_CLOCKS;	/* likewise */
SCHED_THREADS;

/* Stays zero: the initial value of an entry. */
MAP(ARRAY, no_thread, 1, __u32, struct sched_thread);

/* User space makes it as large as the machine; below MAX_CORE_KINDS. */
MAP(ARRAY, core_kinds, 1024, __u32 /* CPU */, __u32);

/* What ran last on each CPU: who had the core while a thread waited for it is rarely whom it
 * lost it to, which may have been an interrupt's thread for some microseconds. */
#define SLICES 64

struct slice {
	__u64 begin, end;
	__u32 tgid, tid;
	char comm[16];
};

struct cpu_slices {
	__u64 since;		/* the running thread began; 0: not known */
	__u32 head;		/* how many slices there were */
	__u32 pad;
	struct slice slice[SLICES];
};

/* As core_kinds; CPU; written by programs on it alone. */
MAP(ARRAY, cpu_slices, 1024, __u32, struct cpu_slices);

struct sched_counters {
	__u64 value[SS_COUNT];
};

MAP(PERCPU_ARRAY, sched_stats, 1, __u32, struct sched_counters);
RINGBUF(spans, 512 << 10);

/* So that the records' types and constants are in the object's BTF. */
const struct sched_span *btf_sched_span __attribute__((unused)) = 0;
const enum wait_cause btf_wait_cause __attribute__((unused)) = 0;
const enum span_flag btf_span_flag __attribute__((unused)) = 0;
const enum thread_state btf_thread_state __attribute__((unused)) = 0;
const enum sched_stat btf_sched_stat __attribute__((unused)) = 0;

/* The scheduler holds its lock around these programs: nothing preempts them on this CPU. */
static __always_inline void count(enum sched_stat which)
{
	__u32 zero = 0;
	struct sched_counters *c = bpf_map_lookup_elem(&sched_stats, &zero);

	if (c)
		c->value[which]++;
}

/* How long graphs of this process have run until `ts`. */
static __always_inline __u64 graph_clock_at(__u32 tgid, __u64 ts)
{
	struct graph_clock *c = bpf_map_lookup_elem(&graph_clocks, &tgid);
	__u64 total, since;

	if (!c)
		return 0;
	total = c->total;
	since = c->since;
	return c->open && ts > since ? total + (ts - since) : total;
}

static __always_inline __u32 kind_of(__u32 cpu)
{
	__u32 *kind = bpf_map_lookup_elem(&core_kinds, &cpu);

	return kind ? *kind & (MAX_CORE_KINDS - 1) : 0;
}

/* The difference of two readings of a clock that two threads may have put wrong. */
static __always_inline __u64 since(__u64 now, __u64 then, __u64 most)
{
	__u64 d = now > then ? now - then : 0;

	return d < most ? d : most;
}

/* Whether waits of its process are looked at. Nearly all threads of a machine are none of those: this
 * comes before all else. */
static __always_inline bool is_watched(struct task_struct *p)
{
	__u32 tgid = p->tgid;
	struct target *wanted = bpf_map_lookup_elem(&targets, &tgid);

	return wanted && !(wanted->flags & (TG_IGNORED | TG_NO_WAITS));
}

/* Entry of a thread of a watched process. */
static __always_inline struct sched_thread *entry_of(struct task_struct *p, __u64 ts, __u32 state)
{
	__u32 tgid = p->tgid, tid = p->pid, zero = 0;
	struct sched_thread *t, *blank;
	__u64 clock;

	t = bpf_map_lookup_elem(&sched_threads, &tid);
	if (t && t->tgid == tgid)
		return t;
	blank = bpf_map_lookup_elem(&no_thread, &zero);
	if (!blank)
		return 0;
	/* Another process had this tid: its entry is of a thread that is gone. */
	if (bpf_map_update_elem(&sched_threads, &tid, blank, BPF_ANY)) {
		count(SS_MAP_FULL);
		return 0;
	}
	t = bpf_map_lookup_elem(&sched_threads, &tid);
	if (!t)
		return 0;
	clock = graph_clock_at(tgid, ts);
	t->begun = t->since = ts;
	t->clock_begun = t->clock_since = clock;
	t->tgid = tgid;
	t->tid = tid;
	t->state = state;
	t->cause = WC_UNKNOWN;
	t->node = ~0;
	t->cpu = bpf_get_smp_processor_id();
	return t;
}

/* Number of the system call that the current thread is in, -1: none. */
static __always_inline long syscall_number(void)
{
	void *regs = (void *)bpf_task_pt_regs((void *)bpf_get_current_task_btf());
#if defined(__TARGET_ARCH_x86)
	__u64 number = -1;

	/* The entry of an exception sets it to -1, that of a system call to its number. */
	bpf_probe_read_kernel(&number, sizeof(number),
			      regs + __builtin_offsetof(struct pt_regs, orig_ax));
	return (long)number;
#else
	__s32 number = -1;

	/* struct pt_regs of the kernel: user_pt_regs, orig_x0, syscallno. */
	bpf_probe_read_kernel(&number, sizeof(number), regs + sizeof(struct pt_regs) + 8);
	return number;
#endif
}

static __always_inline bool is_throttled(struct task_struct *p)
{
	if (bpf_core_field_exists(p->throttled))
		return p->throttled;
	if (bpf_core_field_exists(p->se.cfs_rq) &&
	    bpf_core_field_exists(((struct cfs_rq *)0)->throttle_count)) {
		struct cfs_rq *rq = p->se.cfs_rq;

		return rq && rq->throttle_count > 0;
	}
	return false;
}

static __always_inline __u32 cause_of(struct task_struct *task, bool preempted, __u32 state)
{
	long number;

	if (preempted || !state) {
		if (is_throttled(task))
			return WC_THROTTLED;
		if (!preempted && syscall_number() == NR_SCHED_YIELD)
			return WC_YIELDED;
		return WC_PREEMPTED;
	}
	number = syscall_number();
	if (number == NR_FUTEX)
		return WC_FUTEX;
	if (number == -1)
		return WC_FAULT;
	if (number == NR_NANOSLEEP || number == NR_CLOCK_NANOSLEEP)
		return WC_SLEEP;
	if ((state & STATE_UNINTERRUPTIBLE) || BPF_CORE_READ_BITFIELD(task, in_iowait))
		return WC_IO;
	return WC_OTHER;
}

static __always_inline void add_slice(struct task_struct *p, __u64 ts)
{
	__u32 cpu = bpf_get_smp_processor_id();
	struct cpu_slices *c = bpf_map_lookup_elem(&cpu_slices, &cpu);
	struct slice *s;

	if (!c)
		return;
	if (p->pid && c->since) {
		s = &c->slice[c->head & (SLICES - 1)];
		s->begin = c->since;
		s->end = ts;
		s->tgid = p->tgid;
		s->tid = p->pid;
		__builtin_memcpy(s->comm, p->comm, sizeof(s->comm));
		c->head++;
	}
	c->since = ts;
}

#define TAKERS 4

struct takers {
	const struct cpu_slices *slices;
	__u64 begin, end;
	__u64 ns[TAKERS];
	__u32 tgid[TAKERS];
	__u32 last[TAKERS];	/* the latest slice of it */
};

static long look_at_slice(__u32 i, struct takers *c)
{
	__u32 place = (c->slices->head - 1 - i) & (SLICES - 1);
	const struct slice *s = &c->slices->slice[place];
	__u64 low = s->begin > c->begin ? s->begin : c->begin;
	__u64 high = s->end < c->end ? s->end : c->end;
	int k;

	if (i >= c->slices->head || s->end <= c->begin)
		return 1;	/* older ones are older still */
	if (low >= high)
		return 0;
#pragma unroll
	for (k = 0; k < TAKERS; k++) {
		if (!c->ns[k] || c->tgid[k] == s->tgid) {
			if (!c->ns[k])
				c->last[k] = place;
			c->tgid[k] = s->tgid;
			c->ns[k] += high - low;
			return 0;
		}
	}
	/* More than there is room for: the last place goes to the longest. */
	if (high - low > c->ns[TAKERS - 1]) {
		c->tgid[TAKERS - 1] = s->tgid;
		c->last[TAKERS - 1] = place;
		c->ns[TAKERS - 1] = high - low;
	}
	return 0;
}

/* Who ran most on `cpu` from `begin` to `end`, 0: not known. */
static __always_inline const struct slice *taker_of(__u32 cpu, __u64 begin, __u64 end)
{
	struct takers c = { .begin = begin, .end = end };
	__u64 most = 0;
	__u32 found = 0;
	int k;

	c.slices = bpf_map_lookup_elem(&cpu_slices, &cpu);
	if (!c.slices)
		return 0;
	bpf_loop(SLICES, look_at_slice, &c, 0);
#pragma unroll
	for (k = 0; k < TAKERS; k++) {
		if (c.ns[k] > most) {
			most = c.ns[k];
			found = c.last[k];
		}
	}
	return most ? &c.slices->slice[found & (SLICES - 1)] : 0;
}

/* Global: see below. */
__noinline int send_span(struct sched_thread *t, __u64 ts, __u64 woken, __u32 cpu)
{
	const struct slice *taker;
	struct sched_span *s;

	if (!t)
		return 0;
	s = bpf_ringbuf_reserve(&spans, sizeof(*s), 0);
	if (!s) {
		count(SS_LOST_SPANS);
		t->lost++;
		return 0;
	}
	count(SS_SPANS);
	taker = taker_of(woken > t->since ? cpu : t->cpu, woken, ts);
	s->begin = t->since;
	s->woken = woken;
	s->end = ts;
	s->tgid = t->tgid;
	s->tid = t->tid;
	s->by_tgid = t->by_tgid;
	s->by_tid = t->by_tid;
	__builtin_memcpy(s->by_comm, t->by_comm, sizeof(s->by_comm));
	if (taker) {
		s->by_tgid = taker->tgid;
		s->by_tid = taker->tid;
		__builtin_memcpy(s->by_comm, taker->comm, sizeof(s->by_comm));
	}
	s->seq = t->seq;
	s->node = t->node;
	s->cause = t->cause;
	s->flags = (t->in_call ? SP_CALL : 0) | (cpu != t->cpu ? SP_MIGRATED : 0);
	s->cpu_from = t->cpu;
	s->cpu_to = cpu;
	bpf_ringbuf_submit(s, BPF_RB_NO_WAKEUP);
	return 0;
}

/* A global function: verified once, and not again for every way to each of its callers, which took
 * two thirds of the time of loading. */
__noinline int comes(struct sched_thread *t, __u64 ts)
{
	__u64 clock, woken, clock_woken, blocked, worked, wake = 0, late = 0;
	__u32 cpu = bpf_get_smp_processor_id(), cause;

	if (!t)
		return 0;
	clock = graph_clock_at(t->tgid, ts);
	cause = t->cause;
	if (cause >= WAIT_CAUSES)
		return 0;
	if (t->state == TS_OFF) {
		if (cause < WC_WAKEUP) {
			woken = ts;
			clock_woken = clock;
		} else {
			woken = t->woken ? t->woken : ts;
			clock_woken = t->woken ? t->clock_woken : clock;
		}
		blocked = since(woken, t->since, ~0ULL);
		worked = since(clock_woken, t->clock_since, blocked);
		t->wait_ns[cause] += blocked;
		t->work_wait_ns[cause] += worked;
		t->waits[cause]++;
		if (clock != t->clock_since)
			t->work_waits[cause]++;
		if (cause == WC_FAULT)
			t->page_ns += blocked;
		if (cause > WC_WAKEUP) {
			wake = since(ts, woken, ~0ULL);
			late = since(clock, clock_woken, wake);
			t->wait_ns[WC_WAKEUP] += wake;
			t->work_wait_ns[WC_WAKEUP] += late;
			t->waits[WC_WAKEUP]++;
			if (late) {
				t->work_waits[WC_WAKEUP]++;
				if (late > t->wake_max_ns)
					t->wake_max_ns = late;
			}
		}
		if (cpu != t->cpu) {
			t->migrations++;
			if (kind_of(cpu) != kind_of(t->cpu))
				t->kind_changes++;
		}
		if (t->compute && (t->in_call || clock != t->clock_since) &&
		    (cause < WC_WAKEUP || cause == WC_FAULT || cause == WC_IO ||
		     blocked >= min_blocked_ns || wake >= min_wakeup_ns))
			send_span(t, ts, cause < WC_WAKEUP ? t->since : woken, cpu);
	}
	t->state = TS_RUNNING;
	t->since = ts;
	t->clock_since = clock;
	t->cpu = cpu;
	return 0;
}

static __always_inline void enters(struct task_struct *p, __u64 ts)
{
	struct sched_thread *t;

	if (!is_watched(p))
		return;
	t = entry_of(p, ts, TS_OFF);
	if (t && t->state != TS_EXITED)
		comes(t, ts);
}

/* A thread leaves its core that we did not see come: not every switch is traced (some kernels leave
 * out one in hundreds). How long it has run since it last left is known to the scheduler. */
static __noinline void catches_up(struct sched_thread *t, struct task_struct *p, __u64 ts)
{
	__u64 then = t->woken > t->since ? t->woken : t->since;

	if (t->state != TS_OFF || !t->exec_ns)
		return;
	count(SS_MISSED);
	comes(t, ts - since(p->se.sum_exec_runtime, t->exec_ns, since(ts, then, ~0ULL)));
}

static __always_inline void leaves(struct task_struct *p, struct task_struct *next,
				   bool preempted, __u32 state, __u64 ts)
{
	struct sched_thread *t;
	struct thread *own;
	__u64 clock, ran, worked;
	__u32 tid = p->pid, kind;

	if (!is_watched(p))
		return;
	t = entry_of(p, ts, TS_RUNNING);
	if (!t || t->state == TS_EXITED)
		return;
	count(SS_SWITCHES);
	catches_up(t, p, ts);
	t->exec_ns = p->se.sum_exec_runtime;
	clock = graph_clock_at(t->tgid, ts);
	if (t->state == TS_RUNNING) {
		ran = since(ts, t->since, ~0ULL);
		worked = since(clock, t->clock_since, ran);
		kind = kind_of(bpf_get_smp_processor_id());
		t->run_ns[kind & (MAX_CORE_KINDS - 1)] += ran;
		t->work_run_ns += worked;
	}
	t->cause = cause_of(p, preempted, state);
	t->state = TS_OFF;
	t->since = ts;
	t->clock_since = clock;
	t->woken = t->cause < WC_WAKEUP ? ts : 0;
	t->clock_woken = clock;
	t->cpu = bpf_get_smp_processor_id();
	t->by_tgid = next->tgid;
	t->by_tid = next->pid;
	__builtin_memcpy(t->by_comm, next->comm, sizeof(t->by_comm));
	own = bpf_map_lookup_elem(&threads, &tid);
	t->in_call = own && own->depth;
	t->seq = 0;
	t->node = ~0;
	if (t->in_call) {
		t->compute = 1;
		if (own->nodes) {
			t->seq = own->seq;
			t->node = own->accepted ? own->running : ~0;
		}
	} else if (!t->compute) {
		__u64 wanted = t->work_run_ns + t->work_wait_ns[WC_PREEMPTED] +
			       t->work_wait_ns[WC_WAKEUP] + t->work_wait_ns[WC_THROTTLED];

		t->compute = wanted >= WANTED_NS &&
			     wanted * 4 >= since(clock, t->clock_begun, ~0ULL);
	}
}

SEC("tp_btf/sched_switch")
int on_switch(__u64 *ctx)
{
	bool preempted = ctx[0];
	struct task_struct *prev = (void *)ctx[1], *next = (void *)ctx[2];
	__u32 state = ctx[3];
	__u64 ts = bpf_ktime_get_ns();

	add_slice(prev, ts);
	if (!(state & STATE_DEAD))
		leaves(prev, next, preempted, state, ts);
	enters(next, ts);
	return 0;
}

static __always_inline struct sched_thread *wakes(struct task_struct *p)
{
	struct sched_thread *t;
	__u64 ts;

	if (!is_watched(p))
		return 0;
	ts = bpf_ktime_get_ns();
	t = entry_of(p, ts, TS_OFF);
	if (!t || t->state != TS_OFF || t->woken)
		return 0;
	t->clock_woken = graph_clock_at(t->tgid, ts);
	t->woken = ts;
	return t;
}

SEC("tp_btf/sched_wakeup")
int on_wakeup(__u64 *ctx)
{
	wakes((void *)ctx[0]);
	return 0;
}

SEC("tp_btf/sched_wakeup_new")
int on_wakeup_new(__u64 *ctx)
{
	struct sched_thread *t = wakes((void *)ctx[0]);

	/* It has not run yet, and that is known: 0 would say that it is not. */
	if (t && !t->exec_ns)
		t->exec_ns = 1;
	return 0;
}

SEC("tp_btf/sched_process_exit")
int on_exit(__u64 *ctx)
{
	struct task_struct *p = (void *)ctx[0];
	__u64 ts = bpf_ktime_get_ns(), clock, ran, worked;
	__u32 tid = p->pid, tgid = p->tgid, kind;
	struct sched_thread *t;

	if (!bpf_map_lookup_elem(&targets, &tgid))
		return 0;
	t = bpf_map_lookup_elem(&sched_threads, &tid);
	if (!t || t->tgid != tgid)
		return 0;
	catches_up(t, p, ts);
	if (t->state == TS_RUNNING) {
		clock = graph_clock_at(tgid, ts);
		ran = since(ts, t->since, ~0ULL);
		worked = since(clock, t->clock_since, ran);
		kind = kind_of(bpf_get_smp_processor_id());
		t->run_ns[kind & (MAX_CORE_KINDS - 1)] += ran;
		t->work_run_ns += worked;
		t->since = ts;
		t->clock_since = clock;
	}
	t->state = TS_EXITED;
	return 0;
}
