#include "softmax_gradient.h"

#include "warp.cuh"

namespace burst {

#define BURST_INSTANCES(HOLDS)                                                                  \
  template void on_cuda(const SoftmaxGradient<float, float, HOLDS>&, int64_t, void*);           \
  template void on_cuda(const SoftmaxGradient<float, c10::BFloat16, HOLDS>&, int64_t, void*);   \
  template void on_cuda(const SoftmaxGradient<float, c10::Half, HOLDS>&, int64_t, void*);       \
  template void on_cuda(const SoftmaxGradient<double, double, HOLDS>&, int64_t, void*);

BURST_INSTANCES(Holds::LOGITS)
BURST_INSTANCES(Holds::CAPPED)
BURST_INSTANCES(Holds::EXPONENTIALS)

}  // namespace burst
