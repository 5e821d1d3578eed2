#include "softmax_gradient.h"

#include "ops.h"
#include "tensors.h"

namespace burst {

namespace {

// Returns the data of a contiguous tensor [n] with one number per row of z.
template <class T>
const T* column(const Tensor& x, const Tensor& z, const char* name) {
  BURST_CHECK(x.dim() == 1 && x.size(0) == z.size(0) && x.is_contiguous(),
              name, " must be contiguous, with one number per row of z");
  BURST_CHECK(x.get_device_index() == z.get_device_index() && x.is_cuda() == z.is_cuda(),
              name, " is on another device");
  return numbers<const T>(x, name);
}

}  // namespace

void softmax_gradient_(
    Tensor z, Tensor index, Tensor lse, Tensor of_softmax, Tensor of_label, Tensor of_all,
    int64_t real, double scale, double softcap, bool exponentials) {
  BURST_CHECK(z.dim() == 2 && (z.size(1) <= 1 || z.stride(1) == 1),
              "z must have two dimensions and be contiguous in the last one");
  const int64_t n = z.size(0), v = z.size(1);
  BURST_CHECK(v <= 1 << 30, "z has more than 2^30 columns");
  BURST_CHECK(0 <= real && real <= v, "real must be 0 to ", v, ", got ", real);
  with_types(of_softmax, z, [&](auto acc, auto element) {
    using Acc = decltype(acc);
    using T = decltype(element);
    const auto apply = [&](auto holds) {
      using Op = SoftmaxGradient<Acc, T, decltype(holds)::value>;
      const int64_t chunks = (v + Op::CHUNK - 1) / Op::CHUNK;
      BURST_CHECK(n * chunks <= std::numeric_limits<int32_t>::max(), "z is too large");
      const Op op{
          numbers<T>(z, "z"), z.stride(0), int32_t(v), int32_t(real), uint32_t(chunks),
          column<int64_t>(index, z, "index"), column<Acc>(lse, z, "lse"),
          column<Acc>(of_softmax, z, "of_softmax"), column<Acc>(of_label, z, "of_label"),
          column<Acc>(of_all, z, "of_all"), Acc(scale), Acc(softcap)};
      run(op, n * chunks, z);
    };
    if (exponentials) {
      apply(std::integral_constant<Holds, Holds::EXPONENTIALS>{});
    } else if (softcap != 0) {
      apply(std::integral_constant<Holds, Holds::CAPPED>{});
    } else {
      apply(std::integral_constant<Holds, Holds::LOGITS>{});
    }
  });
}

}  // namespace burst
