// Online softmax: merges a part of a row's attention into the result of earlier parts.
#pragma once

#include "functions.h"

namespace burst {

template <class Acc, class Part>
struct Merge {
  Grid<Acc> out, lse;         // [s, b, h, w], [s, b, h]: read and written
  Grid<const Part> part;      // [s, b, h, w]
  Grid<const Acc> part_lse;   // [s, b, h]
  Shape shape;
  int64_t w;

  int64_t width() const { return w; }

  bool aligned(int n) const { return w % n == 0 && out.aligned(n) && part.aligned(n); }

  template <class Team>
  BURST_BOTH void operator()(Team team, uint32_t row) const {
    const Place place = shape.place(row);
    Acc* const seen = lse.at(place);
    const Acc a = *seen, b = *part_lse.at(place);
    const Acc top = a > b ? a : b;
    // exp(smaller - larger); equal infinities would give NaN
    const Acc ratio = a == b ? Acc(1) : exponential(-std::fabs(a - b));
    const Acc total = top + std::log1p(ratio);
    const bool nothing = top == -Acc(INFINITY);  // no visible key in either part: the row stays 0
    const Acc more = nothing ? Acc(0) : 1 / (1 + ratio), less = more * ratio;
    const Acc keep = a > b ? more : less, take = a > b ? less : more;
    Acc* const to = out.at(place);
    const Part* const from = part.at(place);
    for (int64_t i = team.first(); i < w; i += team.step()) {
      auto sum = load<Team::N>(to + i);
      const auto x = load<Team::N>(from + i);
      for (int n = 0; n < Team::N; ++n) {
        sum.at[n] = sum.at[n] * keep + Acc(x.at[n]) * take;
      }
      store(to + i, sum);
    }
    team.lock_step();  // all lanes have read lse, which is written below
    if (team.leads()) {
      *seen = total;
    }
  }
};

}  // namespace burst
