// SPDX-License-Identifier: (GPL-2.0-only OR BSD-3-Clause)
/*
 * Performance events by op: each thread reads its own events when it enters an op, and what
 * they have counted since the last reading belongs to the op before. The return of a graph
 * closes the last op of the thread that entered it; that of the other threads is closed by
 * their next op, so it has their wait for the next graph in it. An op counts for the weight or
 * cache that it works on, by whose name user space knows its role.
 *
 * Events are opened per thread by user space: neither inherited (the kernel refuses to read
 * such ones here) nor in groups. Needs no BTF.
 */
#include "kernel.h"
#include "maps.h"
#include "counters.h"

struct bpf_perf_event_value {
	__u64 counter, enabled, running;
};

char LICENSE[] SEC("license") = "Dual BSD/GPL";

struct {
	__uint(type, BPF_MAP_TYPE_PERF_EVENT_ARRAY);
	__uint(max_entries, MAX_COUNTED * MAX_COUNTED_THREADS);
	__uint(key_size, sizeof(__u32));
	__uint(value_size, sizeof(__u32));
} events SEC(".maps");

MAP(HASH, count_threads, MAX_COUNTED_THREADS, __u32 /* tid */, struct count_thread);
MAP(HASH, count_sums, 4096, struct count_key, struct count_sum);
MAP(HASH, count_layouts, 1024, __u32 /* tgid */, struct count_layout);

/* New sums begin as this: too large for the stack. */
MAP(ARRAY, count_blank, 1, __u32, struct count_sum);

static __always_inline struct count_sum *sum_of(const struct count_key *key)
{
	struct count_sum *s = bpf_map_lookup_elem(&count_sums, key), *blank;
	__u32 zero = 0, tgid = key->tgid;
	struct count_layout *l;

	if (s)
		return s;
	blank = bpf_map_lookup_elem(&count_blank, &zero);
	if (!blank)
		return 0;
	bpf_map_update_elem(&count_sums, key, blank, BPF_NOEXIST);
	s = bpf_map_lookup_elem(&count_sums, key);
	l = bpf_map_lookup_elem(&count_layouts, &tgid);
	/* A weight is where it is as long as its model is loaded: its name is read once. */
	if (s && l && key->leaf)
		bpf_probe_read_user(s->name, sizeof(s->name) - 1, (void *)(key->leaf + l->t_name));
	return s;
}

#define FLAG_INPUT 1
#define MAX_LOOKED 4	/* sources of an op among which its weight or cache is */

/* The tensor itself, or the one that it is a view of, where that is neither computed nor an input of
 * the graph: a weight or a cache. Else 0. */
static __always_inline __u64 leaf_at(__u64 tensor, const struct count_layout *l)
{
	__u64 root = 0;
	__u32 op = NO_OP, flags = 0;

	if (bpf_probe_read_user(&root, 8, (void *)(tensor + l->t_view_src)))
		return 0;
	if (!root)
		root = tensor;
	if (bpf_probe_read_user(&op, 4, (void *)(root + l->t_op)) || op)
		return 0;
	if (l->t_flags != NO_FIELD &&
	    (bpf_probe_read_user(&flags, 4, (void *)(root + l->t_flags)) || flags & FLAG_INPUT))
		return 0;
	return root;
}

/* The weight or cache that an op works on, and of which type that is. */
static __always_inline void look_at(__u64 tensor, const struct count_layout *l, struct count_key *key)
{
	__u64 source, leaf;

	for (__u32 i = 0; i < MAX_LOOKED; i++) {
		source = 0;
		if (i >= l->n_src ||
		    bpf_probe_read_user(&source, 8, (void *)(tensor + l->t_src + 8 * i)))
			break;
		if (!source)
			continue;
		leaf = leaf_at(source, l);
		if (!leaf)
			continue;
		key->leaf = leaf;
		key->slot = i;
		if (bpf_probe_read_user(&key->type, 4, (void *)(leaf + l->t_type)))
			key->type = NO_OP;
		break;
	}
}

/* Give what was counted since the last reading to what ran, and say what runs now. */
static __always_inline void turn(struct count_thread *t, const struct count_key *now)
{
	struct count_sum *s = 0;

	if (t->started) {
		s = sum_of(&t->key);
		if (!s)
			return;	/* full: it stays with what runs, until there is room */
	}
	for (__u32 i = 0; i < MAX_COUNTED; i++) {
		struct bpf_perf_event_value v = {};

		if (i >= t->n_events)
			break;
		if (bpf_perf_event_read_value(&events, t->slot * MAX_COUNTED + i, &v, sizeof(v))) {
			__sync_fetch_and_add(&t->failed, 1);
			continue;
		}
		if (s) {
			__sync_fetch_and_add(&s->events[i].value, v.counter - t->last[i].value);
			__sync_fetch_and_add(&s->events[i].enabled, v.enabled - t->last[i].enabled);
			__sync_fetch_and_add(&s->events[i].running, v.running - t->last[i].running);
		} else {
			t->first[i].value = v.counter;
			t->first[i].enabled = v.enabled;
			t->first[i].running = v.running;
		}
		t->last[i].value = v.counter;
		t->last[i].enabled = v.enabled;
		t->last[i].running = v.running;
	}
	if (s)
		__sync_fetch_and_add(&s->calls, 1);
	t->key = *now;
	t->started = 1;
}

static __always_inline int enters(__u64 tensor, __u64 next)
{
	__u64 id = bpf_get_current_pid_tgid();
	__u32 tid = id, tgid = id >> 32;
	struct count_thread *t = bpf_map_lookup_elem(&count_threads, &tid);
	struct count_key key = { .tgid = tgid, .op = NO_OP, .type = NO_OP, .own = NO_FIELD };
	struct count_layout *l;
	__u32 own;

	if (!t)
		return 0;
	l = bpf_map_lookup_elem(&count_layouts, &tgid);
	if (l) {
		if (bpf_probe_read_user(&key.op, 4, (void *)(tensor + l->t_op)))
			key.op = NO_OP;
		if (!bpf_probe_read_user(&own, 4, (void *)(tensor + l->t_type)) && own < NO_FIELD)
			key.own = own;
		look_at(tensor, l, &key);
		if (next && !key.leaf)
			look_at(next, l, &key);
	}
	turn(t, &key);
	return 0;
}

SEC("uprobe")
int on_count_op(struct pt_regs *ctx)
{
	return enters(REG_ARG2(ctx), 0);
}

/* Two nodes in one kernel: a norm, and the product with its weight. */
SEC("uprobe")
int on_count_fused(struct pt_regs *ctx)
{
	return enters(REG_ARG2(ctx), REG_ARG3(ctx));
}

SEC("uretprobe")
int on_count_graph_end(struct pt_regs *ctx)
{
	__u64 id = bpf_get_current_pid_tgid();
	__u32 tid = id;
	struct count_thread *t = bpf_map_lookup_elem(&count_threads, &tid);
	struct count_key key = { .tgid = id >> 32, .op = NO_OP, .type = NO_OP, .own = NO_FIELD };

	if (t)
		turn(t, &key);
	return 0;
}

/* So that the structures are in the object's BTF. */
const struct count_thread *btf_count_thread __attribute__((unused)) = 0;
