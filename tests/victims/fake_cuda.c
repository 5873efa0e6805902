/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Stand-ins for CUDA, and a program that uses them.
 *
 * -DDRIVER: libcuda.so.1, which hands out an address of cuLaunchKernel that has no name.
 * -DRUNTIME: a runtime over it, as NVIDIA's is over the real one.
 * -DPROGRAM: does what a line says, with known numbers of everything, and answers.
 * The signatures are those of the public headers; nothing computes, launches are counted.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

typedef struct { unsigned x, y, z; } dim3;
typedef struct {
	size_t x, y; unsigned type; const void *host; uint64_t device; void *array; size_t pitch;
} side2;
typedef struct { side2 from, to; size_t width, height; } copy2;
typedef struct {
	size_t x, y, z, lod; unsigned type; const void *host; uint64_t device; void *array, *reserved; size_t pitch, height;
} side3;
typedef struct { side3 from, to; size_t width, height, depth; } copy3;
typedef struct { void *ptr; size_t pitch, xsize, ysize; } pitched;
typedef struct { size_t x, y, z; } extent;
typedef struct { void *from_array; extent from_pos; pitched from; void *to_array; extent to_pos; pitched to; extent size; int kind; } rt_copy3;
_Static_assert(sizeof(copy2) == 128 && sizeof(copy3) == 200 && sizeof(rt_copy3) == 160, "as in cuda.h");
typedef struct { unsigned gx, gy, gz, bx, by, bz, shared; void *stream; void *attributes; unsigned n; } launch_config;

int cuLaunchKernel(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
		   unsigned shared, void *stream, void **params, void **extra);
int cuLaunchKernelEx(const launch_config *config, void *f, void **params, void **extra);
int cuModuleGetFunction(void **f, void *module, const char *name);
int cuMemAlloc_v2(uint64_t *address, size_t bytes);
int cuMemFree_v2(uint64_t address);
int cuMemcpyHtoD_v2(uint64_t to, const void *from, size_t bytes);
int cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t bytes, void *stream);
int cuMemsetD32_v2(uint64_t to, unsigned value, size_t elements);
int cuStreamSynchronize(void *stream);
int cuCtxSynchronize(void);
int cuStreamBeginCapture_v2(void *stream, int mode);
int cuStreamEndCapture(void *stream, void **graph);
int cuGraphInstantiateWithFlags(void **exec, void *graph, unsigned long long flags);
int cuGraphLaunch(void *exec, void *stream);
int cuGetProcAddress_v2(const char *name, void **address, int version, uint64_t flags, int *status);
int cudaLaunchKernel(const void *f, dim3 grid, dim3 block, void **args, size_t shared, void *stream);
int cudaMalloc(void **address, size_t bytes);
int cudaFree(void *address);
int cudaMemcpy(void *to, const void *from, size_t bytes, int kind);
int cudaDeviceSynchronize(void);
int cuMemcpy2D_v2(const copy2 *copy);
int cuMemcpy3DAsync_v2(const copy3 *copy, void *stream);
int cuMemsetD2D16_v2(uint64_t to, size_t pitch, unsigned short value, size_t width, size_t height);
int cuMemAllocPitch_v2(uint64_t *address, size_t *pitch, size_t width, size_t height, unsigned element);
int cuFuncGetName(const char **name, void *f);
int cuGraphExecUpdate_v2(void *exec, void *graph, void *result);
int cudaMemcpy2D(void *to, size_t to_pitch, const void *from, size_t pitch, size_t width, size_t height, int kind);
int cudaMemcpy3D(const rt_copy3 *copy);
void __cudaRegisterFunction(void **handle, const char *host, char *device, const char *name, int limit, void *tid,
			    void *bid, void *block, void *grid, int *size);

#if defined(DRIVER)
/* What tests/gpu/program.c needs besides: its kernel adds one to each element, which is how often
 * it ran, so the memory of this device is that number. */
static int launched, captured, capturing, executed;

static int launch(unsigned gx, unsigned bx)
{
	if (!gx || bx > 1024)
		return 1;	/* CUDA_ERROR_INVALID_VALUE */
	__atomic_fetch_add(&launched, 1, __ATOMIC_RELAXED);
	__atomic_fetch_add(capturing ? &captured : &executed, 1, __ATOMIC_RELAXED);
	return 0;
}

int cuInit(unsigned flags) { return flags ? 1 : 0; }
int cuDeviceGet(int *device, int number) { return *device = number; }
int cuDevicePrimaryCtxRetain(void **context, int device) { return *context = (void *)0x100, 0; }
int cuCtxSetCurrent(void *context) { return context ? 0 : 1; }
int cuModuleLoadData(void **module, const void *image) { return *module = (void *)0x200, image ? 0 : 1; }
int cuStreamCreate(void **stream, unsigned flags) { return *stream = (void *)0x300, 0; }

int cuMemcpyDtoH_v2(void *to, uint64_t from, size_t bytes)
{
	size_t i;

	for (i = 0; i < bytes / sizeof(int); i++)
		((int *)to)[i] = executed;
	return bytes ? 0 : 1;
}

int cuLaunchKernel(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
		   unsigned shared, void *stream, void **params, void **extra)
{
	return launch(gx, bx);
}

/* The same for those who ask for its address: another place, and no name. */
static int unnamed(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
		   unsigned shared, void *stream, void **params, void **extra)
{
	return launch(gx, bx + 0 * launched);
}

int cuLaunchKernelEx(const launch_config *c, void *f, void **params, void **extra)
{
	return launch(c->gx, c->bx);
}

int cuModuleGetFunction(void **f, void *module, const char *name)
{
	*f = (void *)(0x10000 + 64 * strlen(name));
	return 0;
}

int cuFuncGetName(const char **name, void *f)
{
	*name = f == (void *)0x77777 ? "loaded_before" : 0;
	return *name ? 0 : 400;
}

int cuMemcpy2D_v2(const copy2 *copy) { return copy->height ? 0 : 1; }
int cuMemcpy3DAsync_v2(const copy3 *copy, void *stream) { return copy->depth ? 0 : 1; }
int cuMemsetD2D16_v2(uint64_t to, size_t pitch, unsigned short value, size_t width, size_t height) { return width ? 0 : 1; }
int cuGraphExecUpdate_v2(void *exec, void *graph, void *result) { return exec ? 0 : 1; }

static uint64_t next = 0x700000000000;

int cuMemAlloc_v2(uint64_t *address, size_t bytes)
{
	if (bytes > 1ul << 40)
		return 2;	/* CUDA_ERROR_OUT_OF_MEMORY */
	*address = next;
	next += bytes + 4096;
	return 0;
}

int cuMemAllocPitch_v2(uint64_t *address, size_t *pitch, size_t width, size_t height, unsigned element)
{
	*pitch = (width + 511) / 512 * 512;
	return cuMemAlloc_v2(address, *pitch * height);
}

int cuMemFree_v2(uint64_t address) { return address < next ? 0 : 1; }
int cuMemcpyHtoD_v2(uint64_t to, const void *from, size_t bytes) { return bytes ? 0 : 1; }
int cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t bytes, void *stream) { return bytes ? 0 : 1; }
int cuMemsetD32_v2(uint64_t to, unsigned value, size_t elements) { return elements ? 0 : 1; }

int cuStreamSynchronize(void *stream)
{
	usleep(20000);
	return 0;
}

int cuCtxSynchronize(void)
{
	usleep(10000);
	return 0;
}

int cuStreamBeginCapture_v2(void *stream, int mode)
{
	capturing = 1;
	captured = 0;
	return stream ? 0 : 1;
}

int cuStreamEndCapture(void *stream, void **graph)
{
	*graph = (void *)0x5000;
	capturing = 0;
	return 0;
}

int cuGraphInstantiateWithFlags(void **exec, void *graph, unsigned long long flags)
{
	*exec = (void *)((char *)graph + 0x10);
	return 0;
}

int cuGraphLaunch(void *exec, void *stream)
{
	executed += captured;
	return exec ? 0 : 1;
}

int cuGetProcAddress_v2(const char *name, void **address, int version, uint64_t flags, int *status)
{
	*address = strcmp(name, "cuLaunchKernel") ? 0 : (void *)unnamed;
	return *address ? 0 : 500;
}
#elif defined(RUNTIME)
int cudaLaunchKernel(const void *f, dim3 grid, dim3 block, void **args, size_t shared, void *stream)
{
	void *function;
	int status = cuModuleGetFunction(&function, 0, "of_the_runtime");

	if (!status)
		status = cuLaunchKernel(function, grid.x, grid.y, grid.z, block.x, block.y, block.z, shared, stream,
					args, 0);
	return status ? 9 : 0;	/* cudaErrorInvalidConfiguration */
}

int cudaMalloc(void **address, size_t bytes) { return cuMemAlloc_v2((uint64_t *)address, bytes) ? 2 : 0; }
int cudaFree(void *address) { return cuMemFree_v2((uint64_t)address) ? 1 : 0; }
int cudaMemcpy(void *to, const void *from, size_t bytes, int kind)
{
	return cuMemcpyHtoD_v2((uint64_t)to, from, bytes) ? 1 : 0;
}
int cudaDeviceSynchronize(void) { return cuCtxSynchronize(); }
int cudaMemcpy2D(void *to, size_t to_pitch, const void *from, size_t pitch, size_t width, size_t height, int kind)
{
	copy2 copy = { .width = width, .height = height };

	return cuMemcpy2D_v2(&copy) ? 1 : 0;
}
int cudaMemcpy3D(const rt_copy3 *copy) { return copy->size.z ? 0 : 1; }
void __cudaRegisterFunction(void **handle, const char *host, char *device, const char *name, int limit, void *tid,
			    void *bid, void *block, void *grid, int *size)
{
	if (size)
		*size = limit;
}
#else
static double now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec + t.tv_nsec / 1e9;
}

static void kernel_stub(void) { }
static void registered_stub(void) { puts("never called"); }

int main(void)
{
	int (*pointer)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **,
		       void **) = 0;
	void *matmul, *softmax, *graph, *exec, *stream = (void *)0x1234, *memory[3];
	char line[64], word[16], data[4096];
	uint64_t address;
	double begun;
	int i, n;

	puts("ready");
	fflush(stdout);
	while (fgets(line, sizeof(line), stdin)) {
		n = 0;
		sscanf(line, "%15s %d", word, &n);
		begun = now();
		if (!strcmp(word, "names")) {
			cuModuleGetFunction(&matmul, 0, "matmul_f16");
			cuModuleGetFunction(&softmax, 0, "softmax");
		} else if (!strcmp(word, "driver")) {
			launch_config c = { 7, 1, 1, 64, 2, 1, 0, stream };

			for (i = 0; i < n; i++) {
				cuLaunchKernel(matmul, 32, 16, 2, 128, 4, 1, 0, stream, 0, 0);
				cuLaunchKernelEx(&c, softmax, 0, 0);
			}
			cuLaunchKernel(softmax, 0, 1, 1, 1, 1, 1, 0, stream, 0, 0);	/* refused */
			cuMemcpyHtoD_v2(1, data, 4000);
			cuMemcpyDtoHAsync_v2(data, 1, 96, stream);
			cuMemsetD32_v2(1, 0, 512);
			cuStreamSynchronize(stream);
		} else if (!strcmp(word, "runtime")) {
			for (i = 0; i < n; i++)
				cudaLaunchKernel(kernel_stub, (dim3){ 5, 6, 7 }, (dim3){ 8, 9, 10 }, 0, 0, stream);
			cudaLaunchKernel(kernel_stub, (dim3){ 0, 1, 1 }, (dim3){ 1, 1, 1 }, 0, 0, stream);
			cudaMemcpy((void *)1, data, 1024, 1);
			cudaDeviceSynchronize();
		} else if (!strcmp(word, "memory")) {
			for (i = 0; i < 3; i++)
				cudaMalloc(&memory[i], 1000 * (i + 1));
			cuMemAlloc_v2(&address, 500);
			cudaMalloc(&exec, 1ul << 50);	/* too much */
			cudaFree(memory[0]);
			cuMemFree_v2(address);
		} else if (!strcmp(word, "graph")) {
			cuStreamBeginCapture_v2(stream, 0);
			for (i = 0; i < 50; i++)
				cuLaunchKernel(matmul, 1, 1, 1, 32, 1, 1, 0, stream, 0, 0);
			cuStreamEndCapture(stream, &graph);
			cuGraphInstantiateWithFlags(&exec, graph, 0);
			for (i = 0; i < n; i++)
				cuGraphLaunch(exec, stream);
			cuGraphLaunch((void *)0x9999, stream);	/* captured before anybody looked */
			cuLaunchKernel(matmul, 1, 1, 1, 32, 1, 1, 0, stream, 0, 0);
		} else if (!strcmp(word, "blocks")) {
			copy2 two = { .from.type = 1, .to.type = 2, .width = 100, .height = 7 };
			copy3 three = { .from.type = 2, .to.type = 3, .width = 10, .height = 20, .depth = 30 };
			rt_copy3 plain = { .from.ptr = data, .to.ptr = data, .size = { 8, 4, 2 }, .kind = 3 }, array = plain;
			size_t pitch;

			array.to.ptr = 0;
			array.to_array = data;
			cuMemcpy2D_v2(&two);
			cuMemcpy3DAsync_v2(&three, stream);
			cudaMemcpy2D(data, 64, data, 64, 16, 3, 2);
			cudaMemcpy3D(&plain);
			cudaMemcpy3D(&array);
			cuMemsetD2D16_v2(1, 512, 3, 25, 4);
			cuMemAllocPitch_v2(&address, &pitch, 100, 6, 4);
			cuMemFree_v2(address);
		} else if (!strcmp(word, "register")) {
			__cudaRegisterFunction(0, (const char *)registered_stub, 0, "_Z9real_namePf", -1, 0, 0, 0, 0, 0);
			cudaLaunchKernel(registered_stub, (dim3){ 77, 1, 1 }, (dim3){ 32, 1, 1 }, 0, 0, stream);
		} else if (!strcmp(word, "asks_name")) {
			const char *name;

			cuLaunchKernel((void *)0x77777, 78, 1, 1, 32, 1, 1, 0, stream, 0, 0);
			cuFuncGetName(&name, (void *)0x77777);
		} else if (!strcmp(word, "update")) {
			cuStreamBeginCapture_v2(stream, 0);
			for (i = 0; i < n; i++)
				cuLaunchKernel(matmul, 1, 1, 1, 32, 1, 1, 0, stream, 0, 0);
			cuStreamEndCapture(stream, &graph);
			cuGraphExecUpdate_v2((void *)0x9999, graph, 0);
			cuGraphLaunch((void *)0x9999, stream);
		} else if (!strcmp(word, "ask")) {
			cuGetProcAddress_v2("cuLaunchKernel", (void **)&pointer, 12000, 0, 0);
		} else if (!strcmp(word, "pointer")) {
			for (i = 0; i < n; i++)
				pointer(matmul, 3, 1, 1, 33, 1, 1, 0, stream, 0, 0);
		} else if (!strcmp(word, "paced")) {	/* some 200,000 launches a second */
			for (i = 0; i < n; i++) {
				for (int j = 0; j < 8000; j++)
					__asm__ volatile("" ::: "memory");
				cuLaunchKernel(matmul, 11, 1, 1, 32, 1, 1, 0, stream, 0, 0);
			}
		} else if (!strcmp(word, "flood")) {
			for (i = 0; i < n; i++)
				cuLaunchKernel(matmul, 11, 1, 1, 32, 1, 1, 0, stream, 0, 0);
		}
		printf("%.9f\n", now() - begun);
		fflush(stdout);
	}
	return 0;
}
#endif
