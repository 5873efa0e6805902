/* SPDX-License-Identifier: Apache-2.0 */
/*
 * An engine that computes nothing: the functions, tables and structures by which a profiler
 * knows ggml, with bodies that sleep, on a small transformer's graph.
 *
 * With -DMAIN a program that takes orders, one per line of standard input, and answers each
 * with one line of JSON: what it did and when, by its own clock (CLOCK_MONOTONIC, ns) and its
 * own counters. -DPLAIN_MAIN: a program without an engine, which loads one when told to
 * ("load PATH"). Orders are words; numbers are decimal, lists "0-4,7":
 *
 *   run [fn=decode|encode|process|process_encode|graph|cpu] [pos=LIST] [out=LIST] [status=N]
 *       [us=N] [layers=N] [kv=N] [moe] [fuse=0|1] [plain] [alternatives] [rope=0]
 *       [context=N] [times=N] [thread] [workers] [nested] [fresh] [drop] [hole] [uid=0|1]
 *       [end=jump|exit|hang|die|hold] [at=N] [compute=0|1] [spin] [hoard]
 *   load PATH      dlopen, and pass all further orders to it
 *   map PATH       map a file as a model is
 *   fork           a child runs one order ("run" with its defaults) and ends
 *
 * us: microseconds per kernel, asleep; spin: of CPU time. moe: MUL_MAT_ID in the feed-forward part. plain: no COMPUTE
 * flags. alternatives: some nodes that are not computed. fresh: the graph in new memory.
 * drop: its pages are not present when the call begins. hole: one node lies in no memory.
 * at: the kernel before which `end` happens. hold: it says so, waits for another line, and goes on.
 * hoard: each kernel takes 64 KiB and keeps them.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include "stub_ggml.h"

#define MAX_LIST 4096

int stub_order(char *line);

static uint64_t now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000000000ull + t.tv_nsec;
}

#ifndef PLAIN_MAIN

/* ---- what a profiler reads in the file -------------------------------------- */

static const char *const GGML_OP_NAME[OP_COUNT] = {
#define NAME(name) #name,
	OPERATORS(NAME)
#undef NAME
};

static const struct type_traits type_traits[TYPE_COUNT] = {
	{ "f32", 1, 0, 4, 0, 0, 0 },	   { "f16", 1, 0, 2, 0, 0, 0 },
	{ "q4_0", 32, 0, 18, 1, 0, 0 },   { "q4_K", 256, 0, 144, 1, 0, 0 },
	{ "i32", 1, 0, 4, 0, 0, 0 },
};

#ifdef WITHOUT_NAMES
#define NAME_API static __attribute__((noipa, unused))
#else
#define NAME_API API
#endif
NAME_API const char *ggml_op_name(int op) { return GGML_OP_NAME[op]; }
NAME_API const char *ggml_type_name(int type) { return type_traits[type].name; }
NAME_API const char *engine_says(void) { return "GGML_ASSERT(%s) failed"; }

#ifndef WITHOUT_ACCESSORS
API void *ggml_get_data(const struct tensor *t) { return t->data; }
API const char *ggml_get_name(const struct tensor *t) { return t->name; }
API int ggml_graph_n_nodes(const struct cgraph *g) { return g->n_nodes; }
API struct tensor **ggml_graph_nodes(const struct cgraph *g) { return g->nodes; }
API _Bool ggml_is_view(const struct tensor *t) { return t->view_src != NULL; }
API const char *ggml_op_desc(const struct tensor *t) { return GGML_OP_NAME[t->op]; }
API void ggml_set_output(struct tensor *t) { t->flags |= FLAG_OUTPUT; }
API struct tensor *ggml_set_name(struct tensor *t, const char *name)
{
	size_t i;

	for (i = 0; i < sizeof(t->name) - 1 && name[i]; i++)
		t->name[i] = name[i];
	t->name[i] = 0;
	return t;
}
#ifndef WITHOUT_UID
API uint64_t ggml_graph_next_uid(void)
{
	static uint64_t last;

	return __atomic_add_fetch(&last, 1, __ATOMIC_RELAXED);
}
#endif
#endif

/* ---- orders -------------------------------------------------------------------- */

enum end { END_RETURN, END_JUMP, END_EXIT, END_HANG, END_DIE, END_HOLD };

struct order {
	char fn[16];
	int n_pos, n_out, pos[MAX_LIST], out[MAX_LIST];
	int status, us, layers, kv, moe, fuse, plain, alternatives, rope, context, times, thread;
	int workers, nested, fresh, drop, hole, uid, end, at, compute, quiet, spin, hoard;
};

/* One run at a time is logged; only the thread that runs it writes here. */
struct record {
	uint64_t begin, entered, end;
	int node, fused;
};

static struct log {
	uint64_t call_begin, call_end, graph_begin, graph_end;
	int n_records, nested_calls, present, ended;
	struct record records[MAX_LIST];
} said;

static struct order order;	/* of the run in progress */
static struct cgraph *graph;	/* its graph */
static jmp_buf back;
static char contexts[16];	/* their addresses are the contexts */

static int read_list(const char *text, int *list)
{
	int n = 0;

	while (*text) {
		char *end;
		long a = strtol(text, &end, 10), b = a;

		if (*end == '-')
			b = strtol(end + 1, &end, 10);
		for (; a <= b && n < MAX_LIST; a++)
			list[n++] = a;
		text = *end == ',' ? end + 1 : end;
		if (*end && *end != ',')
			break;
	}
	return n;
}

/* ---- the graph -------------------------------------------------------------------- */

#define EMBD 256
#define HEADS 4
#define DIM 64			/* of a head */
#define FF 512
#define VOCAB 256
#define EXPERTS 4
#define USED 2
#define ARENA (8 << 20)

static struct arena {
	char *base;
	size_t used;
	int file;
} arena;

static void *take(size_t size)
{
	void *at = arena.base + arena.used;

	arena.used += (size + 15) & ~15ull;
	if (arena.used > ARENA)
		abort();
	return at;
}

/* Memory of a file: its pages can be dropped from the page table and keep their content. */
static void new_arena(void)
{
	if (arena.base) {
		munmap(arena.base, ARENA);
		close(arena.file);
	}
	arena.file = memfd_create("graph", MFD_CLOEXEC);
	if (arena.file < 0 || ftruncate(arena.file, ARENA))
		abort();
	arena.base = mmap(NULL, ARENA, PROT_READ | PROT_WRITE, MAP_SHARED, arena.file, 0);
	if (arena.base == MAP_FAILED)
		abort();
	arena.used = 0;
}

static struct tensor *new_tensor(const char *name, int type, int64_t a, int64_t b, int64_t c)
{
	/* What the engine's allocator keeps in front of each: place, size, next one, kind. */
	uint64_t *header = take(sizeof(struct tensor) + 32);
	struct tensor *t = (struct tensor *)(header + 4);
	const struct type_traits *traits = &type_traits[type];

	header[0] = (char *)t - arena.base;
	header[1] = sizeof(*t);
	header[2] = (uintptr_t)(t + 1);
	header[3] = 0;
	memset(t, 0, sizeof(*t));
	t->type = type;
	t->ne[0] = a, t->ne[1] = b, t->ne[2] = c, t->ne[3] = 1;
	t->nb[0] = traits->type_size;
	t->nb[1] = traits->type_size * (a / traits->blck_size);
	t->nb[2] = t->nb[1] * b;
	t->nb[3] = t->nb[2] * c;
	snprintf(t->name, sizeof(t->name), "%s", name);
	t->data = type == TYPE_I32 ? NULL : &contexts;	/* nobody computes with it */
	return t;
}

static struct tensor *weight(const char *form, int layer, int type, int64_t a, int64_t b, int64_t c)
{
	char name[64];

	snprintf(name, sizeof(name), form, layer);
	return new_tensor(name, type, a, b, c);
}

static struct tensor *ints(const char *name, const int *values, int n)
{
	struct tensor *t = new_tensor(name, TYPE_I32, n, 1, 1);

	t->flags = FLAG_INPUT;
	if (n) {
		t->data = take(4 * (size_t)n);
		memcpy(t->data, values, 4 * (size_t)n);
	}
	return t;
}

static struct tensor *node(const char *form, int layer, int op, int64_t a, int64_t b, int64_t c,
			   struct tensor *x, struct tensor *y, struct tensor *z)
{
	struct tensor *t = weight(form, layer, TYPE_F32, a, b, c);

	t->op = op;
	t->src[0] = x, t->src[1] = y, t->src[2] = z;
	t->flags = order.plain ? 0 : FLAG_COMPUTE;
	graph->nodes[graph->n_nodes++] = t;
	return t;
}

static struct tensor *viewed(const char *form, int layer, int op, int64_t a, int64_t b, int64_t c,
			     struct tensor *of)
{
	struct tensor *t = node(form, layer, op, a, b, c, of, NULL, NULL);

	t->view_src = of->view_src ? of->view_src : of;
	t->data = t->view_src->data;
	return t;
}

static struct tensor *norm(const char *form, const char *result, const char *factor, int layer,
			   struct tensor *x)
{
	struct tensor *n = node(form, layer, OP_RMS_NORM, EMBD, x->ne[1], 1, x, NULL, NULL);

	return node(result, layer, OP_MUL, EMBD, x->ne[1], 1, n, weight(factor, layer, TYPE_F32, EMBD, 1, 1),
		    NULL);
}

static struct tensor *rotated(const char *form, int layer, struct tensor *x, struct tensor *pos)
{
	struct tensor *t;

	if (!order.rope)
		return x;
	t = node(form, layer, OP_ROPE, DIM, HEADS, x->ne[2], x, pos, NULL);
	t->op_params[1] = DIM;
	return t;
}

static void layer(int l, struct tensor **stream, struct tensor *pos, struct tensor *out)
{
	struct tensor *x = *stream, *cur, *q, *k, *cache, *kv;
	int64_t n = x->ne[1];

	cur = norm("norm-%d", "attn_norm-%d", "blk.%d.attn_norm.weight", l, x);
	q = node("Qcur-%d", l, OP_MUL_MAT, EMBD, n, 1, weight("blk.%d.attn_q.weight", l, TYPE_Q4_0, EMBD, EMBD, 1),
		 cur, NULL);
	q = viewed("Qcur-%d (reshaped)", l, OP_RESHAPE, DIM, HEADS, n, q);
	q = rotated("Qcur-%d", l, q, pos);
	k = node("Kcur-%d", l, OP_MUL_MAT, EMBD, n, 1, weight("blk.%d.attn_k.weight", l, TYPE_Q4_0, EMBD, EMBD, 1),
		 cur, NULL);
	k = viewed("Kcur-%d (reshaped)", l, OP_RESHAPE, DIM, HEADS, n, k);
	k = rotated("Kcur-%d", l, k, pos);
	cache = weight("cache_k_l%d", l, TYPE_F16, DIM, order.kv, HEADS);
	kv = viewed("cache_k_l%d (view)", l, OP_VIEW, DIM, order.kv, HEADS, cache);
	kv->type = TYPE_F16;
	memcpy(kv->nb, cache->nb, sizeof(kv->nb));
	q = viewed("q-%d (permuted)", l, OP_PERMUTE, DIM, n, HEADS, q);
	cur = node("__fattn__-%d", l, OP_FLASH_ATTN_EXT, DIM, HEADS, n, q, kv, kv);
	cur->src[3] = k;	/* so that nothing hangs in the air */
	cur = viewed("kqv_out-%d", l, OP_RESHAPE, EMBD, n, 1, cur);
	cur = node("attn_out-%d", l, OP_MUL_MAT, EMBD, n, 1,
		   weight("blk.%d.attn_output.weight", l, TYPE_Q4_0, EMBD, EMBD, 1), cur, NULL);
	if (out) {
		cur = node("node_%d", 900 + l, OP_GET_ROWS, EMBD, out->ne[0], 1, cur, out, NULL);
		x = node("node_%d", 950 + l, OP_GET_ROWS, EMBD, out->ne[0], 1, x, out, NULL);
		n = out->ne[0];
	}
	x = node("ffn_inp-%d", l, OP_ADD, EMBD, n, 1, cur, x, NULL);
	cur = norm("norm-%d", "ffn_norm-%d", "blk.%d.ffn_norm.weight", l, x);
	if (order.moe) {
		int ids[USED * MAX_LIST];
		struct tensor *chosen, *logits, *id_rows;

		logits = node("ffn_moe_logits-%d", l, OP_MUL_MAT, EXPERTS, n, 1,
			      weight("blk.%d.ffn_gate_inp.weight", l, TYPE_F32, EMBD, EXPERTS, 1), cur, NULL);
		/* Token t uses experts 0 and 1 + t % 2: 3 of the 4 with two tokens or more. */
		for (int t = 0; t < n; t++)
			ids[USED * t] = 0, ids[USED * t + 1] = 1 + t % 2;
		chosen = node("ffn_moe_topk-%d", l, OP_SOFT_MAX, USED, n, 1, logits, NULL, NULL);
		chosen->type = TYPE_I32;
		chosen->data = take(4 * USED * (size_t)(n ? n : 1));
		memcpy(chosen->data, ids, 4 * USED * (size_t)n);
		cur = viewed("ffn_norm-%d (reshaped)", l, OP_RESHAPE, EMBD, 1, n, cur);
		id_rows = chosen;
		cur = node("ffn_moe_up-%d", l, OP_MUL_MAT_ID, EMBD, USED, n,
			   weight("blk.%d.ffn_up_exps.weight", l, TYPE_Q4_0, EMBD, EMBD, EXPERTS), cur, id_rows);
		cur = node("ffn_moe_out-%d", l, OP_SUM_ROWS, EMBD, n, 1, cur, NULL, NULL);
	} else {
		cur = node("ffn_up-%d", l, OP_MUL_MAT, FF, n, 1,
			   weight("blk.%d.ffn_up.weight", l, TYPE_Q4_K, EMBD, FF, 1), cur, NULL);
		cur = node("ffn_out-%d", l, OP_MUL_MAT, EMBD, n, 1,
			   weight("blk.%d.ffn_down.weight", l, TYPE_F16, FF, EMBD, 1), cur, NULL);
	}
	if (order.alternatives) {
		/* What newer engines build and do not compute. */
		struct tensor *other = node("ffn_other-%d", l, OP_SQRT, EMBD, n, 1, cur, NULL, NULL);

		other->flags &= ~FLAG_COMPUTE;
	}
	*stream = node("l_out-%d", l, OP_ADD, EMBD, n, 1, cur, x, NULL);
}

static void build_graph(void)
{
	struct tensor *x, *pos, *out = NULL;
	int tokens[MAX_LIST] = { 0 };
	static uint64_t uid;

	if (!arena.base || order.fresh)
		new_arena();
	arena.used = 0;
	graph = take(sizeof(*graph));
	memset(graph, 0, sizeof(*graph));
	graph->size = 1024;
	graph->nodes = take(8 * 1024);
	graph->uid = order.uid ? ++uid : 0;
	pos = ints("inp_pos", order.pos, order.n_pos);
	x = node("inp_embd", 0, OP_GET_ROWS, EMBD, order.n_pos, 1,
		 new_tensor("token_embd.weight", TYPE_Q4_0, EMBD, VOCAB, 1), ints("inp_tokens", tokens, order.n_pos),
		 NULL);
	out = ints("inp_out_ids", order.out, order.n_out);
	for (int l = 0; l < order.layers; l++)
		layer(l, &x, pos, l + 1 == order.layers ? out : NULL);
	x = norm("norm", "result_norm", "output_norm.weight", 0, x);
	x = node("result_output", 0, OP_MUL_MAT, VOCAB, x->ne[1], 1,
		 new_tensor("output.weight", TYPE_Q4_0, EMBD, VOCAB, 1), x, NULL);
	if (order.hole)
		graph->nodes[graph->n_nodes / 2] = (struct tensor *)16;
}

/* ---- the functions ------------------------------------------------------------- */

/* Of this thread: a kernel that computes takes longer when others have its core. */
static uint64_t cpu_time(void)
{
	struct timespec t;

	clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
	return t.tv_sec * 1000000000ull + t.tv_nsec;
}

static void wait_us(int us)
{
	struct timespec t = { us / 1000000, us % 1000000 * 1000 };

	if (order.spin) {
		uint64_t until = cpu_time() + us * 1000ull;

		while (cpu_time() < until)
			;
		return;
	}
	while (us && nanosleep(&t, &t) && errno == EINTR)
		;
}

static __thread int working;	/* this thread only helps */
static uint64_t entered;	/* when the last kernel's function was running */

static void kernel(void)
{
	if (working)
		return;
	entered = now();
	if (order.end == END_HOLD && said.n_records == order.at) {
		char line[16];

		printf("{\"held\": true}\n");
		if (!fgets(line, sizeof(line), stdin))
			exit(1);
	} else if (order.end != END_RETURN && said.n_records == order.at) {
		said.ended = 1;
		if (order.end == END_JUMP)
			longjmp(back, 1);
		if (order.end == END_EXIT)
			pthread_exit(NULL);
		if (order.end == END_HANG) {
			printf("{\"hanging\": true}\n");
			for (;;)
				pause();
		}
		abort();
	}
	if (order.hoard) {
		volatile char *memory = malloc(65536);

		for (int i = 0; memory && i < 65536; i += 4096)
			memory[i] = 1;
	}
	wait_us(order.us);
}

/* What an argument was is needed to the end, as in an engine: else arm64's compiler begins a
 * function that uses thread-local variables by overwriting its first argument. */
#if defined(__aarch64__)
#define NEEDED(pointer) __asm__ volatile("" : : "r"(pointer))
#else
#define NEEDED(pointer) ((void)(pointer))
#endif

#ifndef WITHOUT_DISPATCH
API _Bool ggml_cpu_extra_compute_forward(struct params *p, struct tensor *t)
{
	kernel();
	NEEDED(p);
	NEEDED(t);
	return 1;
}
#else
#define ggml_cpu_extra_compute_forward(p, t) ((void)(p), kernel())
#endif

#if defined(WITHOUT_DISPATCH) || defined(WITHOUT_FUSED)
#define CAN_FUSE 0
#define ggml_compute_forward_rms_norm_mul_fused(p, a, b) ((void)(p), kernel())
#else
#define CAN_FUSE 1
API void ggml_compute_forward_rms_norm_mul_fused(struct params *p, struct tensor *a, struct tensor *b)
{
	kernel();
	NEEDED(p);
	NEEDED(a);
	NEEDED(b);
	__asm__ volatile("" ::: "memory");	/* not a tail call, nor the same code as another */
}
#endif

static int is_empty(const struct tensor *t)
{
	int none = t->op == OP_NONE || t->op == OP_RESHAPE || t->op == OP_VIEW || t->op == OP_PERMUTE ||
		   t->op == OP_TRANSPOSE;

	return none || !t->ne[0] || !t->ne[1] || !t->ne[2];
}

#ifdef UNUSED_DISPATCH
#define dispatch(p, t) kernel()
#else
#define dispatch(p, t) ggml_cpu_extra_compute_forward(p, t)
#endif

/* All kernels of a graph, as one thread of the pool runs them. */
static void compute(struct cgraph *g)
{
	struct params p = { working, 1 + order.workers };

	for (int i = 0; i < g->n_nodes; i++) {
		struct tensor *t = g->nodes[i], *next = i + 1 < g->n_nodes ? g->nodes[i + 1] : NULL;
		struct record r = { .node = i };

		if ((uintptr_t)t < 4096 || is_empty(t) || (!order.plain && !(t->flags & FLAG_COMPUTE)))
			continue;
		r.fused = CAN_FUSE && order.fuse && t->op == OP_RMS_NORM && next && next->op == OP_MUL &&
			  next->src[0] == t;
		r.begin = now();
		if (r.fused)
			ggml_compute_forward_rms_norm_mul_fused(&p, t, next);
		else
			dispatch(&p, t);
#ifdef SLOW
		/* Another build: kernels whose result is called so take longer. */
		if (!working && !strncmp(t->name, SLOW, strlen(SLOW)))
			wait_us(SLOW_US);
#endif
		r.entered = entered;
		r.end = now();
		if (!working)
			said.records[said.n_records++] = r;
		i += r.fused;
	}
}

static void *worker(void *g)
{
	working = 1;
	compute(g);
	return NULL;
}

#ifdef WITHOUT_CPU
#define PRIVATE static __attribute__((noipa))
PRIVATE int graph_compute_hidden(struct cgraph *g, void *plan)
#define ggml_graph_compute graph_compute_hidden
#else
API int ggml_graph_compute(struct cgraph *g, void *plan)
#endif
{
	pthread_t thread;

	(void)plan;
	if (order.workers && pthread_create(&thread, NULL, worker, g))
		abort();
	compute(g);
	if (order.workers)
		pthread_join(thread, NULL);
	return 0;
}

#ifdef WITHOUT_GRAPHS
#define GRAPH_API static __attribute__((noipa))
#else
#define GRAPH_API API
#endif

GRAPH_API int ggml_backend_graph_compute_async(void *backend, struct cgraph *g)
{
	int status = ggml_graph_compute(g, backend);

	__asm__ volatile("" ::: "memory");
	return status;
}

GRAPH_API int ggml_backend_sched_graph_compute_async(void *sched, struct cgraph *g)
{
	static char backend;
	struct cgraph split = *g;	/* a view of the whole, without a number */
	int status;

	(void)sched;
	said.graph_begin = now();
	split.n_leafs = 0;
	split.uid = 0;
	status = ggml_backend_graph_compute_async(&backend, &split);
	said.graph_end = now();
	return status;
}

#ifdef WITHOUT_CALLS
#define CALL_API static __attribute__((noipa, unused))
#else
#define CALL_API API
#endif

static int one_call(void *context)
{
	int status = order.status;

	/* A call that fails has found no room for its tokens and computes nothing. */
	if (status == 0 || order.compute)
		ggml_backend_sched_graph_compute_async(context, graph);
	else
		wait_us(order.us);
	return status;
}

#ifdef TRAP_ENCODE
__asm__(".globl llama_encode\n.type llama_encode,@function\nllama_encode: int3\n"
	"xor %eax,%eax\nret\n.size llama_encode,.-llama_encode\n");
int llama_encode(void *context, struct batch batch);
#else
CALL_API int llama_encode(void *context, struct batch batch)
{
	said.nested_calls += order.nested;
	(void)batch;
	return one_call(context) + 0 * batch.n_tokens;
}
#endif

#ifdef CLONED_DECODE
__attribute__((noipa)) static int clone_of_decode(void *context, struct batch batch) __asm__("llama_decode.isra.0");
__attribute__((noipa)) static int clone_of_decode(void *context, struct batch batch)
#define llama_decode clone_of_decode
#else
CALL_API int llama_decode(void *context, struct batch batch)
#endif
{
	int status = order.nested ? llama_encode(context, batch) : one_call(context);

	__asm__ volatile("" ::: "memory");
	return status;
}

CALL_API int llama_process(void *context, int type, void *batch)
{
	(void)batch;
	return one_call(context) + 0 * type;
}

/* ---- the driver ------------------------------------------------------------------ */

static void enter(void)
{
	void *context = &contexts[order.context & 15];
	struct batch batch = { .n_tokens = order.n_pos, .pos = order.pos };

	said.call_begin = now();
	if (!strcmp(order.fn, "decode"))
		order.status = llama_decode(context, batch);
	else if (!strcmp(order.fn, "encode"))
		order.status = llama_encode(context, batch);
	else if (!strncmp(order.fn, "process", 7))
		order.status = llama_process(context, !strcmp(order.fn, "process"), &batch);
	else if (!strcmp(order.fn, "graph"))
		ggml_backend_sched_graph_compute_async(context, graph);
	else
		ggml_graph_compute(graph, NULL);
	said.call_end = now();
}

static void *thread_main(void *unused)
{
	(void)unused;
	enter();
	return NULL;
}

/* How many pages of the arena this process has in its page table. */
static int pages_present(void)
{
	int file = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC), present = 0;
	size_t pages = (arena.used + 4095) / 4096;

	for (size_t i = 0; i < pages; i++) {
		uint64_t entry = 0;

		if (pread(file, &entry, 8, ((uintptr_t)arena.base / 4096 + i) * 8) == 8)
			present += entry >> 63;
	}
	close(file);
	return present;
}

static void run_once(void)
{
	pthread_t thread;

	memset(&said, 0, sizeof(said));
	said.present = -1;
	build_graph();
	if (order.drop) {
		struct cgraph *g = graph;

		madvise(arena.base, ARENA, MADV_DONTNEED);
		said.present = pages_present();
		graph = g;
	}
	if (order.thread || order.end == END_EXIT) {
		if (pthread_create(&thread, NULL, thread_main, NULL))
			abort();
		pthread_join(thread, NULL);
	} else if (!setjmp(back)) {
		enter();
	}
}

static void answer(int times)
{
	printf("{\"times\": %d, \"status\": %d, \"call\": [%llu, %llu], \"graph\": [%llu, %llu], \"nodes\": %d, "
	       "\"present\": %d, \"ended\": %d, \"nested\": %d, \"context\": %llu, \"kernels\": [",
	       times, order.status, (unsigned long long)said.call_begin, (unsigned long long)said.call_end,
	       (unsigned long long)said.graph_begin, (unsigned long long)said.graph_end,
	       graph ? graph->n_nodes : 0, said.present, said.ended, said.nested_calls,
	       (unsigned long long)(uintptr_t)&contexts[order.context & 15]);
	for (int i = 0; i < said.n_records; i++) {
		struct record *r = &said.records[i];

		printf("%s[%d, %d, \"%s\", %llu, %llu]", i ? ", " : "", r->node, r->fused,
		       GGML_OP_NAME[graph->nodes[r->node]->op], (unsigned long long)r->begin,
		       (unsigned long long)r->end);
	}
	printf("], \"entered\": [");
	for (int i = 0; i < said.n_records; i++)
		printf("%s%llu", i ? ", " : "", (unsigned long long)said.records[i].entered);
	printf("], \"ops\": [");
	for (int i = 0; graph && i < graph->n_nodes; i++)
		printf("%s\"%s\"", i ? ", " : "",
		       (uintptr_t)graph->nodes[i] < 4096 ? "?" : GGML_OP_NAME[graph->nodes[i]->op]);
	printf("]}\n");
}

static int number(const char *word, const char *key, int *value)
{
	size_t n = strlen(key);

	if (strncmp(word, key, n))
		return 0;
	if (!word[n])
		*value = 1;
	else if (word[n] == '=')
		*value = atoi(word + n + 1);
	else
		return 0;
	return 1;
}

static int read_order(char *line)
{
	static const struct { const char *key; size_t at; } keys[] = {
#define KEY(name) { #name, offsetof(struct order, name) }
		KEY(status), KEY(us), KEY(layers), KEY(kv), KEY(moe), KEY(fuse), KEY(plain),
		KEY(alternatives), KEY(rope), KEY(context), KEY(times), KEY(thread), KEY(workers),
		KEY(nested), KEY(fresh), KEY(drop), KEY(hole), KEY(uid), KEY(at), KEY(compute), KEY(quiet), KEY(spin),
		KEY(hoard),
	};
	char *word, *state = NULL;

	memset(&order, 0, sizeof(order));
	strcpy(order.fn, "decode");
	order.us = 200, order.layers = 2, order.kv = 256, order.fuse = 1, order.rope = 1, order.times = 1;
	order.uid = 1, order.n_pos = 1, order.n_out = 1;
	for (word = strtok_r(line, " ", &state); word; word = strtok_r(NULL, " ", &state)) {
		size_t i;

		if (!strncmp(word, "fn=", 3)) {
			snprintf(order.fn, sizeof(order.fn), "%s", word + 3);
			continue;
		}
		if (!strncmp(word, "pos=", 4)) {
			order.n_pos = read_list(word + 4, order.pos);
			continue;
		}
		if (!strncmp(word, "out=", 4)) {
			order.n_out = read_list(word + 4, order.out);
			continue;
		}
		if (!strncmp(word, "end=", 4)) {
			const char *how = word + 4;

			order.end = !strcmp(how, "jump") ? END_JUMP : !strcmp(how, "exit") ? END_EXIT :
				    !strcmp(how, "hang") ? END_HANG : !strcmp(how, "hold") ? END_HOLD : END_DIE;
			continue;
		}
		for (i = 0; i < sizeof(keys) / sizeof(*keys); i++)
			if (number(word, keys[i].key, (int *)((char *)&order + keys[i].at)))
				break;
		if (i == sizeof(keys) / sizeof(*keys))
			return 0;
	}
	return 1;
}

API int stub_order(char *line)
{
	struct order whole;
	int status;

	if (!strncmp(line, "fork", 4)) {
		pid_t child = fork();

		if (!child) {
			read_order(line + 4);
			whole = order;
			for (int i = 0; i < whole.times; i++) {
				order = whole;
				run_once();
			}
			_exit(0);
		}
		waitpid(child, &status, 0);
		printf("{\"child\": %d, \"status\": %d}\n", (int)child, status);
		return 1;
	}
	if (strncmp(line, "run", 3) || !read_order(line + 3)) {
		printf("{\"error\": \"no such order\"}\n");
		return 0;
	}
	whole = order;
	for (int i = 0; i < whole.times; i++) {
		order = whole;
		/* Each further time is the next token. */
		for (int n = 0; n < order.n_pos; n++)
			order.pos[n] += i * order.n_pos;
		run_once();
	}
	answer(whole.times);
	return 1;
}

#endif /* PLAIN_MAIN */

#if defined(MAIN) || defined(PLAIN_MAIN)
int main(void)
{
	static char line[65536];
	int (*obey)(char *) = NULL;

	setvbuf(stdout, NULL, _IOLBF, 0);
	printf("{\"ready\": %d}\n", (int)getpid());
#ifndef PLAIN_MAIN
	obey = stub_order;
#endif
	while (fgets(line, sizeof(line), stdin)) {
		line[strcspn(line, "\n")] = 0;
		if (!strncmp(line, "load ", 5)) {
			void *library = dlopen(line + 5, RTLD_NOW | RTLD_GLOBAL);
			int (*found)(char *) = library ? (int (*)(char *))dlsym(library, "stub_order") : NULL;

			obey = found ? found : obey;
			printf("{\"loaded\": %s, \"at\": %llu}\n", library ? "true" : "false",
			       (unsigned long long)now());
			if (!library)
				fprintf(stderr, "%s\n", dlerror());
		} else if (!strncmp(line, "map ", 4)) {
			int file = open(line + 4, O_RDONLY | O_CLOEXEC);
			void *at = mmap(NULL, 4096, PROT_READ, MAP_PRIVATE, file, 0);

			close(file);
			printf("{\"mapped\": %s}\n", at == MAP_FAILED ? "false" : "true");
		} else if (!strncmp(line, "code ", 5)) {
			/* Any file, mapped as if it were code. */
			int file = open(line + 5, O_RDONLY | O_CLOEXEC);
			void *at = mmap(NULL, 4096, PROT_READ | PROT_EXEC, MAP_PRIVATE, file, 0);

			close(file);
			printf("{\"mapped\": %s}\n", at == MAP_FAILED ? "false" : "true");
		} else if (obey) {
			obey(line);
		} else {
			printf("{\"error\": \"no engine\"}\n");
		}
	}
	return 0;
}
#endif
