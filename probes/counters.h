/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-3-Clause) */
/* What counters.bpf.c and user space share. */
#ifndef PROFINFER_COUNTERS_H
#define PROFINFER_COUNTERS_H

#define MAX_COUNTED 8		/* events of one thread */
#define MAX_COUNTED_THREADS 512
#define NO_OP 0xffffffff	/* count_key.op: outside every op */
#define MAX_COUNTED_NAME 64	/* of a ggml_tensor's name */
#define NO_FIELD 0xffff		/* count_layout: this build has no such field */

/* What an event has counted: value, in `running` of `enabled` ns. */
struct count_reading {
	__u64 value, enabled, running;
};

struct count_key {
	__u32 tgid;
	__u32 op;		/* ggml_tensor.op; NO_OP */
	__u32 type;		/* of the leaf; NO_OP: there is none, or it could not be read */
	__u16 own;		/* type of the op's own result; 0xffff: likewise */
	__u16 slot;		/* which source the leaf is */
	__u64 leaf;		/* the weight or cache that it works on, a ggml_tensor; 0: none */
};

/* Only growing. Written by all threads of the process, with atomic additions. */
struct count_sum {
	__u64 calls;
	char name[MAX_COUNTED_NAME];	/* of the leaf */
	struct count_reading events[MAX_COUNTED];
};

/* A thread whose events are open. Written by user space when it is new, then by the thread. */
struct count_thread {
	__u32 slot;		/* event i is element slot * MAX_COUNTED + i of map "events" */
	__u32 n_events;
	__u32 started;		/* `last` and `key` hold */
	__u32 failed;		/* readings that the kernel refused */
	struct count_key key;	/* what is running */
	struct count_reading last[MAX_COUNTED];
	struct count_reading first[MAX_COUNTED];	/* where the sums begin */
};

/* Where to find things in a ggml_tensor; map "count_layouts" by tgid. */
struct count_layout {
	__u16 t_op, t_src, t_type, n_src, t_view_src, t_flags, t_name, reserved;
};

#endif
