// The softmax-cross-entropy gradient of a tile of logits, in the tile's own place.
//
// A logit is x = scale * z, or cap * tanh(scale * z / cap). The gradient by z, up to `scale`, which
// the coefficients hold, is (exp(x - lse) of_softmax - of_all, + of_label at the label) dx/dz / scale.
// A row whose three coefficients are 0 becomes 0, even if it holds NaN.
#pragma once

#include "functions.h"

namespace burst {

// What a tile holds when the gradient is wanted.
enum class Holds { LOGITS, CAPPED, EXPONENTIALS };

template <class Acc, class T, Holds HOLDS>
struct SoftmaxGradient {
  static constexpr int32_t CHUNK = 4096;  // columns of a row that one team takes

  T* z;  // [n, v]: read and written
  int64_t stride;
  int32_t v, real;  // columns; those from `real` on are padding, and become 0
  uint32_t chunks;  // of a row
  const int64_t* index;  // [n], the column of each label; anything outside where it has none
  const Acc *lse, *of_softmax, *of_label, *of_all;  // [n]
  Acc scale, cap;

  int64_t width() const { return v < CHUNK ? v : CHUNK; }

  bool aligned(int n) const {
    return v % n == 0 && stride % n == 0 && reinterpret_cast<uintptr_t>(z) % (n * sizeof(T)) == 0;
  }

  template <class Team>
  BURST_BOTH void operator()(Team team, uint32_t item) const {
    const uint32_t row = item / chunks;
    const int32_t begin = int32_t(item % chunks) * CHUNK;
    const int32_t end = v - begin < CHUNK ? v : begin + CHUNK;
    const int64_t at = index[row];
    const int32_t label = at >= 0 && at < real ? int32_t(at) : -1;
    const Acc log = lse[row], softmax = of_softmax[row], hit = of_label[row], all = of_all[row];
    const bool used = softmax != 0 || hit != 0 || all != 0;
    const int32_t nonzero = used ? real : 0;  // columns
    T* const line = z + row * stride;
    for (int32_t i = begin + int32_t(team.first()); i < end; i += int32_t(team.step())) {
      auto x = load<Team::N>(line + i);
      for (int n = 0; n < Team::N; ++n) {
        const Acc mine = i + n == label ? hit : Acc(0);
        const Acc gradient = column(Acc(x.at[n]), log, softmax, all, mine);
        x.at[n] = T(i + n < nonzero ? gradient : Acc(0));
      }
      store(line + i, x);
    }
  }

 private:
  BURST_BOTH Acc column(Acc raw, Acc log, Acc softmax, Acc all, Acc hit) const {
    if constexpr (HOLDS == Holds::EXPONENTIALS) {
      return raw * softmax - all + hit;
    } else if constexpr (HOLDS == Holds::CAPPED) {
      const Tanh<Acc> tanh(raw * scale / cap);
      return (exponential(cap * tanh.value - log) * softmax - all + hit) * tanh.slope;
    } else {
      return exponential(raw * scale - log) * softmax - all + hit;
    }
  }
};

}  // namespace burst
