// The interface of the operators: a team of lanes computes one row, with one code for both devices.
//
// On the CPU a team is one lane, and the compiler vectorizes its loops (host.h). On CUDA a team is a
// warp (warp.cuh). A team has:
//   N             consecutive numbers that a lane reads or writes at once
//   first, step   start and step of a lane's loop
//   sum, max      reductions over all lanes
//   lock_step     a barrier of the lanes
//   leads         true for one lane
//
// This header does not use tensors, threads or torch, except torch's header-only 16-bit numbers.
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
// The next loop may add or compare in any order. Otherwise loops over floats are not vectorized.
#define BURST_ADDS(...) BURST_PRAGMA(omp simd reduction(+ : __VA_ARGS__))
#define BURST_MAXIMISES(most) BURST_PRAGMA(omp simd reduction(max : most))
#endif

namespace burst {

// N consecutive numbers in memory, read or written at once.
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

// The index of one of s x b x h rows.
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

// A number, or a row of consecutive numbers, for each place.
template <class T>
struct Grid {
  T* start;
  int64_t s, b, h;  // strides, in numbers

  BURST_BOTH T* at(const Place& place) const {
    return start + place.s * s + place.b * b + place.h * h;
  }

  // Returns true if every row begins at the alignment of a pack of n numbers.
  bool aligned(int n) const {
    return reinterpret_cast<uintptr_t>(start) % (n * sizeof(T)) == 0 &&
        s % n == 0 && b % n == 0 && h % n == 0;
  }
};

}  // namespace burst
