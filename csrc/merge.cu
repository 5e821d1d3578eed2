#include "merge.h"

#include "warp.cuh"

namespace burst {

template void on_cuda(const Merge<float, float>&, int64_t, void*);
template void on_cuda(const Merge<float, c10::BFloat16>&, int64_t, void*);
template void on_cuda(const Merge<float, c10::Half>&, int64_t, void*);
template void on_cuda(const Merge<double, double>&, int64_t, void*);

}  // namespace burst
