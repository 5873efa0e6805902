/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ggml's backends, as far as their entry points: one that computes before it returns, and one
 * that hands the work over at once and is done 50 ms later, for which synchronize waits.
 * Built as a library; with -DPROGRAM, what computes with both as often as a line says.
 */
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

struct ggml_backend { const char *guid; const char *(*get_name)(struct ggml_backend *); double ready; };
struct ggml_backend_buffer { void (*free_buffer)(struct ggml_backend_buffer *); };
struct ggml_cgraph { int size, n_nodes; };
struct ggml_tensor { int type; struct ggml_backend_buffer *buffer; };

int ggml_backend_graph_compute_async(struct ggml_backend *backend, struct ggml_cgraph *graph);
void ggml_backend_synchronize(struct ggml_backend *backend);
void ggml_backend_tensor_get(struct ggml_tensor *tensor, void *data, size_t offset, size_t size);

static double now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec + t.tv_nsec / 1e9;
}

#ifndef PROGRAM
__attribute__((noinline)) int ggml_backend_graph_compute_async(struct ggml_backend *backend, struct ggml_cgraph *graph)
{
	if (graph->n_nodes < 0)
		return -1;
	if (backend->ready < 0)
		usleep(10000);	/* computes here and now */
	else
		backend->ready = now() + 0.05;
	return 0;
}

__attribute__((noinline)) void ggml_backend_synchronize(struct ggml_backend *backend)
{
	double left = backend->ready < 0 ? 0 : backend->ready - now();

	if (left > 0)
		usleep(left * 1e6);
}

__attribute__((noinline)) void ggml_backend_tensor_get(struct ggml_tensor *tensor, void *data, size_t offset, size_t size)
{
	((volatile char *)data)[0] = tensor->type;
}
#else
static const char *cpu_name(struct ggml_backend *backend) { return "CPU"; }
static const char *device_name(struct ggml_backend *backend) { return "device"; }
static void free_buffer(struct ggml_backend_buffer *buffer) { }

int main(void)
{
	struct ggml_backend cpu = { "c", cpu_name, -1 }, device = { "d", device_name, 0 };
	struct ggml_backend_buffer buffer = { free_buffer };
	struct ggml_tensor tensor = { 1, &buffer };
	struct ggml_cgraph front = { 64, 30 }, back = { 64, 70 };
	char line[32], data[64];
	double begun, taken;
	int i, n;

	puts("ready");
	fflush(stdout);
	while (fgets(line, sizeof(line), stdin)) {
		n = atoi(line);
		taken = 0;
		for (i = 0; i < n; i++) {
			begun = now();
			ggml_backend_graph_compute_async(&cpu, &front);
			ggml_backend_graph_compute_async(&device, &back);
			ggml_backend_synchronize(&device);
			ggml_backend_tensor_get(&tensor, data, 0, sizeof(data));
			taken += now() - begun;
		}
		printf("%.9f\n", taken);
		fflush(stdout);
	}
	return 0;
}
#endif
