#include "delta.h"

#include "warp.cuh"

namespace burst {

template void on_cuda(const Delta<float, float>&, int64_t, void*);
template void on_cuda(const Delta<float, c10::BFloat16>&, int64_t, void*);
template void on_cuda(const Delta<float, c10::Half>&, int64_t, void*);
template void on_cuda(const Delta<double, double>&, int64_t, void*);

}  // namespace burst
