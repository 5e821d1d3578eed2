// The gradient of softmax cross entropy for a tile of logits, written into the tile.
//
// A logit is x = scale * z, or cap * tanh(scale * z / cap). The gradient with respect to z is
// (exp(x - lse) of_softmax - of_all, + of_label at the label) dx/dz / scale. The coefficients of_*
// contain the factor `scale`.
// A row whose three coefficients are 0 becomes 0, even if it holds NaN.
#pragma once

#include "functions.h"

namespace burst {

// The content of a tile before the gradient.
enum class Holds { LOGITS, CAPPED, EXPONENTIALS };

template <class Acc, class T, Holds HOLDS>
struct SoftmaxGradient {
  static constexpr int32_t CHUNK = 4096;  // columns of a row for one team

  T* z;  // [n, v]: read and written
  int64_t stride;
  int32_t v, real;  // columns; columns from `real` on are padding, and become 0
  uint32_t chunks;  // per row
  const int64_t* index;  // [n], the column of each label; outside [0, real) without a label
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
        const Acc label_term = i + n == label ? hit : Acc(0);
        const Acc gradient = column(Acc(x.at[n]), log, softmax, all, label_term);
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
