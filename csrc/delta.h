// delta = rowsum(dout * out), which backward requires for every row.
#pragma once

#include "team.h"

namespace burst {

template <class Acc, class In>
struct Delta {
  Grid<const In> dout, out;  // [s, b, h, w]
  Grid<Acc> delta;           // [s, b, h]: written
  Shape shape;
  int64_t w;

  int64_t width() const { return w; }

  bool aligned(int n) const { return w % n == 0 && dout.aligned(n) && out.aligned(n); }

  template <class Team>
  BURST_BOTH void operator()(Team team, uint32_t row) const {
    const Place place = shape.place(row);
    const In* const x = dout.at(place);
    const In* const y = out.at(place);
    Acc sum = 0;
    BURST_ADDS(sum)
    for (int64_t i = team.first(); i < w; i += team.step()) {
      const auto a = load<Team::N>(x + i), b = load<Team::N>(y + i);
      for (int n = 0; n < Team::N; ++n) {
        sum += Acc(a.at[n]) * Acc(b.at[n]);
      }
    }
    sum = team.sum(sum);
    if (team.leads()) {
      *delta.at(place) = sum;
    }
  }
};

}  // namespace burst
