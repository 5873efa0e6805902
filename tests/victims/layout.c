/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A graph as ggml builds one, in any of the layouts that ggml had or that a fork could have.
 * The functions that read one field carry ggml's names, so that what is read out of
 * their machine code can be compared with what the compiler says. Prints
 *     FIELD OFFSET                        one line per field that this build has
 *     graph HEX                           bytes of the graph's header
 *     node INDEX ADDRESS HEX              512 bytes from each node on (fewer at the arena's end)
 *
 * Options: NAME_SIZE, N_SRC, N_DIMS, BACKEND, GRAD, COUNTERS, NO_FLAGS, UID, EXTRA_POINTER, NO_PADDING, STATIC_ARRAY.
 */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifndef NAME_SIZE
#define NAME_SIZE 64
#endif
#ifndef N_SRC
#define N_SRC 10
#endif

enum op { NONE, DUP, ADD, MUL, RMS_NORM, MUL_MAT, CPY, CONT, RESHAPE, VIEW, PERMUTE, ROPE, SOFT_MAX, UNARY, N_OPS };
enum type { F32, F16, Q4_K, I32, N_TYPES };

struct ggml_tensor {
	enum type type;
#ifdef BACKEND
	int backend;
#endif
	void *buffer;
#ifdef N_DIMS
	int n_dims;
#endif
	int64_t ne[4];
	size_t nb[4];
	enum op op;
	int32_t op_params[16];
#ifdef NO_FLAGS
	_Bool is_param;
#else
	int32_t flags;
#endif
#ifdef GRAD
	struct ggml_tensor *grad;
#endif
	struct ggml_tensor *src[N_SRC];
#ifdef COUNTERS
	int runs;
	int64_t cycles, time_us;
#endif
	struct ggml_tensor *view_src;
	size_t view_offs;
#ifdef EXTRA_POINTER
	void *fork_of_ours;
#endif
	void *data;
	char name[NAME_SIZE];
	void *extra;
#ifdef N_DIMS
	char padding[12];
#elif !defined(NO_PADDING)
	char padding[8];
#endif
} __attribute__((aligned(16)));

struct ggml_cgraph {
	int size, n_nodes, n_leafs;
	struct ggml_tensor **nodes, **grads, **grad_accs, **leafs;
	int32_t *use_counts;
	struct { size_t size; uint32_t *used; struct ggml_tensor **keys; } set;
	int order;
#ifdef UID
	uint64_t uid;
#endif
};

void *ggml_get_data(const struct ggml_tensor *t) { return t->data; }
const char *ggml_get_name(const struct ggml_tensor *t) { return t->name; }
int ggml_graph_n_nodes(struct ggml_cgraph *g) { return g->n_nodes; }
struct ggml_tensor **ggml_graph_nodes(struct ggml_cgraph *g) { return g->nodes; }
int64_t ggml_nelements(const struct ggml_tensor *t) { return t->ne[0] * t->ne[1] * t->ne[2] * t->ne[3]; }
_Bool ggml_is_transposed(const struct ggml_tensor *t) { return t->nb[0] > t->nb[1]; }
_Bool ggml_is_view(const struct ggml_tensor *t) { return t->view_src != NULL; }
int ggml_get_unary_op(const struct ggml_tensor *t)
{
	if (t->op != UNARY)
		abort();
	return t->op_params[0];
}
#ifndef NO_FLAGS
void ggml_set_output(struct ggml_tensor *t) { t->flags |= 2; }
#endif
#ifdef UID
__attribute__((visibility("hidden"), noinline)) uint64_t ggml_graph_next_uid(void) { static uint64_t last; return ++last; }
__attribute__((visibility("default"))) void ggml_backend_sched_split_graph(void *sched, struct ggml_cgraph *g)
{
	puts("");
	g->uid = ggml_graph_next_uid();
	printf("%d\n", g->n_leafs + (sched != NULL));
}
#endif
struct ggml_tensor *ggml_set_name(struct ggml_tensor *t, const char *name)
{
	size_t i;

	for (i = 0; i < sizeof t->name - 1 && name[i]; i++)
		t->name[i] = name[i];
	t->name[i] = 0;
	return t;
}

/* ggml's own arena: a header of 32 bytes before each object, and no zeros anywhere. */
struct object { size_t offs, size; struct object *next; int type; char padding[4]; };
#define ARENA (1 << 18)
static char *arena;
static size_t used;
#ifdef STATIC_ARRAY
static struct ggml_tensor all[64];
static int made;
#endif

static struct ggml_tensor *tensor(enum type type, int64_t a, int64_t b, int64_t c, enum op op, const char *name)
{
	static const int block[] = { 1, 1, 256, 1 }, size[] = { 4, 2, 144, 4 };
#ifdef STATIC_ARRAY
	struct ggml_tensor *t = &all[made++];
#else
	struct object *o = (struct object *)(arena + used);
	struct ggml_tensor *t = (struct ggml_tensor *)(o + 1);

	*o = (struct object){ used + sizeof *o, sizeof *t, NULL, 0, { 0 } };
	used += sizeof *o + sizeof *t;
	o->next = (struct object *)(arena + used);
#endif
	*t = (struct ggml_tensor){ .type = type, .ne = { a, b, c, 1 }, .op = op };
	t->nb[0] = size[type];
	t->nb[1] = t->nb[0] * (a / block[type]);
	t->nb[2] = t->nb[1] * b;
	t->nb[3] = t->nb[2] * c;
	t->buffer = arena + ARENA;
	t->data = malloc(16);
	ggml_set_name(t, "an earlier, longer name");
	return ggml_set_name(t, name);
}

static struct ggml_tensor *view(struct ggml_tensor *of, enum op op, int64_t a, int64_t b, int64_t c, const char *name)
{
	struct ggml_tensor *t = tensor(of->type, a, b, c, op, name);

	t->view_src = of->view_src ? of->view_src : of;
	t->data = of->data;
	t->src[0] = of;
	return t;
}

#define SHOW(type, field, as) printf("%s %zu\n", as, offsetof(struct type, field))
static void hex(const void *p, size_t n)
{
	for (size_t i = 0; i < n; i++)
		printf("%02x", ((const unsigned char *)p)[i]);
	putchar('\n');
}

int main(void)
{
	struct ggml_tensor *nodes[40], *x, *w, *k;
	struct ggml_cgraph *g;
	int n = 0;

	arena = malloc(ARENA + 64);
	memset(arena, 0xa5, ARENA + 64);
	x = tensor(F32, 256, 6, 1, NONE, "inp_embd");
	w = tensor(Q4_K, 256, 512, 1, NONE, "blk.0.attn_q.weight");
	k = tensor(F16, 512, 256, 1, NONE, "cache_k_l0");
	for (int layer = 0; layer < 3; layer++) {
#define OP(o, a, b, c, text) (x = tensor(F32, a, b, c, o, text), x->src[0] = n ? nodes[n - 1] : w, nodes[n++] = x)
		OP(RMS_NORM, 256, 6, 1, "norm-0");
		OP(MUL, 256, 6, 1, "attn_norm-0"), x->src[1] = w;
		OP(MUL_MAT, 512, 6, 1, "Qcur-0"), x->src[1] = x->src[0], x->src[0] = w;
		nodes[n] = view(nodes[n - 1], RESHAPE, 64, 8, 6, "Qcur-0 (reshaped)"), n++;
		OP(ROPE, 64, 8, 6, "Qcur_rope-0"), x->src[1] = k, x->op_params[1] = 64;
		nodes[n] = view(nodes[n - 1], PERMUTE, 64, 6, 8, "Qcur_permuted"), x = nodes[n++];
		x->nb[1] = 64 * 4 * 8, x->nb[2] = 64 * 4, x->nb[3] = 64 * 4 * 8 * 6;
		nodes[n] = view(k, VIEW, 512, 6, 1, "k_view"), nodes[n]->view_offs = 1024 * 17, n++;
		OP(CPY, 512, 6, 1, "k_copy"), x->src[0] = nodes[n - 3], x->src[1] = nodes[n - 2];
		OP(SOFT_MAX, 256, 6, 8, ""), x->src[0] = nodes[n - 4], x->src[2] = w;
		OP(CONT, 512, 6, 1, "kqv_out-0");
		OP(ADD, 512, 6, 1, "l_out-0"), x->src[1] = nodes[2];
	}
	g = calloc(1, sizeof *g + 64);
	memset(g + 1, 0xa5, 64);
	*g = (struct ggml_cgraph){ .size = 64, .n_nodes = n, .n_leafs = 3, .nodes = nodes, .leafs = nodes };
#ifdef UID
	g->uid = ggml_graph_next_uid();
#endif
#ifndef NO_FLAGS
	ggml_set_output(nodes[n - 1]);
	SHOW(ggml_tensor, flags, "t_flags");
#endif
#ifdef UID
	SHOW(ggml_cgraph, uid, "g_uid");
#endif
	SHOW(ggml_cgraph, n_nodes, "g_n_nodes"), SHOW(ggml_cgraph, nodes, "g_nodes");
	SHOW(ggml_tensor, type, "t_type"), SHOW(ggml_tensor, buffer, "t_buffer"), SHOW(ggml_tensor, ne, "t_ne");
	SHOW(ggml_tensor, nb, "t_nb"), SHOW(ggml_tensor, op, "t_op"), SHOW(ggml_tensor, op_params, "t_op_params");
	SHOW(ggml_tensor, src, "t_src"), SHOW(ggml_tensor, view_src, "t_view_src");
	SHOW(ggml_tensor, view_offs, "t_view_offs"), SHOW(ggml_tensor, data, "t_data");
	SHOW(ggml_tensor, name, "t_name"), SHOW(ggml_tensor, extra, "t_extra");
	printf("n_src %d\nname_size %d\nt_size %zu\n", N_SRC, NAME_SIZE, sizeof(struct ggml_tensor));
	printf("graph ");
	hex(g, sizeof *g + 64);
	for (int i = 0; i < n; i++) {
		printf("node %d %zu ", i, (size_t)nodes[i]);
		hex(nodes[i], 512);
	}
	return 0;
}
