// Online softmax: a part of a row's attention is merged into what the row has seen before.
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
    // log(exp a + exp b); of equals without a difference, which would be NaN of infinities
    const Acc total = a == b ? a + Acc(0.6931471805599453)
                             : (a > b ? a : b) + std::log1p(std::exp(-std::fabs(a - b)));
    const Acc base = total == -Acc(INFINITY) ? Acc(0) : total;  // a row that saw nothing stays 0
    const Acc keep = std::exp(a - base), take = std::exp(b - base);
    Acc* const to = out.at(place);
    const Part* const from = part.at(place);
    for (int64_t i = team.first(); i < w; i += team.step()) {
      auto sum = load<Team::N>(to + i);
      const auto more = load<Team::N>(from + i);
      for (int n = 0; n < Team::N; ++n) {
        sum.at[n] = sum.at[n] * keep + Acc(more.at[n]) * take;
      }
      store(to + i, sum);
    }
    team.lock_step();  // all have read what is written now
    if (team.leads()) {
      *seen = total;
    }
  }
};

}  // namespace burst
