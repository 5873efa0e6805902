/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-3-Clause) */
/*
 * A tracer of the shape that the ProfInfer paper describes (its table 2 and section 3.3), for
 * comparison: BCC; entry and return of the call, of the graph and of every operator's
 * function, at their first byte, on every thread; the tensor's fields read by fixed offsets;
 * one ring record each way, with a wake-up, for Python to look at one by one.
 */
#include <uapi/linux/ptrace.h>

struct record {
	u64 ts;
	u64 address;	/* of the function; 0: a return */
	u64 tensor;
	u64 src[2];
	s64 ne[4];
	s64 src_ne[8];
	u32 tid;
	u32 cpu;
	u32 op;
	u32 pad;
	char name[64];
};

BPF_RINGBUF_OUTPUT(records, 1024);
BPF_ARRAY(lost, u64, 1);

static __always_inline struct record *begin(void)
{
	u64 id = bpf_get_current_pid_tgid();
	struct record *r;
	u32 zero = 0;

	if (id >> 32 != TARGET)
		return 0;
	r = records.ringbuf_reserve(sizeof(struct record));
	if (!r) {
		lost.increment(zero);	/* the published one does not count */
		return 0;
	}
	__builtin_memset(r, 0, sizeof(*r));
	r->ts = bpf_ktime_get_ns();
	r->tid = id;
	r->cpu = bpf_get_smp_processor_id();
	return r;
}

int function_entry(struct pt_regs *ctx)
{
	u64 address = PT_REGS_IP(ctx);
	struct record *r = begin();

	if (!r)
		return 0;
	r->address = address;
	records.ringbuf_submit(r, 0);
	return 0;
}

int op_entry(struct pt_regs *ctx)
{
	u64 address = PT_REGS_IP(ctx), tensor = PT_REGS_PARM2(ctx);
	struct record *r = begin();
	int i;

	if (!r)
		return 0;
	r->address = address;
	r->tensor = tensor;
	bpf_probe_read_user(&r->op, 4, (void *)(tensor + 80));
	bpf_probe_read_user(r->ne, 32, (void *)(tensor + 16));
	bpf_probe_read_user(r->src, 16, (void *)(tensor + 152));
	bpf_probe_read_user(r->name, 64, (void *)(tensor + 256));
	for (i = 0; i < 2; i++)
		if (r->src[i])
			bpf_probe_read_user(&r->src_ne[4 * i], 32, (void *)(r->src[i] + 16));
	records.ringbuf_submit(r, 0);
	return 0;
}

int any_return(struct pt_regs *ctx)
{
	struct record *r = begin();

	if (r)
		records.ringbuf_submit(r, 0);
	return 0;
}
