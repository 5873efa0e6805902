/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Calls functions a known number of times when told to.
 *
 * Reads lines "COUNT" from standard input; for each it calls second(), which calls first(),
 * COUNT times and answers with one line: the sum of the return values. Ends at end of file.
 * A second thread does the same work when the line is "t COUNT".
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

/* noipa: not inlined, not cloned, and its result is not known to the caller. */
__attribute__((noipa)) long first(long a, long b)
{
	__asm__ volatile("" ::: "memory");
	return a + b;
}

__attribute__((noipa)) long second(long a)
{
	char room[64];
	__asm__ volatile("" : : "r"(room) : "memory");
	return first(a, 1) * 3;	/* not a tail call: a frame of its own */
}

static long work(long count)
{
	long sum = 0;

	for (long i = 0; i < count; i++)
		sum += second(i);
	return sum;
}

static void *worker(void *count)
{
	return (void *)work((long)count);
}

int main(void)
{
	char line[64];

	setvbuf(stdout, NULL, _IOLBF, 0);
	printf("ready\n");
	while (fgets(line, sizeof(line), stdin)) {
		if (line[0] == 't') {
			pthread_t thread;
			void *sum = NULL;

			if (pthread_create(&thread, NULL, worker, (void *)atol(line + 1)))
				return 1;
			pthread_join(thread, &sum);
			printf("%ld\n", (long)sum);
		} else {
			printf("%ld\n", work(atol(line)));
		}
	}
	return 0;
}
