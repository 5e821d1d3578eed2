// The table of operators, torch.ops.megatron_burst.*, and of their devices.
#include "ops.h"

#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(megatron_burst, m) {
  m.def("merge_(Tensor(a!) out, Tensor(b!) lse, Tensor part, Tensor part_lse) -> ()");
  m.def("delta_out(Tensor dout, Tensor out, Tensor(a!) delta) -> ()");
  m.def("stand_in_out(Tensor dout, Tensor delta, Tensor(a!) out) -> ()");
  m.def(
      "softmax_gradient_(Tensor(a!) z, Tensor index, Tensor lse, Tensor of_softmax, "
      "Tensor of_label, Tensor of_all, int real, float scale, float softcap, bool exponentials) "
      "-> ()");
}

#define BURST_OPERATORS(m)                                             \
  m.impl("merge_", TORCH_BOX(&burst::merge_));                         \
  m.impl("delta_out", TORCH_BOX(&burst::delta_out));                   \
  m.impl("stand_in_out", TORCH_BOX(&burst::stand_in_out));             \
  m.impl("softmax_gradient_", TORCH_BOX(&burst::softmax_gradient_))

STABLE_TORCH_LIBRARY_IMPL(megatron_burst, CPU, m) {
  BURST_OPERATORS(m);
}

#ifdef BURST_CUDA
STABLE_TORCH_LIBRARY_IMPL(megatron_burst, CUDA, m) {
  BURST_OPERATORS(m);
}
#endif
