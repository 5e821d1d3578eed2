// Rows on CUDA: one warp per row, with loads of four numbers if every row is aligned for them.
#pragma once

#include <stdexcept>
#include <string>

#include <cuda_runtime.h>

#include "team.h"

namespace burst {

constexpr int WARP = 32, WARPS = 4;  // lanes of a warp, warps of a block
constexpr unsigned ALL_LANES = 0xffffffffu;

template <int PACK>
struct Warp {
  static constexpr int N = PACK;
  __device__ static int64_t lane() { return threadIdx.x % WARP; }
  __device__ static int64_t first() { return lane() * N; }
  __device__ static int64_t step() { return WARP * N; }
  __device__ static bool leads() { return lane() == 0; }
  __device__ static void lock_step() { __syncwarp(); }
  template <class F>
  __device__ static F sum(F x) {
    for (int distance = WARP / 2; distance; distance /= 2) {
      x += __shfl_xor_sync(ALL_LANES, x, distance);
    }
    return x;
  }
  template <class F>
  __device__ static F max(F x) {
    for (int distance = WARP / 2; distance; distance /= 2) {
      const F other = __shfl_xor_sync(ALL_LANES, x, distance);
      x = other > x ? other : x;
    }
    return x;
  }
};

// All lanes of a warp have the same row, so none of them returns before the others.
template <int PACK, class Op>
__global__ void __launch_bounds__(WARP* WARPS) each_row(const Op op, uint32_t rows) {
  const uint32_t row = blockIdx.x * WARPS + threadIdx.x / WARP;
  if (row < rows) {
    op(Warp<PACK>{}, row);
  }
}

template <class Op>
void on_cuda(const Op& op, int64_t rows, void* stream) {
  if (rows == 0) {
    return;
  }
  const auto kernel = op.aligned(4) ? each_row<4, Op> : each_row<1, Op>;
  const unsigned blocks = unsigned((rows + WARPS - 1) / WARPS);
  kernel<<<blocks, WARP * WARPS, 0, static_cast<cudaStream_t>(stream)>>>(op, uint32_t(rows));
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string("CUDA: ") + cudaGetErrorString(error));
  }
}

}  // namespace burst
