// Rows on the CPU, over torch's threads, with the vector width of this processor.
#pragma once

#include <algorithm>

#include <torch/csrc/stable/ops.h>

#include "team.h"

namespace burst {

// A team of one lane.
struct Lane {
  static constexpr int N = 1;
  static constexpr int64_t first() { return 0; }
  static constexpr int64_t step() { return 1; }
  static constexpr bool leads() { return true; }
  static void lock_step() {}
  template <class F>
  static BURST_BOTH F sum(F x) {
    return x;
  }
  template <class F>
  static BURST_BOTH F max(F x) {
    return x;
  }
};

// `op` is a local copy, so the compiler can assume that writes to rows do not change it.
template <class Op>
BURST_BOTH void each_row(const Op op, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    op(Lane{}, uint32_t(row));
  }
}

template <class Op>
void each_row_plain(const Op& op, int64_t begin, int64_t end) {
  each_row(op, begin, end);
}

#ifdef __x86_64__
// A second copy of the code, for processors with AVX2; the library must run on all processors.
template <class Op>
__attribute__((target("avx2,fma"))) void each_row_wide(const Op& op, int64_t begin, int64_t end) {
  each_row(op, begin, end);
}

inline bool wide() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}
#else
template <class Op>
void each_row_wide(const Op& op, int64_t begin, int64_t end) {
  each_row(op, begin, end);
}

inline bool wide() {
  return false;
}
#endif

constexpr int64_t GRAIN = 1 << 15;  // smallest number of elements per thread

template <class Op>
void on_cpu(const Op& op, int64_t rows) {
  const auto run = wide() ? each_row_wide<Op> : each_row_plain<Op>;
  const int64_t grain = std::max<int64_t>(1, GRAIN / std::max<int64_t>(1, op.width()));
  torch::stable::parallel_for(
      0, rows, grain, [&](int64_t begin, int64_t end) { run(op, begin, end); });
}

}  // namespace burst
