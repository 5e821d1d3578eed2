// The tiles of narrow.h for one kind of processor. Four lanes, which every processor has.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "narrow.h"

namespace burst {

namespace {
constexpr int W = 4;
#include "narrow_tiles.h"
}  // namespace

const NarrowTiles& narrow_plain() { return TILES; }

}  // namespace burst
