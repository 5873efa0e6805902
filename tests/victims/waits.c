/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Waits in every way a thread can, when told to.
 *
 * Reads a line from standard input and answers with one:
 *   spin MS            uses MS of CPU time
 *   sleep MS           nanosleep
 *   futex MS           waits on a futex until a time-out
 *   poll MS            waits in poll() until a time-out
 *   yield COUNT        sched_yield
 *   read FILE          reads a file whose pages were dropped, with system calls
 *   touch FILE         touches each page of a mapped file whose pages were dropped; no read-ahead
 *   anon PAGES         touches fresh anonymous memory; answers with its address
 *   threads COUNT MS   so many threads, one after the other, that use MS of CPU time each
 *   fork MS            a child that uses MS of CPU time and touches 100 fresh pages; answers with its pid
 *   exec               executes itself anew
 * The answer is "ok" and numbers that the line speaks of. Ends at end of file.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static long long used(void)
{
	struct timespec t;

	clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
	return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static void spin(long ms)
{
	long long until = used() + ms * 1000000LL;

	while (used() < until)
		for (volatile int i = 0; i < 10000; i++)
			;
}

static void *spinner(void *ms)
{
	spin((long)ms);
	return NULL;
}

static int dropped(const char *file, off_t *size)
{
	int fd = open(file, O_RDONLY);
	struct stat st;

	if (fd < 0 || fstat(fd, &st))
		return -1;
	*size = st.st_size;
	posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
	return fd;
}

static long sum;

int main(int argc, char **argv)
{
	char line[4096];
	long page = sysconf(_SC_PAGESIZE);

	(void)argc;
	setvbuf(stdout, NULL, _IOLBF, 0);
	/* So that reading a line reads no further, for exec. */
	setvbuf(stdin, NULL, _IONBF, 0);
	printf("ready\n");
	while (fgets(line, sizeof(line), stdin)) {
		char *rest = strchr(line, ' ');
		long n = rest ? atol(rest) : 0;
		struct timespec t = { n / 1000, n % 1000 * 1000000 };

		line[strcspn(line, "\n")] = 0;
		if (!strncmp(line, "spin", 4)) {
			spin(n);
		} else if (!strncmp(line, "sleep", 5)) {
			nanosleep(&t, NULL);
		} else if (!strncmp(line, "futex", 5)) {
			int word = 0;

			syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, 0, &t, NULL, 0);
		} else if (!strncmp(line, "poll", 4)) {
			poll(NULL, 0, (int)n);
		} else if (!strncmp(line, "yield", 5)) {
			while (n--)
				sched_yield();
		} else if (!strncmp(line, "read", 4) || !strncmp(line, "touch", 5)) {
			off_t size = 0;
			int fd = dropped(rest + 1, &size);

			if (fd < 0)
				return 1;
			posix_fadvise(fd, 0, 0, POSIX_FADV_RANDOM);
			if (line[0] == 'r') {
				static char block[65536];

				while (read(fd, block, sizeof(block)) > 0)
					sum += block[0];
				printf("ok\n");
			} else {
				char *p = mmap(NULL, size, PROT_READ, MAP_PRIVATE, fd, 0);

				if (p == MAP_FAILED)
					return 1;
				madvise(p, size, MADV_RANDOM);
				for (off_t i = 0; i < size; i += page)
					sum += p[i];
				printf("ok %lu\n", (unsigned long)p);	/* stays mapped */
			}
			close(fd);
			continue;
		} else if (!strncmp(line, "anon", 4)) {
			char *p = mmap(NULL, n * page, PROT_READ | PROT_WRITE,
				       MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

			if (p == MAP_FAILED)
				return 1;
			madvise(p, n * page, MADV_NOHUGEPAGE);
			for (long i = 0; i < n; i++)
				p[i * page] = 1;
			printf("ok %lu\n", (unsigned long)p);
			continue;
		} else if (!strncmp(line, "threads", 7)) {
			char *second = strchr(rest + 1, ' ');
			long ms = second ? atol(second) : 0;

			while (n--) {
				pthread_t thread;

				if (pthread_create(&thread, NULL, spinner, (void *)ms))
					return 1;
				pthread_join(thread, NULL);
			}
		} else if (!strncmp(line, "fork", 4)) {
			pid_t child = fork();

			if (!child) {
				char *p = mmap(NULL, 100 * page, PROT_READ | PROT_WRITE,
					       MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

				for (int i = 0; i < 100; i++)
					p[i * page] = 1;
				spin(n);
				_exit(0);
			}
			waitpid(child, NULL, 0);
			printf("ok %d\n", (int)child);
			continue;
		} else if (!strncmp(line, "exec", 4)) {
			execv("/proc/self/exe", argv);
			return 1;
		} else {
			return 1;
		}
		printf("ok\n");
	}
	return 0;
}
