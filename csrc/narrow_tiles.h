// Attention of narrow heads, tile by tile, in vectors of W floats. Included once for each kind of
// processor, inside a namespace that has said what W is; so it includes nothing itself.
//
// torch's CPU attention multiplies tiles by a library for large matrices, which is slow where heads
// are no wider than 16. Here one side of a tile lies in the lanes, two vectors of them: the queries in
// forward, where everything that online softmax does to a row then stays in its lane, and the keys
// in backward, where dk and dv do. The other side goes by in blocks, whose numbers are broadcast.
// What a block makes (probabilities, and the gradients of the scores) stays in the first-level cache.
//
// Rows beyond the end are zeros and count as hidden: a hidden pair has the probability 0. Scores are
// in units of ln 2, because 2^x costs less than e^x: queries are scaled by that before.

template <int N>
struct Vector {
  typedef float Floats __attribute__((vector_size(N * 4)));
  typedef int32_t Ints __attribute__((vector_size(N * 4)));
};
using F = Vector<W>::Floats;
using I = Vector<W>::Ints;

#define NARROW_INLINE static inline __attribute__((always_inline))

constexpr int LANES = 2 * W;
constexpr int ROWS = W == 16 ? 8 : 4;  // of a block at once, as many as there are registers for

NARROW_INLINE F load(const float* from) {
  F x;
  std::memcpy(&x, from, sizeof x);
  return x;
}

NARROW_INLINE void store(float* to, F x) { std::memcpy(to, &x, sizeof x); }

NARROW_INLINE F all(float x) { return x - F{}; }

NARROW_INLINE I lane_numbers() {
  I x;
  for (int i = 0; i < W; ++i) {
    x[i] = i;
  }
  return x;
}

// 2^x for x up to about 0, to 1e-7 of itself; below 2^-125 it stays there. x + ROUND has round(x) in
// its last bits, and the polynomial, of least relative error, is that of the rest in [-1/2, 1/2].
NARROW_INLINE F power_of_two(F x) {
  constexpr float ROUND = 0x1.8p23f;
  x = x < -125.0f ? all(-125.0f) : x;
  const F shifted = x + ROUND;
  const F rest = x - (shifted - ROUND);
  F p = all(0x1.5bba14p-10f);
  p = p * rest + 0x1.3cea88p-7f;
  p = p * rest + 0x1.c6b752p-5f;
  p = p * rest + 0x1.ebf9bcp-3f;
  p = p * rest + 0x1.62e42ap-1f;
  p = p * rest + 1.0f;
  return (F)((I)p + ((I)shifted << 23));
}

// to[r] += rows[r] . columns, for ROWS rows [D] and the columns [D][LANES].
template <int D>
NARROW_INLINE void add_products(const float* rows, const float* columns, F (&to)[ROWS][2]) {
#pragma GCC unroll 16
  for (int c = 0; c < D; ++c) {
    const F a = load(columns + c * LANES), b = load(columns + c * LANES + W);
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
      const F x = all(rows[r * D + c]);
      to[r][0] += x * a;
      to[r][1] += x * b;
    }
  }
}

// sums[c] = keep sums[c] + sum over a block's rows i of weights[i] rows[i][c], in every lane. The
// block is added up by itself first: over a million rows that is what keeps the sum accurate.
template <int D>
NARROW_INLINE void add_rows(
    const float* weights, const float* rows, float* sums, const F (&keep)[2]) {
  constexpr int C = 8;
#pragma GCC unroll 2
  for (int first = 0; first < D; first += C) {
    F part[C][2] = {};
    for (int i = 0; i < NARROW_BLOCK; ++i) {
      const F a = load(weights + i * LANES), b = load(weights + i * LANES + W);
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) {
        const F x = all(rows[i * D + first + c]);
        part[c][0] += x * a;
        part[c][1] += x * b;
      }
    }
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
      float* const to = sums + (first + c) * LANES;
      store(to, load(to) * keep[0] + part[c][0]);
      store(to + W, load(to + W) * keep[1] + part[c][1]);
    }
  }
}

// sums[i][:] += sum over the lanes of weights[i][lane] rows[lane][:], for a block's i.
template <int D>
NARROW_INLINE void add_lanes(const float* weights, const float* rows, float* sums) {
  constexpr int V = D % W == 0 ? W : 8, N = D / V, R = 8;
  using G = typename Vector<V>::Floats;
  for (int i = 0; i < NARROW_BLOCK; i += R) {
    G part[R][N] = {};
#pragma GCC unroll 2
    for (int lane = 0; lane < LANES; ++lane) {
#pragma GCC unroll 2
      for (int n = 0; n < N; ++n) {
        G x;
        std::memcpy(&x, rows + lane * D + n * V, sizeof x);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          part[r][n] += weights[(i + r) * LANES + lane] * x;
        }
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
      for (int n = 0; n < N; ++n) {
        float* const to = sums + (i + r) * D + n * V;
        G x;
        std::memcpy(&x, to, sizeof x);
        x += part[r][n];
        std::memcpy(to, &x, sizeof x);
      }
    }
  }
}

// x where low <= lane <= high, else `hidden`. Only tiles at an edge of what is visible ask.
NARROW_INLINE void hide(F (&x)[2], int64_t low, int64_t high, float hidden) {
  const int32_t from = std::clamp<int64_t>(low, -1, LANES);
  const int32_t to = std::clamp<int64_t>(high, -1, LANES);
  for (int u = 0; u < 2; ++u) {
    const I lane = lane_numbers() + u * W;
    x[u] = (lane >= from) & (lane <= to) ? x[u] : all(hidden);
  }
}

// Scores of a block of keys from j on, into s [NARROW_BLOCK][LANES]; raises `top`.
template <int D>
NARROW_INLINE void score_keys(
    const NarrowForward& x, int64_t j, bool whole, float* s, F (&top)[2]) {
  for (int i = 0; i < NARROW_BLOCK; i += ROWS) {
    F part[ROWS][2] = {};
    add_products<D>(x.k + (j + i) * D, x.queries, part);
    if (!whole) {
      for (int r = 0; r < ROWS; ++r) {
        const int64_t key = j + i + r;
        const int64_t high = key < x.t ? key + x.band.left - x.first : -1;
        hide(part[r], key - x.band.right - x.first, high, -INFINITY);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 2
      for (int u = 0; u < 2; ++u) {
        top[u] = part[r][u] > top[u] ? part[r][u] : top[u];
        store(s + (i + r) * LANES + u * W, part[r][u]);
      }
    }
  }
}

// s = 2^(s - base), in place; adds up the rows in `sum`.
NARROW_INLINE void exponentials(float* s, const F (&base)[2], bool whole, F (&sum)[2]) {
#pragma GCC unroll 4
  for (int j = 0; j < NARROW_BLOCK; ++j) {
#pragma GCC unroll 2
    for (int u = 0; u < 2; ++u) {
      float* const at = s + j * LANES + u * W;
      const F score = load(at);
      F p = power_of_two(score - base[u]);
      if (!whole) {
        p = score == -INFINITY ? F{} : p;
      }
      sum[u] += p;
      store(at, p);
    }
  }
}

template <int D>
void forward(const NarrowForward& x) {
  alignas(64) float s[NARROW_BLOCK * LANES];
  F peak[2] = {all(-INFINITY), all(-INFINITY)}, total[2] = {};
  std::memset(x.out, 0, sizeof(float) * D * LANES);
  const int64_t last = std::min<int64_t>(x.first + LANES, x.s) - 1;
  const int64_t begin = std::max<int64_t>(0, x.first - x.band.left) / NARROW_BLOCK * NARROW_BLOCK;
  const int64_t end = std::min(x.t, last + x.band.right + 1);
  for (int64_t j = begin; j < end; j += NARROW_BLOCK) {
    const int64_t stop = j + NARROW_BLOCK;
    const bool whole = stop <= x.t && j >= last - x.band.left && stop - 1 <= x.first + x.band.right;
    F top[2] = {peak[0], peak[1]}, base[2], keep[2], sum[2] = {};
    score_keys<D>(x, j, whole, s, top);
    for (int u = 0; u < 2; ++u) {
      base[u] = top[u] == -INFINITY ? F{} : top[u];  // a row that saw nothing yet
      keep[u] = power_of_two(peak[u] - base[u]);
      peak[u] = top[u];
    }
    exponentials(s, base, whole, sum);
    for (int u = 0; u < 2; ++u) {
      total[u] = total[u] * keep[u] + sum[u];
    }
    add_rows<D>(s, x.v + j * D, x.out, keep);
  }
  for (int u = 0; u < 2; ++u) {
    const F share = total[u] == 0.0f ? F{} : 1.0f / total[u];
    for (int c = 0; c < D; ++c) {
      float* const at = x.out + c * LANES + u * W;
      store(at, load(at) * share);
    }
    store(x.peak + u * W, peak[u]);
    store(x.total + u * W, total[u]);
  }
}

// p = 2^(scores - lse) and ds = p (dp - delta) of a block of queries from i on.
template <int D>
NARROW_INLINE void score_gradients(
    const NarrowBackward& x, int64_t i, bool whole, float* p, float* ds) {
  for (int n = 0; n < NARROW_BLOCK; n += ROWS) {
    F part[ROWS][2] = {}, change[ROWS][2] = {};
    add_products<D>(x.q + (i + n) * D, x.keys, part);
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {  // lse last: every sum that holds it rounds to its size
      part[r][0] = power_of_two(part[r][0] - x.lse[i + n + r]);
      part[r][1] = power_of_two(part[r][1] - x.lse[i + n + r]);
    }
    if (!whole) {
      for (int r = 0; r < ROWS; ++r) {
        const int64_t query = i + n + r;
        const int64_t high = std::min(query + x.band.right, x.t - 1);
        hide(part[r], query - x.band.left - x.first, query < x.s ? high - x.first : -1, 0);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
      store(p + (n + r) * LANES, part[r][0]);
      store(p + (n + r) * LANES + W, part[r][1]);
    }
    add_products<D>(x.dout + (i + n) * D, x.values, change);
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 2
      for (int u = 0; u < 2; ++u) {
        const int at = (n + r) * LANES + u * W;
        store(ds + at, load(p + at) * (change[r][u] - x.delta[i + n + r]));
      }
    }
  }
}

template <int D>
void backward(const NarrowBackward& x) {
  alignas(64) float p[NARROW_BLOCK * LANES], ds[NARROW_BLOCK * LANES];
  const F keep[2] = {all(1), all(1)};
  const int64_t last = std::min<int64_t>(x.first + LANES, x.t) - 1;
  const int64_t begin = std::max<int64_t>(0, x.first - x.band.right) / NARROW_BLOCK * NARROW_BLOCK;
  const int64_t end = std::min(x.s, last + x.band.left + 1);
  for (int64_t i = begin; i < end; i += NARROW_BLOCK) {
    const int64_t stop = i + NARROW_BLOCK;
    const bool whole = stop <= x.s && x.first + LANES <= x.t && i >= last - x.band.right &&
        stop - 1 <= x.first + x.band.left;
    score_gradients<D>(x, i, whole, p, ds);
    add_rows<D>(p, x.dout + i * D, x.dvalues, keep);
    add_rows<D>(ds, x.q + i * D, x.dkeys, keep);
    add_lanes<D>(ds, x.k, x.dq + i * D);
  }
}

const NarrowTiles TILES = {
    LANES,
    {forward<8>, forward<16>},
    {backward<8>, backward<16>},
};
