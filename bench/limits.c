/* Reads memory as fast as this machine can: every thread takes chunk after chunk, and hardly anything is computed. */
#include <stddef.h>
#include <stdint.h>

typedef uint64_t Words __attribute__((vector_size(32), aligned(8)));

/* `count` vectors of 32 bytes. */
uint64_t read_all(const Words *words, size_t count, int threads) {
    const size_t chunk = 1 << 13;
    uint64_t total = 0;
#pragma omp parallel for num_threads(threads) schedule(dynamic) reduction(^ : total)
    for (size_t start = 0; start < count; start += chunk) {
        const size_t end = start + chunk < count ? start + chunk : count;
        Words a = {0}, b = {0}, c = {0}, d = {0};
        size_t i = start;
        for (; i + 4 <= end; i += 4) {
            a ^= words[i];
            b ^= words[i + 1];
            c ^= words[i + 2];
            d ^= words[i + 3];
        }
        for (; i < end; i++) a ^= words[i];
        a ^= b ^ c ^ d;
        for (int lane = 0; lane < 4; lane++) total ^= a[lane];
    }
    return total;
}
