// How the work of a call is laid out: which tokens an expert has, how many rows and threads are worth it, and memory.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#include "kernels.h"

namespace minimoe {
namespace {

constexpr int64_t L2_BYTES = 1 << 18;      // of a weight that are kept close for all tokens, while as many arrive
constexpr int64_t SERIAL_BYTES = 1 << 18;  // less than this is not worth waking other threads for

// Of the L1 data cache; 0 where the system does not tell.
inline int64_t l1_bytes() {
#if defined(_SC_LEVEL1_DCACHE_SIZE)
    return sysconf(_SC_LEVEL1_DCACHE_SIZE);
#else
    return 0;
#endif
}

// Memory from the start of a cache line on, not yet written; much of it in huge pages where the system has them, which
// cost fewer faults.
template <class N>
class Room {
   public:
    explicit Room(int64_t count = 0) : bytes_(size_t(count) * sizeof(N)) {
        const size_t unit = bytes_ < HUGE_PAGE ? LINE : HUGE_PAGE, whole = (bytes_ + unit - 1) / unit * unit;
        room_.reset(static_cast<N *>(std::aligned_alloc(unit, std::max(whole, unit))));
        if (!room_) throw std::bad_alloc();
#if defined(MADV_HUGEPAGE)
        if (unit == HUGE_PAGE) madvise(room_.get(), whole, MADV_HUGEPAGE);
#endif
    }
    N *data() const { return room_.get(); }
    N &operator[](int64_t i) const { return room_.get()[i]; }
    size_t bytes() const { return bytes_; }

   private:
    static constexpr size_t LINE = 64, HUGE_PAGE = 1 << 21;
    struct Free {
        void operator()(N *room) const { std::free(room); }
    };
    std::unique_ptr<N, Free> room_;
    size_t bytes_;
};

// Memory of the calling thread that is kept from call to call: fresh pages would cost as much as the products.
class Scratch {
   public:
    // Room for so many bytes in up to PIECES pieces.
    void reserve(int64_t bytes) {
        const size_t needed = bytes + (PIECES + 1) * LINE;
        if (room_.bytes() < needed) {
            room_ = Room<std::byte>();  // never both
            room_ = Room<std::byte>(needed);
        }
        next_ = room_.data();
    }
    // The next piece, not yet written, from the start of a cache line on.
    template <class N>
    N *take(int64_t count) {
        next_ += -reinterpret_cast<uintptr_t>(next_) % LINE;
        N *const piece = reinterpret_cast<N *>(next_);
        next_ += count * sizeof(N);
        return piece;
    }

   private:
    static constexpr size_t LINE = 64, PIECES = 3;
    Room<std::byte> room_;
    std::byte *next_ = nullptr;
};

thread_local Scratch scratch;

// Rows of a weight that one thread takes at a time: so many chunks, a few times as many as threads so that they end
// together, but no more rows than the L2 cache holds; a multiple of what the kernels multiply at a time.
inline int64_t chunk_rows(int64_t rows, int64_t columns, int64_t bytes, int64_t chunks) {
    constexpr int64_t STEP = 12;
    const int64_t fitting = L2_BYTES / std::max<int64_t>(columns * bytes, 1) / STEP * STEP;
    chunks = std::max<int64_t>(chunks, 1);
    return std::max(std::min((rows + chunks * STEP - 1) / (chunks * STEP) * STEP, fitting), STEP);
}

// How many threads a call is worth that multiplies so many bytes of weights, counted anew for every token.
inline int worth(int64_t bytes, int threads) { return bytes < SERIAL_BYTES ? 1 : threads; }

// The live pairs sorted by expert, within an expert by token.
struct Pairs {
    std::vector<int64_t> live;     // experts that have tokens
    std::vector<int64_t> offsets;  // [E + 1]
    std::vector<int64_t> tokens;   // [P]
    std::vector<float> weights;    // [P]
    std::vector<int64_t> firsts;   // [T + 1], of each token's pairs among `own`
    std::vector<int64_t> own;      // [P], the pairs of each token by ascending expert

    explicit Pairs(const Experts &m) : offsets(m.E + 1), firsts(m.T + 1) {
        for (int64_t t = 0; t < m.T; t++)
            for (int64_t j = 0; j < m.k[t]; j++) offsets[m.experts[t * m.K + j] + 1]++;
        for (int64_t e = 0; e < m.E; e++) {
            if (offsets[e + 1]) live.push_back(e);
            offsets[e + 1] += offsets[e];
        }
        tokens.resize(offsets[m.E]);
        weights.resize(offsets[m.E]);
        std::vector<int64_t> next(offsets.begin(), offsets.end() - 1);
        for (int64_t t = 0; t < m.T; t++)
            for (int64_t j = 0; j < m.k[t]; j++) {
                const int64_t place = next[m.experts[t * m.K + j]]++;
                tokens[place] = t;
                weights[place] = m.weights[t * m.K + j];
            }
        for (int64_t t = 0; t < m.T; t++) firsts[t + 1] = firsts[t] + m.k[t];
        own.resize(tokens.size());
        next.assign(firsts.begin(), firsts.end() - 1);
        for (size_t p = 0; p < tokens.size(); p++) own[next[tokens[p]]++] = p;
    }
};

// Items 0 to n - 1, in as many shares as threads. A thread takes the items of its share in order, and when none is left
// the last ones of others.
class Shares {
   public:
    Shares(int64_t items, int threads) : threads_(threads), left_(threads * APART) {
        for (int64_t i = 0; i < threads; i++)
            left_[i * APART] = range(items * i / threads, items * (i + 1) / threads);
    }

    // The next item, or -1.
    int64_t take(int share) {
        for (int i = 0; i < threads_; i++) {
            std::atomic<uint64_t> &left = left_[(share + i) % threads_ * APART];
            uint64_t seen = left.load(std::memory_order_relaxed);
            for (int64_t first; (first = int64_t(seen & LOW)) < int64_t(seen >> 32);) {
                const int64_t end = int64_t(seen >> 32);
                const uint64_t rest = i == 0 ? range(first + 1, end) : range(first, end - 1);
                if (left.compare_exchange_weak(seen, rest, std::memory_order_relaxed)) return i == 0 ? first : end - 1;
            }
        }
        return -1;
    }

    // What a share takes next of its own, or -1.
    int64_t next(int share) const {
        const uint64_t seen = left_[share * APART].load(std::memory_order_relaxed);
        return int64_t(seen & LOW) < int64_t(seen >> 32) ? int64_t(seen & LOW) : -1;
    }

   private:
    static constexpr uint64_t LOW = 0xffffffff;
    static constexpr int APART = 16;  // so that no two shares lie in one cache line, nor in a pair of them
    // From `first` on, before `end`.
    static uint64_t range(int64_t first, int64_t end) { return uint64_t(end) << 32 | uint64_t(first); }

    int threads_;
    std::vector<std::atomic<uint64_t>> left_;  // what is left of each share, every APART-th
};

// Rows of matrices, shared among threads in chunks. A thread goes through what is its share in the order of memory, for
// only a long stream is read at full speed. A Matrix has `rows`.
template <class Matrix>
class Chunks {
   public:
    struct Chunk {
        const Matrix *of;  // null: there is none
        int64_t row, rows;
    };

    Chunks(std::vector<Matrix> all, int64_t rows, int threads)
        : all_(std::move(all)), rows_(rows), firsts_(all_.size() + 1), shares_(number(), threads) {}

    // work(chunk, next) for each chunk of a share, and then for what is left of others'; `next` comes after it.
    template <class F>
    void run(int share, F work) {
        for (int64_t item = shares_.take(share); item >= 0; item = shares_.take(share))
            work(chunk(item), chunk(shares_.next(share)));
    }

   private:
    // Of all chunks. The i-th matrix has those from firsts_[i] on, which this fills in.
    int64_t number() {
        for (size_t i = 0; i < all_.size(); i++) firsts_[i + 1] = firsts_[i] + (all_[i].rows + rows_ - 1) / rows_;
        return firsts_.back();
    }

    Chunk chunk(int64_t item) const {
        if (item < 0) return {nullptr, 0, 0};
        const int64_t i = std::upper_bound(firsts_.begin(), firsts_.end(), item) - firsts_.begin() - 1;
        const int64_t row = (item - firsts_[i]) * rows_;
        return {&all_[i], row, std::min(rows_, all_[i].rows - row)};
    }

    std::vector<Matrix> all_;
    int64_t rows_;
    std::vector<int64_t> firsts_;
    Shares shares_;
};

}  // namespace
}  // namespace minimoe
