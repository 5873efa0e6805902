/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-3-Clause) */
/* Entry and return of a function with one session link; skips every third return. */
#include "kernel.h"
#include <bpf/bpf_helpers.h>

char LICENSE[] SEC("license") = "Dual BSD/GPL";

extern bool bpf_session_is_return(void) __ksym;

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 2);
	__type(key, __u32);
	__type(value, __u64);
} counts SEC(".maps");

SEC("uprobe")
int on_both(struct pt_regs *ctx)
{
	__u32 key = bpf_session_is_return();
	__u64 *n = bpf_map_lookup_elem(&counts, &key);

	if (!n)
		return 0;
	return (__sync_fetch_and_add(n, 1) + 1) % 3 == 0 && !key;
}
