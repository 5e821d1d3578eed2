#include "stand_in.h"

#include "warp.cuh"

namespace burst {

template void on_cuda(const StandIn<float, float>&, int64_t, void*);
template void on_cuda(const StandIn<float, c10::BFloat16>&, int64_t, void*);
template void on_cuda(const StandIn<float, c10::Half>&, int64_t, void*);
template void on_cuda(const StandIn<double, double>&, int64_t, void*);

}  // namespace burst
