/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-3-Clause) */
/* Counts hits by cookie and sends one record each: for tests of the kernel room. */
#include "kernel.h"
#include "events.h"
#include <bpf/bpf_helpers.h>

char LICENSE[] SEC("license") = "Dual BSD/GPL";

#define COUNTERS 16

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, COUNTERS);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, __u64);
} counts SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 3);
	__type(key, __u32);
	__type(value, __u64);
} plain SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 4);
	__type(key, __u32);
	__type(value, __u64);
} table SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 16);
} records SEC(".maps");

struct op_hit *btf_op_hit;	/* keeps the type in the object's BTF */

const volatile __u32 discard_every = 0;
const volatile __u64 only_tgid = 0;
const volatile __s16 negative = -3;

static __always_inline void count(void *ctx, __u64 value)
{
	__u32 key = bpf_get_attach_cookie(ctx);
	__u64 *n;
	struct op_hit *record;

	if (only_tgid && bpf_get_current_pid_tgid() >> 32 != only_tgid)
		return;
	n = bpf_map_lookup_elem(&counts, &key);
	if (!n)
		return;
	__sync_fetch_and_add(n, 1);
	record = bpf_ringbuf_reserve(&records, sizeof(*record), 0);
	if (!record)
		return;
	record->ts = value;
	record->seq = *n;
	record->node = key;
	if (discard_every && *n % discard_every == 0)
		bpf_ringbuf_discard(record, BPF_RB_NO_WAKEUP);
	else
		bpf_ringbuf_submit(record, BPF_RB_NO_WAKEUP);
}

SEC("uprobe")
int on_entry(struct pt_regs *ctx)
{
	count(ctx, REG_ARG1(ctx));
	return 0;
}

SEC("uprobe")
int on_return(struct pt_regs *ctx)
{
	count(ctx, REG_RET(ctx));
	return 0;
}

/*
 * Refused by every verifier: an unchecked map value (newer ones know that a constant
 * key is in the array, hence the variable one). Loaded only where that is the test.
 */
SEC("uprobe")
int refused(struct pt_regs *ctx)
{
	__u32 key = bpf_get_smp_processor_id();
	__u64 *n = bpf_map_lookup_elem(&counts, &key);

	*n = 1;
	return 0;
}

SEC("raw_tp")
int on_exit(void *ctx)
{
	__u32 key = COUNTERS - 1;
	__u64 *n = bpf_map_lookup_elem(&counts, &key);

	if (n && only_tgid && bpf_get_current_pid_tgid() >> 32 == only_tgid)
		__sync_fetch_and_add(n, 1);
	return 0;
}
