/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-3-Clause) */
/*
 * The one record format between the BPF programs and user space.
 *
 * Everything here has a fixed size and natural alignment without holes. User
 * space derives its numpy types and its constants from the BTF of the built
 * object (agent/kernel/btf.py); nothing in this file is written a second time.
 *
 * Times are ns of CLOCK_MONOTONIC (bpf_ktime_get_ns), never the target's clock.
 */
#ifndef PROFINFER_EVENTS_H
#define PROFINFER_EVENTS_H

#define MAX_SRC 10		/* GGML_MAX_SRC of every known ggml */
#define INLINE_INTS 8		/* positions and rows carried by the event itself */
#define CHUNK_INTS 64
#define RAW_BYTES 512
#define NAME_BYTES 64
#define OP_PARAM_WORDS 16

/* ---- ring "events": calls and graphs; a handful per token --------------- */

enum event_kind {
	EV_CALL_BEGIN = 1,	/* llama_decode / llama_encode / llama_process */
	EV_CALL_END = 2,
	EV_GRAPH_BEGIN = 3,
	EV_GRAPH_END = 4,
	EV_CALL_ABANDONED = 5,	/* the frame is gone without a return: longjmp, thread exit */
	EV_GRAPH_ABANDONED = 6,
};

enum event_level {		/* which function; comes from the attach cookie */
	LV_DECODE = 1,
	LV_ENCODE = 2,
	LV_PROCESS = 3,		/* llama_process: the second argument says which of the two */
	LV_SCHED = 8,		/* ggml_backend_sched_graph_compute_async: the whole graph */
	LV_BACKEND = 9,		/* ggml_backend_graph_compute_async: a split on a backend */
	LV_CPU = 10,		/* ggml_graph_compute: a split on the CPU; ops run inside */
};

enum event_flag {
	EF_KNOWN = 1 << 0,	/* GRAPH_BEGIN: descriptors of this hash were confirmed earlier */
	EF_DESCRIBED = 1 << 1,	/* GRAPH_BEGIN: descriptors of this hash were sent with this seq */
	EF_SAME = 1 << 2,	/* GRAPH_BEGIN at LV_CPU/LV_BACKEND: same nodes as the enclosing graph */
	EF_FAULT = 1 << 3,	/* some read of the target's memory failed: fields are partial */
	EF_SNAPSHOT = 1 << 4,	/* the layout is not checked yet: raw chunks were sent */
	EF_UNPAIRED = 1 << 5,	/* END whose begin was not seen (attached in mid-call) */
	EF_CUT = 1 << 6,	/* more nodes than MAX_NODES: the tail was not looked at */
	EF_TRACED = 1 << 7,	/* GRAPH_BEGIN at LV_CPU: its ops go to ring "ops" */
	EF_SUMMED = 1 << 8,	/* GRAPH_BEGIN at LV_CPU: its ops are added up in "sums" */
	EF_DISARMED = 1 << 9,	/* GRAPH_END: the op probes went away while it ran */
};

struct event {
	__u64 ts;		/* when: entry for BEGIN, return for END */
	__u64 begin_ts;		/* END: ts of its BEGIN, 0 when unpaired */
	__u32 tgid;
	__u32 tid;
	__u32 seq;		/* number of this call or of this graph execution, never 0 */
	__u32 call;		/* seq of the outermost call open on this thread, 0: none */
	__u32 parent;		/* seq of the graph execution that encloses this graph, 0: none;
				 * CALL_*: seq of the call that encloses this one, 0: outermost */
	__u16 kind;		/* enum event_kind */
	__u16 cpu;
	__u32 level;		/* enum event_level */
	__u32 flags;		/* enum event_flag */
	__u64 object;		/* call: llama_context *; LV_SCHED: sched; LV_BACKEND: backend */
	__s64 status;		/* END: the function's return value */
	/* GRAPH_BEGIN */
	__u64 cgraph;
	__u64 uid;		/* ggml_cgraph.uid, 0 when unset or not in this layout */
	__u64 hash;		/* over op, type and shape of each node and its sources */
	__u32 n_nodes;
	__u32 n_pos;		/* elements of the position tensor, 0: none found */
	__u32 n_out;		/* elements of the output-row ids, 0: none found */
	__u32 batch_tokens;	/* CALL_BEGIN of LV_DECODE/LV_ENCODE: llama_batch.n_tokens, else 0 */
	__s32 pos[INLINE_INTS];	/* the first of them; the rest comes as int chunks */
	__s32 out[INLINE_INTS];
	/* GRAPH_END at LV_CPU */
	__u32 hits;		/* op probe hits on this thread inside this graph */
	__u32 accepted;		/* of these, records sent to ring "ops" or lost there */
	__u32 lost;		/* of the accepted, reserve failures */
	__u32 op_faults;	/* hits whose node could not be told for a failed read */
	/* GRAPH_BEGIN */
	__u32 sum_slot;		/* EF_SUMMED: index into "owners" + 1 */
	__u32 tokens;		/* of the outermost graph: rows it takes from a table,
				 * 0: none (and where its begin was not seen) */
};

/* ---- ring "ops": op_batch; one op_hit per executed kernel on thread 0 -------------------- */

enum op_flag {
	OP_FUSED = 1u << 31,	/* this node and the next ran as one kernel */
	OP_NODE_MASK = 0x00ffffff,
};

struct op_hit {
	__u64 ts;
	__u32 seq;		/* of the LV_CPU graph execution */
	__u32 node;		/* index in that graph | enum op_flag */
};

/* A ring's record holds several: in an engine at work, where caches are cold, a record of its own
 * costs a hit more than all the rest of the program. */
#define OP_BATCH 16

struct op_batch {
	__u32 count;		/* of the hits, those that are used */
	__u32 seq;		/* theirs */
	struct op_hit hit[OP_BATCH];
};

/* ---- ring "nodes": descriptors of a graph not seen before ---------------- */

enum node_role {
	ND_NODE = 0,		/* index = its place in cgraph->nodes */
	ND_LEAF = 1,		/* a source with op NONE: index = the node that uses it */
};

struct node_desc {
	__u64 addr;		/* struct ggml_tensor * */
	__u32 seq;		/* of the GRAPH_BEGIN with EF_DESCRIBED */
	__u32 index;
	__u32 role;		/* enum node_role */
	__u32 slot;		/* ND_LEAF: which source of that node */
	__u32 type;
	__u32 op;
	__u32 flags;		/* ggml_tensor.flags */
	__u32 fault;		/* 1: the tensor could not be read, other fields are unknown */
	__u32 tgid;
	__u32 reserved;
	__s64 ne[4];
	__u64 nb[4];
	__s32 op_params[OP_PARAM_WORDS];
	__u64 src[MAX_SRC];
	__u64 view_src;
	__u64 view_offs;
	__u64 data;
	__u64 buffer;
	__u64 extra;
	char name[NAME_BYTES];	/* not NUL-terminated when cut */
};

/* ---- ring "ints": positions, output rows, expert sets -------------------- */

enum chunk_what {
	CH_POS = 1,		/* elements [offset, offset + count) of the position tensor */
	CH_OUT = 2,		/* likewise of the output-row ids */
	CH_EXPERTS = 3,		/* MUL_MAT_ID at `node`: value[] is a bitmap of the experts used,
				 * count = how many distinct, offset = ids read */
};

struct int_chunk {
	__u64 ts;
	__u32 seq;
	__u32 node;
	__u16 what;		/* enum chunk_what */
	__u16 count;
	__u32 offset;
	__u32 tgid;
	__u32 reserved;
	__s32 value[CHUNK_INTS];
};

/* ---- ring "raws": bytes of a live graph, for choosing the layout ---------- */

enum raw_what {
	RAW_CGRAPH = 1,		/* index 0 */
	RAW_NODE = 2,		/* index = node */
	RAW_SOURCE = 3,		/* unused by the kernel side; for tests */
};

struct raw_chunk {
	__u64 addr;
	__u32 seq;
	__u16 what;		/* enum raw_what */
	__u16 index;
	__u32 size;		/* bytes that could be read, <= RAW_BYTES */
	__u32 tgid;
	__u8 bytes[RAW_BYTES];
};

/* ---- configuration: map "layouts", one entry per distinct layout ---------- */

enum layout_state {
	LY_UNKNOWN = 0,		/* send a snapshot of each graph, read nothing else */
	LY_CHOSEN = 1,		/* a live graph checked out under it */
	LY_ASSUMED = 2,		/* read graphs by it, and send snapshots until it was checked */
};

struct layout {
	__u32 state;		/* enum layout_state */
	/* ggml_cgraph */
	__u16 g_n_nodes, g_nodes, g_uid;	/* offsets; g_uid 0xffff: no such field */
	/* ggml_tensor */
	__u16 t_type, t_buffer, t_ne, t_nb, t_op, t_op_params, t_flags;
	__u16 t_src, t_view_src, t_view_offs, t_data, t_name, t_extra;	/* 0xffff: absent */
	__u16 t_size;		/* bytes of ggml_tensor that may be read at once, <= RAW_BYTES */
	__u16 n_src;		/* <= MAX_SRC */
	/* numbers of this build's operators, from its own table; 0xffff: not known */
	__u16 op_rope, op_get_rows, op_mul_mat_id;
	__u16 reserved;
	__u32 type_i32;		/* number of type i32 in this build; ~0: not known */
};

/* ---- map "targets": what is wanted of a process ----------------------------- */

enum op_mode {
	OPS_OFF = 0,
	OPS_TRACE = 1,		/* a record per kernel */
	OPS_SUM = 2,		/* sums per node, where the graph has a slot; no records */
};

enum target_flag {
	TG_IGNORED = 1 << 0,	/* not to be looked at, whatever links say */
	TG_NO_CALLS = 1 << 1,	/* these levels are shed, though others need the links */
	TG_NO_GRAPHS = 1 << 2,
	TG_TEMPLATE = 1 << 3,	/* map "templates": there is one */
	TG_NO_WAITS = 1 << 4,	/* shed: sched.bpf.c does not look at its threads, */
	TG_NO_FAULTS = 1 << 5,	/* nor faults.bpf.c at its page faults */
};

struct target {
	__u32 layout;		/* index into "layouts" */
	__u32 mode;		/* enum op_mode, for graphs that begin from now on */
	__u32 epoch;		/* changes whenever op probes were taken away */
	__u32 flags;		/* enum target_flag */
	__u32 generation;	/* changes whenever returns may have been missed */
	__u32 reserved;
};

/* Links of the daemon belong to a file and see every process that maps it. What is wanted of
 * a process that nobody has said anything about yet is in map "templates", by the number that
 * the cookie carries: so the first token of a new process is seen. */
#define MAX_TEMPLATES 256

/* ---- map "known": graphs by hash; "spares", "sums", "owners": sampled op times --- */

enum known_state {
	KN_SENT = 1,		/* descriptors were sent */
	KN_CONFIRMED = 2,	/* user space has them all */
};

struct hash_key {
	__u64 hash;		/* begins with the number of nodes */
	__u32 tgid;
	__u32 pad;
};

struct known_graph {
	__u32 state;		/* enum known_state */
	__u32 slot;		/* index into "owners" + 1; 0: no slot */
	__u32 first;		/* node n of this graph is element first + n of "sums" */
	__u32 n_nodes;		/* elements reserved there */
};

#define SIZE_UNKNOWN 16

struct spare_key {
	__u32 tgid;
	__u32 n_nodes;		/* of the graph; 0: any */
	__u32 size_class;	/* log2 of event.tokens, 15 at most; SIZE_UNKNOWN */
	__u32 reserved;
};

struct spare_slot {
	__u32 slot;		/* index into "owners" + 1 */
	__u32 first;		/* node n is element first + n of "sums" */
	__u32 n_nodes;		/* elements reserved there: larger graphs are not added up */
	__u32 reserved;
};

#define SUM_BUCKETS 16
#define SUM_FIRST_LOG2 8	/* bucket 0: below 512 ns; each next one twice as long */
#define MAX_SLOTS 256
#define MAX_SUMS 65536

/* Times in ns since the slot was given out. Written by thread 0 of the one execution
 * that owns the slot, so without atomics; 32-bit fields wrap and are read as differences. */
struct node_sum {
	__u64 time;
	__u32 calls;
	__u32 fused;		/* of the calls, those that ran this node and the next */
	__u32 min;
	__u32 max;
	__u32 bucket[SUM_BUCKETS];
};

/* ---- counters that only grow: map "stats", and "tallies" for each of many targets ---- */

enum stat {
	ST_HITS_CALL, ST_HITS_GRAPH, ST_HITS_OP,	/* probe hits of watched processes */
	ST_HITS_OTHER_THREAD,	/* op hits on threads other than thread 0 */
	ST_OP_NESTED,		/* op hits dropped: not the next node of this thread's graph */
	ST_LOST_EVENTS, ST_LOST_OPS, ST_LOST_NODES, ST_LOST_INTS, ST_LOST_RAWS,
	ST_FAULT_CALL, ST_FAULT_GRAPH, ST_FAULT_NODE, ST_FAULT_OP, ST_FAULT_INTS,
	ST_MAP_FULL,		/* a thread's state found no room */
	ST_SLOT_BUSY,		/* executions not summed: another thread ran the same graph */
	ST_SKIPPED_RETURN,	/* session: calls not followed, for their return could do damage:
				 * no code at the return address, or one waits on another stack */
	ST_WALKED,		/* nodes looked at, of graphs that no uid told to be known */
	ST_COUNT,
};

/* attach cookie: level in the low byte, how far the site has moved the stack
 * pointer below its value at function entry (bytes; 0xffff: unknown) in the next
 * 16 bits, then index into "templates" + 1 (0: none). */

/* levels used by op probes in their cookies */
enum op_probe {
	OPP_DISPATCH = 16,	/* (params, tensor) */
	OPP_FUSED2 = 17,	/* (params, tensor, next tensor): both nodes in one kernel */
};

#endif
