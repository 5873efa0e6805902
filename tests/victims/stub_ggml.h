/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Structures of the stub engine, in the public order of fields, and its knobs:
 *
 *   -DNAME_SIZE=N      bytes of a tensor's name (64)
 *   -DEXTRA_POINTER    a pointer more before `data`: a layout that no release has
 *   -DINSERTED_OP      one operator more, as number 10
 *   -DWITHOUT_...      functions that this build lacks: CALLS, GRAPHS, SCHED, DISPATCH, FUSED,
 *                      CPU, ACCESSORS, UID
 *   -DTRAP_ENCODE      llama_encode begins with int3 (and may not be called)
 *   -DCLONED_DECODE    llama_decode is only there as llama_decode.isra.0
 *   -DUNUSED_DISPATCH  the dispatch function is there, and nobody calls it
 *   -DHIDE             nothing is exported
 */
#ifndef STUB_GGML_H
#define STUB_GGML_H

#include <stdint.h>
#include <stddef.h>

#ifndef NAME_SIZE
#define NAME_SIZE 64
#endif
#define MAX_SOURCES 10

#ifdef HIDE
#define API __attribute__((noipa, used, visibility("hidden")))
#else
#define API __attribute__((noipa, used, visibility("default")))
#endif

/* Operators: today's first ones, so that the numbers are not those of any release. */
#ifdef INSERTED_OP
#define INSERTED(X) X(BRAND_NEW)
#else
#define INSERTED(X)
#endif
#define OPERATORS(X) \
	X(NONE) X(DUP) X(ADD) X(ADD_ID) X(ADD1) X(ACC) X(SUB) X(MUL) X(DIV) X(SQR) \
	INSERTED(X) \
	X(SQRT) X(LOG) X(SIN) X(COS) X(SUM) X(SUM_ROWS) X(MEAN) X(CONCAT) X(NORM) X(RMS_NORM) \
	X(MUL_MAT) X(MUL_MAT_ID) X(SCALE) X(CPY) X(CONT) X(RESHAPE) X(VIEW) X(PERMUTE) \
	X(TRANSPOSE) X(GET_ROWS) X(SET_ROWS) X(SOFT_MAX) X(ROPE) X(FLASH_ATTN_EXT) X(UNARY) X(GLU)

enum op {
#define NUMBER(name) OP_##name,
	OPERATORS(NUMBER)
#undef NUMBER
	OP_COUNT
};

enum type { TYPE_F32, TYPE_F16, TYPE_Q4_0, TYPE_Q4_K, TYPE_I32, TYPE_COUNT };

enum flag { FLAG_INPUT = 1, FLAG_OUTPUT = 2, FLAG_COMPUTE = 16 };

struct tensor {
	int32_t type;
	void *buffer;
	int64_t ne[4];
	uint64_t nb[4];
	int32_t op;
	int32_t op_params[16];
	int32_t flags;
	struct tensor *src[MAX_SOURCES];
	struct tensor *view_src;
	uint64_t view_offs;
#ifdef EXTRA_POINTER
	void *of_a_fork;
#endif
	void *data;
	char name[NAME_SIZE];
	void *extra;
	char padding[8];
};

struct cgraph {
	int32_t size, n_nodes, n_leafs;
	struct tensor **nodes, **grads, **grad_accs, **leafs;
	int32_t *use_counts;
	uint64_t set_size;
	void *set_used, *set_keys;
	int32_t order;
	uint64_t uid;
};

struct params {
	int32_t ith, nth;
};

/* 56 bytes, passed by value: on the stack. */
struct batch {
	int32_t n_tokens;
	int32_t *token;
	float *embd;
	int32_t *pos, *n_seq_id;
	int32_t **seq_id;
	int8_t *logits;
};

struct type_traits {
	const char *name;
	int64_t blck_size, interleave;
	size_t type_size;
	_Bool quantized;
	void (*to_float)(void), (*from_float)(void);
};

#endif
