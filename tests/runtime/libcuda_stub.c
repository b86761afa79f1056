/* A libcuda.so.1 without a GPU: the driver calls of a partition table, enough for the real cuda-bindings to be driven through
   them. Each call notes its arguments on standard error, one line; an H200's 132 SMs are split as the manual says. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

typedef int Result;
typedef struct {
    int type;
    unsigned char padding[92];
    union { unsigned sms; unsigned char space[40]; } sm;
    void *next;
} Resource; /* CUdevResource: a tag, a union whose first word of the SM kind is smCount, 144 bytes */

#define NOTE(...) do { fprintf(stderr, __VA_ARGS__); fputc('\n', stderr); } while (0)

Result cuGetProcAddress_v2(const char *name, void **call, int version, unsigned long flags, int *status) {
    *call = dlsym(dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD), name);
    if (status) *status = *call ? 0 : 1;
    return 0;
}
Result cuInit(unsigned flags) { return flags; }
Result cuDriverGetVersion(int *version) { *version = 13000; return 0; }
Result cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
Result cuDeviceGetAttribute(int *value, int attribute, int device) {
    *value = attribute == 16 ? 132 : attribute == 75 ? 9 : attribute == 76 ? 0 : -1;
    return 0;
}
static void fill(Resource *r, int type, unsigned sms) { memset(r, 0, sizeof *r); r->type = type; r->sm.sms = sms; }
Result cuDeviceGetDevResource(int device, Resource *r, int type) { fill(r, type, 132); return type != 1; }
Result cuDevSmResourceSplitByCount(Resource *groups, unsigned *count, const Resource *in, Resource *rest, unsigned flags,
                                   unsigned least) {
    unsigned step = flags & 1 ? 2 : 8, sms = (least + step - 1) / step * step;
    NOTE("split groups=%u of=%u flags=%u least=%u", *count, in->sm.sms, flags, least);
    if (sms >= in->sm.sms) return 915; /* CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION */
    fill(&groups[0], 1, sms);
    fill(rest, 1, in->sm.sms - sms);
    *count = 1;
    return 0;
}
Result cuDevResourceGenerateDesc(void **descriptor, Resource *r, unsigned count) {
    *descriptor = (void *)(size_t)r->sm.sms;
    return count != 1;
}
/* A context's handle carries its SMs in the low bits. */
Result cuGreenCtxCreate(void **context, void *descriptor, int device, unsigned flags) {
    static size_t next = 0;
    *context = (void *)((next += 0x1000) + (size_t)descriptor);
    NOTE("create %p flags=%u", *context, flags);
    return 0;
}
Result cuGreenCtxGetDevResource(void *context, Resource *r, int type) { fill(r, type, (size_t)context & 0xfff); return 0; }
Result cuGreenCtxStreamCreate(void **stream, void *context, unsigned flags, int priority) {
    *stream = (void *)((size_t)context + 0x1000000);
    NOTE("stream %p of=%p flags=%u priority=%d", *stream, context, flags, priority);
    return 0;
}
/* A graph of two nodes: a kernel of grid 112, in the context that the graph's handle is, and a memcpy. */
typedef struct {
    void *func;
    unsigned grid[3], block[3], shared;
    void **parameters, **extra;
    void *kern, *ctx;
} KernelNode; /* CUDA_KERNEL_NODE_PARAMS, its second version */
Result cuGraphGetNodes(void *graph, void **nodes, size_t *count) {
    if (nodes) for (size_t i = 0; i < *count && i < 2; i++) nodes[i] = (char *)graph + i;
    *count = 2;
    return 0;
}
Result cuGraphNodeGetType(void *node, int *type) { *type = (size_t)node & 1; return 0; }
Result cuGraphKernelNodeGetParams(void *node, KernelNode *p) {
    memset(p, 0, sizeof *p);
    p->kern = (void *)0x99;
    p->grid[0] = 112; p->grid[1] = p->grid[2] = 1;
    p->block[0] = 128; p->block[1] = p->block[2] = 1;
    p->ctx = node;
    return 0;
}
Result cuKernelGetName(const char **name, void *kernel) { *name = "gemm_kernel"; return kernel != (void *)0x99; }
Result cuFuncGetName(const char **name, void *function) { *name = "never asked"; return 1; }
Result cuStreamDestroy(void *stream) { NOTE("destroy stream %p", stream); return 0; }
Result cuGreenCtxDestroy(void *context) { NOTE("destroy context %p", context); return 0; }
Result cuCtxFromGreenCtx(void **context, void *green) { *context = green; return 0; }
Result cuCtxPushCurrent(void *context) { NOTE("push %p", context); return 0; }
Result cuCtxPopCurrent(void **context) { *context = 0; NOTE("pop"); return 0; }
