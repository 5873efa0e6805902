/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Memory bandwidth the way STREAM defines its triad: a[i] = b[i] + 3 c[i] over arrays of
 * doubles that no cache holds, 24 bytes counted per element, the best of some repeats.
 *
 * stream BYTES THREADS REPEATS  prints bytes per second.
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

static size_t elements;
static int threads, repeats;
static double *a, *b, *c;
static double begun[64], ended[64];
static pthread_barrier_t all;
static double best;

static double now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec + t.tv_nsec * 1e-9;
}

static void *work(void *argument)
{
	int me = (int)(size_t)argument;
	size_t first = elements / threads * me, last = first + elements / threads, i;

	for (i = first; i < last; i++)
		a[i] = b[i] = c[i] = 1.0;
	for (int n = 0; n < repeats; n++) {
		pthread_barrier_wait(&all);
		begun[me] = now();
		for (i = first; i < last; i++)
			a[i] = b[i] + 3.0 * c[i];
		ended[me] = now();
		pthread_barrier_wait(&all);
		if (me == 0) {
			double from = begun[0], to = ended[0];

			for (int k = 1; k < threads; k++) {
				from = begun[k] < from ? begun[k] : from;
				to = ended[k] > to ? ended[k] : to;
			}
			double rate = 24.0 * (elements / threads * threads) / (to - from);

			best = rate > best ? rate : best;
		}
	}
	return NULL;
}

int main(int argc, char **argv)
{
	pthread_t ids[64];

	if (argc != 4)
		return 2;
	elements = strtoull(argv[1], NULL, 10) / sizeof(double);
	threads = atoi(argv[2]);
	repeats = atoi(argv[3]);
	if (threads < 1 || threads > 64)
		return 2;
	a = aligned_alloc(4096, elements * sizeof(double));
	b = aligned_alloc(4096, elements * sizeof(double));
	c = aligned_alloc(4096, elements * sizeof(double));
	if (!a || !b || !c)
		return 1;
	pthread_barrier_init(&all, NULL, threads);
	for (int n = 0; n < threads; n++)
		pthread_create(&ids[n], NULL, work, (void *)(size_t)n);
	for (int n = 0; n < threads; n++)
		pthread_join(ids[n], NULL);
	printf("%.0f\n", best);
	return 0;
}
