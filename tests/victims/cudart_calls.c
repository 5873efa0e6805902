/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Calls NVIDIA's runtime (its path is the argument) as often as a line says, and answers with
 * what each function returned. Without a device every one of them fails.
 */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

typedef struct { unsigned x, y, z; } dim3;

static void kernel(void) { }

int main(int argc, char **argv)
{
	void *library = dlopen(argv[1], RTLD_NOW), *address = 0;
	int (*get_count)(int *), (*allocate)(void **, size_t), (*launch)(const void *, dim3, dim3, void **, size_t, void *);
	int (*copy)(void *, const void *, size_t, int), (*wait)(void), (*release)(void *);
	char line[32], data[64];
	int n, i, status[5] = { 0 };

	if (argc < 2 || !library)
		return 1;
	*(void **)&get_count = dlsym(library, "cudaGetDeviceCount");
	*(void **)&allocate = dlsym(library, "cudaMalloc");
	*(void **)&launch = dlsym(library, "cudaLaunchKernel");
	*(void **)&copy = dlsym(library, "cudaMemcpy");
	*(void **)&wait = dlsym(library, "cudaDeviceSynchronize");
	*(void **)&release = dlsym(library, "cudaFree");
	get_count(&n);
	puts("ready");
	fflush(stdout);
	while (fgets(line, sizeof(line), stdin)) {
		n = atoi(line);
		for (i = 0; i < n; i++) {
			status[0] = allocate(&address, 4096);
			status[1] = launch((void *)kernel, (dim3){ 4, 3, 2 }, (dim3){ 64, 2, 1 }, 0, 0, 0);
			status[2] = copy(data, data, sizeof(data), 2);
			status[3] = wait();
			status[4] = release(data);
		}
		printf("%d %d %d %d %d\n", status[0], status[1], status[2], status[3], status[4]);
		fflush(stdout);
	}
	return 0;
}
