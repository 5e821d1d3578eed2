// torch's current stream. A torch without CUDA lacks the function that returns it, and must also load
// this library. So the function is looked up at the first call and not linked.
#ifdef BURST_CUDA

#include <dlfcn.h>

#include "tensors.h"

namespace burst {

void* current_stream(int32_t device) {
  using Look = AOTITorchError (*)(int32_t, void**);
  static const Look look = [] {
    // torch loads its libraries locally, so dlsym does not search them by default
    void* const torch_cuda = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    void* const from = torch_cuda ? torch_cuda : RTLD_DEFAULT;
    return reinterpret_cast<Look>(dlsym(from, "aoti_torch_get_current_cuda_stream"));
  }();
  BURST_CHECK(look, "this torch has no function aoti_torch_get_current_cuda_stream");
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(look(device, &stream));
  return stream;
}

}  // namespace burst

#endif
