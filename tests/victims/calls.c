/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Calls functions a known number of times when told to.
 *
 * Reads lines "COUNT" from standard input; for each it calls once_a_line() once, and second(), which
 * calls first(), COUNT times, and answers with one line: the sum of the return values. Ends at end of file.
 * A second thread does the same work when the line is "t COUNT"; "p COUNT PAUSE" counts to PAUSE
 * before each call of second().
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

__attribute__((noipa)) long once_a_line(long a)
{
	__asm__ volatile("" ::: "memory");
	return a;
}

static long work(long count, long pause)
{
	long sum = once_a_line(0);

	for (long i = 0; i < count; i++) {
		for (long j = 0; j < pause; j++)
			__asm__ volatile("" ::: "memory");
		sum += second(i);
	}
	return sum;
}

static void *worker(void *count)
{
	return (void *)work((long)count, 0);
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
		} else if (line[0] == 'p') {
			char *rest;
			long count = strtol(line + 1, &rest, 10);

			printf("%ld\n", work(count, atol(rest)));
		} else {
			printf("%ld\n", work(atol(line), 0));
		}
	}
	return 0;
}
