/* SPDX-License-Identifier: Apache-2.0 */
/*
 * An engine in miniature whose calls are disturbed in the middle.
 *
 * llama_decode() runs a graph of four nodes through the functions of a real engine, with
 * structures laid out as today's. Every function of a call returns the number that came in
 * as batch.n_tokens, so that an end can be told to belong to its beginning. In the middle of
 * the graph the thread does what `during` says. Reads lines "WHAT COUNT" from standard input:
 *
 *   calls    COUNT calls
 *   storm    COUNT calls under SIGALRM every 150 us; every fourth signal decodes, too
 *   altstack likewise, with the handler on a stack of its own that lies above the thread's
 *   jump     COUNT calls, of which a signal handler leaves every other one by siglongjmp
 *   churn    COUNT threads one after the other, three calls each; every fifth exits inside one
 *   swap     COUNT times: a call is suspended in the middle, two others run on another stack
 *            of the same thread (above and below in turn), then it goes on
 *   cross    COUNT times: two calls on two stacks; the one that began first returns first
 *   fork     COUNT times: fork in the middle of a call; parent and child return, child calls on
 *   twin     fork in the middle of a call; the child decodes on and on. Answers with its pid
 *   exec     replaces the program in the middle of a call by one that sleeps
 *   exit     ends the process in the middle of a call
 *
 * and answers "WHAT finished=F left=L wrong=W": calls that returned, calls that were left,
 * and results that were not what they had to be (with those of children).
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

#define API __attribute__((noipa, visibility("default"), used))
#define NODES 4
#define STACK (256 << 10)

const char *const engine_says = "GGML_ASSERT(%s) failed";

struct batch {
	int n_tokens;
	long rest[6];
};

struct tensor {
	int type, pad;
	void *buffer;
	int64_t ne[4];
	uint64_t nb[4];
	int op, op_params[16], flags;
	struct tensor *src[10];
	struct tensor *view_src;
	uint64_t view_offs;
	void *data;
	char name[64];
	void *extra;
	char padding[8];
};

struct graph {
	int size, n_nodes, n_leafs, pad;
	struct tensor **nodes, **grads, **grad_accs, **leafs;
	int32_t *use_counts;
	uint64_t hash[4];
	uint64_t uid;
};

static __thread void (*volatile during)(void);
static struct tensor tensors[NODES + 1];
static struct tensor *node_list[NODES];
static struct graph graph = { .size = NODES, .n_nodes = NODES, .nodes = node_list, .uid = 1 };
static volatile int finished, left, wrong;
static int next_number = 1;

API int ggml_cpu_extra_compute_forward(void *params, void *tensor)
{
	volatile char room[40];

	room[0] = *(char *)tensor;
	for (int i = 0; i < 300; i++)
		room[i % 40] = (char)i;
	return *(int *)params + room[1] * 0;
}

API int ggml_graph_compute(struct graph *g, void *plan)
{
	int n = *(int *)plan, sum = 0;

	for (int i = 0; i < g->n_nodes; i++) {
		sum += ggml_cpu_extra_compute_forward(plan, g->nodes[i]);
		if (i == 1) {
			void (*what)(void) = during;	/* once: a signal handler may take it */

			during = 0;
			if (what)
				what();
		}
	}
	return sum == NODES * n ? n : -1;
}

API int ggml_backend_sched_graph_compute_async(void *sched, struct graph *g)
{
	volatile char room[72];

	room[3] = 1;
	return ggml_graph_compute(g, sched) + (room[3] - 1);
}

API int llama_decode(void *context, struct batch batch)
{
	volatile char room[24];
	int n = batch.n_tokens;

	(void)context;
	room[1] = 2;
	return ggml_backend_sched_graph_compute_async(&n, &graph) + (room[1] - 2);
}

static void call(void)
{
	int n = __atomic_fetch_add(&next_number, 1, __ATOMIC_RELAXED);

	if (llama_decode(&graph, (struct batch){ .n_tokens = n }) != n)
		__atomic_fetch_add(&wrong, 1, __ATOMIC_RELAXED);
	__atomic_fetch_add(&finished, 1, __ATOMIC_RELAXED);
}

static void pause_a_little(void)
{
	struct timespec begin, now;

	clock_gettime(CLOCK_MONOTONIC, &begin);
	do
		clock_gettime(CLOCK_MONOTONIC, &now);
	while ((now.tv_sec - begin.tv_sec) * 1000000000L + now.tv_nsec - begin.tv_nsec < 60000);
}

/* ---- signals ------------------------------------------------------------------------ */

static volatile int ticks, inside;
static sigjmp_buf home;

static void set_timer(int microseconds)
{
	struct itimerval every = { { 0, microseconds }, { 0, microseconds } };

	setitimer(ITIMER_REAL, &every, NULL);
}

static void tick(int signal)
{
	(void)signal;
	if (++ticks % 4 == 0)
		call();
}

static void leave(int signal)
{
	(void)signal;
	if (inside)
		siglongjmp(home, 1);
}

static void handle(void (*handler)(int), int flags)
{
	struct sigaction action = { .sa_handler = handler, .sa_flags = SA_RESTART | flags };

	sigaction(SIGALRM, &action, NULL);
}

static void stormy(int count)
{
	set_timer(150);
	for (int i = 0; i < count; i++) {
		during = pause_a_little;
		call();
	}
	set_timer(0);
}

static void storm(int count)
{
	handle(tick, 0);
	stormy(count);
}

struct job {
	int count;
	stack_t handlers;
};

static void *low_down(void *argument)
{
	struct job *job = argument;

	sigaltstack(&job->handlers, NULL);
	stormy(job->count);
	return NULL;
}

/* The handlers' stack lies above that of the thread: entering a function there looks as if
 * what is open on the thread's own stack had been left. */
static void altstack(int count)
{
	char *room = mmap(NULL, 3 * STACK, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	struct job job = { count, { .ss_sp = room + 2 * STACK, .ss_size = STACK } };
	pthread_attr_t attributes;
	pthread_t thread;
	sigset_t alarm;

	mprotect(room, STACK, PROT_READ | PROT_WRITE);
	mprotect(room + 2 * STACK, STACK, PROT_READ | PROT_WRITE);
	handle(tick, SA_ONSTACK);
	pthread_attr_init(&attributes);
	pthread_attr_setstack(&attributes, room, STACK);
	pthread_create(&thread, &attributes, low_down, &job);
	sigemptyset(&alarm);
	sigaddset(&alarm, SIGALRM);
	pthread_sigmask(SIG_BLOCK, &alarm, NULL);
	pthread_join(thread, NULL);
	pthread_sigmask(SIG_UNBLOCK, &alarm, NULL);
}

static void until_left(void)
{
	inside = 1;
	set_timer(100);
	for (;;)
		pause_a_little();
}

static void jump(int count)
{
	handle(leave, 0);
	for (volatile int i = 0; i < count; i++) {
		during = i % 2 ? until_left : 0;
		if (!sigsetjmp(home, 1)) {
			call();
		} else {
			inside = 0;
			set_timer(0);
			left++;
		}
	}
}

/* ---- threads ------------------------------------------------------------------------ */

static void end_thread(void)
{
	__atomic_fetch_add(&left, 1, __ATOMIC_RELAXED);
	pthread_exit(NULL);
}

static void *brief(void *leaves)
{
	call();
	call();
	if (leaves)
		during = end_thread;
	call();
	return NULL;
}

static void churn(int count)
{
	pthread_t two[2];

	for (int i = 0; i < count; i += 2) {
		for (int k = 0; k < 2; k++)
			pthread_create(&two[k], NULL, brief, (i + k) % 5 == 4 ? &graph : NULL);
		for (int k = 0; k < 2; k++)
			pthread_join(two[k], NULL);
	}
}

/* ---- stacks ------------------------------------------------------------------------- */

static ucontext_t suspended, other;

static void on_another_stack(void)
{
	call();
	call();
}

static void switch_away(void)
{
	swapcontext(&suspended, &other);
}

static void inner(void)
{
	during = switch_away;
	call();
}

/* Three stacks: the thread's, and two that lie apart, one above the other. A call is begun on
 * one of these and suspended; two calls run on the other one; then the first goes on. */
static void swap(int count)
{
	char *room = mmap(NULL, 5 * STACK, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	static ucontext_t here;

	mprotect(room, STACK, PROT_READ | PROT_WRITE);
	mprotect(room + 2 * STACK, STACK, PROT_READ | PROT_WRITE);
	for (int i = 0; i < count; i++) {
		getcontext(&suspended);
		suspended.uc_stack.ss_sp = room + (i % 2) * 2 * STACK;
		suspended.uc_stack.ss_size = STACK;
		suspended.uc_link = &here;
		makecontext(&suspended, inner, 0);
		getcontext(&other);
		other.uc_stack.ss_sp = room + (1 - i % 2) * 2 * STACK;
		other.uc_stack.ss_size = STACK;
		other.uc_link = &suspended;
		makecontext(&other, on_another_stack, 0);
		swapcontext(&here, &suspended);
	}
}

static ucontext_t first_half, second_half, back;

static void give_way(void)
{
	swapcontext(&first_half, &second_half);
}

static void give_back(void)
{
	swapcontext(&second_half, &first_half);
}

static void begin_first(void)
{
	during = give_way;
	call();
	swapcontext(&first_half, &second_half);
}

static void begin_second(void)
{
	during = give_back;
	call();
}

/* Two calls that overlap: A begins, B begins, A returns, B returns. */
static void cross(int count)
{
	char *room = mmap(NULL, 5 * STACK, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	mprotect(room, STACK, PROT_READ | PROT_WRITE);
	mprotect(room + 2 * STACK, STACK, PROT_READ | PROT_WRITE);
	for (volatile int i = 0; i < count; i++) {
		ucontext_t *both[] = { &first_half, &second_half };

		for (int k = 0; k < 2; k++) {
			getcontext(both[k]);
			both[k]->uc_stack.ss_sp = room + (i + k) % 2 * 2 * STACK;
			both[k]->uc_stack.ss_size = STACK;
			both[k]->uc_link = &back;
			makecontext(both[k], k ? begin_second : begin_first, 0);
		}
		swapcontext(&back, &first_half);
	}
}

/* ---- processes ---------------------------------------------------------------------- */

static pid_t child;

static void divide(void)
{
	child = fork();
}

static void fork_inside(int count)
{
	for (int i = 0; i < count; i++) {
		int status = 0;

		during = divide;
		call();
		if (!child) {
			call();
			call();
			_exit(wrong);
		}
		waitpid(child, &status, 0);
		wrong += !WIFEXITED(status) || WEXITSTATUS(status);
	}
}

/* A child that decodes for itself until its input ends, for a look at its memory. */
static void twin(int count)
{
	(void)count;
	during = divide;
	call();
	if (child)
		return;
	for (;;) {
		call();
		usleep(1000);
	}
}

static void replace(void)
{
	execl("/bin/sleep", "sleep", "60", NULL);
	_exit(127);
}

static void replaced(int count)
{
	(void)count;
	during = replace;
	call();
}

static void end_process(void)
{
	_exit(7);
}

static void ended(int count)
{
	(void)count;
	during = end_process;
	call();
}

static void calls(int count)
{
	for (int i = 0; i < count; i++)
		call();
}

int main(void)
{
	static const struct { const char *name; void (*run)(int); } modes[] = {
		{ "calls", calls }, { "storm", storm }, { "altstack", altstack }, { "jump", jump },
		{ "churn", churn }, { "swap", swap }, { "cross", cross }, { "fork", fork_inside },
		{ "twin", twin }, { "exec", replaced }, { "exit", ended },
	};
	char line[128], what[32];
	int count;

	for (int i = 0; i <= NODES; i++) {
		struct tensor *t = &tensors[i];

		*t = (struct tensor){ .ne = { 32, 1, 1, 1 }, .nb = { 4, 128, 128, 128 }, .flags = 16 };
		snprintf(t->name, sizeof(t->name), "node_%d", i);
		if (i) {
			t->op = 2;	/* ADD */
			t->src[0] = t->src[1] = &tensors[i - 1];
			node_list[i - 1] = t;
		}
	}
	setvbuf(stdout, NULL, _IOLBF, 0);
	printf("ready\n");
	while (fgets(line, sizeof(line), stdin)) {
		if (sscanf(line, "%31s %d", what, &count) != 2)
			return 2;
		finished = left = wrong = 0;
		for (unsigned i = 0; i < sizeof(modes) / sizeof(*modes); i++)
			if (!strcmp(what, modes[i].name))
				modes[i].run(count);
		if (!strcmp(what, "twin"))
			printf("%d\n", child);
		else
			printf("%s finished=%d left=%d wrong=%d\n", what, finished, left, wrong);
	}
	return engine_says[0] == 0;
}
