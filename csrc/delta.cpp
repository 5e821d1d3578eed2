#include "delta.h"

#include "ops.h"
#include "tensors.h"

namespace burst {

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

}  // namespace burst
