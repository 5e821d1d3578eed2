// Conversion of torch's tensors to the operators' arguments, and the launch on the device. Only this
// header uses both. It throws an exception for an invalid tensor;
// megatron_burst/kernels/native.py decides whether an operator is called at all.
#pragma once

#include <limits>
#include <utility>

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/tensor.h>

#include "host.h"
#include "team.h"

#define BURST_CHECK(condition, ...) STD_TORCH_CHECK(condition, "megatron_burst: ", __VA_ARGS__)

namespace burst {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

template <class T>
constexpr ScalarType KIND = ScalarType::Undefined;
template <>
inline constexpr ScalarType KIND<float> = ScalarType::Float;
template <>
inline constexpr ScalarType KIND<double> = ScalarType::Double;
template <>
inline constexpr ScalarType KIND<c10::BFloat16> = ScalarType::BFloat16;
template <>
inline constexpr ScalarType KIND<c10::Half> = ScalarType::Half;
template <>
inline constexpr ScalarType KIND<int64_t> = ScalarType::Long;

// Returns the data pointer after a check of the dtype. T may be const.
template <class T>
T* numbers(const Tensor& x, const char* name) {
  BURST_CHECK(x.scalar_type() == KIND<std::remove_const_t<T>>, name, " has a wrong dtype");
  if constexpr (std::is_const_v<T>) {
    return static_cast<T*>(x.const_data_ptr());
  } else {
    return static_cast<T*>(x.mutable_data_ptr());
  }
}

// Returns s, b and h of a tensor [s, b, h] or [s, b, h, w].
inline Shape shape(const Tensor& x) {
  constexpr int64_t limit = std::numeric_limits<int32_t>::max();
  BURST_CHECK(x.size(0) * x.size(1) * x.size(2) <= limit, "more rows than 2^31 - 1");
  return {uint32_t(x.size(0)), uint32_t(x.size(1)), uint32_t(x.size(2))};
}

// Returns the grid of a tensor of `dims` dimensions with the leading sizes of `like`. Rows must be
// contiguous.
template <class T>
Grid<T> grid(const Tensor& x, int64_t dims, const Tensor& like, const char* name) {
  BURST_CHECK(x.dim() == dims, name, " must have ", dims, " dimensions, got ", x.dim());
  for (int64_t i = 0; i < dims; ++i) {
    const bool same = i >= like.dim() || x.size(i) == like.size(i);
    BURST_CHECK(same, name, " has another size in dimension ", i);
  }
  BURST_CHECK(x.get_device_index() == like.get_device_index() && x.is_cuda() == like.is_cuda(),
              name, " is on another device");
  const bool rows = dims == 4 && x.size(3) > 1;
  BURST_CHECK(!rows || x.stride(3) == 1, name, " must be contiguous in its last dimension");
  return {numbers<T>(x, name), x.stride(0), x.stride(1), x.stride(2)};
}

// Calls f(accumulator, element) with zeros of the types of these tensors.
template <class F>
void with_types(const Tensor& accumulator, const Tensor& element, const F& f) {
  const ScalarType kind = element.scalar_type();
  if (accumulator.scalar_type() == ScalarType::Double) {
    BURST_CHECK(kind == ScalarType::Double, "float64 accumulates only float64");
    return f(double{}, double{});
  }
  if (kind == ScalarType::Float) {
    f(float{}, float{});
  } else if (kind == ScalarType::BFloat16) {
    f(float{}, c10::BFloat16{});
  } else if (kind == ScalarType::Half) {
    f(float{}, c10::Half{});
  } else {
    BURST_CHECK(false, "float32 accumulates float32, bfloat16 and float16");
  }
}

#ifdef BURST_CUDA
template <class Op>
void on_cuda(const Op& op, int64_t rows, void* stream);  // instantiated in the .cu of the operator

void* current_stream(int32_t device);
#endif

// Runs an operator on all rows, on the device of `like`.
template <class Op>
void run(const Op& op, int64_t rows, const Tensor& like) {
  if (like.is_cpu()) {
    return on_cpu(op, rows);
  }
#ifdef BURST_CUDA
  const auto device = like.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  on_cuda(op, rows, current_stream(device));
#else
  BURST_CHECK(false, "this library was built without CUDA");
#endif
}

}  // namespace burst
