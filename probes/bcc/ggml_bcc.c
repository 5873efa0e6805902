/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-3-Clause) */
/*
 * Token, graph and op level in BCC's dialect, for boards without a built object.
 *
 * Records, maps and program names are those of ggml.bpf.c, so user space does not tell the
 * two apart. What differs comes from what older kernels and BCC's loader have:
 *
 *  - Programs are not sleepable: memory that is valid but not present is not read, and
 *    counted as a fault.
 *  - No bpf_loop: loops are bounded, and a graph is walked WALK nodes at a time by programs
 *    that tail-call themselves, 33 times at most. Hence MAX_NODES.
 *  - No sums (sampling) and no expert sets: ops are traced or not looked at.
 */
#include <uapi/linux/ptrace.h>
#include "events.h"

#define WALK 128
#define MAX_NODES (15 * WALK)
#define MAX_FRAMES 8
#define MAX_INT_CHUNKS 256
#define SNAPSHOT_NODES 64
#define WINDOW 8
#define ABSENT 0xffff
#define TENSOR_FLAG_COMPUTE 16
#define MOVED_UNKNOWN 0xffff
#ifndef BPF_RB_NO_WAKEUP
#define BPF_RB_NO_WAKEUP 1
#endif

#if defined(bpf_target_x86)
#define RETURN_POPS 8
#define BATCH_ADDR(ctx, sp) ((sp) + 8)
#elif defined(bpf_target_arm64)
#define RETURN_POPS 0
#define BATCH_ADDR(ctx, sp) PT_REGS_PARM2(ctx)
#else
#error "the calling convention of this architecture is not known here"
#endif

enum tail { TAIL_WALK, TAIL_DESCRIBE, TAIL_POSITIONS, TAIL_FINISH, TAILS };

struct frame {
	u64 ts;
	u64 sp;
	u64 object;
	u32 seq;
	u32 level;
	u32 call;
	u32 inner_call, inner_graph;
	u32 pad;
};

struct graph_key {
	u64 cgraph;
	u32 tgid;
	u32 pad;
};

struct graph_info {
	u64 uid;
	u64 nodes;
	u64 hash;
	u64 pos_tensor;
	u64 out_tensor;
	u32 n_nodes;
	u32 pad;
};

struct thread {
	struct frame frames[MAX_FRAMES];
	u32 depth;
	u32 layout;
	u64 whole_nodes_first, whole_nodes_last, whole_hash;
	u32 whole_n_nodes, whole_flags;
	/* the CPU graph that runs on this thread; nodes 0: none, or op level off */
	u64 nodes;
	u32 n_nodes;
	u32 next;
	u32 seq;
	u32 hits, accepted, lost, op_faults;
	/* the graph that is being entered, handed from program to program */
	u32 at;
	u32 faults;
	struct graph_info info;
	u64 first, last;
	u64 where, found[16];
	u32 slot, pad;
	struct event e;
	u64 window[WINDOW];
	u8 tensor[RAW_BYTES + 64];
	u8 source[128];
	u32 source_op[MAX_SRC], source_type[MAX_SRC];
};

struct counters {
	u64 value[ST_COUNT];
};

BPF_RINGBUF_OUTPUT(events, EVENTS_PAGES);
BPF_RINGBUF_OUTPUT(ops, OPS_PAGES);
BPF_RINGBUF_OUTPUT(nodes, NODES_PAGES);
BPF_RINGBUF_OUTPUT(ints, INTS_PAGES);
BPF_RINGBUF_OUTPUT(raws, RAWS_PAGES);
BPF_ARRAY(layouts, struct layout, 16);
BPF_HASH(targets, u32, struct target, 1024);
BPF_HASH(threads, u32, struct thread, 1024);
BPF_TABLE("lru_hash", struct graph_key, struct graph_info, graphs, 1024);
BPF_TABLE("lru_hash", struct hash_key, struct known_graph, known, 4096);
BPF_HASH(spares, struct spare_key, struct spare_slot, 1);	/* not used here */
BPF_PERCPU_ARRAY(stats, struct counters, 1);
BPF_ARRAY(last_seq, u32, 1);
BPF_TABLE("lru_hash", u32, u8, taken, 1024);
BPF_ARRAY(blank, struct thread, 1);
BPF_PROG_ARRAY(tails, TAILS);

static __always_inline void count(u32 which)
{
	u32 zero = 0;
	struct counters *c = stats.lookup(&zero);

	if (c)
		__sync_fetch_and_add(&c->value[which], 1);
}

/* A number that no other call or graph has, 0: none found. BCC compiles for the oldest
 * instruction set, whose atomic addition returns nothing: inserting is atomic too. */
static __always_inline u32 new_seq(void)
{
	u32 zero = 0, *last = last_seq.lookup(&zero), seq;
	u8 one = 1;
	int i;

	if (!last)
		return 0;
	seq = *last;
#pragma clang loop unroll(disable)
	for (i = 0; i < 16; i++) {
		seq++;
		if (seq && !taken.insert(&seq, &one)) {
			*last = seq;
			return seq;
		}
	}
	return 0;
}

static __always_inline bool is_call(u32 level)
{
	return level < LV_SCHED;
}

static __always_inline bool fetch(void *to, u32 size, u64 from)
{
	return bpf_probe_read_user(to, size, (void *)from) == 0;
}

/* The asm hides from the compiler what it could prove: the verifier cannot. */
static __always_inline u64 at_most(u64 n, u64 most)
{
	asm volatile("" : "+r"(n));
	return n > most ? most : n;
}

static __always_inline u64 tensor_u64(const struct thread *t, u16 off)
{
	return *(const u64 *)(t->tensor + (off & 0x1f8));
}

static __always_inline u32 tensor_u32(const struct thread *t, u16 off)
{
	return *(const u32 *)(t->tensor + (off & 0x1fc));
}

static __always_inline u64 mix(u64 h, u64 v)
{
	h = (h ^ v) * 0x9e3779b97f4a7c15ULL;
	return h ^ (h >> 29);
}

static __always_inline struct thread *this_thread(void)
{
	u32 tid = bpf_get_current_pid_tgid();

	return threads.lookup(&tid);
}

static __always_inline struct layout *layout_of(const struct thread *t)
{
	u32 index = t->layout;

	return layouts.lookup(&index);
}

/* ---- frames ---------------------------------------------------------------------- */

static __always_inline void fill_event(struct event *e, u64 ts, u32 kind)
{
	u64 id = bpf_get_current_pid_tgid();

	__builtin_memset(e, 0, sizeof(*e));
	e->ts = ts;
	e->tgid = id >> 32;
	e->tid = id;
	e->kind = kind;
	e->cpu = bpf_get_smp_processor_id();
}

static __always_inline void send_event(struct event *e)
{
	if (events.ringbuf_output(e, sizeof(*e), BPF_RB_NO_WAKEUP))
		count(ST_LOST_EVENTS);
}

/* The asm hides from the compiler that the mask is superfluous: the verifier wants it. */
static __always_inline struct frame *frame_at(struct thread *t, u32 i)
{
	asm volatile("" : "+r"(i));
	return &t->frames[i & (MAX_FRAMES - 1)];
}

static __always_inline struct frame *top_frame(struct thread *t)
{
	return t->depth ? frame_at(t, t->depth - 1) : 0;
}

/* Drops frames that cannot be open any more (see ggml.bpf.c): on entry those that were
 * entered lower on the stack, on return those above the frame that returns. */
static __always_inline void drop_frames(struct thread *t, u64 sp, u64 ts, u32 level, bool returning)
{
	int i;

#pragma clang loop unroll(disable)
	for (i = 0; i < MAX_FRAMES; i++) {
		struct frame *f = top_frame(t);

		if (!f)
			break;
		if (returning ? f->level == level && f->sp == sp :
				f->sp > sp || (f->sp == sp && f->level != level))
			break;
		fill_event(&t->e, ts, is_call(f->level) ? EV_CALL_ABANDONED : EV_GRAPH_ABANDONED);
		t->e.begin_ts = f->ts;
		t->e.seq = f->seq;
		t->e.level = f->level;
		t->e.object = f->object;
		send_event(&t->e);
		if (f->level == LV_CPU)
			t->nodes = 0;
		t->depth--;
	}
}

static __always_inline bool has_frame(const struct thread *t, u32 level, u64 sp)
{
	u32 i;

#pragma clang loop unroll(disable)
	for (i = 0; i < MAX_FRAMES; i++)
		if (i < t->depth && t->frames[i].level == level && t->frames[i].sp == sp)
			return true;
	return false;
}

static __always_inline struct thread *enter_thread(u32 tid, u32 layout)
{
	struct thread *t = threads.lookup(&tid), *b;
	u32 zero = 0;

	if (t)
		return t;
	b = blank.lookup(&zero);
	if (!b)
		return 0;
	if (threads.insert(&tid, b)) {
		count(ST_MAP_FULL);
		return 0;
	}
	t = threads.lookup(&tid);
	if (t)
		t->layout = layout;
	return t;
}

/* ---- entering a graph --------------------------------------------------------------- */

static __always_inline void send_raw(u64 addr, u32 seq, u16 what, u16 index)
{
	struct raw_chunk *r = raws.ringbuf_reserve(sizeof(struct raw_chunk));
	u32 size = RAW_BYTES;

	if (!r) {
		count(ST_LOST_RAWS);
		return;
	}
	if (!fetch(r->bytes, RAW_BYTES, addr)) {
		size = 320;	/* the arena may end before 512 bytes do */
		__builtin_memset(r->bytes, 0, RAW_BYTES);
		if (!fetch(r->bytes, 320, addr)) {
			size = 0;
			count(ST_FAULT_GRAPH);
		}
	}
	r->addr = addr;
	r->seq = seq;
	r->what = what;
	r->index = index;
	r->size = size;
	r->tgid = bpf_get_current_pid_tgid() >> 32;
	raws.ringbuf_submit(r, BPF_RB_NO_WAKEUP);
}

static __always_inline void snapshot(struct thread *t)
{
	u32 i;

	t->e.flags |= EF_SNAPSHOT;
	send_raw(t->e.cgraph, t->e.seq, RAW_CGRAPH, 0);
#pragma clang loop unroll(disable)
	for (i = 0; i < SNAPSHOT_NODES; i++) {
		u64 addr = 0;

		if (i >= t->info.n_nodes || !fetch(&addr, 8, t->info.nodes + 8ULL * i) || !addr)
			break;
		send_raw(addr, t->e.seq, RAW_NODE, i);
	}
}

static __always_inline void graph_fault(struct thread *t)
{
	t->e.flags |= EF_FAULT;
	count(ST_FAULT_GRAPH);
}

/* Which program goes on with the graph; TAILS: there is nothing to go on with. */
static __always_inline u32 enter_graph(struct thread *t, const struct layout *l)
{
	struct graph_key key = { .cgraph = t->e.cgraph, .tgid = t->e.tgid };
	struct graph_info *g = &t->info, *seen;

	__builtin_memset(g, 0, sizeof(*g));
	if (!fetch(&g->n_nodes, 4, t->e.cgraph + l->g_n_nodes) ||
	    !fetch(&g->nodes, 8, t->e.cgraph + l->g_nodes) ||
	    (l->g_uid != ABSENT && !fetch(&g->uid, 8, t->e.cgraph + l->g_uid))) {
		graph_fault(t);
		return TAILS;
	}
	if (g->n_nodes > MAX_NODES) {
		g->n_nodes = MAX_NODES;
		t->e.flags |= EF_CUT;
	}
	t->e.n_nodes = g->n_nodes;
	t->e.uid = g->uid;
	if (!g->n_nodes)
		return TAILS;
	if (l->state != LY_CHOSEN) {
		snapshot(t);
		if (l->state == LY_UNKNOWN)
			return TAILS;
	}
	if (!fetch(&t->first, 8, g->nodes) ||
	    !fetch(&t->last, 8, g->nodes + 8ULL * (g->n_nodes - 1))) {
		graph_fault(t);
		return TAILS;
	}
	if (t->e.level != LV_SCHED && t->e.parent && t->first == t->whole_nodes_first &&
	    t->last == t->whole_nodes_last && g->n_nodes == t->whole_n_nodes) {
		t->e.flags |= EF_SAME | t->whole_flags;
		g->hash = t->whole_hash;
		return TAIL_POSITIONS;
	}
	seen = graphs.lookup(&key);
	if (seen && g->uid && seen->uid == g->uid && seen->nodes == g->nodes &&
	    seen->n_nodes == g->n_nodes) {
		struct hash_key hk = { .hash = seen->hash, .tgid = t->e.tgid };
		struct known_graph *k = known.lookup(&hk);

		if (k && k->state == KN_CONFIRMED) {
			*g = *seen;
			t->e.flags |= EF_KNOWN;
			return TAIL_POSITIONS;
		}
	}
	t->at = 0;
	t->faults = 0;
	g->hash = g->n_nodes;
	return TAIL_WALK;
}

static __always_inline u64 mix_source(struct thread *t, const struct layout *l, u64 addr, u32 slot)
{
	u64 *ne, h;
	u32 op, type;

	if (!fetch(t->source, 96, addr))
		return 0;
	type = *(u32 *)(t->source + (l->t_type & 0x3c));
	op = *(u32 *)(t->source + (l->t_op & 0x7c));
	ne = (u64 *)(t->source + (l->t_ne & 0x38));
	t->source_op[slot] = op;
	t->source_type[slot] = type;
	h = mix(slot + 1, ((u64)op << 32) | type);
	h = mix(h, ne[0] ^ (ne[1] << 32));
	return mix(h, ne[2] ^ (ne[3] << 32)) ?: 1;
}

/* Fingerprint of one node: its op, type and shape, and those of its sources. */
static __always_inline void walk_node(struct thread *t, const struct layout *l, u32 i)
{
	struct graph_info *g = &t->info;
	u32 op, flags = 0;
	u64 addr = 0, hash;
	u32 s;

	if (!fetch(&addr, 8, g->nodes + 8ULL * i) || !addr || !fetch(t->tensor, 320, addr)) {
		t->faults++;
		return;
	}
	op = tensor_u32(t, l->t_op);
	/* Newer engines build alternatives and choose by a flag which are computed. */
	if (l->t_flags != ABSENT)
		flags = (tensor_u32(t, l->t_flags) & TENSOR_FLAG_COMPUTE) << 12;
	hash = mix(g->hash, ((u64)(op | flags) << 32) | tensor_u32(t, l->t_type));
	hash = mix(hash, tensor_u64(t, l->t_ne) ^ (tensor_u64(t, l->t_ne + 8) << 32));
	hash = mix(hash, tensor_u64(t, l->t_ne + 16) ^ (tensor_u64(t, l->t_ne + 24) << 32));
	t->source_op[0] = t->source_op[1] = ~0;
#pragma clang loop unroll(disable)
	for (s = 0; s < MAX_SRC; s++) {
		u64 src = tensor_u64(t, l->t_src + 8 * s), h = 1;

		if (s < l->n_src && src) {
			h = mix_source(t, l, src, s);
			if (!h)
				t->faults++;
		}
		hash = mix(hash, h);
	}
	g->hash = hash;
	if (op == l->op_rope && !g->pos_tensor)
		g->pos_tensor = tensor_u64(t, l->t_src + 8);
	if (op == l->op_get_rows && !g->out_tensor && (s32)t->source_op[0] > 0 &&
	    t->source_op[1] == 0 && t->source_type[1] == l->type_i32)
		g->out_tensor = tensor_u64(t, l->t_src + 8);
}

int walk(struct pt_regs *ctx)
{
	struct thread *t = this_thread();
	struct layout *l = t ? layout_of(t) : 0;
	u32 i, go_on = TAIL_POSITIONS;

	if (!t || !l)
		return 0;
#pragma clang loop unroll(disable)
	for (i = 0; i < WALK; i++) {
		if (t->at >= t->info.n_nodes)
			break;
		walk_node(t, l, t->at++);
	}
	if (t->at < t->info.n_nodes) {
		go_on = TAIL_WALK;
	} else if (t->faults) {
		graph_fault(t);	/* incomplete: not to be recognised later, nor described */
	} else {
		struct graph_key key = { .cgraph = t->e.cgraph, .tgid = t->e.tgid };
		struct hash_key hk = { .hash = t->info.hash, .tgid = t->e.tgid };
		struct known_graph sent = { .state = KN_SENT, .n_nodes = t->info.n_nodes };
		struct known_graph *k = known.lookup(&hk);

		if (t->info.uid)
			graphs.update(&key, &t->info);
		if (k && k->state == KN_CONFIRMED) {
			t->e.flags |= EF_KNOWN;
		} else if (!k && !known.insert(&hk, &sent)) {
			t->e.flags |= EF_DESCRIBED;
			t->at = t->faults = 0;
			go_on = TAIL_DESCRIBE;
		}
	}
	tails.call(ctx, go_on);
	return 0;
}

/* ---- descriptors ----------------------------------------------------------------------- */

/* WALK nodes, each with those of its sources that have no operator: weights and inputs.
 *
 * Written for the verifier, which walks through every round of a loop: what differs between
 * rounds lies in memory, where it sees no difference, and there are few branches, of which it
 * remembers 8192. Ring "nodes" carries raw chunks here; user space makes descriptors of them.
 * The high byte of their `what` is 0 for the node, else 1 + the number of its source. */
int describe(struct pt_regs *ctx)
{
	struct thread *t = this_thread();
	struct layout *l = t ? layout_of(t) : 0;
	u32 i;

	if (!t || !l)
		return 0;
	t->where = t->info.nodes + 8ULL * t->at;
	t->slot = 0;	/* 0: the node; s: its source s - 1 */
#pragma clang loop unroll(disable)
	for (i = 0; i < WALK * (MAX_SRC + 1); i++) {
		struct raw_chunk *r;
		u64 addr = 0;
		u32 op = 0, size = l->t_size & (RAW_BYTES - 1);

		if (t->at >= t->info.n_nodes)
			break;
		fetch(&addr, 8, t->where);
		t->found[t->slot & 15] = addr;
		fetch(&op, 4, addr + l->t_op);
		if (addr && !(op * t->slot)) {
			r = nodes.ringbuf_reserve(sizeof(struct raw_chunk));
			if (!r)
				break;
			/* What cannot be read is sent too, with a size of 0. */
			size &= ~(bpf_probe_read_user(r->bytes, size, (void *)addr) >> 31);
			t->faults += !size;
			r->addr = addr;
			r->seq = t->e.seq;
			r->what = RAW_NODE | t->slot << 8;
			r->index = t->at;
			r->size = size;
			r->tgid = t->e.tgid;
			nodes.ringbuf_submit(r, BPF_RB_NO_WAKEUP);
		}
		t->where = t->found[0] + l->t_src + 8ULL * t->slot++;
		if (t->slot > l->n_src) {
			t->slot = 0;
			t->at++;
			t->where = t->info.nodes + 8ULL * t->at;
		}
	}
	if (t->slot || t->at < t->info.n_nodes) {
		if (i == WALK * (MAX_SRC + 1))
			tails.call(ctx, TAIL_DESCRIBE);
		count(ST_LOST_NODES);	/* a full ring: all is sent again */
	}
	if (t->faults)
		count(ST_FAULT_NODE);
	tails.call(ctx, TAIL_POSITIONS);
	return 0;
}

/* ---- the graph is known: positions, output rows, ops -------------------------------------- */

/* Integers of the tensor at `addr`: the first ones to `first`, the rest as chunks. */
static __always_inline u32 read_ints(struct thread *t, const struct layout *l, u64 addr, s32 *first,
				     u32 what)
{
	u64 n = 0, data = 0;
	u32 i, at, some;

	if (!addr)
		return 0;
	if (!fetch(&n, 8, addr + l->t_ne))
		goto fault;
	if (!n)
		return 0;
	if (!fetch(&data, 8, addr + l->t_data) || !data || n > INLINE_INTS + MAX_INT_CHUNKS * CHUNK_INTS)
		goto fault;
	some = at_most(n, INLINE_INTS);
	if (!fetch(first, some * 4, data))
		goto fault;
#pragma clang loop unroll(disable)
	for (i = 0; i < MAX_INT_CHUNKS; i++) {
		struct int_chunk *k;

		at = INLINE_INTS + i * CHUNK_INTS;
		if (at >= n)
			break;
		k = ints.ringbuf_reserve(sizeof(struct int_chunk));
		if (!k) {
			count(ST_LOST_INTS);
			break;
		}
		some = at_most(n - at, CHUNK_INTS);
		k->ts = t->e.ts;
		k->seq = t->e.seq;
		k->node = 0;
		k->what = what;
		k->count = some;
		k->offset = at;
		__builtin_memset(k->value, 0, sizeof(k->value));
		if (!fetch(k->value, some * 4, data + 4ULL * at)) {
			k->count = 0;
			count(ST_FAULT_INTS);
		}
		ints.ringbuf_submit(k, BPF_RB_NO_WAKEUP);
	}
	return n;
fault:
	count(ST_FAULT_INTS);
	return 0;
}

static __always_inline void open_ops(struct thread *t)
{
	u32 tgid = t->e.tgid;
	struct target *target = targets.lookup(&tgid);

	if (t->e.level != LV_CPU || !target || target->mode != OPS_TRACE)
		return;
	t->n_nodes = t->info.n_nodes;
	t->next = 0;
	t->seq = t->e.seq;
	t->hits = t->accepted = t->lost = t->op_faults = 0;
	t->nodes = t->info.nodes;
	t->e.flags |= EF_TRACED;
}

static __always_inline bool wants_ints(const struct thread *t)
{
	return t->e.level == LV_SCHED || !t->e.parent;
}

/* One program for each list: the verifier would try every end of one with every end of the
 * other. */
int positions(struct pt_regs *ctx)
{
	struct thread *t = this_thread();
	struct layout *l = t ? layout_of(t) : 0;

	if (!t || !l)
		return 0;
	t->e.hash = t->info.hash;
	if (wants_ints(t))
		t->e.n_pos = read_ints(t, l, t->info.pos_tensor, t->e.pos, CH_POS);
	tails.call(ctx, TAIL_FINISH);
	return 0;
}

int finish(struct pt_regs *ctx)
{
	struct thread *t = this_thread();
	struct layout *l = t ? layout_of(t) : 0;

	if (!t || !l)
		return 0;
	if (wants_ints(t))
		t->e.n_out = read_ints(t, l, t->info.out_tensor, t->e.out, CH_OUT);
	if (t->e.level == LV_SCHED) {
		t->whole_nodes_first = t->first;
		t->whole_nodes_last = t->last;
		t->whole_n_nodes = t->info.n_nodes;
		t->whole_hash = t->info.hash;
		t->whole_flags = t->e.flags & (EF_KNOWN | EF_FAULT);
	}
	open_ops(t);
	send_event(&t->e);
	return 0;
}

/* ---- entry and return ---------------------------------------------------------------------- */

int on_entry(struct pt_regs *ctx)
{
	u64 ts = bpf_ktime_get_ns();
	u64 id = bpf_get_current_pid_tgid();
	u64 cookie = bpf_get_attach_cookie(ctx);
	u32 level = cookie & 0xff, moved = (cookie >> 8) & 0xffff;
	u32 tgid = id >> 32, tid = id, layout_index, seq, next;
	u64 arg1 = PT_REGS_PARM1(ctx), arg2 = PT_REGS_PARM2(ctx);
	u64 sp = PT_REGS_SP(ctx) + (moved == MOVED_UNKNOWN ? 0 : moved);
	struct target *target = targets.lookup(&tgid);
	struct frame *f, *below, outer = {};
	struct layout *l;
	struct thread *t;

	if (!target)
		return 0;
	layout_index = target->layout;
	l = layouts.lookup(&layout_index);
	if (!l)
		return 0;
	count(is_call(level) ? ST_HITS_CALL : ST_HITS_GRAPH);
	t = enter_thread(tid, layout_index);
	if (!t)
		return 0;
	drop_frames(t, sp, ts, level, false);
	seq = new_seq();
	if (!seq || t->depth >= MAX_FRAMES) {
		count(ST_MAP_FULL);
		return 0;
	}
	below = top_frame(t);
	if (below)
		outer = *below;
	f = frame_at(t, t->depth);
	f->ts = ts;
	f->sp = sp;
	f->seq = seq;
	f->level = level;
	f->object = arg1;
	f->call = outer.call ?: is_call(level) ? f->seq : 0;
	f->inner_call = is_call(level) ? f->seq : outer.inner_call;
	f->inner_graph = is_call(level) ? outer.inner_graph : f->seq;
	t->depth++;

	fill_event(&t->e, ts, is_call(level) ? EV_CALL_BEGIN : EV_GRAPH_BEGIN);
	t->e.seq = f->seq;
	t->e.level = level;
	t->e.object = arg1;
	t->e.call = f->call;
	if (is_call(level)) {
		t->e.parent = outer.inner_call;
		if (level == LV_PROCESS) {
			t->e.status = (s32)arg2;
		} else if (!fetch(&t->e.batch_tokens, 4, BATCH_ADDR(ctx, sp))) {
			t->e.flags |= EF_FAULT;
			count(ST_FAULT_CALL);
		}
	} else {
		t->e.parent = outer.inner_graph;
		t->e.cgraph = level == LV_CPU ? arg1 : arg2;
		if (level == LV_CPU)
			t->nodes = 0;
		next = enter_graph(t, l);
		if (next != TAILS) {
			tails.call(ctx, next);
			graph_fault(t);	/* not reached where the chain is whole */
		}
	}
	send_event(&t->e);
	return 0;
}

int on_return(struct pt_regs *ctx)
{
	u64 ts = bpf_ktime_get_ns();
	u64 id = bpf_get_current_pid_tgid();
	u32 level = bpf_get_attach_cookie(ctx) & 0xff;
	u32 tgid = id >> 32, tid = id;
	u64 sp = PT_REGS_SP(ctx) - RETURN_POPS;
	s64 status = (s32)PT_REGS_RC(ctx);
	struct target *target = targets.lookup(&tgid);
	struct thread *t;
	struct frame f = {}, *top;
	struct event *e;

	if (!target)
		return 0;
	count(is_call(level) ? ST_HITS_CALL : ST_HITS_GRAPH);
	t = threads.lookup(&tid);
	if (t && has_frame(t, level, sp)) {
		drop_frames(t, sp, ts, level, true);
		top = top_frame(t);
		if (top) {
			f = *top;
			t->depth--;
		}
	}
	e = events.ringbuf_reserve(sizeof(struct event));
	if (!e) {
		count(ST_LOST_EVENTS);
	} else {
		fill_event(e, ts, is_call(level) ? EV_CALL_END : EV_GRAPH_END);
		e->level = level;
		e->status = status;
		e->seq = f.seq;
		e->begin_ts = f.ts;
		e->object = f.object;
		e->call = f.call;
		if (!f.seq)
			e->flags |= EF_UNPAIRED;
		top = t && f.seq ? top_frame(t) : 0;
		if (top)
			e->parent = is_call(level) ? top->inner_call : top->inner_graph;
		if (t && f.seq && level == LV_CPU && t->seq == f.seq) {
			e->hits = t->hits;
			e->accepted = t->accepted;
			e->lost = t->lost;
			e->op_faults = t->op_faults;
		}
		events.ringbuf_submit(e, BPF_RB_NO_WAKEUP);
	}
	if (!t)
		return 0;
	if (level == LV_CPU)
		t->nodes = 0;
	if (level == LV_SCHED)
		t->whole_n_nodes = 0;
	if (!t->depth)
		threads.delete(&tid);
	return 0;
}

/* ---- ops ------------------------------------------------------------------------------------ */

/* Index of `tensor` among the nodes not yet passed, or -1 (a nested helper, for one). */
static __always_inline long find_node(struct thread *t, u64 tensor)
{
	u32 base = t->next, w;
	int i;

#pragma clang loop unroll(disable)
	for (w = 0; w < MAX_NODES / WINDOW; w++) {
		if (base >= t->n_nodes)
			return -1;
		/* May read past the last node; what is found there is not accepted. */
		if (!fetch(t->window, sizeof(t->window), t->nodes + 8ULL * base)) {
			t->op_faults++;
			count(ST_FAULT_OP);
			return -1;
		}
		for (i = 0; i < WINDOW; i++)
			if (t->window[i] == tensor)
				return base + i < t->n_nodes ? (long)(base + i) : -1;
		base += WINDOW;
	}
	return -1;
}

static __always_inline int on_op(u64 tensor, u32 fused)
{
	u64 ts = bpf_ktime_get_ns();
	struct thread *t = this_thread();
	struct op_hit *h;
	long node;

	if (!t) {
		count(ST_HITS_OTHER_THREAD);
		return 0;
	}
	count(ST_HITS_OP);
	if (!t->nodes)
		return 0;
	t->hits++;
	node = find_node(t, tensor);
	if (node < 0) {
		count(ST_OP_NESTED);
		return 0;
	}
	t->next = node + (fused ? 2 : 1);
	t->accepted++;
	h = ops.ringbuf_reserve(sizeof(struct op_hit));
	if (!h) {
		t->lost++;
		count(ST_LOST_OPS);
		return 0;
	}
	h->ts = ts;
	h->seq = t->seq;
	h->node = (u32)node | (fused ? OP_FUSED : 0);
	ops.ringbuf_submit(h, BPF_RB_NO_WAKEUP);
	return 0;
}

int on_op_dispatch(struct pt_regs *ctx)
{
	return on_op(PT_REGS_PARM2(ctx), 0);
}

int on_op_fused2(struct pt_regs *ctx)
{
	return on_op(PT_REGS_PARM2(ctx), 1);
}

/* ---- threads that end inside a call ------------------------------------------------------------ */

int on_thread_exit(void *ctx)
{
	u64 ts = bpf_ktime_get_ns();
	u32 tid = bpf_get_current_pid_tgid();
	struct thread *t = threads.lookup(&tid);

	if (!t)
		return 0;
	drop_frames(t, ~0ULL, ts, 0, false);
	threads.delete(&tid);
	return 0;
}
