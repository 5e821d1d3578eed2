// The operators that torch calls; the header of each formula describes it.
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

// z [n, v]; index, lse and coefficients of its rows [n]. softcap 0: none. exponentials: z contains
// exp(x - shift), of_softmax contains the factor exp(shift - lse), and lse is not read.
void softmax_gradient_(
    Tensor z, Tensor index, Tensor lse, Tensor of_softmax, Tensor of_label, Tensor of_all,
    int64_t real, double scale, double softcap, bool exponentials);

}  // namespace burst
