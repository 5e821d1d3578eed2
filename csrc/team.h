// What the operators are written in: one row at a time, by a team of lanes, the same on both devices.
//
// On the CPU a team is one lane and the compiler makes vectors of its loops (host.h); on CUDA it is
// a warp (warp.cuh). A team has N, how many neighbours a lane takes at once; first() and step(),
// where its loop begins and how far it goes; sum(x), max(x) over all lanes; lock_step(), after which
// every lane has done what stands before it; leads(), true for one lane.
//
// Must not know tensors, threads or torch; only its 16-bit numbers, which are headers alone.
#pragma once

#include <cstdint>

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#ifdef __CUDACC__
#define BURST_BOTH __host__ __device__ __forceinline__
#define BURST_ADDS(...)
#define BURST_MAXIMISES(most)
#else
#define BURST_BOTH inline __attribute__((always_inline))
#define BURST_PRAGMA(text) _Pragma(#text)
// The next loop may add up, or compare, in any order: else no vector could do it for floats.
#define BURST_ADDS(...) BURST_PRAGMA(omp simd reduction(+ : __VA_ARGS__))
#define BURST_MAXIMISES(most) BURST_PRAGMA(omp simd reduction(max : most))
#endif

namespace burst {

// N neighbours in memory, read or written at once.
template <class T, int N>
struct alignas(sizeof(T) * N) Pack {
  T at[N];
};

template <int N, class T>
BURST_BOTH Pack<T, N> load(const T* from) {
  return *reinterpret_cast<const Pack<T, N>*>(from);
}

template <int N, class T>
BURST_BOTH void store(T* to, const Pack<T, N>& pack) {
  *reinterpret_cast<Pack<T, N>*>(to) = pack;
}

// Which of s x b x h rows.
struct Place {
  uint32_t s, b, h;
};

struct Shape {
  uint32_t s, b, h;

  BURST_BOTH Place place(uint32_t row) const {
    const uint32_t rest = row / h;
    return {rest / b, rest % b, row % h};
  }
};

// A number, or a row of neighbours, for each place.
template <class T>
struct Grid {
  T* start;
  int64_t s, b, h;  // how many numbers apart neighbours are

  BURST_BOTH T* at(const Place& place) const {
    return start + place.s * s + place.b * b + place.h * h;
  }

  // Does every row begin where a pack of n may?
  bool aligned(int n) const {
    return reinterpret_cast<uintptr_t>(start) % (n * sizeof(T)) == 0 &&
        s % n == 0 && b % n == 0 && h % n == 0;
  }
};

}  // namespace burst
