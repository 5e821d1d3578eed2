// The operators that work on the rows of [s, b, h, w]: merge, delta and the stand-in output.
#include "delta.h"
#include "merge.h"
#include "ops.h"
#include "stand_in.h"
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

void delta_out(Tensor dout, Tensor out, Tensor delta) {
  with_types(delta, dout, [&](auto acc, auto element) {
    using Acc = decltype(acc);
    using In = decltype(element);
    const Delta<Acc, In> op{
        grid<const In>(dout, 4, dout, "dout"),
        grid<const In>(out, 4, dout, "out"),
        grid<Acc>(delta, 3, dout, "delta"),
        shape(dout),
        dout.size(3)};
    run(op, delta.numel(), dout);
  });
}

void stand_in_out(Tensor dout, Tensor delta, Tensor out) {
  with_types(delta, dout, [&](auto acc, auto element) {
    using Acc = decltype(acc);
    using T = decltype(element);
    const StandIn<Acc, T> op{
        grid<const T>(dout, 4, dout, "dout"),
        grid<const Acc>(delta, 3, dout, "delta"),
        grid<T>(out, 4, dout, "out"),
        shape(dout),
        dout.size(3)};
    run(op, delta.numel(), dout);
  });
}

}  // namespace burst
