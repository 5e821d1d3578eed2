// The stream that torch is on. A torch without CUDA lacks the function that says so, and the same
// library shall load there, so it is looked up when it is needed and not linked.
#ifdef BURST_CUDA

#include <dlfcn.h>

#include "tensors.h"

namespace burst {

void* current_stream(int32_t device) {
  using Look = AOTITorchError (*)(int32_t, void**);
  static const Look look = [] {
    // torch keeps its libraries to itself: they are not among what dlsym searches by default
    void* const torch_cuda = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    void* const from = torch_cuda ? torch_cuda : RTLD_DEFAULT;
    return reinterpret_cast<Look>(dlsym(from, "aoti_torch_get_current_cuda_stream"));
  }();
  BURST_CHECK(look, "this torch cannot tell its CUDA stream");
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(look(device, &stream));
  return stream;
}

}  // namespace burst

#endif
