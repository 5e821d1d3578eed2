// The operators, as torch calls them; what each does is said in the header of its formula.
#pragma once

#include <torch/csrc/stable/tensor.h>

namespace burst {

using torch::stable::Tensor;

// out [s, b, h, w], lse [s, b, h] in float or double, and a part of the same shapes.
void merge_(Tensor out, Tensor lse, Tensor part, Tensor part_lse);

// dout, out [s, b, h, w] of one dtype -> delta [s, b, h] in float or double.
void delta_out(Tensor dout, Tensor out, Tensor delta);

// dout [s, b, h, w], delta [s, b, h] -> out [s, b, h, w] in the dtype of dout.
void stand_in_out(Tensor dout, Tensor delta, Tensor out);

// z [n, v] and its rows' index, lse and coefficients, each [n]; softcap 0: none. exponentials: z holds
// exp(x - something) by now, which is in of_softmax too, and lse is not read.
void softmax_gradient_(
    Tensor z, Tensor index, Tensor lse, Tensor of_softmax, Tensor of_label, Tensor of_all,
    int64_t real, double scale, double softcap, bool exponentials);

// Attention on the CPU, widths up to 16, of float32, bfloat16 or float16 in float32: q, out [b, h, s, w], k, v [b, g, t, w], g divides
// h; lse [b, h, s] of these keys alone. Row m sees column n where m - left <= n <= m + right.
// In vectors of 4, 8 or 16 floats; 0: of as many as there are.
void narrow_forward(
    Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, int64_t left, int64_t right, double scale,
    int64_t vector);

// Its gradients dq, dk, dv, of dout [b, h, s, w]; lse that of all keys there are, and delta =
// rowsum(dout * out), both [b, h, s].
void narrow_backward(
    Tensor dout, Tensor q, Tensor k, Tensor v, Tensor lse, Tensor delta, Tensor dq, Tensor dk,
    Tensor dv, int64_t left, int64_t right, double scale, int64_t vector);

}  // namespace burst
