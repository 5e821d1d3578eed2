// Attention of narrow heads on the CPU: what one call of the tiles' code (narrow_tiles.h) is given.
// That code is compiled for several kinds of processor (narrow_avx512.cpp, narrow_avx2.cpp,
// narrow_plain.cpp); narrow.cpp chooses one when it runs.
//
// D is the width of a head, rounded up to 8 or 16: rows are packed and padded with zeros.
// Row m of s sees column n of t where m - left <= n <= m + right.
#pragma once

#include <cstdint>

namespace burst {

constexpr int NARROW_BLOCK = 64;  // rows of the side that is not in the lanes
constexpr int NARROW_STEP = 8, NARROW_WIDTHS = 2;

struct Band {
  int64_t left, right;
};

// Some queries, as many as there are lanes, and all keys.
struct NarrowForward {
  const float *queries;        // [D][lanes], scaled by scale / ln 2
  const float *k, *v;          // [t, rounded up to NARROW_BLOCK][D]
  int64_t first, s, t;         // `first` of s queries is the first lane
  Band band;
  float *out, *peak, *total;   // [D][lanes], [lanes], [lanes]: lse / ln 2 = peak + log2(total)
};

// Some keys, as many as there are lanes, and all queries.
struct NarrowBackward {
  const float *keys, *values;            // [D][lanes]
  const float *k;                        // [lanes][D], the same keys
  const float *q, *dout;                 // [s, rounded up][D]; q scaled by scale / ln 2
  const float *lse, *delta;              // [s, rounded up]: lse / ln 2, delta
  int64_t first, s, t;                   // `first` of t keys is the first lane
  Band band;
  float *dkeys, *dvalues, *dq;           // [D][lanes], [D][lanes], [s, rounded up][D]: added to
};

// The code for one kind of processor; of each function one for every width.
struct NarrowTiles {
  int lanes;
  void (*forward[NARROW_WIDTHS])(const NarrowForward&);
  void (*backward[NARROW_WIDTHS])(const NarrowBackward&);
};

const NarrowTiles& narrow_plain();
#ifdef __x86_64__
const NarrowTiles& narrow_avx2();
const NarrowTiles& narrow_avx512();
#endif

}  // namespace burst
