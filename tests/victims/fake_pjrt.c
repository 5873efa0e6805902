/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A PJRT plugin of a hundred lines: programs that finish on a thread of their own, later.
 * -DFUNCTIONS=n: how many functions its table has (an old plugin has fewer, a new one more).
 * Stripped, it exports nothing but GetPjrtApi. With -DCLIENT: the program that loads it (when
 * told "load PATH"), compiles, runs and awaits, and says how long its runs took by its own clock.
 */
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

struct program { size_t size; void *ext; const char *code; size_t code_size; const char *format; size_t format_size; };
struct compile { size_t size; void *ext, *client; struct program *program; const char *options; size_t options_size; void *executable; };
struct execute { size_t size; void *ext, *executable, *options; void ***arguments; size_t devices, n_arguments; void ***outputs; void **events; };
struct wait { size_t size; void *ext, *event; };
struct ready { size_t size; void *ext, *event; _Bool is_ready; };
struct on_ready { size_t size; void *ext, *event; void (*callback)(void *, void *); void *argument; };
struct from_host { size_t size; void *ext, *client, *data; int type; int64_t *dims; size_t n_dims; void *strides; size_t n_strides; int semantics; void *device, *memory, *layout, *done, *buffer; };
struct to_device { size_t size; void *ext, *buffer, *device, *made; };
struct on_device { size_t size; void *ext, *buffer; size_t bytes; };
struct stats { size_t size; void *ext, *device; int64_t in_use, peak; _Bool peak_set; int64_t n; _Bool n_set; int64_t largest; _Bool largest_set; int64_t limit; _Bool limit_set; };
struct version { size_t size; void *ext; int major, minor; };

enum {
	EVENT_DESTROY = 5, EVENT_IS_READY = 6, EVENT_AWAIT = 8, EVENT_ON_READY = 9, COMPILE = 20, FROM_HOST = 22,
	STATS = 34, EXECUTE = 55, ON_DEVICE = 64, TO_DEVICE = 69, MOST = 256
};

static double now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec + t.tv_nsec / 1e9;
}

#ifndef CLIENT
#ifndef FUNCTIONS
#define FUNCTIONS 118
#endif
#ifndef MINOR
#define MINOR 64
#endif
struct event { pthread_mutex_t lock; pthread_cond_t told; int done, ms; pthread_t thread; void (*callback)(void *, void *); void *argument; };
struct executable { int ms, runs; };
struct api { size_t size; void *ext; struct version version; void *(*functions[FUNCTIONS])(void *); };

static void *later(void *argument)
{
	struct event *event = argument;

	usleep(1000 * event->ms);
	pthread_mutex_lock(&event->lock);
	event->done = 1;
	pthread_cond_broadcast(&event->told);
	if (event->callback)
		event->callback(0, event->argument);
	pthread_mutex_unlock(&event->lock);
	return 0;
}

static void *on_ready(void *argument)
{
	struct on_ready *a = argument;
	struct event *event = a->event;

	pthread_mutex_lock(&event->lock);
	event->callback = a->callback;
	event->argument = a->argument;
	if (event->done)
		a->callback(0, a->argument);
	pthread_mutex_unlock(&event->lock);
	return 0;
}

/* A buffer is its size. */
static void *from_host(void *argument)
{
	struct from_host *a = argument;

	a->done = 0;
	a->buffer = malloc(sizeof(size_t));
	*(size_t *)a->buffer = 4 * a->dims[0] * a->dims[1];
	return 0;
}

static void *to_device(void *argument)
{
	struct to_device *a = argument;

	a->made = malloc(sizeof(size_t));
	*(size_t *)a->made = *(size_t *)a->buffer;
	return 0;
}

static void *on_device(void *argument)
{
	struct on_device *a = argument;

	a->bytes = *(size_t *)a->buffer;
	return 0;
}

static void *stats(void *argument)
{
	struct stats *a = argument;

	a->in_use = 1000;
	a->peak = 3000;
	a->peak_set = 1;
	a->limit = 1ll << 40;
	a->limit_set = 0;	/* says that it does not know */
	return 0;
}

static void *compile(void *argument)
{
	struct compile *a = argument;

	usleep(3000);
	if (!strncmp(a->program->code, "broken", 6))
		return strdup("an error");
	a->executable = calloc(1, sizeof(struct executable));
	/* "@slow", "@quick": what their runs take. */
	((struct executable *)a->executable)->ms = !strncmp(a->program->code, "module @slow", 12) ? 60
		: !strncmp(a->program->code, "module @quick", 13) ? 10 : 40;
	return 0;
}

static void *execute(void *argument)
{
	struct execute *a = argument;
	struct executable *executable = a->executable;
	struct event *event;
	size_t i;

	if (!executable->runs++)
		usleep(15000);	/* what a first run makes ready */
	/* A client that knows fewer fields asks for no event. */
	for (i = 0; a->size >= sizeof(*a) && a->events && i < a->devices; i++) {
		event = calloc(1, sizeof(*event));
		pthread_mutex_init(&event->lock, 0);
		pthread_cond_init(&event->told, 0);
		event->ms = executable->ms * (i + 1);	/* one device after the other */
		pthread_create(&event->thread, 0, later, event);
		a->events[i] = event;
	}
	return 0;
}

static void *await(void *argument)
{
	struct event *event = ((struct wait *)argument)->event;

	pthread_mutex_lock(&event->lock);
	while (!event->done)
		pthread_cond_wait(&event->told, &event->lock);
	pthread_mutex_unlock(&event->lock);
	return 0;
}

static void *is_ready(void *argument)
{
	struct ready *a = argument;

	a->is_ready = ((struct event *)a->event)->done;
	return 0;
}

static void *destroy(void *argument)
{
	struct event *event = ((struct wait *)argument)->event;

	pthread_join(event->thread, 0);
	free(event);
	return 0;
}

/* Many of them, so that the table is full of addresses of this library's code. */
static void *nothing(void *argument)
{
	return argument ? 0 : "nothing";
}

const void *GetPjrtApi(void)
{
	static struct api api;
	int i;

	if (!api.size) {
		for (i = 0; i < FUNCTIONS; i++)
			api.functions[i] = nothing;
		api.functions[COMPILE] = compile;
		api.functions[EXECUTE] = execute;
		api.functions[EVENT_AWAIT] = await;
		api.functions[EVENT_IS_READY] = is_ready;
		api.functions[EVENT_DESTROY] = destroy;
		api.functions[EVENT_ON_READY] = on_ready;
		api.functions[FROM_HOST] = from_host;
		api.functions[TO_DEVICE] = to_device;
		api.functions[ON_DEVICE] = on_device;
		api.functions[STATS] = stats;
		api.version = (struct version){ sizeof(struct version), 0, 0, MINOR };
		api.size = sizeof(api);
	}
	return &api;
}
#else
static void *(**functions)(void *);

static void *run(const char *code, int times, int small, int poll, double *taken)
{
	struct program program = { sizeof(program), 0, code, strlen(code), "mlir", 4 };
	struct compile compile = { sizeof(compile), 0, 0, &program };
	void *event = 0, *error = functions[COMPILE](&compile);
	int i;

	for (i = 0; !error && i < times; i++) {
		struct execute execute = { small ? 64 : sizeof(execute), 0, compile.executable, .devices = 1, .events = &event };
		double begun = now();

		functions[EXECUTE](&execute);
		if (small)
			continue;
		if (poll) {
			struct ready ready = { 25, 0, event };

			do {
				usleep(200);
				functions[EVENT_IS_READY](&ready);
			} while (!ready.is_ready);
		} else {
			functions[EVENT_AWAIT](&(struct wait){ sizeof(struct wait), 0, event });
		}
		*taken += now() - begun;
		functions[EVENT_DESTROY](&(struct wait){ sizeof(struct wait), 0, event });
	}
	return error;
}

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t told = PTHREAD_COND_INITIALIZER;
static int called;

__attribute__((noinline)) static void callback(void *error, void *argument)
{
	pthread_mutex_lock(&lock);
	called = 1;
	pthread_cond_broadcast(&told);
	pthread_mutex_unlock(&lock);
}

/* Runs on some devices, done when the plugin has called back, or every device's event was awaited. */
static void compiled(void *executable, int devices, int calls_back, double *taken)
{
	void *events[8] = { 0 };
	struct execute execute = { sizeof(execute), 0, executable, .devices = devices, .events = events };
	double begun = now();
	int i;

	called = 0;
	functions[EXECUTE](&execute);
	if (calls_back) {
		functions[EVENT_ON_READY](&(struct on_ready){ sizeof(struct on_ready), 0, events[0], callback, &called });
		pthread_mutex_lock(&lock);
		while (!called)
			pthread_cond_wait(&told, &lock);
		pthread_mutex_unlock(&lock);
	}
	for (i = 0; !calls_back && i < devices; i++)
		functions[EVENT_AWAIT](&(struct wait){ sizeof(struct wait), 0, events[i] });
	*taken += now() - begun;
	for (i = 0; i < devices; i++)
		functions[EVENT_DESTROY](&(struct wait){ sizeof(struct wait), 0, events[i] });
}

static void *make(const char *code)
{
	struct program program = { sizeof(program), 0, code, strlen(code), "mlir", 4 };
	struct compile compile = { sizeof(compile), 0, 0, &program };

	functions[COMPILE](&compile);
	return compile.executable;
}

/* A buffer to a second device, and on to a third; then one whose size nobody has said, unless asked. */
static void copies(int ask)
{
	int64_t dims[2] = { 10, 25 };
	struct from_host host = { sizeof(host), .type = 11, .dims = dims, .n_dims = 2 };
	struct to_device second = { sizeof(second), .device = (void *)2 }, third = { sizeof(third), .device = (void *)3 };
	size_t hidden = 777;

	functions[FROM_HOST](&host);
	second.buffer = host.buffer;
	functions[TO_DEVICE](&second);
	third.buffer = second.made;
	functions[TO_DEVICE](&third);
	if (ask)
		functions[ON_DEVICE](&(struct on_device){ sizeof(struct on_device), 0, &hidden });
	second.buffer = &hidden;
	functions[TO_DEVICE](&second);
	functions[STATS](&(struct stats){ sizeof(struct stats), 0, (void *)2 });
	functions[STATS](&(struct stats){ 32, 0, (void *)3 });	/* a client that knows the first field only */
}

int main(void)
{
	void *program, *other;
	int i;
	char line[4200], word[16], rest[4096];
	double taken;
	int times;

	puts("ready");
	fflush(stdout);
	while (fgets(line, sizeof(line), stdin)) {
		taken = 0;
		sscanf(line, "%15s %4095s", word, rest);
		times = atoi(rest);
		if (!strcmp(word, "open")) {	/* and does not ask for its functions */
			dlopen(rest, RTLD_NOW | RTLD_LOCAL);
		} else if (!strcmp(word, "load")) {
			void *library = dlopen(rest, RTLD_NOW | RTLD_LOCAL);
			void *(*get)(void) = (void *(*)(void))dlsym(library, "GetPjrtApi");

			functions = (void *(**)(void *))((char *)get() + 40);
		} else if (!strcmp(word, "run")) {
			run("module @waits {}", times, 0, 0, &taken);
		} else if (!strcmp(word, "poll")) {
			run("module @polls attributes {}", times, 0, 1, &taken);
		} else if (!strcmp(word, "small")) {
			run("module @knows_less {}", times, 1, 0, &taken);
		} else if (!strcmp(word, "devices")) {
			program = make("module @spread {}");
			for (i = 0; i < times; i++)
				compiled(program, 3, 0, &taken);
		} else if (!strcmp(word, "callback")) {
			program = make("module @calls_back {}");
			for (i = 0; i < times; i++)
				compiled(program, 1, 1, &taken);
		} else if (!strcmp(word, "serve")) {
			program = make("module @slow {}");
			other = make("module @quick {}");
			for (i = 0; i < 6 * times; i++)
				compiled(i % 6 ? other : program, 1, 0, &taken);
		} else if (!strcmp(word, "copies")) {
			copies(times);
		} else if (!strcmp(word, "broken")) {
			run("broken @name", 0, 0, 0, &taken);
		}
		printf("%.9f\n", taken);
		fflush(stdout);
	}
	return 0;
}
#endif
