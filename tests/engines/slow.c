/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Makes one operator of a real engine slower: an LD_PRELOAD library that waits PFSLOW_NS busily,
 * on thread 0, whenever the CPU backend has begun a kernel whose result's name begins with
 * PFSLOW_NAME ("ffn_up-" is that of every layer). So there are two builds of one engine that
 * differ in one operator and in nothing else.
 *
 * It stands in front of ggml_cpu_extra_compute_forward, which the engine calls first for every
 * kernel that is not fused, and waits after the engine's own function has returned: by then the
 * kernel has begun, as seen by whoever probes that function. The offset of the name is today's; it
 * is compared with what the engine itself says, and the process is stopped when they differ.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#ifndef T_NAME
#define T_NAME 256
#endif

static bool (*real)(void *, void *);
static const char *slow;
static uint64_t length, ns;

static uint64_t now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* In the global scope, or in that of the calling object (a library opened locally). */
static void *find(const char *name, void *caller)
{
	void *f = dlsym(RTLD_NEXT, name);
	Dl_info info;
	void *handle;

	if (!f && dladdr(caller, &info) && info.dli_fname) {
		handle = dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
		f = handle ? dlsym(handle, name) : NULL;
	}
	if (!f) {
		fprintf(stderr, "slow: no %s\n", name);
		_exit(97);
	}
	return f;
}

static void set_up(void *tensor, void *caller)
{
	const char *(*get_name)(const void *) = find("ggml_get_name", caller);
	const char *given = getenv("PFSLOW_NAME"), *wait = getenv("PFSLOW_NS");

	if (get_name(tensor) != (char *)tensor + T_NAME) {
		fprintf(stderr, "slow: the name of a tensor is not where this was compiled for\n");
		_exit(97);
	}
	slow = given ? given : "";
	length = strlen(slow);
	ns = wait ? strtoull(wait, NULL, 10) : 0;
	real = find("ggml_cpu_extra_compute_forward", caller);
}

/* Exported without a type, so that no profiler takes this library for a part of the engine. */
#ifdef __aarch64__
#define JUMP "b"
#else
#define JUMP "jmp"
#endif
__asm__(".text\n.globl ggml_cpu_extra_compute_forward\nggml_cpu_extra_compute_forward: " JUMP " slow_extra");

__attribute__((used, noclone)) static bool slow_extra(void *params, void *tensor)
{
	bool done;
	uint64_t until;

	if (!real)
		set_up(tensor, __builtin_return_address(0));
	done = real(params, tensor);
	if (length && *(int *)params == 0 && !strncmp((char *)tensor + T_NAME, slow, length)) {
		until = now() + ns;
		while (now() < until)
			;
	}
	return done;
}
