// Rows on the CPU: over torch's threads, in vectors as wide as this processor has.
#pragma once

#include <algorithm>

#include <torch/csrc/stable/ops.h>

#include "team.h"

namespace burst {

// The team of one lane.
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

// `op` is a copy of one's own: what the rows are written with may then not change it.
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
// The same once more for processors of the last ten years; the library must run on all.
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

constexpr int64_t GRAIN = 1 << 15;  // numbers that are worth a thread

template <class Op>
void on_cpu(const Op& op, int64_t rows) {
  const auto run = wide() ? each_row_wide<Op> : each_row_plain<Op>;
  const int64_t grain = std::max<int64_t>(1, GRAIN / std::max<int64_t>(1, op.width()));
  torch::stable::parallel_for(
      0, rows, grain, [&](int64_t begin, int64_t end) { run(op, begin, end); });
}

}  // namespace burst
