// The tiles of narrow.h for one kind of processor. Eight lanes: x86 processors since 2013.
#ifdef __x86_64__
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "narrow.h"

// After the headers: what they define, other files define too, and the linker keeps any one.
#pragma GCC target("avx2,fma")

namespace burst {

namespace {
constexpr int W = 8;
#include "narrow_tiles.h"
}  // namespace

const NarrowTiles& narrow_avx2() { return TILES; }

}  // namespace burst
#endif
