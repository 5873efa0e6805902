/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A device's library that nobody knows: hands work over, finishes later, fails on request.
 * Built as a library; with -DPROGRAM the program that uses it, which waits for a line, works,
 * and says what it did and how long the work took by its own clock.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

struct npu_context { int pending; double ready; };
struct npu_tensor { int dtype; int rows, cols; int pad; long bytes; char name[32]; };

int my_npu_matmul(struct npu_context *ctx, struct npu_tensor *tensor);
int my_npu_wait(struct npu_context *ctx);
int my_npu_upload(struct npu_context *ctx, const void *data, long bytes);

static double now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec + t.tv_nsec / 1e9;
}

#ifndef PROGRAM
__attribute__((noinline)) int my_npu_matmul(struct npu_context *ctx, struct npu_tensor *tensor)
{
	if (tensor->rows < 0)
		return -5;
	ctx->pending++;
	ctx->ready = now() + 0.005;
	return 0;
}

__attribute__((noinline)) int my_npu_wait(struct npu_context *ctx)
{
	double left = ctx->ready - now();

	if (left > 0)
		usleep(left * 1e6);
	ctx->pending = 0;
	return 0;
}

__attribute__((noinline)) int my_npu_upload(struct npu_context *ctx, const void *data, long bytes)
{
	ctx->pending += ((const char *)data)[bytes - 1];
	return 0;
}
#else
int main(void)
{
	static char data[4096];
	static struct npu_tensor a = { 1, 64, 32, 0, 4096, "blk.0.ffn" }, b = { 0, 8, 8, 0, 256, "blk.1.ffn" };
	static struct npu_tensor bad = { 0, -1, 0, 0, 1, "bad" };
	struct npu_context ctx = { 0 };
	char line[32];
	double taken = 0;
	int i, turn;

	puts("ready");
	fflush(stdout);
	while (fgets(line, sizeof(line), stdin)) {
		taken = 0;
		turn = atoi(line);
		my_npu_upload(&ctx, data, sizeof(data));
		for (i = 0; i < turn; i++) {
			double begun = now();

			my_npu_matmul(&ctx, &a);
			my_npu_wait(&ctx);
			taken += now() - begun;
			my_npu_matmul(&ctx, &b);	/* never awaited by itself: with the next one */
		}
		my_npu_matmul(&ctx, &bad);
		printf("%.9f\n", taken);
		fflush(stdout);
	}
	return 0;
}
#endif
