/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The independent truth of the tests: an LD_PRELOAD library that writes down what the
 * CPU backend really executes. It shares no code, no probe and no layout table with the
 * profiler, and it is never part of the product.
 *
 * It stands in front of
 *   ggml_graph_compute                       one call per CPU graph
 *   ggml_cpu_extra_compute_forward           called first for every op that is not fused
 *   ggml_compute_forward_rms_norm_mul_fused  two nodes in one kernel
 * and notes, on thread 0 only, the tensor and the time of entry. An op lasts until the next
 * entry, the last one until the graph returns. Operator and type names are asked of the
 * engine itself (ggml_op_name, ggml_type_name). The struct offsets below are those of today's
 * ggml (override with -D); they are compared with the engine's own accessors at each new
 * graph, and the process is stopped when they differ: a wrong truth is worse than none.
 *
 * On the way of an op there is one clock read and one store into a buffer that exists
 * already; formatting and writing happen after the graph has returned, and the description
 * of a graph is written again only when it changed. Output: the file named by PFSHIM_OUT,
 * records as `struct head` and its payload, little endian.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#ifndef T_TYPE
#define T_TYPE 0
#define T_NE 16
#define T_NB 48
#define T_OP 80
#define T_OP_PARAMS 84
#define T_FLAGS 148
#define T_SRC 152
#define T_VIEW_SRC 232
#define T_VIEW_OFFS 240
#define T_DATA 248
#define T_NAME 256
#define T_EXTRA 320
#define G_N_NODES 4
#define G_NODES 16
#define G_UID 88
#endif
#define N_SRC 10
#define MAX_OPS 65536

enum { REC_DESC = 1, REC_GRAPH = 2 };

struct head {
	uint32_t magic, kind;
	uint64_t bytes; /* of payload */
};

struct tensor_rec {
	uint64_t addr, data, view_src, view_offs, extra;
	int64_t ne[4];
	uint64_t nb[4];
	uint64_t src[N_SRC];
	int32_t op_params[16];
	uint32_t flags, index; /* index: place in the graph, ~0 for a source that is no node */
	char op[32], type[16], name[64];
};

struct op_rec {
	uint64_t ts;
	uint64_t node, fused; /* tensor addresses; fused: the second node, 0 when none */
	uint64_t experts;     /* MUL_MAT_ID: bitmap of the first 64 experts asked for */
};

struct graph_rec {
	uint64_t begin, end;
	uint64_t cgraph, uid;
	uint32_t seq, desc, n_nodes, n_ops;
	int32_t tid, status;
};

struct state {
	bool busy, described;
	uint32_t desc, n_ops;
	uint64_t print;
	struct op_rec *ops;
	int mul_mat_id; /* its number in this build, -1: not looked up yet */
};

static __thread struct state *mine;
static uint32_t next_seq, next_desc;
static int out_fd = -1;
static pthread_mutex_t out_lock = PTHREAD_MUTEX_INITIALIZER;

static int (*real_graph)(void *, void *);
static bool (*real_extra)(void *, void *);
static void (*real_fused)(void *, void *, void *);
static const char *(*op_name)(int);
static const char *(*type_name)(int);
static const char *(*get_name)(const void *);
static int64_t (*nelements)(const void *);
static void *(*get_data)(const void *);
static int (*graph_n_nodes)(void *);

#define AT(type, p, off) (*(type *)((char *)(p) + (off)))

static void die(const char *what)
{
	fprintf(stderr, "shim: %s\n", what);
	_exit(97);
}

static uint64_t now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* The next definition in the global scope, or, for a library that was opened locally (a
 * Python module, or one that cffi opened), the one in the scope of the calling object. */
static void *find(const char *name, void *caller)
{
	void *f = dlsym(RTLD_NEXT, name);
	Dl_info info;
	void *handle;

	if (f || !dladdr(caller, &info) || !info.dli_fname)
		return f;
	handle = dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
	return handle ? dlsym(handle, name) : NULL;
}

static void must(void **slot, const char *name, void *caller)
{
	*slot = find(name, caller);
	if (!*slot)
		die(name);
}

static void set_up(void *caller)
{
	const char *path = getenv("PFSHIM_OUT");

	must((void **)&op_name, "ggml_op_name", caller);
	must((void **)&type_name, "ggml_type_name", caller);
	must((void **)&get_name, "ggml_get_name", caller);
	must((void **)&get_data, "ggml_get_data", caller);
	must((void **)&nelements, "ggml_nelements", caller);
	must((void **)&graph_n_nodes, "ggml_graph_n_nodes", caller);
	must((void **)&real_graph, "ggml_graph_compute", caller);
	if (path)
		out_fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
}

static void write_all(const void *bytes, size_t n)
{
	const char *p = bytes;

	while (n) {
		ssize_t done = write(out_fd, p, n);

		if (done <= 0)
			die("cannot write PFSHIM_OUT");
		p += done;
		n -= (size_t)done;
	}
}

static void put(uint32_t kind, const void *a, size_t na, const void *b, size_t nb)
{
	struct head h = { 0x4d494853, kind, na + nb };

	pthread_mutex_lock(&out_lock);
	write_all(&h, sizeof(h));
	write_all(a, na);
	write_all(b, nb);
	pthread_mutex_unlock(&out_lock);
}

static void describe(struct tensor_rec *r, void *t, uint32_t index)
{
	int64_t n = 1;

	memset(r, 0, sizeof(*r));
	r->addr = (uintptr_t)t;
	r->data = AT(uint64_t, t, T_DATA);
	r->view_src = AT(uint64_t, t, T_VIEW_SRC);
	r->view_offs = AT(uint64_t, t, T_VIEW_OFFS);
	r->extra = AT(uint64_t, t, T_EXTRA);
	memcpy(r->ne, (char *)t + T_NE, sizeof(r->ne));
	memcpy(r->nb, (char *)t + T_NB, sizeof(r->nb));
	memcpy(r->src, (char *)t + T_SRC, sizeof(r->src));
	memcpy(r->op_params, (char *)t + T_OP_PARAMS, sizeof(r->op_params));
	r->flags = AT(uint32_t, t, T_FLAGS);
	r->index = index;
	snprintf(r->op, sizeof(r->op), "%s", op_name(AT(int, t, T_OP)));
	snprintf(r->type, sizeof(r->type), "%s", type_name(AT(int, t, T_TYPE)));
	memcpy(r->name, (char *)t + T_NAME, sizeof(r->name));
	for (int i = 0; i < 4; i++)
		n *= r->ne[i];
	if (get_name(t) != (char *)t + T_NAME || nelements(t) != n || (uintptr_t)get_data(t) != r->data)
		die("the layout of ggml_tensor is not the one this shim was compiled for");
}

static uint64_t mix(uint64_t h, uint64_t v)
{
	h = (h ^ v) * 0x9e3779b97f4a7c15u;
	return h ^ (h >> 29);
}

static uint64_t fingerprint(void *g, int n)
{
	void **nodes = AT(void **, g, G_NODES);
	uint64_t h = (uint64_t)n;

	for (int i = 0; i < n; i++) {
		void *t = nodes[i];

		h = mix(h, (uintptr_t)t);
		h = mix(h, AT(uint32_t, t, T_OP) | (uint64_t)AT(uint32_t, t, T_FLAGS) << 32);
		for (int k = 0; k < 4; k++)
			h = mix(h, AT(uint64_t, t, T_NE + 8 * k) ^ AT(uint64_t, t, T_NB + 8 * k) << 1);
		for (int k = 0; k < N_SRC; k++) {
			void *s = AT(void *, t, T_SRC + 8 * k);

			if (s)
				h = mix(mix(h, (uintptr_t)s), AT(uint64_t, s, T_NE) ^ AT(uint64_t, s, T_NE + 8) << 20);
		}
		h = mix(h, AT(uint64_t, t, T_DATA));
	}
	return h;
}

static void send_description(struct state *s, void *g, int n)
{
	void **nodes = AT(void **, g, G_NODES);
	size_t most = (size_t)n * (1 + N_SRC), used = 0;
	struct tensor_rec *all = malloc(most * sizeof(*all));
	struct { uint32_t desc, n; } front;

	if (!all)
		die("out of memory");
	for (int i = 0; i < n; i++)
		describe(&all[used++], nodes[i], (uint32_t)i);
	for (int i = 0; i < n; i++)
		for (int k = 0; k < N_SRC; k++) {
			void *t = AT(void *, nodes[i], T_SRC + 8 * k);

			if (t)
				describe(&all[used++], t, ~0u);
		}
	front.desc = s->desc = __atomic_add_fetch(&next_desc, 1, __ATOMIC_RELAXED);
	front.n = (uint32_t)used;
	put(REC_DESC, &front, sizeof(front), all, used * sizeof(*all));
	free(all);
}

static int look_up_mul_mat_id(void)
{
	for (int i = 0; i < 256; i++) {
		const char *name = op_name(i);

		if (!name || !strcmp(name, "NONE"))
			continue;
		if (!strcmp(name, "MUL_MAT_ID"))
			return i;
		if (!strcmp(name, "CROSS_ENTROPY_LOSS"))
			break;
	}
	return -2;
}

/* Exported without a type. The dynamic linker does not mind; a tool that looks for the engine's
 * functions does not take this library for a part of the engine. */
#ifdef __aarch64__
#define JUMP "b"
#else
#define JUMP "jmp"
#endif
#define INTERPOSE(name) \
	__asm__(".text\n.globl " #name "\n" #name ": " JUMP " shim_" #name)

INTERPOSE(ggml_graph_compute);
INTERPOSE(ggml_cpu_extra_compute_forward);
INTERPOSE(ggml_compute_forward_rms_norm_mul_fused);

__attribute__((used, noclone)) static int shim_ggml_graph_compute(void *g, void *plan)
{
	struct graph_rec r = { 0 };
	struct state *s = mine;
	int n;

	if (!real_graph)
		set_up(__builtin_return_address(0));
	if (out_fd < 0)
		return real_graph(g, plan);
	if (!s) {
		s = mine = calloc(1, sizeof(*s));
		if (!s || !(s->ops = malloc(MAX_OPS * sizeof(*s->ops))))
			die("out of memory");
		memset(s->ops, 0, MAX_OPS * sizeof(*s->ops));
		s->mul_mat_id = look_up_mul_mat_id();
	}
	n = AT(int, g, G_N_NODES);
	if (n != graph_n_nodes(g))
		die("the layout of ggml_cgraph is not the one this shim was compiled for");
	s->n_ops = 0;
	s->busy = true;
	r.begin = now();
	r.status = real_graph(g, plan);
	r.end = now();
	s->busy = false;

	uint64_t print = fingerprint(g, n);

	if (!s->described || print != s->print) {
		send_description(s, g, n);
		s->described = true;
		s->print = print;
	}
	r.cgraph = (uintptr_t)g;
	r.uid = AT(uint64_t, g, G_UID);
	r.seq = __atomic_add_fetch(&next_seq, 1, __ATOMIC_RELAXED);
	r.desc = s->desc;
	r.n_nodes = (uint32_t)n;
	r.n_ops = s->n_ops;
	r.tid = gettid();
	put(REC_GRAPH, &r, sizeof(r), s->ops, s->n_ops * sizeof(*s->ops));
	return r.status;
}

static uint64_t experts_of(void *t)
{
	void *ids = AT(void *, t, T_SRC + 16);
	uint64_t seen = 0;

	for (int64_t j = 0; j < AT(int64_t, ids, T_NE + 8); j++)
		for (int64_t i = 0; i < AT(int64_t, ids, T_NE); i++) {
			char *row = AT(char *, ids, T_DATA) + j * AT(int64_t, ids, T_NB + 8);
			int32_t e = AT(int32_t, row, i * AT(int64_t, ids, T_NB));

			if (e >= 0 && e < 64)
				seen |= 1ull << e;
		}
	return seen;
}

static void note(void *params, void *t, void *fused)
{
	struct state *s = mine;
	struct op_rec *o;

	if (!s || !s->busy || AT(int, params, 0) != 0)
		return;
	if (s->n_ops == MAX_OPS)
		die("more ops in a graph than the buffer holds");
	o = &s->ops[s->n_ops++];
	o->node = (uintptr_t)t;
	o->fused = (uintptr_t)fused;
	o->experts = AT(int, t, T_OP) == s->mul_mat_id ? experts_of(t) : 0;
	o->ts = now();
}

__attribute__((used, noclone)) static bool shim_ggml_cpu_extra_compute_forward(void *params, void *t)
{
	if (!real_extra)
		must((void **)&real_extra, "ggml_cpu_extra_compute_forward", __builtin_return_address(0));
	note(params, t, NULL);
	return real_extra(params, t);
}

__attribute__((used, noclone)) static void
shim_ggml_compute_forward_rms_norm_mul_fused(void *params, void *t, void *next)
{
	if (!real_fused)
		must((void **)&real_fused, "ggml_compute_forward_rms_norm_mul_fused", __builtin_return_address(0));
	note(params, t, next);
	real_fused(params, t, next);
}
