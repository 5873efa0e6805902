/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Functions that bear an engine's names, with bodies that only pass the time. What is in
 * the file is chosen when it is compiled:
 *
 *   -DCALLS -DGRAPHS -DCPU         the three levels (entry points, scheduler, CPU backend)
 *   -DDISPATCH -DFUSED -DFORWARD -DOPERATORS    ways to see operators (with CPU)
 *   -DMAIN                         a program: reads lines "COUNT", makes that many calls of
 *                                  whatever entry it has, answers with the count; a line
 *                                  "o PATH" loads a library; ends at end of file
 *   -DHIDE                         nothing is exported
 *   -DLINK                         MAIN calls llama_decode of a linked library
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <fcntl.h>
#include <unistd.h>

#ifdef HIDE
#define API __attribute__((noipa, visibility("hidden"), used))
#else
#define API __attribute__((noipa, visibility("default"), used))
#endif

struct batch {
	int n_tokens;
	long rest[6];
};

extern const char *const engine_says;
#ifndef LINK
const char *const engine_says = "GGML_ASSERT(%s) failed";
#endif

/* A body with a frame, a call and a result, so that no two of them are the same code. */
#define BODY(seed, a) do { \
	char room[48]; \
	int n = snprintf(room, sizeof(room), "%d %s", (int)(seed), (const char *)(a)); \
	__asm__ volatile("" : : "r"(room) : "memory"); \
	return n > 0 ? 0 : seed; \
} while (0)

#ifdef CALLS
API int llama_decode(void *context, struct batch batch) { BODY(batch.n_tokens, context); }
API int llama_encode(void *context, struct batch batch) { BODY(batch.n_tokens + 1, context); }
API int llama_process(void *context, int type, void *batch) { (void)batch; BODY(type, context); }
#elif defined(LINK)
int llama_decode(void *context, struct batch batch);
#endif

#ifdef GRAPHS
API int ggml_backend_sched_graph_compute_async(void *sched, void *graph) { (void)graph; BODY(3, sched); }
API int ggml_backend_graph_compute_async(void *backend, void *graph) { (void)graph; BODY(4, backend); }
#endif

#ifdef CPU
API int ggml_graph_compute(void *graph, void *plan) { (void)plan; BODY(5, graph); }
#endif
#ifdef DISPATCH
API int ggml_cpu_extra_compute_forward(void *params, void *tensor) { (void)tensor; BODY(6, params); }
#endif
#ifdef FUSED
API int ggml_compute_forward_rms_norm_mul_fused(void *params, void *a, void *b)
{
	(void)a, (void)b;
	BODY(7, params);
}
#endif
#ifdef FORWARD
__attribute__((noipa, used)) static int ggml_compute_forward(void *params, void *tensor)
{
	(void)tensor;
	BODY(8, params);
}
int (*forward)(void *, void *) = ggml_compute_forward;
#endif
#ifdef OPERATORS
API int ggml_compute_forward_add(void *params, void *tensor) { (void)tensor; BODY(9, params); }
API int ggml_compute_forward_mul_mat(void *params, void *tensor) { (void)tensor; BODY(10, params); }
API int ggml_compute_forward_rope(void *params, void *tensor) { (void)tensor; BODY(11, params); }
API int ggml_compute_forward_table = 1;
#endif

#ifdef CLONES
/* The compiler specialises these: they are called with constants only. */
__attribute__((noinline)) static int llama_encode(const char *context, int b, int *p)
{
	return printf("%s %d", context, b) * *p;
}
__attribute__((noinline)) static int ggml_graph_compute(const char *graph, int b, int *p)
{
	return printf("%s.%d", graph, b) + *p;
}
int clones(int n) { return llama_encode("a", 7, &n) + ggml_graph_compute("b", 7, &n) + llama_encode("c", 7, &n); }
int other_clones(int n) { return ggml_graph_compute("d", 7, &n); }
#endif

#ifdef MAIN
int main(int argc, char **argv)
{
	char line[4096];

	(void)argc, (void)argv;
	setvbuf(stdout, NULL, _IOLBF, 0);
	printf("ready\n");
	while (fgets(line, sizeof(line), stdin)) {
		line[strcspn(line, "\n")] = 0;
		if (line[0] == 'o') {
			printf("%s\n", dlopen(line + 2, RTLD_NOW) ? "loaded" : dlerror());
		} else if (line[0] == 'm') {
			/* map any file as if it were code */
			int fd = open(line + 2, O_RDONLY);
			void *at = mmap(NULL, 4096, PROT_READ | PROT_EXEC, MAP_PRIVATE, fd, 0);

			close(fd);
			printf("%s\n", at == MAP_FAILED ? "failed" : "mapped");
		} else {
			int n = atoi(line), sum = 0;
#if defined(CALLS) || defined(LINK)
			for (int i = 0; i < n; i++)
				sum += llama_decode("context", (struct batch){ .n_tokens = i });
#endif
			printf("%d\n", n + sum);
		}
	}
	return engine_says[0] == 0;
}
#endif
