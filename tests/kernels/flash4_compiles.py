"""A script: FlashAttention 4 compiles its kernels for what our kernel passes. Runs none of them.

    FLASH_ATTENTION_ARCH=sm_90 CUTE_DSL_ARCH=sm_90a FLASH_ATTENTION_NUM_SMS=132 \
        python tests/kernels/flash4_compiles.py WIDTH VALUE_WIDTH MASK ...

Needs the package and no GPU: on fake tensors the package checks shapes and dtypes and compiles, and
returns before it would launch. The environment says what for; the package reads it. MASK: full,
causal, window, documents; for sm_100 full asks the driver something, which is not there without a
GPU.
"""

import os
import sys

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_burst.kernels import flash
from megatron_burst.kernels.base import Rows, Scoring
from megatron_burst.kernels.online_softmax import empty_result
from megatron_burst.kernels.operators import TileVisibility
from megatron_burst.layout import Span
from megatron_burst.masks import Causal, Documents, Full, Window

major = int(os.environ["FLASH_ATTENTION_ARCH"].removeprefix("sm_")) // 10
torch.cuda.get_device_capability = lambda device: (major, 0)
kernel = flash.kernel("flash4")
width, value_width = map(int, sys.argv[1:3])
masks = {
    "full": Full(), "causal": Causal(), "window": Window(63, 0),
    "documents": Documents([0, 100, 101, 256]) & Causal(),
}  # fmt: skip
with FakeTensorMode():
    shapes = [(4, width), (2, width), (2, value_width), (4, value_width)]
    whole = [torch.empty(256, 2, *shape, dtype=torch.bfloat16, device="cuda:0") for shape in shapes]
    for name in sys.argv[3:]:
        q, k, v, dout = whole if name != "documents" else (x[:, :1] for x in whole)
        work = kernel.work_for(masks[name], [Span(0, 1, 256)], [Span(0, 1, 256)])
        if name == "documents":  # a fake tensor cannot be copied from the host
            (lengths,) = (one.lengths for one in work)
            bounds = [torch.empty(4, dtype=torch.int32, device=q.device) for _ in range(2)]
            lengths._by_device[q.device] = (
                *bounds,
                torch.empty(256, dtype=torch.bool, device=q.device),
            )
        out, lse = empty_result(q, value_width)
        kernel.forward(q, k, v, work, Scoring(0.1), out, lse)
        rows = Rows(q, dout, lse, torch.empty_like(lse))
        sums = [torch.zeros(x.shape, device="cuda:0") for x in (q, k, v)]
        kernel.backward(rows, k, v, work, Scoring(0.1), *sums)
    q, k, v, _ = (x.permute(1, 2, 0, 3) for x in whole)
    part, stats = kernel.operator.forward(q, k, v, TileVisibility(causal=True), 1.0)
    assert part.shape == (2, 4, 256, value_width)
    assert (stats.shape, stats.dtype) == ((2, 4, 256), torch.float32)
print("compiled")
