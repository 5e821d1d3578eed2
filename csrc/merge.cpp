#include "merge.h"

#include "ops.h"
#include "tensors.h"

namespace burst {

void merge_(Tensor out, Tensor lse, Tensor part, Tensor part_lse) {
  with_types(out, part, [&](auto acc, auto element) {
    using Acc = decltype(acc);
    using Part = decltype(element);
    const Merge<Acc, Part> op{
        grid<Acc>(out, 4, out, "out"),
        grid<Acc>(lse, 3, out, "lse"),
        grid<const Part>(part, 4, out, "part"),
        grid<const Acc>(part_lse, 3, out, "part_lse"),
        shape(out),
        out.size(3)};
    run(op, lse.numel(), out);
  });
}

}  // namespace burst
