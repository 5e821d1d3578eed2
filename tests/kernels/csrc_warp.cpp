// The formulas of csrc/ run by a warp of threads instead of a warp of a GPU: the same lanes, packs
// and reductions as csrc/warp.cuh has, so that what a lane may and may not do is tested without one.
#include <array>
#include <barrier>
#include <thread>
#include <vector>

#include "delta.h"
#include "merge.h"
#include "softmax_gradient.h"
#include "stand_in.h"

using namespace burst;

namespace {

constexpr int LANES = 32;

struct Board {
  std::barrier<> meeting{LANES};
  std::array<double, LANES> told;
};

template <int PACK>
struct Threads {
  static constexpr int N = PACK;
  Board* board;
  int lane;

  int64_t first() const { return lane * N; }
  int64_t step() const { return LANES * N; }
  bool leads() const { return lane == 0; }
  void lock_step() const { board->meeting.arrive_and_wait(); }

  template <class F, class Join>
  F joined(F x, Join join) const {
    board->told[lane] = x;
    lock_step();
    F all = F(board->told[0]);
    for (int i = 1; i < LANES; ++i) {
      all = join(all, F(board->told[i]));
    }
    lock_step();  // nobody writes before all have read
    return all;
  }
  template <class F>
  F sum(F x) const {
    return joined(x, [](F a, F b) { return a + b; });
  }
  template <class F>
  F max(F x) const {
    return joined(x, [](F a, F b) { return b > a ? b : a; });
  }
};

// Returns the size of the packs, as csrc/warp.cuh picks it.
template <int PACK, class Op>
int as_a_warp(const Op& op, int64_t rows) {
  Board board;
  std::vector<std::thread> lanes;
  for (int lane = 0; lane < LANES; ++lane) {
    lanes.emplace_back([&, lane] {
      for (int64_t row = 0; row < rows; ++row) {
        op(Threads<PACK>{&board, lane}, uint32_t(row));
      }
    });
  }
  for (auto& lane : lanes) {
    lane.join();
  }
  return PACK;
}

template <class Op>
int go(const Op& op, int64_t rows) {
  return op.aligned(4) ? as_a_warp<4>(op, rows) : as_a_warp<1>(op, rows);
}

// Contiguous [s, b, h, w] and [s, b, h].
template <class T>
Grid<T> rows(void* x, Shape shape, int64_t w) {
  return {static_cast<T*>(x), w * shape.h * shape.b, w * shape.h, w};
}

using Low = c10::BFloat16;

template <class T>
int stood_in(void* dout, void* delta, void* out, Shape shape, int64_t w) {
  const StandIn<float, T> op{
      rows<const T>(dout, shape, w), rows<const float>(delta, shape, 1),
      rows<T>(out, shape, w), shape, w};
  return go(op, shape.s * shape.b * shape.h);
}

}  // namespace

extern "C" {

int merge(void* out, void* lse, void* part, void* part_lse, uint32_t s, uint32_t b, uint32_t h,
          int64_t w) {
  const Shape shape{s, b, h};
  const Merge<float, Low> op{
      rows<float>(out, shape, w), rows<float>(lse, shape, 1), rows<const Low>(part, shape, w),
      rows<const float>(part_lse, shape, 1), shape, w};
  return go(op, s * b * h);
}

int delta(void* dout, void* out, void* found, uint32_t s, uint32_t b, uint32_t h, int64_t w) {
  const Shape shape{s, b, h};
  const Delta<float, Low> op{
      rows<const Low>(dout, shape, w), rows<const Low>(out, shape, w),
      rows<float>(found, shape, 1), shape, w};
  return go(op, s * b * h);
}

int stand_in(void* dout, void* delta, void* out, uint32_t s, uint32_t b, uint32_t h, int64_t w) {
  return stood_in<Low>(dout, delta, out, {s, b, h}, w);
}

int stand_in_half(void* dout, void* delta, void* out, uint32_t s, uint32_t b, uint32_t h,
                  int64_t w) {
  return stood_in<c10::Half>(dout, delta, out, {s, b, h}, w);
}

int softmax_gradient(void* z, void* index, void* lse, void* of_softmax, void* of_label, void* of_all,
                     int64_t n, int32_t v, int32_t real, float scale, float cap) {
  using Op = SoftmaxGradient<float, Low, Holds::CAPPED>;
  const uint32_t chunks = uint32_t((v + Op::CHUNK - 1) / Op::CHUNK);
  const auto column = [](void* x) { return static_cast<const float*>(x); };
  const Op op{
      static_cast<Low*>(z), v, v, real, chunks, static_cast<const int64_t*>(index), column(lse),
      column(of_softmax), column(of_label), column(of_all), scale, cap};
  return go(op, n * chunks);
}

}  // extern "C"
