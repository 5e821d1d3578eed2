// An O' with rowsum(dout * O') = delta, for attention operators that require an output.
//
// With m near the largest |dout| of a row and n = dout / m: O' = n (delta / m / |n|^2), and 0 where
// dout = 0. Without m, rows of tiny gradients would lose all accuracy. m is a power of 2, so the
// division rounds nothing. If O' exceeds the range of float16, O' = sign(dout) (delta / |dout|_1),
// which is never larger than the original output.
#pragma once

#include <type_traits>

#include "functions.h"

namespace burst {

template <class Acc, class T>
struct StandIn {
  Grid<const T> dout;       // [s, b, h, w]
  Grid<const Acc> delta;    // [s, b, h]
  Grid<T> out;              // [s, b, h, w]: written
  Shape shape;
  int64_t w;

  int64_t width() const { return w; }

  bool aligned(int n) const { return w % n == 0 && dout.aligned(n) && out.aligned(n); }

  template <class Team>
  BURST_BOTH void operator()(Team team, uint32_t row) const {
    const Place place = shape.place(row);
    const T* const from = dout.at(place);
    T* const to = out.at(place);
    const Acc m = largest(team, from), per_m = inverse(m);
    Acc squares = 0, sizes = 0;
    BURST_ADDS(squares, sizes)
    for (int64_t i = team.first(); i < w; i += team.step()) {
      const auto x = load<Team::N>(from + i);
      for (int n = 0; n < Team::N; ++n) {
        const Acc scaled = Acc(x.at[n]) * per_m;
        squares += scaled * scaled;
        sizes += std::fabs(scaled);
      }
    }
    squares = team.sum(squares);
    const Acc factor = squares == 0 ? Acc(0) : *delta.at(place) * per_m / squares;
    if constexpr (std::is_same_v<T, c10::Half>) {  // other dtypes have the range of the accumulator
      if (!(std::fabs(m * per_m * factor) <= Acc(65504))) {
        return fill(team, from, to, *delta.at(place) / team.sum(sizes) * per_m);
      }
    }
    for (int64_t i = team.first(); i < w; i += team.step()) {
      auto x = load<Team::N>(from + i);
      for (int n = 0; n < Team::N; ++n) {
        x.at[n] = T(Acc(x.at[n]) * per_m * factor);
      }
      store(to + i, x);
    }
  }

 private:
  // Fills a row with `even` and the signs of dout; 0 stays 0, and NaN stays NaN.
  template <class Team>
  BURST_BOTH void fill(Team team, const T* from, T* to, Acc even) const {
    for (int64_t i = team.first(); i < w; i += team.step()) {
      auto x = load<Team::N>(from + i);
      for (int n = 0; n < Team::N; ++n) {
        const Acc value = x.at[n];
        x.at[n] = T(value > 0 ? even : value < 0 ? -even : value * even);
      }
      store(to + i, x);
    }
  }

  // Returns the largest magnitude of a row. It ignores NaN, which the sum of squares contains.
  template <class Team>
  BURST_BOTH Acc largest(Team team, const T* from) const {
    Acc m = 0;
    BURST_MAXIMISES(m)
    for (int64_t i = team.first(); i < w; i += team.step()) {
      const auto x = load<Team::N>(from + i);
      for (int n = 0; n < Team::N; ++n) {
        const Acc size = std::fabs(Acc(x.at[n]));
        m = size > m ? size : m;
      }
    }
    return team.max(m);
  }
};

}  // namespace burst
