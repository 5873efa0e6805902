/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A real CUDA program without a compiler for the device: the kernel is PTX text, which the
 * driver compiles. Does what a line says ("launch N", "runtime N", "graph N") and answers.
 * Built against nothing: both libraries are opened by name, the runtime by its path.
 */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *ptx =
	".version 7.0\n.target sm_70\n.address_size 64\n"
	".visible .entry add_one(.param .u64 p) {\n"
	".reg .u64 %rd<4>; .reg .u32 %r<4>;\n"
	"ld.param.u64 %rd1, [p]; cvta.to.global.u64 %rd2, %rd1;\n"
	"mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ntid.x; mov.u32 %r3, %tid.x;\n"
	"mad.lo.u32 %r1, %r1, %r2, %r3; mul.wide.u32 %rd3, %r1, 4; add.u64 %rd2, %rd2, %rd3;\n"
	"ld.global.u32 %r2, [%rd2]; add.u32 %r2, %r2, 1; st.global.u32 [%rd2], %r2; ret;\n}\n";

#define N 65536

static void *driver, *runtime;

static int call(const char *name, int status)
{
	if (status) {
		printf("%s: %d\n", name, status);
		exit(1);
	}
	return 0;
}

#define FIND(library, name, ...) int (*name)(__VA_ARGS__) = (int (*)(__VA_ARGS__))dlsym(library, #name)
#define FIND2(library, name, symbol, ...) int (*name)(__VA_ARGS__) = (int (*)(__VA_ARGS__))dlsym(library, symbol)

int main(int argc, char **argv)
{
	static int host[N];
	void *context, *module, *kernel, *stream, *graph, *exec, *arguments[1], *other = 0;
	unsigned long long device;
	char line[64], word[16];
	int number, i, n;

	driver = dlopen("libcuda.so.1", RTLD_NOW);
	runtime = dlopen(argc > 1 ? argv[1] : "libcudart.so.12", RTLD_NOW);
	if (!driver || !runtime)
		return puts(dlerror()), 1;
	FIND(driver, cuInit, unsigned);
	FIND(driver, cuDeviceGet, int *, int);
	FIND(driver, cuDevicePrimaryCtxRetain, void **, int);
	FIND(driver, cuCtxSetCurrent, void *);
	FIND(driver, cuModuleLoadData, void **, const void *);
	FIND(driver, cuModuleGetFunction, void **, void *, const char *);
	FIND(driver, cuStreamCreate, void **, unsigned);
	FIND(driver, cuStreamSynchronize, void *);
	FIND(driver, cuStreamEndCapture, void *, void **);
	FIND(driver, cuGraphInstantiateWithFlags, void **, void *, unsigned long long);
	FIND(driver, cuGraphLaunch, void *, void *);
	FIND2(driver, begin_capture, "cuStreamBeginCapture_v2", void *, int);
	FIND2(driver, allocate, "cuMemAlloc_v2", unsigned long long *, size_t);
	FIND2(driver, to_device, "cuMemcpyHtoD_v2", unsigned long long, const void *, size_t);
	FIND2(driver, to_host, "cuMemcpyDtoH_v2", void *, unsigned long long, size_t);
	FIND(driver, cuLaunchKernel, void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
	     void *, void **, void **);
	FIND(runtime, cudaMalloc, void **, size_t);
	FIND(runtime, cudaFree, void *);
	FIND(runtime, cudaMemcpy, void *, const void *, size_t, int);
	FIND(runtime, cudaDeviceSynchronize, void);

	call("cuInit", cuInit(0));
	call("cuDeviceGet", cuDeviceGet(&number, 0));
	call("cuDevicePrimaryCtxRetain", cuDevicePrimaryCtxRetain(&context, number));
	call("cuCtxSetCurrent", cuCtxSetCurrent(context));
	call("cuModuleLoadData", cuModuleLoadData(&module, ptx));
	call("cuStreamCreate", cuStreamCreate(&stream, 0));
	puts("ready");
	fflush(stdout);
	while (fgets(line, sizeof(line), stdin)) {
		n = 0;
		sscanf(line, "%15s %d", word, &n);
		if (!strcmp(word, "prepare")) {
			call("function", cuModuleGetFunction(&kernel, module, "add_one"));
			call("alloc", allocate(&device, sizeof(host)));
			call("copy", to_device(device, host, sizeof(host)));
			arguments[0] = &device;
		} else if (!strcmp(word, "launch")) {
			for (i = 0; i < n; i++)
				call("launch", cuLaunchKernel(kernel, N / 256, 1, 1, 256, 1, 1, 0, stream, arguments, 0));
			call("wait", cuStreamSynchronize(stream));
			call("copy", to_host(host, device, sizeof(host)));
		} else if (!strcmp(word, "runtime")) {
			for (i = 0; i < n; i++) {
				call("cudaMalloc", cudaMalloc(&other, 1 << 20));
				call("cudaMemcpy", cudaMemcpy(other, host, sizeof(host), 1));
				call("cudaFree", cudaFree(other));
			}
			call("cudaDeviceSynchronize", cudaDeviceSynchronize());
		} else if (!strcmp(word, "graph")) {
			call("begin", begin_capture(stream, 0));
			for (i = 0; i < 20; i++)
				call("launch", cuLaunchKernel(kernel, N / 256, 1, 1, 256, 1, 1, 0, stream, arguments, 0));
			call("end", cuStreamEndCapture(stream, &graph));
			call("instantiate", cuGraphInstantiateWithFlags(&exec, graph, 0));
			for (i = 0; i < n; i++)
				call("graph", cuGraphLaunch(exec, stream));
			call("wait", cuStreamSynchronize(stream));
			call("copy", to_host(host, device, sizeof(host)));
		}
		printf("%d\n", host[N - 1]);	/* how often the kernel really ran */
		fflush(stdout);
	}
	return 0;
}
