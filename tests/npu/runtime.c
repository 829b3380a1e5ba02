/* What lowered code calls when it runs on a CPU: memory, copies, and the functions of Ascend's own
 * mathematics that it names. */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The buffers of one program. They begin as garbage, as on a device. */
static char *buffers;
static size_t used;
static const size_t capacity = (size_t)1 << 28;

void begin_program(void) {
    if (!buffers) buffers = malloc(capacity);
    used = 0;
}

void *_mlir_memref_to_llvm_alloc(uint64_t bytes) {
    used = (used + 63) & ~(size_t)63;
    if (used + bytes > capacity) {
        fprintf(stderr, "a program takes more than %zu bytes\n", capacity);
        abort();
    }
    char *buffer = buffers + used;
    used += bytes;
    return memset(buffer, 0xA5, bytes);
}

void *_mlir_memref_to_llvm_aligned_alloc(uint64_t alignment, uint64_t bytes) {
    char *buffer = _mlir_memref_to_llvm_alloc(bytes + alignment);
    return buffer + (alignment - (uintptr_t)buffer % alignment) % alignment;
}

void _mlir_memref_to_llvm_free(void *buffer) { (void)buffer; }

/* MLIR's unranked memref: a rank, and a descriptor that ends with that many sizes and strides. */
struct memref {
    char *allocated, *aligned;
    int64_t offset, sizes[];
};
struct unranked {
    int64_t rank;
    struct memref *memref;
};

static void copy(int64_t rank, const int64_t *sizes, const char *from, const int64_t *from_strides,
                 char *to, const int64_t *to_strides, int64_t bytes) {
    if (rank == 0) {
        memcpy(to, from, bytes);
        return;
    }
    for (int64_t i = 0; i < sizes[0]; i++)
        copy(rank - 1, sizes + 1, from + i * from_strides[0] * bytes, from_strides + 1,
             to + i * to_strides[0] * bytes, to_strides + 1, bytes);
}

void memrefCopy(int64_t bytes, struct unranked *source, struct unranked *target) {
    struct memref *from = source->memref, *to = target->memref;
    int64_t rank = source->rank;
    copy(rank, from->sizes, from->aligned + from->offset * bytes, from->sizes + rank,
         to->aligned + to->offset * bytes, to->sizes + rank, bytes);
}

float __hmf_tanhf(float x) { return tanhf(x); }
float __hmf_log1pf(float x) { return log1pf(x); }
float __hmf_expm1f(float x) { return expm1f(x); }
float __hmf_powf(float x, float y) { return powf(x, y); }
float __hmf_reluf(float x) { return x > 0 ? x : 0; }
float __hmf_recipf(float x) { return 1 / x; }
_Bool __hmf_isinf(float x) { return isinf(x); }
_Bool __hmf_isnan(float x) { return isnan(x); }

/* float32 to bfloat16, to nearest, ties to even. */
__bf16 __truncsfbf2(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    uint16_t half = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    if (x != x) half = 0x7fc0;
    __bf16 result;
    memcpy(&result, &half, 2);
    return result;
}
