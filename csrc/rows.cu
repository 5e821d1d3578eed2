#include "delta.h"
#include "merge.h"
#include "stand_in.h"
#include "warp.cuh"

namespace burst {

#define BURST_ROWS(Acc, Element)                                      \
  template void on_cuda(const Merge<Acc, Element>&, int64_t, void*);  \
  template void on_cuda(const Delta<Acc, Element>&, int64_t, void*);  \
  template void on_cuda(const StandIn<Acc, Element>&, int64_t, void*)

BURST_ROWS(float, float);
BURST_ROWS(float, c10::BFloat16);
BURST_ROWS(float, c10::Half);
BURST_ROWS(double, double);

}  // namespace burst
