/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-3-Clause) */
/*
 * Declarations of maps in one line each; and once, for the objects that share them, those that
 * ggml.bpf.o and sched.bpf.o have and others use (user space hands them over, so size and types
 * must be the same). An object declares what it uses: libbpf creates whatever is declared.
 */
#ifndef PROFINFER_MAPS_H
#define PROFINFER_MAPS_H

#define MAP(kind, name, entries, key_type, value_type)                                           \
	struct {                                                                                 \
		__uint(type, BPF_MAP_TYPE_##kind);                                               \
		__uint(max_entries, entries);                                                    \
		__type(key, key_type);                                                           \
		__type(value, value_type);                                                       \
	} name SEC(".maps")

#define RINGBUF(name, bytes)                                                                     \
	struct {                                                                                 \
		__uint(type, BPF_MAP_TYPE_RINGBUF);                                              \
		__uint(max_entries, bytes);                                                      \
	} name SEC(".maps")

#define TARGETS MAP(HASH, targets, 1024, __u32 /* tgid */, struct target)
#define THREADS MAP(HASH, threads, 1024, __u32 /* tid */, struct thread)
#define GRAPH_CLOCKS MAP(LRU_HASH, graph_clocks, 1024, __u32 /* tgid */, struct graph_clock)
#define SCHED_THREADS MAP(HASH, sched_threads, 4096, __u32 /* tid */, struct sched_thread)

#endif
