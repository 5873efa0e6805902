/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-3-Clause) */
/*
 * Token, graph and op level for engines built on ggml.
 *
 * Token and graph programs are sleepable: bpf_copy_from_user() pages memory in,
 * where bpf_probe_read_user() returns -EFAULT for a page that is valid but not
 * present. The op program is not: the engine has just used what it reads.
 *
 * Programs attached to uprobes are preemptible, so nothing is kept per CPU but
 * counters: what a thread needs lives in its entry of `threads`. An entry exists
 * only for a thread inside a watched call or graph, which is also how the op
 * program tells thread 0 (the one that called ggml_graph_compute) from the rest
 * of the pool without reading params->ith.
 */
#include "kernel.h"
#include "maps.h"
#include "events.h"
#include "causes.h"
#include "thread.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

#define MAX_NODES 16384
#define MAX_INT_CHUNKS 256
#define SNAPSHOT_NODES 64
#define EXPERT_BITS (CHUNK_INTS * 32)
#define ABSENT 0xffff
#define TENSOR_FLAG_COMPUTE 16
#define MOVED_UNKNOWN 0xffff

struct graph_key {
	__u64 cgraph;
	__u32 tgid;
	__u32 pad;
};

struct graph_info {		/* what one walk found; valid while uid stays the same */
	__u64 uid;
	__u64 nodes;
	__u64 hash;
	__u64 pos_tensor;	/* second source of the first ROPE */
	__u64 out_tensor;	/* row ids of the first GET_ROWS on a computed tensor */
	__u32 n_nodes;
	__u32 has_experts;
	__u32 tokens;		/* rows of the first GET_ROWS from a table; 0: there is none */
	__u32 reserved;		/* no padding: older kernels want to see every byte of it written */
};

struct counters {
	__u64 value[ST_COUNT];
};

#define RING(name, size)					\
	struct {						\
		__uint(type, BPF_MAP_TYPE_RINGBUF);		\
		__uint(max_entries, size);			\
	} name SEC(".maps")

/* One ring per record size: user space decodes each in bulk. Sizes may be changed
 * before loading. */
RING(events, 1 << 20);	/* a quarter second at 3,000 tokens/s */
RING(ops, 4 << 20);
RING(nodes, 4 << 20);
RING(ints, 1 << 20);
RING(raws, 256 << 10);

MAP(ARRAY, layouts, 64, __u32, struct layout);
TARGETS;
THREADS;
MAP(LRU_HASH, graphs, 1024, struct graph_key, struct graph_info);

/* User space deletes an entry whose descriptors did not arrive, and they are sent
 * again; it fills in the slot of a graph whose ops are to be summed. */
MAP(LRU_HASH, known, 4096, struct hash_key, struct known_graph);

/* Where the ops of a graph without a slot of its own are added up: a shape that is met
 * once, as a prompt's is, could never be summed otherwise. */
MAP(HASH, spares, 1024, struct spare_key, struct spare_slot);

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, MAX_SUMS);
	__type(key, __u32);
	__type(value, struct node_sum);
} sums SEC(".maps");

/* tid of the thread that is running a slot's graph. */
MAP(ARRAY, owners, MAX_SLOTS, __u32, __u32);
MAP(PERCPU_ARRAY, stats, 1, __u32, struct counters);

/* With `per_target`: the same counters by tgid, of those that user space has put in. The rest
 * is counted in "stats". Sized before loading. */
const volatile bool per_target = false;

MAP(PERCPU_HASH, tallies, 1, __u32 /* tgid */, struct counters);
MAP(ARRAY, templates, MAX_TEMPLATES, __u32, struct target);
MAP(ARRAY, last_seq, 1, __u32, __u32);

/* User space raises it when it has taken call or graph probes away: returns were missed
 * then, and a frame from before could be taken for that of a later function. */
MAP(ARRAY, generation, 1, __u32, __u32);

/* How long graphs have been running, by tgid; the scheduler's programs read it. */
GRAPH_CLOCKS;
MAP(ARRAY, blank, 1, __u32, struct thread);	/* stays zero: the initial value of an entry */

/* So that the records' types and constants are in the object's BTF. */
const struct op_hit *btf_op_hit __attribute__((unused)) = 0;
const struct op_batch *btf_op_batch __attribute__((unused)) = 0;
const struct node_desc *btf_node_desc __attribute__((unused)) = 0;
const struct int_chunk *btf_int_chunk __attribute__((unused)) = 0;
const struct raw_chunk *btf_raw_chunk __attribute__((unused)) = 0;
const struct event *btf_event __attribute__((unused)) = 0;
const enum event_kind btf_event_kind __attribute__((unused)) = 0;
const enum event_level btf_event_level __attribute__((unused)) = 0;
const enum event_flag btf_event_flag __attribute__((unused)) = 0;
const enum op_flag btf_op_flag __attribute__((unused)) = 0;
const enum node_role btf_node_role __attribute__((unused)) = 0;
const enum chunk_what btf_chunk_what __attribute__((unused)) = 0;
const enum raw_what btf_raw_what __attribute__((unused)) = 0;
const enum stat btf_stat __attribute__((unused)) = 0;
const enum layout_state btf_layout_state __attribute__((unused)) = 0;
const enum op_mode btf_op_mode __attribute__((unused)) = 0;
const enum target_flag btf_target_flag __attribute__((unused)) = 0;
const enum known_state btf_known_state __attribute__((unused)) = 0;
const enum op_probe btf_op_probe __attribute__((unused)) = 0;

static __always_inline void add(enum stat which, __u64 amount)
{
	__u32 zero = 0;
	struct counters *c = 0;

	if (per_target) {
		__u32 tgid = bpf_get_current_pid_tgid() >> 32;

		c = bpf_map_lookup_elem(&tallies, &tgid);
	}
	if (!c)
		c = bpf_map_lookup_elem(&stats, &zero);
	/* Atomic, for a program may be preempted by another on the same CPU; on a
	 * per-CPU value, for the line stays in this core. */
	if (c)
		__sync_fetch_and_add(&c->value[which], amount);
}

static __always_inline void count(enum stat which)
{
	add(which, 1);
}

static __always_inline __u32 new_seq(void)
{
	__u32 zero = 0;
	__u32 *last = bpf_map_lookup_elem(&last_seq, &zero);

	return last ? __sync_fetch_and_add(last, 1) + 1 : 1;
}

static __always_inline __u32 cookie_level(__u64 cookie)
{
	return cookie & 0xff;
}

/* Unknown where the function realigned its stack first: no return probe is there
 * either, and the stack pointer as it is will do for the order of frames. */
static __always_inline __u64 cookie_moved(__u64 cookie)
{
	__u64 moved = (cookie >> 8) & 0xffff;

	return moved == MOVED_UNKNOWN ? 0 : moved;
}

static __always_inline bool is_call(__u32 level)
{
	return level < LV_SCHED;
}

/*
 * What is wanted of this process at a probe with this cookie, copied to `want`; false: nothing.
 * A copy, so that the verifier need not follow two kinds of pointers through all that comes.
 */
static __always_inline bool wanted_here(__u32 tgid, __u64 cookie, struct target *want)
{
	__u32 template = (cookie >> 24) & 0xffff, level = cookie_level(cookie);
	struct target *t = bpf_map_lookup_elem(&targets, &tgid);

	if (!t) {
		if (!template)
			return false;
		template--;
		t = bpf_map_lookup_elem(&templates, &template);
		if (!t || !(t->flags & TG_TEMPLATE))
			return false;
	}
	*want = *t;
	return !(want->flags & (TG_IGNORED | (is_call(level) ? TG_NO_CALLS : TG_NO_GRAPHS)));
}

/*
 * Reads the target's memory. What the engine has just written is nearly always there, and
 * then the plain helper is several times cheaper; where a page is not present it returns
 * -EFAULT, and the sleeping one pages it in.
 */
static __always_inline long read_user(void *to, __u32 size, __u64 from)
{
	if (!bpf_probe_read_user(to, size, (void *)from))
		return 0;
	return bpf_copy_from_user(to, size, (void *)from);
}

/* ---- fields of a tensor that was read into a thread's scratch ------------- */

static __always_inline __u64 tensor_u64(const struct thread *t, __u16 off)
{
	return *(const __u64 *)(t->tensor + (off & 0x1f8));
}

static __always_inline __u32 tensor_u32(const struct thread *t, __u16 off)
{
	return *(const __u32 *)(t->tensor + (off & 0x1fc));
}

static __always_inline __u64 mix(__u64 h, __u64 v)
{
	h = (h ^ v) * 0x9e3779b97f4a7c15ULL;
	return h ^ (h >> 29);
}

/* ---- the walk: a fingerprint of the graph, and what to read at each run ---- */

struct walk {
	struct thread *t;
	const struct layout *l;
	__u64 nodes;
	__u64 hash;
	__u64 pos_tensor;
	__u64 out_tensor;
	__u32 has_experts;
	__u32 tokens;
	__u32 faults;
};

/*
 * Fingerprint of the source at `addr` of node `i`, 0 when it cannot be read: how far back
 * it lies, if it is one of the last RECENT nodes (whose shapes are in the fingerprint
 * already; that is most of them, and a read is most of the price), else its op, type and
 * shape. Its op (1 for one that is a node) and type are left in t->source_op[slot] and
 * t->source_type[slot].
 *
 * A global function, so that the verifier looks at it once and not for each of ten
 * sources of a node on each path through the walk.
 */
__noinline __u64 mix_source(struct thread *t, __u64 addr, __u32 offsets, __u32 slot, __u32 i)
{
	__u64 *ne, h;
	__u32 op, type;
	int k;

	if (!t || slot >= MAX_SRC)
		return 0;
	t->source_op[slot] = ~0;
	for (k = 0; k < RECENT; k++) {
		if (t->recent[k] == addr) {
			t->source_op[slot] = 1;
			return mix(slot + 1, (i - k) & (RECENT - 1)) ?: 1;
		}
	}
	if (read_user(t->source, 96, addr))
		return 0;
	type = *(__u32 *)(t->source + (offsets & 0x3c));
	op = *(__u32 *)(t->source + ((offsets >> 8) & 0x7c));
	ne = (__u64 *)(t->source + ((offsets >> 16) & 0x38));
	t->source_op[slot] = op;
	t->source_type[slot] = type;
	h = mix(slot + 1 + MAX_SRC, ((__u64)op << 32) | type);
	h = mix(h, ne[0] ^ (ne[1] << 32));
	return mix(h, ne[2] ^ (ne[3] << 32)) ?: 1;
}

/* Address of node `i`, 0 when it cannot be read. Pointers are read by the window; one by
 * one where a window would leave the page. To be asked in order. Global: see above. */
__noinline __u64 node_at(struct thread *t, __u64 nodes, __u32 i)
{
	__u64 addr = 0;

	if (!t)
		return 0;
	if (i % WINDOW == 0)
		t->has_window = !bpf_probe_read_user(t->window, sizeof(t->window),
						     (void *)(nodes + 8ULL * i));
	if (t->has_window)
		return t->window[i % WINDOW];
	if (read_user(&addr, sizeof(addr), nodes + 8ULL * i))
		return 0;
	return addr;
}

static long walk_node(__u32 i, struct walk *w)
{
	const struct layout *l = w->l;
	struct thread *t = w->t;
	__u32 offsets = l->t_type | l->t_op << 8 | l->t_ne << 16;
	__u32 size = l->t_src + 8 * MAX_SRC;
	__u64 addr = 0, src, hash;
	__u32 op, type;
	int s;

	addr = node_at(t, w->nodes, i);
	if (!addr) {
		w->faults++;
		return 0;
	}
	if (size > RAW_BYTES)
		size = RAW_BYTES;
	if (read_user(t->tensor, size, addr)) {
		w->faults++;
		return 0;
	}
	op = tensor_u32(t, l->t_op);
	type = tensor_u32(t, l->t_type);
	/* Newer engines build alternatives and choose by a flag which are computed. */
	if (l->t_flags != ABSENT)
		op |= (tensor_u32(t, l->t_flags) & TENSOR_FLAG_COMPUTE) << 12;
	hash = mix(w->hash, ((__u64)op << 32) | type);
	op &= 0xffff;
	hash = mix(hash, tensor_u64(t, l->t_ne) ^ (tensor_u64(t, l->t_ne + 8) << 32));
	hash = mix(hash, tensor_u64(t, l->t_ne + 16) ^ (tensor_u64(t, l->t_ne + 24) << 32));
	t->source_op[0] = t->source_op[1] = ~0;
	for (s = 0; s < MAX_SRC; s++) {
		__u64 h = 1;

		src = tensor_u64(t, l->t_src + 8 * s);
		if (s < l->n_src && src)
			h = mix_source(t, src, offsets, s, i);
		if (!h)
			w->faults++;
		hash = mix(hash, h);
	}
	w->hash = hash;
	t->recent[i % RECENT] = addr;
	if (op == l->op_rope && !w->pos_tensor)
		w->pos_tensor = tensor_u64(t, l->t_src + 8);
	/* Row ids: a leaf of integers that picks rows of something computed. Expert
	 * weights are picked by a computed index, tokens from a leaf. */
	if (op == l->op_get_rows && !w->out_tensor && (__s32)t->source_op[0] > 0 &&
	    t->source_op[1] == 0 && t->source_type[1] == l->type_i32)
		w->out_tensor = tensor_u64(t, l->t_src + 8);
	if (op == l->op_mul_mat_id)
		w->has_experts = 1;
	/* A leaf picks rows of a table: the embeddings of the tokens. */
	if (op == l->op_get_rows && !w->tokens && t->source_op[0] == 0 && t->source_op[1] == 0 &&
	    t->source_type[1] == l->type_i32)
		w->tokens = tensor_u64(t, l->t_ne + 8);
	return 0;
}

/* ---- descriptors ----------------------------------------------------------- */

struct describe {
	struct thread *t;
	const struct layout *l;
	__u64 nodes;
	__u32 seq;
	__u32 lost;
	/* for the leaf pass over one node */
	__u32 index;
};

static __always_inline void fill_desc(struct node_desc *d, const struct thread *t,
				      const struct layout *l)
{
	int i;

	d->type = tensor_u32(t, l->t_type);
	d->op = tensor_u32(t, l->t_op);
	d->flags = l->t_flags == ABSENT ? 0 : tensor_u32(t, l->t_flags);
	for (i = 0; i < 4; i++) {
		d->ne[i] = tensor_u64(t, l->t_ne + 8 * i);
		d->nb[i] = tensor_u64(t, l->t_nb + 8 * i);
	}
	for (i = 0; i < OP_PARAM_WORDS; i++)
		d->op_params[i] = l->t_op_params == ABSENT ? 0 :
			tensor_u32(t, l->t_op_params + 4 * i);
	for (i = 0; i < MAX_SRC; i++)
		d->src[i] = i < l->n_src ? tensor_u64(t, l->t_src + 8 * i) : 0;
	d->view_src = l->t_view_src == ABSENT ? 0 : tensor_u64(t, l->t_view_src);
	d->view_offs = l->t_view_offs == ABSENT ? 0 : tensor_u64(t, l->t_view_offs);
	d->data = tensor_u64(t, l->t_data);
	d->buffer = l->t_buffer == ABSENT ? 0 : tensor_u64(t, l->t_buffer);
	d->extra = l->t_extra == ABSENT ? 0 : tensor_u64(t, l->t_extra);
	for (i = 0; i < NAME_BYTES / 8; i++)
		((__u64 *)d->name)[i] = tensor_u64(t, l->t_name + 8 * i);
}

/* Index, role and source of a descriptor, as one argument: five are all that a function has. */
#define PLACE(index, role, slot) ((__u64)(index) << 32 | (role) << 8 | (slot))

/* Sends the tensor at `addr`; 1: there was no room. Global: see above. */
__noinline int send_desc(struct thread *t, const struct layout *l, __u64 addr, __u64 place, __u32 seq)
{
	struct node_desc *d;
	__u32 size;
	long err;

	if (!t || !l)
		return 0;
	size = l->t_size;
	if (size > RAW_BYTES)
		size = RAW_BYTES;
	if (!size)
		return 0;
	err = bpf_copy_from_user(t->tensor, size, (void *)addr);
	if (err)
		count(ST_FAULT_NODE);
	d = bpf_ringbuf_reserve(&nodes, sizeof(*d), 0);
	if (!d) {
		count(ST_LOST_NODES);
		return 1;
	}
	__builtin_memset(d, 0, sizeof(*d));
	d->addr = addr;
	d->seq = seq;
	d->index = place >> 32;
	d->role = place >> 8 & 0xff;
	d->slot = place & 0xff;
	d->tgid = bpf_get_current_pid_tgid() >> 32;
	d->fault = err ? 1 : 0;
	if (!err)
		fill_desc(d, t, l);
	bpf_ringbuf_submit(d, BPF_RB_NO_WAKEUP);
	return 0;
}

/* Sends source `slot` of node c->index if it is a leaf: views of a cgraph have no
 * leafs of their own, so weights and inputs are reached through their users. */
static long describe_source(__u32 slot, struct describe *c)
{
	const struct layout *l = c->l;
	__u64 addr = 0, src = 0;
	__u32 op = 0;

	if (slot >= l->n_src)
		return 1;
	/* Read again: sending a leaf overwrites the scratch. */
	if (bpf_copy_from_user(&addr, sizeof(addr), (void *)(c->nodes + 8ULL * c->index)) || !addr)
		return 1;
	if (bpf_copy_from_user(&src, sizeof(src), (void *)(addr + l->t_src + 8ULL * slot)))
		return 1;
	if (!src)
		return 0;
	if (bpf_copy_from_user(&op, sizeof(op), (void *)(src + l->t_op))) {
		count(ST_FAULT_NODE);
		return 0;
	}
	if (op == 0)
		c->lost += send_desc(c->t, l, src, PLACE(c->index, ND_LEAF, slot), c->seq);
	return 0;
}

static long describe_node(__u32 i, struct describe *c)
{
	__u64 addr = 0;

	if (bpf_copy_from_user(&addr, sizeof(addr), (void *)(c->nodes + 8ULL * i)) || !addr) {
		count(ST_FAULT_NODE);
		return 0;
	}
	c->lost += send_desc(c->t, c->l, addr, PLACE(i, ND_NODE, 0), c->seq);
	c->index = i;
	bpf_loop(MAX_SRC, describe_source, c, 0);
	/* A full ring will not drain while we are here: the rest would be lost too,
	 * and the whole graph is sent again anyway. */
	return c->lost ? 1 : 0;
}

/* ---- snapshot for the choice of a layout ------------------------------------- */

static __always_inline void send_raw(__u64 addr, __u32 seq, __u16 what, __u16 index)
{
	struct raw_chunk *r = bpf_ringbuf_reserve(&raws, sizeof(*r), 0);
	__u32 size = RAW_BYTES;

	if (!r) {
		count(ST_LOST_RAWS);
		return;
	}
	if (bpf_copy_from_user(r->bytes, RAW_BYTES, (void *)addr)) {
		/* The arena may end before 512 bytes do. */
		size = 320;
		__builtin_memset(r->bytes, 0, RAW_BYTES);
		if (bpf_copy_from_user(r->bytes, 320, (void *)addr)) {
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
	bpf_ringbuf_submit(r, BPF_RB_NO_WAKEUP);
}

static long snapshot_node(__u32 i, struct describe *c)
{
	__u64 addr = 0;

	if (bpf_copy_from_user(&addr, sizeof(addr), (void *)(c->nodes + 8ULL * i)) || !addr)
		return 1;
	send_raw(addr, c->seq, RAW_NODE, i);
	return 0;
}

/* ---- integers: positions and output rows ------------------------------------- */

struct ints {
	__u64 data;
	__u64 ts;
	__u32 n;
	__u32 seq;
	__u32 what;
	__u32 lost;
};

static long send_ints(__u32 i, struct ints *c)
{
	__u32 offset = INLINE_INTS + i * CHUNK_INTS;
	struct int_chunk *k;
	__u32 n;

	if (offset >= c->n)
		return 1;
	n = c->n - offset;
	if (n > CHUNK_INTS)
		n = CHUNK_INTS;
	k = bpf_ringbuf_reserve(&ints, sizeof(*k), 0);
	if (!k) {
		count(ST_LOST_INTS);
		return 1;
	}
	k->ts = c->ts;
	k->seq = c->seq;
	k->node = 0;
	k->what = c->what;
	k->count = n;
	k->offset = offset;
	k->tgid = bpf_get_current_pid_tgid() >> 32;
	k->reserved = 0;
	__builtin_memset(k->value, 0, sizeof(k->value));
	if (bpf_copy_from_user(k->value, n * 4, (void *)(c->data + 4ULL * offset))) {
		k->count = 0;
		count(ST_FAULT_INTS);
	}
	bpf_ringbuf_submit(k, BPF_RB_NO_WAKEUP);
	return 0;
}

/* Reads the integers of the tensor at `addr`: the first into the event, the rest as
 * chunks. Returns how many there are, -1 when they cannot be read. Global: see above. */
__noinline int read_ints(const struct layout *l, __u64 addr, struct event *e, __u32 what)
{
	struct ints c = { .what = what };
	__u64 ne0 = 0;
	__u32 n;

	if (!l || !e)
		return -1;
	c.seq = e->seq;
	c.ts = e->ts;
	if (bpf_copy_from_user(&ne0, 8, (void *)(addr + l->t_ne)))
		return -1;
	if (!ne0)
		return 0;	/* no rows asked for: an empty tensor, without data */
	if (bpf_copy_from_user(&c.data, 8, (void *)(addr + l->t_data)) || !c.data ||
	    ne0 > INLINE_INTS + MAX_INT_CHUNKS * CHUNK_INTS)
		return -1;
	n = ne0 > INLINE_INTS ? INLINE_INTS : ne0;
	if (bpf_copy_from_user(what == CH_POS ? e->pos : e->out, n * 4, (void *)c.data))
		return -1;
	c.n = ne0;
	if (ne0 > INLINE_INTS)
		bpf_loop(MAX_INT_CHUNKS, send_ints, &c, 0);
	return ne0;
}

/* Whether it is the scheduler's copy of an input for another backend than the CPU, by its name
 * "<backend>#<tensor>#<n>": its data is an address on the device, not in this process. */
__noinline int elsewhere(const struct layout *l, __u64 tensor)
{
	char name[48] = {};	/* "RPC0[127.0.0.1:50052]#…" is among the longest */
	__u32 i;

	if (!l || !tensor || l->t_name == ABSENT ||
	    bpf_copy_from_user(name, sizeof(name), (void *)(tensor + l->t_name)) ||
	    (name[0] == 'C' && name[1] == 'P' && name[2] == 'U' && name[3] == '#'))
		return 0;
	for (i = 1; i < sizeof(name); i++)
		if (name[i] == '#')
			return 1;
	return 0;
}

/* ---- op level of the graph that runs on a thread ------------------------------ */

static __always_inline void add_sum(struct thread *t, __u64 ts)
{
	__u32 i = t->last_sum - 1;
	struct node_sum *s;
	__u64 dt = ts - t->last_ts;
	__u32 d, bucket;

	if (!t->last_sum)
		return;
	t->last_sum = 0;
	s = bpf_map_lookup_elem(&sums, &i);
	if (!s)
		return;
	d = dt > 0xffffffff ? 0xffffffff : dt;
	s->time += dt;
	if (!s->calls || d < s->min)
		s->min = d;
	if (d > s->max)
		s->max = d;
	s->calls++;
	/* log2 by halving the width: no loop, no table */
	bucket = 0;
	d >>= SUM_FIRST_LOG2 + 1;
	if (d >= 1 << 8) {
		bucket += 8;
		d >>= 8;
	}
	if (d >= 1 << 4) {
		bucket += 4;
		d >>= 4;
	}
	if (d >= 1 << 2) {
		bucket += 2;
		d >>= 2;
	}
	bucket += d >= 2 ? 2 : d;
	if (bucket >= SUM_BUCKETS)
		bucket = SUM_BUCKETS - 1;
	s->bucket[bucket & (SUM_BUCKETS - 1)]++;
}

static __always_inline __u32 size_class(__u32 tokens)
{
	__u32 class = 0;

	if (!tokens)
		return SIZE_UNKNOWN;
	if (tokens >= 1 << 15)
		return 15;
	if (tokens >= 1 << 8) {
		class += 8;
		tokens >>= 8;
	}
	if (tokens >= 1 << 4) {
		class += 4;
		tokens >>= 4;
	}
	if (tokens >= 1 << 2) {
		class += 2;
		tokens >>= 2;
	}
	return class + (tokens >> 1);
}

/*
 * Where this thread's graph is added up, slot + 1, and t->sum_first; 0: nowhere. Its own
 * slot, else a spare one for graphs of its size, else one for any graph with so many tokens.
 *
 * A global function, so that the verifier looks at it once (see mix_source).
 */
__noinline __u32 find_slot(struct thread *t, __u64 hash, __u32 tgid, __u32 n_nodes)
{
	struct hash_key hk = { .hash = hash, .tgid = tgid };
	struct spare_key sk = { .tgid = tgid, .n_nodes = n_nodes };
	struct known_graph *g;
	struct spare_slot *s;

	if (!t)
		return 0;
	g = bpf_map_lookup_elem(&known, &hk);
	if (g && g->slot && g->n_nodes >= n_nodes) {
		t->sum_first = g->first;
		return g->slot;
	}
	sk.size_class = size_class(t->tokens);
	s = bpf_map_lookup_elem(&spares, &sk);
	if (!s) {
		sk.n_nodes = 0;
		s = bpf_map_lookup_elem(&spares, &sk);
	}
	if (!s || s->n_nodes < n_nodes)
		return 0;
	t->sum_first = s->first;
	return s->slot;
}

/* Lets the op program see this CPU graph, if its ops are wanted. */
/* Global, also for the stack: see walk_graph. */
__noinline int open_ops(struct thread *t, const struct target *target, struct event *e, __u64 nodes,
			__u32 n_nodes)
{
	if (!t || !target || !e)
		return 0;
	t->n_nodes = n_nodes;
	t->next = 0;
	t->seq = e->seq;
	t->hits = t->accepted = t->lost = t->op_faults = 0;
	t->last_sum = 0;
	t->sum_slot = 0;
	t->epoch = target->epoch;
	t->mode = target->mode;
	if (t->mode == OPS_TRACE) {
		e->flags |= EF_TRACED;
	} else if (t->mode == OPS_SUM) {
		__u32 slot = find_slot(t, e->hash, e->tgid, n_nodes), *owner;

		if (!slot)
			return 0;
		slot--;
		owner = bpf_map_lookup_elem(&owners, &slot);
		if (!owner)
			return 0;
		if (__sync_val_compare_and_swap(owner, 0, e->tid)) {
			count(ST_SLOT_BUSY);
			return 0;
		}
		e->sum_slot = t->sum_slot = slot + 1;
		e->flags |= EF_SUMMED;
	} else {
		return 0;
	}
	t->nodes = nodes;
	return 0;
}

/*
 * A graph begins on this thread, or (begins false) is over. Two threads that do so at once may
 * put their process's clock wrong by as long as that takes.
 */
static __always_inline void run_clock(struct thread *t, bool begins)
{
	__u32 tgid = bpf_get_current_pid_tgid() >> 32;
	struct graph_clock *c, fresh = {};
	__u64 now = bpf_ktime_get_ns();

	if (t->on_clock == begins)
		return;
	t->on_clock = begins;
	c = bpf_map_lookup_elem(&graph_clocks, &tgid);
	if (!c) {
		if (!begins)
			return;
		bpf_map_update_elem(&graph_clocks, &tgid, &fresh, BPF_NOEXIST);
		c = bpf_map_lookup_elem(&graph_clocks, &tgid);
		if (!c)
			return;
	}
	if (begins) {
		if (!__sync_fetch_and_add(&c->open, 1))
			c->since = now;
	} else if (c->open && __sync_fetch_and_add(&c->open, -1) == 1) {
		c->total += now - c->since;
	}
}

/* Hands the hits of this thread on to the ring. */
static __always_inline void flush_hits(struct thread *t)
{
	__u32 count = t->batched;
	struct op_batch *b;

	if (!count)
		return;
	t->batched = 0;
	b = bpf_ringbuf_reserve(&ops, sizeof(*b), 0);
	if (!b) {
		t->lost += count;
		add(ST_LOST_OPS, count);
		return;
	}
	b->count = count;
	b->seq = t->seq;
	__builtin_memcpy(b->hit, t->batch, sizeof(b->hit));
	bpf_ringbuf_submit(b, BPF_RB_NO_WAKEUP);
}

/* The CPU graph on this thread is over, at `ts`; 0: it did not come to its end. */
__noinline int close_ops(struct thread *t, const struct target *target, __u64 ts)
{
	if (!t)
		return 0;
	t->nodes = 0;
	flush_hits(t);
	run_clock(t, false);
	/* Counted here and not hit by hit: a graph has hundreds. */
	if (t->hits) {
		add(ST_HITS_OP, t->hits);
		t->hits = 0;
	}
	if (!t->sum_slot)
		return 0;
	/* Without probes the last op seen was not the last: its end is not known. */
	if (ts && target && target->epoch == t->epoch)
		add_sum(t, ts);
	t->last_sum = 0;
	{
		__u32 slot = t->sum_slot - 1;
		__u32 *owner = bpf_map_lookup_elem(&owners, &slot);

		t->sum_slot = 0;
		if (owner)
			__sync_lock_test_and_set(owner, 0);
	}
	return 0;
}

/* ---- frames: which calls and graphs are open on a thread ----------------------- */

static __always_inline void fill_event(struct event *e, __u64 ts, __u32 kind)
{
	__u64 id = bpf_get_current_pid_tgid();

	__builtin_memset(e, 0, sizeof(*e));
	e->ts = ts;
	e->tgid = id >> 32;
	e->tid = id;
	e->kind = kind;
	e->cpu = bpf_get_smp_processor_id();
}

static __always_inline void send_abandoned(const struct frame *f, __u64 ts)
{
	struct event *e = bpf_ringbuf_reserve(&events, sizeof(*e), 0);

	if (!e) {
		count(ST_LOST_EVENTS);
		return;
	}
	fill_event(e, ts, is_call(f->level) ? EV_CALL_ABANDONED : EV_GRAPH_ABANDONED);
	e->begin_ts = f->ts;
	e->seq = f->seq;
	e->level = f->level;
	e->object = f->object;
	bpf_ringbuf_submit(e, BPF_RB_NO_WAKEUP);
}

/* The mask repeats what the caller has checked. The empty asm hides that from the
 * compiler, which would drop the mask, and with it the bound that the verifier
 * needs to see at the access itself. */
static __always_inline struct frame *frame_at(struct thread *t, __u32 i)
{
	asm volatile("" : "+r"(i));
	return &t->frames[i & (MAX_FRAMES - 1)];
}

static __always_inline struct frame *top_frame(struct thread *t)
{
	return t->depth ? frame_at(t, t->depth - 1) : 0;
}

struct unwind {
	struct thread *t;
	__u64 sp;		/* stack pointer at the entry of the function that is entered, */
	__u64 ts;
	__u32 level;		/* of this level, */
	__u32 returning;	/* or that returns */
};

/* Whether this is the frame of a function of this level, entered with this stack pointer:
 * what returns, be it after a longjmp or on another stack than the one entered last. */
static __always_inline bool is_frame(const struct frame *f, __u32 level, __u64 sp)
{
	return f->level == level && f->sp == sp;
}

static __always_inline bool has_frame(const struct thread *t, __u32 level, __u64 sp)
{
	__u32 i;

	for (i = 0; i < MAX_FRAMES; i++)
		if (i < t->depth && is_frame(&t->frames[i], level, sp))
			return true;
	return false;
}

/* Drops the innermost frame if it cannot be open any more. On entry: the stack grows
 * down, so what is still open was entered higher up (equal for a tail call, which is
 * another function). On return: whatever lies above the frame that returns. */
static long drop_frame(__u32 i, struct unwind *u)
{
	struct thread *t = u->t;
	struct frame *f = top_frame(t);

	if (!f)
		return 1;
	if (u->returning ? is_frame(f, u->level, u->sp) :
			   f->sp > u->sp || (f->sp == u->sp && f->level != u->level))
		return 1;
	send_abandoned(f, u->ts);
	if (f->level == LV_CPU)
		close_ops(t, 0, 0);
	t->depth--;
	return 0;
}

/* Global, also for the stack: see walk_graph. */
__noinline int drop_frames(struct thread *t, __u64 sp, __u64 ts, __u32 level, __u32 returning)
{
	struct unwind u = { .sp = sp, .ts = ts, .level = level, .returning = returning };
	struct frame *f;

	if (!t)
		return 0;
	u.t = t;
	f = top_frame(t);
	/* Nearly always there is nothing to drop. */
	if (f && (returning ? !is_frame(f, level, sp) : f->sp <= sp))
		bpf_loop(MAX_FRAMES, drop_frame, &u, 0);
	return 0;
}

/* Of everybody's probes and of this target's. */
static __always_inline __u32 generation_of(const struct target *target)
{
	__u32 zero = 0, *now = bpf_map_lookup_elem(&generation, &zero);

	return now ? *now + target->generation : 0;
}

/* This thread's state, 0: none. What is left of an older generation is dropped. */
static __always_inline struct thread *this_thread(__u32 tid, const struct target *target, __u64 ts)
{
	struct thread *t = bpf_map_lookup_elem(&threads, &tid);
	__u32 now = generation_of(target);

	if (t && t->generation != now) {
		drop_frames(t, ~0ULL, ts, 0, false);
		close_ops(t, 0, 0);
		t->whole_n_nodes = 0;
		t->generation = now;
	}
	return t;
}

static __always_inline struct thread *enter_thread(__u32 tid, const struct target *target, __u64 ts)
{
	struct thread *t = this_thread(tid, target, ts);
	__u32 zero = 0;
	struct thread *b;

	if (t)
		return t;
	b = bpf_map_lookup_elem(&blank, &zero);
	if (!b)
		return 0;
	if (bpf_map_update_elem(&threads, &tid, b, BPF_NOEXIST)) {
		count(ST_MAP_FULL);
		return 0;
	}
	t = bpf_map_lookup_elem(&threads, &tid);
	if (t) {
		t->layout = target->layout;
		t->generation = generation_of(target);
	}
	return t;
}

/* ---- entry --------------------------------------------------------------------- */

/* Finds out what a graph is, and counts what could not be read of it. Global, and by itself: kernels
 * before 6.13 allow 512 bytes of stack for a program and all that it calls. */
__noinline int walk_graph(struct thread *t, const struct layout *l, struct graph_info *info)
{
	struct walk w = {};

	if (!t || !l || !info)
		return 0;
	w.t = t;
	w.l = l;
	w.nodes = info->nodes;
	w.hash = info->n_nodes;
	/* Zero, but the verifier must not know: it would count each fault up to the last node,
	 * where any number is as good. */
	w.faults = w.tokens = *(volatile __u32 *)&info->has_experts;
	__builtin_memset(t->recent, 0, sizeof(t->recent));
	bpf_loop(info->n_nodes, walk_node, &w, 0);
	add(ST_WALKED, info->n_nodes);
	info->hash = w.hash;
	info->pos_tensor = elsewhere(l, w.pos_tensor) ? 0 : w.pos_tensor;
	info->out_tensor = elsewhere(l, w.out_tensor) ? 0 : w.out_tensor;
	info->has_experts = w.has_experts;
	info->tokens = w.tokens;
	return w.faults;
}

__noinline int describe_graph(struct thread *t, const struct layout *l, __u64 nodes, __u32 n_nodes,
			      __u32 seq)
{
	struct describe c = { .nodes = nodes, .seq = seq };

	if (!t || !l)
		return 0;
	c.t = t;
	c.l = l;
	bpf_loop(n_nodes, describe_node, &c, 0);
	return 0;
}

__noinline int snapshot_graph(__u64 cgraph, __u64 nodes, __u32 n_nodes, __u32 seq)
{
	struct describe c = { .nodes = nodes, .seq = seq };

	send_raw(cgraph, seq, RAW_CGRAPH, 0);
	bpf_loop(n_nodes < SNAPSHOT_NODES ? n_nodes : SNAPSHOT_NODES, snapshot_node, &c, 0);
	return 0;
}

__noinline int enter_graph(struct thread *t, const struct layout *l,
			   const struct target *target, struct event *e)
{
	/* One place for both: see walk_graph about the stack. */
	union {
		struct graph_key graph;
		struct hash_key known;
	} key = {};
	struct graph_info *seen, info = {};
	__u64 nodes, uid, first = 0, last = 0;
	__u32 n_nodes;

	if (!t || !l || !target || !e)
		return 0;
	key.graph.cgraph = e->cgraph;
	key.graph.tgid = e->tgid;
	if (bpf_copy_from_user(&info.n_nodes, 4, (void *)(e->cgraph + l->g_n_nodes)) ||
	    bpf_copy_from_user(&info.nodes, 8, (void *)(e->cgraph + l->g_nodes)) ||
	    (l->g_uid != ABSENT &&
	     bpf_copy_from_user(&info.uid, 8, (void *)(e->cgraph + l->g_uid)))) {
		e->flags |= EF_FAULT;
		count(ST_FAULT_GRAPH);
		return 0;
	}
	n_nodes = info.n_nodes;
	nodes = info.nodes;
	uid = info.uid;
	if (n_nodes > MAX_NODES) {
		n_nodes = MAX_NODES;
		e->flags |= EF_CUT;
	}
	e->n_nodes = n_nodes;
	e->uid = uid;
	if (!n_nodes)
		return 0;

	if (l->state != LY_CHOSEN) {
		e->flags |= EF_SNAPSHOT;
		snapshot_graph(e->cgraph, nodes, n_nodes, e->seq);
		if (l->state == LY_UNKNOWN)
			return 0;
	}

	if (bpf_copy_from_user(&first, 8, (void *)nodes) ||
	    bpf_copy_from_user(&last, 8, (void *)(nodes + 8ULL * (n_nodes - 1)))) {
		e->flags |= EF_FAULT;
		count(ST_FAULT_GRAPH);
		return 0;
	}
	if (e->level != LV_SCHED && e->parent && first == t->whole_nodes_first &&
	    last == t->whole_nodes_last && n_nodes == t->whole_n_nodes) {
		e->flags |= EF_SAME | t->whole_flags;
		e->hash = t->whole_hash;
		goto open_for_ops;
	}

	seen = bpf_map_lookup_elem(&graphs, &key.graph);
	if (seen && uid && seen->uid == uid && seen->nodes == nodes && seen->n_nodes == n_nodes) {
		info = *seen;
	} else {
		info.n_nodes = n_nodes;
		if (walk_graph(t, l, &info)) {
			/* Incomplete: not to be recognised later, nor described. */
			e->flags |= EF_FAULT;
			count(ST_FAULT_GRAPH);
		} else if (uid) {
			bpf_map_update_elem(&graphs, &key.graph, &info, BPF_ANY);
		}
	}
	e->hash = info.hash;
	if (!(e->flags & EF_FAULT)) {
		struct known_graph *g;

		__builtin_memset(&key, 0, sizeof(key));
		key.known.hash = info.hash;
		key.known.tgid = e->tgid;
		g = bpf_map_lookup_elem(&known, &key.known);
		if (g) {
			if (g->state == KN_CONFIRMED)
				e->flags |= EF_KNOWN;
		} else {
			struct known_graph sent = { .state = KN_SENT, .n_nodes = n_nodes };

			if (bpf_map_update_elem(&known, &key.known, &sent, BPF_NOEXIST) == 0) {
				e->flags |= EF_DESCRIBED;
				describe_graph(t, l, nodes, n_nodes, e->seq);
			}
		}
	}
	if (e->level == LV_SCHED || !e->parent) {
		int n;

		if (info.pos_tensor) {
			n = read_ints(l, info.pos_tensor, e, CH_POS);
			if (n < 0)
				count(ST_FAULT_INTS);
			else
				e->n_pos = n;
		}
		if (info.out_tensor) {
			n = read_ints(l, info.out_tensor, e, CH_OUT);
			if (n < 0)
				count(ST_FAULT_INTS);
			else
				e->n_out = n;
		}
	}
	if (e->level == LV_SCHED) {
		t->whole_nodes_first = first;
		t->whole_nodes_last = last;
		t->whole_n_nodes = n_nodes;
		t->whole_hash = info.hash;
		t->whole_flags = e->flags & (EF_KNOWN | EF_FAULT);
	}
	if (!e->parent)
		t->tokens = info.tokens;
	t->has_experts = info.has_experts;
open_for_ops:
	e->tokens = t->tokens;
	if (e->level == LV_CPU)
		open_ops(t, target, e, nodes, n_nodes);
	return 0;
}

/* A function was entered: its frame, 1; 0: there is no room. Global, also for the stack: see walk_graph. */
__noinline int push_frame(struct thread *t, __u64 sp, __u64 ts, __u64 object, __u32 level)
{
	struct frame *f, *below, outer = {};

	if (!t)
		return 0;
	if (t->depth >= MAX_FRAMES) {
		count(ST_MAP_FULL);
		return 0;
	}
	below = top_frame(t);
	if (below)
		outer = *below;
	f = frame_at(t, t->depth);
	f->ts = ts;
	f->sp = sp;
	f->seq = new_seq();
	f->level = level;
	f->object = object;
	f->open = outer.open | 1 << (level & 31);
	f->call = outer.call ?: is_call(level) ? f->seq : 0;
	f->inner_call = is_call(level) ? f->seq : outer.inner_call;
	f->inner_graph = is_call(level) ? outer.inner_graph : f->seq;
	t->depth++;
	return 1;
}

/* False when the function is not followed any further: no return is needed. */
static __always_inline bool worker_entry(struct pt_regs *ctx, __u64 cookie)
{
	__u64 ts = bpf_ktime_get_ns();
	__u64 id = bpf_get_current_pid_tgid();
	__u32 level = cookie_level(cookie);
	__u32 tgid = id >> 32, tid = id;
	struct target want, *target = &want;
	__u64 sp = REG_SP(ctx) + cookie_moved(cookie);
	/* Both read here, at constant offsets: the compiler would else choose an
	 * offset into ctx at run time, which the verifier does not allow. */
	__u64 arg1 = *(volatile unsigned long *)&REG_ARG1(ctx);
	__u64 arg2 = *(volatile unsigned long *)&REG_ARG2(ctx);
	struct frame *f, *below;
	__u32 layout_index;
	struct layout *l;
	struct thread *t;
	struct event *e;

	if (!wanted_here(tgid, cookie, target))
		return false;
	layout_index = target->layout;
	l = bpf_map_lookup_elem(&layouts, &layout_index);
	if (!l)
		return false;
	count(is_call(level) ? ST_HITS_CALL : ST_HITS_GRAPH);
	t = enter_thread(tid, target, ts);
	if (!t)
		return false;
	drop_frames(t, sp, ts, level, false);
	if (!push_frame(t, sp, ts, arg1, level))
		return false;
	f = top_frame(t);
	if (!f)
		return false;
	below = t->depth > 1 ? frame_at(t, t->depth - 2) : 0;

	e = bpf_ringbuf_reserve(&events, sizeof(*e), 0);
	if (!e) {
		count(ST_LOST_EVENTS);
		return true;
	}
	fill_event(e, ts, is_call(level) ? EV_CALL_BEGIN : EV_GRAPH_BEGIN);
	e->seq = f->seq;
	e->level = level;
	e->object = arg1;
	e->call = f->call;
	if (is_call(level)) {
		e->parent = below ? below->inner_call : 0;
		if (level == LV_PROCESS) {
			/* enum llama_process_type: 0 encode, 1 decode */
			e->status = (__s32)arg2;
		} else if (bpf_copy_from_user(&e->batch_tokens, 4, (void *)BATCH_ADDR(ctx, sp))) {
			e->flags |= EF_FAULT;
			count(ST_FAULT_CALL);
		}
	} else {
		e->parent = below ? below->inner_graph : 0;
		e->cgraph = level == LV_CPU ? arg1 : arg2;
		if (level == LV_CPU)
			close_ops(t, 0, 0);
		enter_graph(t, l, target, e);
		if (level == LV_CPU)
			run_clock(t, true);
	}
	bpf_ringbuf_submit(e, BPF_RB_NO_WAKEUP);
	return true;
}

/* ---- return -------------------------------------------------------------------- */

static __always_inline void worker_return(struct pt_regs *ctx, __u64 cookie)
{
	__u64 ts = bpf_ktime_get_ns();
	__u64 id = bpf_get_current_pid_tgid();
	__u32 level = cookie_level(cookie);
	__u32 tgid = id >> 32, tid = id;
	struct target want, *target = &want;
	__u64 sp = REG_SP(ctx) - RETURN_POPS;	/* as it was at the entry */
	struct frame f = {}, *top;
	struct thread *t;
	struct event *e;

	if (!wanted_here(tgid, cookie, target))
		return;
	count(is_call(level) ? ST_HITS_CALL : ST_HITS_GRAPH);
	t = this_thread(tid, target, ts);
	if (t && has_frame(t, level, sp)) {
		drop_frames(t, sp, ts, level, true);
		top = top_frame(t);
		if (top) {
			f = *top;
			t->depth--;
		}
	}
	e = bpf_ringbuf_reserve(&events, sizeof(*e), 0);
	if (!e) {
		count(ST_LOST_EVENTS);
	} else {
		fill_event(e, ts, is_call(level) ? EV_CALL_END : EV_GRAPH_END);
		e->level = level;
		e->status = (__s32)REG_RET(ctx);
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
			flush_hits(t);
			e->hits = t->hits;
			e->accepted = t->accepted;
			e->lost = t->lost;
			e->op_faults = t->op_faults;
			if (t->epoch != target->epoch)
				e->flags |= EF_DISARMED;
		}
		bpf_ringbuf_submit(e, BPF_RB_NO_WAKEUP);
	}
	if (!t)
		return;
	if (level == LV_CPU)
		close_ops(t, target, ts);
	if (level == LV_SCHED)
		t->whole_n_nodes = 0;
	if (!t->depth)
		bpf_map_delete_elem(&threads, &tid);
}

SEC("uprobe.s")
int on_entry(struct pt_regs *ctx)
{
	worker_entry(ctx, bpf_get_attach_cookie(ctx));
	return 0;
}

SEC("uretprobe.s")
int on_return(struct pt_regs *ctx)
{
	worker_return(ctx, bpf_get_attach_cookie(ctx));
	return 0;
}

/* ---- ops ------------------------------------------------------------------------ */

struct experts {
	struct thread *t;
	__u64 data;
	__u64 stride;
	__u32 used;
	__u32 faults;
};

static long experts_row(__u32 row, struct experts *c)
{
	struct thread *t = c->t;
	__u32 n = c->used;
	int i;

	if (n > MAX_USED_EXPERTS)
		n = MAX_USED_EXPERTS;
	if (bpf_probe_read_user(t->ids, n * 4, (void *)(c->data + row * c->stride))) {
		c->faults++;
		return 1;
	}
	for (i = 0; i < MAX_USED_EXPERTS; i++) {
		__u32 id = t->ids[i];

		if (i >= n)
			break;
		if (id < EXPERT_BITS)
			t->bitmap[(id >> 5) & (CHUNK_INTS - 1)] |= 1u << (id & 31);
	}
	return 0;
}

/* MUL_MAT_ID: which experts this execution touches; the bytes it reads follow. */
static __always_inline void send_experts(struct thread *t, const struct layout *l, __u64 tensor,
					 __u32 node, __u64 ts)
{
	struct experts c = { .t = t };
	__u64 ids = 0, rows = 0, used = 0;
	struct int_chunk *k;
	int i;

	if (bpf_probe_read_user(&ids, 8, (void *)(tensor + l->t_src + 16)) || !ids ||
	    bpf_probe_read_user(&used, 8, (void *)(ids + l->t_ne)) ||
	    bpf_probe_read_user(&rows, 8, (void *)(ids + l->t_ne + 8)) ||
	    bpf_probe_read_user(&c.stride, 8, (void *)(ids + l->t_nb + 8)) ||
	    bpf_probe_read_user(&c.data, 8, (void *)(ids + l->t_data)) ||
	    !used || used > MAX_USED_EXPERTS || !rows || rows > 65536) {
		count(ST_FAULT_INTS);
		return;
	}
	c.used = used;
	__builtin_memset(t->bitmap, 0, sizeof(t->bitmap));
	bpf_loop(rows, experts_row, &c, 0);
	if (c.faults) {
		count(ST_FAULT_INTS);
		return;
	}
	k = bpf_ringbuf_reserve(&ints, sizeof(*k), 0);
	if (!k) {
		count(ST_LOST_INTS);
		return;
	}
	k->ts = ts;
	k->seq = t->seq;
	k->node = node;
	k->what = CH_EXPERTS;
	k->count = 0;
	k->offset = used * rows;
	k->tgid = bpf_get_current_pid_tgid() >> 32;
	k->reserved = 0;
	for (i = 0; i < CHUNK_INTS; i++) {
		k->value[i] = t->bitmap[i];
		k->count += __builtin_popcount(t->bitmap[i]);
	}
	bpf_ringbuf_submit(k, BPF_RB_NO_WAKEUP);
}

struct search {
	struct thread *t;
	__u64 tensor;
	__u32 base;
	__s32 found;		/* -1: not yet */
};

/* Looks at WINDOW node pointers from s->base on; 1: found, or nothing more to see. */
static __always_inline long search_window(struct search *s)
{
	struct thread *t = s->t;
	int i;

	if (s->base >= t->n_nodes)
		return 1;
	/* May read past the last node; what is found there is not accepted. */
	if (bpf_probe_read_user(t->window, sizeof(t->window),
				(void *)(t->nodes + 8ULL * s->base))) {
		t->op_faults++;
		count(ST_FAULT_OP);
		return 1;
	}
	for (i = 0; i < WINDOW; i++) {
		if (t->window[i] == s->tensor) {
			if (s->base + i < t->n_nodes)
				s->found = s->base + i;
			return 1;
		}
	}
	s->base += WINDOW;
	return 0;
}

static long search_further(__u32 i, struct search *s)
{
	return search_window(s);
}

/* Index of `tensor` among the nodes not yet passed, or -1: a nested helper, a
 * tensor on the stack, or the node already running. The next kernel is nearly
 * always in the first window: only views and other empty ops lie between. */
static __always_inline long find_node(struct thread *t, __u64 tensor)
{
	struct search s = { .t = t, .tensor = tensor, .base = t->next, .found = -1 };

	if (!search_window(&s))
		bpf_loop(MAX_NODES / WINDOW, search_further, &s, 0);
	return s.found;
}

static __always_inline void on_op(struct pt_regs *ctx, bool fused)
{
	__u64 ts = bpf_ktime_get_ns();
	__u32 tid = bpf_get_current_pid_tgid();
	struct thread *t = bpf_map_lookup_elem(&threads, &tid);
	__u64 tensor = REG_ARG2(ctx);
	struct op_hit *h;
	long node;

	if (!t) {
		count(ST_HITS_OTHER_THREAD);
		return;
	}
	/* Thread 0 outside a graph whose ops are wanted, or of one whose begin was lost. */
	if (!t->nodes) {
		count(ST_HITS_OP);
		return;
	}
	t->hits++;
	node = find_node(t, tensor);
	if (node < 0) {
		count(ST_OP_NESTED);
		return;
	}
	t->next = node + (fused ? 2 : 1);
	t->running = node;
	t->accepted++;
	if (t->mode == OPS_SUM) {
		__u32 i = t->sum_first + (__u32)node;

		add_sum(t, ts);
		t->last_ts = ts;
		t->last_sum = i + 1;
		if (fused) {
			struct node_sum *s = bpf_map_lookup_elem(&sums, &i);

			if (s)
				s->fused++;
		}
	} else {
		h = &t->batch[t->batched & (OP_BATCH - 1)];
		h->ts = ts;
		h->seq = t->seq;
		h->node = (__u32)node | (fused ? OP_FUSED : 0);
		if (++t->batched >= OP_BATCH)
			flush_hits(t);
	}
	if (t->has_experts && !fused) {
		__u32 index = t->layout;
		struct layout *l = bpf_map_lookup_elem(&layouts, &index);
		__u32 op = 0;

		if (l && !bpf_probe_read_user(&op, 4, (void *)(tensor + l->t_op)) &&
		    op == l->op_mul_mat_id)
			send_experts(t, l, tensor, node, ts);
	}
}

SEC("uprobe")
int on_op_dispatch(struct pt_regs *ctx)
{
	on_op(ctx, false);
	return 0;
}

SEC("uprobe")
int on_op_fused2(struct pt_regs *ctx)
{
	on_op(ctx, true);
	return 0;
}

/* ---- threads that end inside a call ---------------------------------------------- */

SEC("raw_tp/sched_process_exit")
int on_thread_exit(void *ctx)
{
	__u64 ts = bpf_ktime_get_ns();
	__u32 tid = bpf_get_current_pid_tgid();
	struct thread *t = bpf_map_lookup_elem(&threads, &tid);

	if (!t)
		return 0;
	drop_frames(t, ~0ULL, ts, 0, false);
	close_ops(t, 0, 0);
	bpf_map_delete_elem(&threads, &tid);
	return 0;
}
