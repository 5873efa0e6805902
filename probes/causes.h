/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-3-Clause) */
/*
 * Records and maps of the programs that say why something was slow: scheduler, page faults,
 * barriers. The same rules as in events.h: fixed sizes, natural alignment, no holes; user
 * space derives its types from the BTF of the built objects. Times are ns of CLOCK_MONOTONIC.
 *
 * Everything is keyed by process (tgid) or thread (tid): one set of programs serves every
 * watched process.
 */
#ifndef PROFINFER_CAUSES_H
#define PROFINFER_CAUSES_H

/* ---- ring "spans" (sched.bpf.c): a compute thread that was off its core ------ */

#define WAIT_CAUSES 10

enum wait_cause {
	/* ready, and not running */
	WC_PREEMPTED = 0,	/* it could have gone on: another took the core */
	WC_YIELDED = 1,		/* it gave the core away itself (sched_yield) */
	WC_THROTTLED = 2,	/* its control group had used up its CPU quota */
	WC_WAKEUP = 3,		/* from its wake-up until it ran: after any blocked wait */
	/* blocked */
	WC_FUTEX = 4,		/* on a futex: a barrier, a lock, or waiting for work */
	WC_FAULT = 5,		/* for a page, outside any system call */
	WC_IO = 6,		/* for I/O in a system call */
	WC_SLEEP = 7,		/* nanosleep and the like */
	WC_OTHER = 8,		/* in any other system call */
	WC_UNKNOWN = 9,		/* it had left its core before it was watched */
};

enum span_flag {
	SP_CALL = 1 << 0,	/* the thread was inside a call or graph that it had entered itself */
	SP_MIGRATED = 1 << 1,	/* it came back on another core */
};

/* Only those in which a graph of the process ran, and long ones: see sched.bpf.c. */
struct sched_span {
	__u64 begin;		/* it left its core */
	__u64 woken;		/* it was ready again; = begin for WC_PREEMPTED .. WC_THROTTLED */
	__u64 end;		/* it ran again */
	__u32 tgid;
	__u32 tid;
	__u32 by_tgid;		/* who ran most on the core while it was ready; 0: nobody (idle) */
	__u32 by_tid;
	char by_comm[16];
	__u32 seq;		/* SP_CALL: graph execution at op level at that moment, 0: none */
	__u32 node;		/* the node that ran in it, ~0: none yet */
	__u16 cause;		/* enum wait_cause: why it left */
	__u16 flags;		/* enum span_flag */
	__u16 cpu_from, cpu_to;
};

/* Map "sched_threads", by tid: where the time of a thread of a watched process goes. "work":
 * while a graph of the process ran on the CPU. Times in ns since it was first seen. */
#define MAX_CORE_KINDS 8

enum thread_state {
	TS_RUNNING = 0,
	TS_OFF = 1,		/* off its core for `cause` */
	TS_EXITED = 2,		/* gone: user space adds it up and deletes the entry */
};

struct sched_thread {
	__u64 begun;		/* first seen */
	__u64 since;		/* the present state began */
	__u64 woken;		/* TS_OFF: ready again since, 0: still blocked */
	__u64 clock_begun;	/* graph clock of the process at `begun`, `since`, `woken` */
	__u64 clock_since;
	__u64 clock_woken;
	__u64 run_ns[MAX_CORE_KINDS];	/* running, by kind of core (map "core_kinds") */
	__u64 work_run_ns;
	__u64 wait_ns[WAIT_CAUSES];
	__u64 work_wait_ns[WAIT_CAUSES];
	__u64 page_ns;		/* blocked for pages since its last fault record */
	__u64 wake_max_ns;	/* longest time from wake-up to running, while a graph ran */
	__u64 exec_ns;		/* what the scheduler says it had run when it last left a core; 0: not known, 1: it is new */
	__u32 waits[WAIT_CAUSES];	/* how often */
	__u32 work_waits[WAIT_CAUSES];
	__u32 migrations;	/* came back on another core */
	__u32 kind_changes;	/* of these, to a core of another kind */
	__u32 tgid;
	__u32 tid;
	__u32 by_tgid, by_tid;	/* TS_OFF: who got the core */
	char by_comm[16];
	__u32 seq, node;	/* TS_OFF: as in struct sched_span */
	__u16 state;		/* enum thread_state */
	__u16 cause;		/* TS_OFF: enum wait_cause */
	__u16 cpu;
	__u16 in_call;		/* TS_OFF: inside a call or graph that it had entered itself */
	__u32 compute;		/* 1: takes part in computing graphs */
	__u32 lost;		/* records of it that found no room */
};

/* Map "graph_clocks", by tgid: how long graphs have been running on the CPU. */
struct graph_clock {
	__u64 total;		/* ns, up to `since` while one runs */
	__u64 since;
	__u32 open;		/* how many run now */
	__u32 reserved;
};

enum sched_stat {		/* per-CPU map "sched_stats" */
	SS_SWITCHES,		/* of threads of watched processes */
	SS_MISSED,		/* of these, whose coming to their core was not traced */
	SS_SPANS,		/* recorded */
	SS_LOST_SPANS,
	SS_MAP_FULL,		/* a thread found no room */
	SS_COUNT,
};

/* ---- ring "faults" (faults.bpf.c): one per page fault ------------------------- */

enum fault_kind {
	FK_MINOR = 0,
	FK_MAJOR = 1,
};

struct fault_rec {
	__u64 ts;		/* when it was resolved */
	__u64 addr;
	__u64 wait_ns;		/* blocked for it, ~0: not known (no sched.bpf.c) */
	__u32 tgid;
	__u32 tid;
	__u32 seq;		/* as in struct sched_span */
	__u32 node;
	__u16 kind;		/* enum fault_kind */
	__u16 cpu;
	__u32 reserved;
};

/* Map "fault_counts", by tgid: all faults, also those without a record. */
struct fault_count {
	__u64 faults[2];	/* by enum fault_kind */
	__u64 unrecorded[2];	/* beyond what the ring held, or beyond the limit per second */
	__u64 lost;		/* of these, beyond what the ring held */
	__u64 second;		/* of the limit: ts >> 30 */
	__u64 in_second;
};

enum fault_stat {		/* per-CPU map "fault_stats" */
	FS_FAULTS,
	FS_LOST,		/* the ring was full */
	FS_LIMITED,		/* beyond the limit per second */
	FS_MAP_FULL,
	FS_COUNT,
};

/* ---- ring "barriers" (barrier.bpf.c): one per op and thread ------------------- */

struct barrier_rec {
	__u64 begin;		/* the op's entry on this thread */
	__u64 arrived;		/* its last arrival at a barrier before its next op */
	__u64 end;		/* its next op's entry, 0: not known */
	__u64 tensor;		/* struct ggml_tensor * of the op */
	__u64 ready_ns;		/* begin to arrived: ready and not running */
	__u64 paging_ns;	/* begin to arrived: blocked for pages */
	__u64 blocked_ns;	/* arrived to end: asleep; the rest of it was spinning or ready */
	__u64 late_ns;		/* arrived to end: ready and not running */
	__u32 tgid;
	__u32 tid;
	__u32 arrivals;		/* at barriers between begin and end */
	__u16 cpu;		/* at arrived */
	__u16 reserved;
};

enum barrier_stat {		/* per-CPU map "barrier_stats" */
	BS_HITS,
	BS_RECORDS,
	BS_LOST,
	BS_MAP_FULL,
	BS_COUNT,
};

enum barrier_probe {		/* attach cookies */
	BP_OP = 32,		/* (params, tensor): an op begins on this thread */
	BP_ARRIVE = 33,		/* ggml_barrier */
};

#endif
