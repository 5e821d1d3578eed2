// The tiles of narrow.h for one kind of processor. Sixteen lanes: x86 processors with AVX-512.
#ifdef __x86_64__
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "narrow.h"

// After the headers: what they define, other files define too, and the linker keeps any one.
#pragma GCC target("avx512f,avx2,fma")

namespace burst {

namespace {
constexpr int W = 16;
#include "narrow_tiles.h"
}  // namespace

const NarrowTiles& narrow_avx512() { return TILES; }

}  // namespace burst
#endif
