/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-3-Clause) */
/*
 * What the token, graph and op programs keep of a thread inside a call or graph: the value of
 * map "threads". Other programs read it to know what a thread was doing.
 */
#ifndef PROFINFER_THREAD_H
#define PROFINFER_THREAD_H

#define MAX_FRAMES 8
#define RECENT 8
#define WINDOW 8		/* node pointers read at once by the op program */
#define MAX_USED_EXPERTS 32

struct frame {
	__u64 ts;
	__u64 sp;		/* at function entry */
	__u64 object;
	__u32 seq;
	__u32 level;
	/* of this frame and those below it, so that nothing is searched for later */
	__u32 call;		/* seq of the outermost call */
	__u32 inner_call, inner_graph;	/* seq of the innermost call and graph */
	__u32 open;		/* bit per level */
};

struct thread {
	/* What the op program needs comes first, side by side: every cache line of it is cold again
	 * when the next kernel begins. The CPU graph that runs on this thread: */
	__u64 nodes;		/* 0: none, or op level off */
	__u64 last_ts;		/* OPS_SUM: when the running op began */
	__u32 last_sum;		/* its element of "sums" + 1; 0: none running */
	__u32 sum_first, sum_slot;
	__u32 mode, epoch;
	__u32 n_nodes;
	__u32 next;		/* first index that a hit may name */
	__u32 seq;
	__u32 has_experts;
	__u32 hits, accepted, lost, op_faults;
	__u32 running;		/* the node that runs, once `accepted` */
	__u32 batched;		/* hits in `batch` */
	__u32 layout;
	__u64 window[WINDOW];	/* scratch: node pointers */
	struct op_hit batch[OP_BATCH];	/* OPS_TRACE: on their way to the ring */
	struct frame frames[MAX_FRAMES];
	__u32 depth;
	__u32 generation;
	/* the whole graph that is open on this thread (LV_SCHED) */
	__u64 whole_nodes_first, whole_nodes_last, whole_hash;
	__u32 whole_n_nodes, whole_flags;
	__u32 tokens;		/* of the outermost graph: rows taken from a table */
	/* scratch of this thread's programs */
	__u32 has_window;	/* the walk: whether it holds the pointers around this node */
	__u32 on_clock;		/* this thread's CPU graph is on the process's graph clock */
	__u32 pad;
	__u8 tensor[RAW_BYTES + 64];
	__u8 source[128];
	__u32 source_op[MAX_SRC], source_type[MAX_SRC];
	__u64 recent[RECENT];	/* addresses of the last nodes of the walk */
	__u32 bitmap[CHUNK_INTS];
	__u32 ids[MAX_USED_EXPERTS];
};

#endif
