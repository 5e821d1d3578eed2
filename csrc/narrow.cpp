// The operators over narrow.h: packs what torch gives, and takes the tiles of this processor. A head
// of keys with its queries is the work of one thread in backward, which adds to their dk and dv; in
// forward a few queries are.
#include <algorithm>
#include <cmath>
#include <memory>
#include <new>

#include "narrow.h"
#include "ops.h"
#include "tensors.h"

namespace burst {

namespace {

constexpr float LN2 = 0.69314718056f;
constexpr int MOST_LANES = 32, WIDEST = NARROW_STEP * NARROW_WIDTHS;

// Those with vectors of so many floats; 0: of as many as this processor has.
const NarrowTiles& tiles(int64_t vector) {
#ifdef __x86_64__
  const int most = __builtin_cpu_supports("avx512f") ? 16
      : __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? 8
                                                                          : 4;
#else
  const int most = 4;
#endif
  vector = vector == 0 ? most : vector;
  BURST_CHECK(vector == 4 || (vector == 8 && most >= 8) || (vector == 16 && most == 16),
              "vector must be 0, 4, 8 or 16, and at most ", most, " here, got ", vector);
#ifdef __x86_64__
  return vector == 16 ? narrow_avx512() : vector == 8 ? narrow_avx2() : narrow_plain();
#else
  return narrow_plain();
#endif
}

// [b, h, s, w] as it lies in memory.
template <class T>
struct Heads {
  T* start;
  int64_t b, h, s, w;              // sizes
  int64_t of_b, of_h, of_s, of_w;  // strides

  T* row(int64_t head, int64_t i) const {  // head of b x h
    return start + head / h * of_b + head % h * of_h + i * of_s;
  }
};

// A tensor [b, h, s] or [b, h, s, w].
template <class T>
Heads<T> heads(const Tensor& x, int64_t dims, const char* name) {
  BURST_CHECK(x.is_cpu(), name, " must be on the CPU");
  BURST_CHECK(x.dim() == dims, name, " must have ", dims, " dimensions, got ", x.dim());
  const bool wide = dims == 4;
  return {numbers<T>(x, name), x.size(0), x.size(1), x.size(2), wide ? x.size(3) : 1,
          x.stride(0), x.stride(1), x.stride(2), wide ? x.stride(3) : 0};
}

template <class A, class B>
void check_same(const Heads<A>& x, const Heads<B>& like, const char* name) {
  BURST_CHECK(x.b == like.b && x.h == like.h && x.s == like.s, name, " has other sizes than its like");
}

template <class A, class B, class C>
void check(const Heads<A>& q, const Heads<B>& k, const Heads<C>& v) {
  check_same(v, k, "v");
  BURST_CHECK(q.w == k.w && q.w == v.w, "q, k and v must have one width");
  BURST_CHECK(1 <= q.w && q.w <= WIDEST, "widths are 1 to ", WIDEST, ", got ", q.w);
  BURST_CHECK(q.b == k.b && k.h > 0 && q.h % k.h == 0, "the heads of k must divide those of q");
}

int64_t up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

// Floats that begin where a vector may; zeros.
class Buffer {
 public:
  explicit Buffer(int64_t n) : at_(new (std::align_val_t(64)) float[std::max<int64_t>(n, 1)]()) {}
  ~Buffer() { operator delete[](at_, std::align_val_t(64)); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  float* get() const { return at_; }

 private:
  float* at_;
};

// Rows of a head as [s, ...][width] in float, times `by`; the rest is 0 and stays so.
template <class T>
void pack(const Heads<const T>& x, int64_t head, int64_t width, float by, float* to) {
  for (int64_t i = 0; i < x.s; ++i) {
    const T* const from = x.row(head, i);
    for (int64_t c = 0; c < x.w; ++c) {
      to[i * width + c] = float(from[c * x.of_w]) * by;
    }
  }
}

// Rows from `first` on as [width][lanes], times `by`.
template <class T>
void pack_lanes(
    const Heads<const T>& x, int64_t head, int64_t first, int lanes, float by, float* to) {
  std::fill_n(to, up(x.w, NARROW_STEP) * lanes, 0.0f);
  for (int64_t i = 0; i < std::min<int64_t>(lanes, x.s - first); ++i) {
    const T* const from = x.row(head, first + i);
    for (int64_t c = 0; c < x.w; ++c) {
      to[c * lanes + i] = float(from[c * x.of_w]) * by;
    }
  }
}

// [width][lanes] into rows from `first` on, times `by`.
void unpack_lanes(const float* from, int lanes, float by, const Heads<float>& x, int64_t head,
                  int64_t first) {
  for (int64_t i = 0; i < std::min<int64_t>(lanes, x.s - first); ++i) {
    float* const to = x.row(head, first + i);
    for (int64_t c = 0; c < x.w; ++c) {
      to[c * x.of_w] = from[c * lanes + i] * by;
    }
  }
}

template <class T>
void forward_of(
    const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& lse,
    Band band, double scale, int64_t vector) {
  const auto Q = heads<const T>(q, 4, "q"), K = heads<const T>(k, 4, "k"),
             V = heads<const T>(v, 4, "v");
  const auto O = heads<float>(out, 4, "out"), L = heads<float>(lse, 3, "lse");
  check(Q, K, V);
  check_same(O, Q, "out");
  check_same(L, Q, "lse");
  BURST_CHECK(O.w == Q.w, "out must be as wide as q");
  const NarrowTiles& code = tiles(vector);
  const int64_t width = up(Q.w, NARROW_STEP), each = up(K.s, NARROW_BLOCK) * width;
  const Buffer keys(K.b * K.h * each), values(K.b * K.h * each);
  for (int64_t head = 0; head < K.b * K.h; ++head) {
    pack(K, head, width, 1, keys.get() + head * each);
    pack(V, head, width, 1, values.get() + head * each);
  }
  const int64_t blocks = up(Q.s, code.lanes) / code.lanes;
  const auto run = [&](int64_t begin, int64_t end) {
    alignas(64) float queries[WIDEST * MOST_LANES], sums[WIDEST * MOST_LANES];
    alignas(64) float peak[MOST_LANES], total[MOST_LANES];
    for (int64_t n = begin; n < end; ++n) {
      const int64_t head = n / blocks, first = n % blocks * code.lanes;
      const int64_t of = (head / Q.h * K.h + head % Q.h / (Q.h / K.h)) * each;
      pack_lanes(Q, head, first, code.lanes, float(scale) / LN2, queries);
      code.forward[width / NARROW_STEP - 1]({queries, keys.get() + of, values.get() + of, first,
                                             Q.s, K.s, band, sums, peak, total});
      unpack_lanes(sums, code.lanes, 1, O, head, first);
      for (int64_t i = 0; i < std::min<int64_t>(code.lanes, Q.s - first); ++i) {
        const bool none = total[i] == 0;
        *L.row(head, first + i) = none ? -INFINITY : peak[i] * LN2 + std::log(total[i]);
      }
    }
  };
  torch::stable::parallel_for(0, Q.b * Q.h * blocks, 1, run);
}

// One head of keys and its queries.
template <class T>
struct Gradients {
  Heads<const T> q, k, v, dout;
  Heads<const float> lse, delta;
  Heads<float> dq, dk, dv;
  Band band;
  float scale;
  const NarrowTiles& code;

  void operator()(int64_t head) const {
    const int64_t width = up(q.w, NARROW_STEP), lanes = code.lanes;
    const Buffer dkeys(up(k.s, lanes) * width), dvalues(up(k.s, lanes) * width);
    const int64_t group = q.h / k.h, first = head / k.h * q.h + head % k.h * group;
    for (int64_t of = first; of < first + group; ++of) {
      queries(head, of, dkeys.get(), dvalues.get());
    }
    for (int64_t at = 0; at < k.s; at += lanes) {
      unpack_lanes(dkeys.get() + at * width, lanes, LN2, dk, head, at);
      unpack_lanes(dvalues.get() + at * width, lanes, 1, dv, head, at);
    }
  }

  // The queries of head `of` against the keys of `head`: all of dq, and what is added to the rest.
  void queries(int64_t head, int64_t of, float* dkeys, float* dvalues) const {
    const int64_t width = up(q.w, NARROW_STEP), lanes = code.lanes, rows = up(q.s, NARROW_BLOCK);
    const Buffer packed(rows * width), upper(rows * width), sums(rows * width), of_rows(2 * rows);
    float *const lses = of_rows.get(), *const deltas = lses + rows;
    pack(q, of, width, scale / LN2, packed.get());
    pack(dout, of, width, 1, upper.get());
    for (int64_t i = 0; i < q.s; ++i) {
      const float x = *lse.row(of, i);
      lses[i] = x == -INFINITY ? 1e30f : x / LN2;  // a row that sees nothing
      deltas[i] = *delta.row(of, i);
    }
    alignas(64) float keys[WIDEST * MOST_LANES], values[WIDEST * MOST_LANES];
    alignas(64) float apart[MOST_LANES * WIDEST];
    for (int64_t at = 0; at < k.s; at += lanes) {
      pack_lanes(k, head, at, code.lanes, 1, keys);
      pack_lanes(v, head, at, code.lanes, 1, values);
      for (int64_t lane = 0; lane < lanes; ++lane) {
        for (int64_t c = 0; c < width; ++c) {
          apart[lane * width + c] = keys[c * lanes + lane];
        }
      }
      code.backward[width / NARROW_STEP - 1](
          {keys, values, apart, packed.get(), upper.get(), lses, deltas, at, q.s, k.s,
           band, dkeys + at * width, dvalues + at * width, sums.get()});
    }
    for (int64_t i = 0; i < q.s; ++i) {
      float* const to = dq.row(of, i);
      for (int64_t c = 0; c < q.w; ++c) {
        to[c * dq.of_w] = sums.get()[i * width + c] * scale;
      }
    }
  }
};

template <class T>
void backward_of(
    const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& lse,
    const Tensor& delta, const Tensor& dq, const Tensor& dk, const Tensor& dv, Band band,
    double scale, int64_t vector) {
  const Gradients<T> op{
      heads<const T>(q, 4, "q"), heads<const T>(k, 4, "k"),
      heads<const T>(v, 4, "v"), heads<const T>(dout, 4, "dout"),
      heads<const float>(lse, 3, "lse"), heads<const float>(delta, 3, "delta"),
      heads<float>(dq, 4, "dq"), heads<float>(dk, 4, "dk"), heads<float>(dv, 4, "dv"),
      band, float(scale), tiles(vector)};
  check(op.q, op.k, op.v);
  check_same(op.dout, op.q, "dout");
  check_same(op.lse, op.q, "lse");
  check_same(op.delta, op.q, "delta");
  check_same(op.dq, op.q, "dq");
  check_same(op.dk, op.k, "dk");
  check_same(op.dv, op.k, "dv");
  for (const auto& x : {op.dq, op.dk, op.dv}) {
    BURST_CHECK(x.w == op.q.w && op.dout.w == op.q.w, "all widths must be that of q");
  }
  torch::stable::parallel_for(0, op.k.b * op.k.h, 1, [&](int64_t begin, int64_t end) {
    for (int64_t head = begin; head < end; ++head) {
      op(head);
    }
  });
}

// f(an element) of the type of these queries.
template <class F>
void with_elements(const Tensor& q, const Tensor& lse, const F& f) {
  with_types(lse, q, [&](auto acc, auto element) {
    if constexpr (std::is_same_v<decltype(acc), float>) {
      f(element);
    } else {
      BURST_CHECK(false, "attention of narrow heads adds up in float32 alone");
    }
  });
}

}  // namespace

void narrow_forward(
    Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, int64_t left, int64_t right,
    double scale, int64_t vector) {
  with_elements(q, lse, [&](auto element) {
    forward_of<decltype(element)>(q, k, v, out, lse, {left, right}, scale, vector);
  });
}

void narrow_backward(
    Tensor dout, Tensor q, Tensor k, Tensor v, Tensor lse, Tensor delta, Tensor dq, Tensor dk,
    Tensor dv, int64_t left, int64_t right, double scale, int64_t vector) {
  with_elements(q, lse, [&](auto element) {
    backward_of<decltype(element)>(
        dout, q, k, v, lse, delta, dq, dk, dv, {left, right}, scale, vector);
  });
}

}  // namespace burst
