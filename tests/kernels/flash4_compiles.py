"""A script: FlashAttention 4 compiles its kernels for what our kernel passes. Runs none of them.

    FLASH_ATTENTION_ARCH=sm_90 CUTE_DSL_ARCH=sm_90a FLASH_ATTENTION_NUM_SMS=132 \
        python tests/kernels/flash4_compiles.py WIDTH VALUE_WIDTH MASK ...

Needs the package and no GPU: on fake tensors the package checks shapes and dtypes and compiles, and
returns before it would launch. The environment says what for; the package reads it. MASK: full,
causal, window, documents, for calls of tiles; windows (over documents) and blocks, for lists of
blocks whose mask functions read intervals and bit tables; packs, for 20 packs of documents under
windows, which must need one kernel per pass. For sm_100 the package
asks the driver for the number of multiprocessors: the script answers.
"""

import os
import sys

import cutlass
import numpy as np
import torch
from flash_attn.cute import interface
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_burst.kernels import flash, masked_pairs
from megatron_burst.kernels.base import Rows, Scoring
from megatron_burst.kernels.online_softmax import empty_result
from megatron_burst.kernels.operators import TileVisibility
from megatron_burst.layout import Span
from megatron_burst.masks import BlockSparse, Causal, Documents, Full, Window

LENGTH = 2048


class Hardware:
    """Stand for `HardwareInfo`, which needs a driver."""

    def get_device_multiprocessor_count(self):
        return int(os.environ["FLASH_ATTENTION_NUM_SMS"])

    def get_max_active_clusters(self, cluster_size):
        return self.get_device_multiprocessor_count() // cluster_size


cutlass.utils.HardwareInfo = Hardware
major = int(os.environ["FLASH_ATTENTION_ARCH"].removeprefix("sm_")) // 10
torch.cuda.get_device_capability = lambda device: (major, 0)
kernel = flash.kernel("flash4", device=torch.device("cuda:0"))
width, value_width = map(int, sys.argv[1:3])


def pack(seed):
    """Return a pack whose documents start anywhere."""
    cuts = np.random.default_rng(seed).choice(np.arange(1, LENGTH), 24 + seed % 5, replace=False)
    return Documents([0, *sorted(cuts.tolist()), LENGTH])


def fake_copies(arrays, device):
    """Stand for `copy_together`: a fake tensor cannot be copied from the host."""
    return {id(x): torch.empty(x.shape, dtype=torch.int32, device=device) for x in arrays}


masked_pairs.copy_together = fake_copies
table = np.random.default_rng(0).random((LENGTH // 32,) * 2) < 0.4
masks = {
    "full": [Full()], "causal": [Causal()], "window": [Window(63, 0)],
    "documents": [Documents([0, 100, 101, LENGTH]) & Causal()],
    "windows": [pack(0) & Window(63, 20)], "blocks": [BlockSparse(table, 32) & Causal()],
    "packs": [pack(seed) & Window(63, 20) for seed in range(20)],
}  # fmt: skip
compiled = [interface._flash_attn_fwd.compile_cache, interface._flash_attn_bwd.compile_cache]


def entries():
    """Return the numbers of kernels that were compiled so far, forward and backward."""
    return [len(cache.cache) for cache in compiled]


def both_passes(name, mask, q, k, v, dout):
    halves = LENGTH // 4
    spans = [Span(0, 1, halves), Span(LENGTH - halves, 1, halves)]  # of rank 0 of 2, zigzag
    if name in ("full", "causal", "window", "documents"):
        spans = [Span(0, 1, LENGTH)]
    work = kernel.works_for(mask, [(spans, spans)])[0]
    assert (work[0].visibility.blocks is not None) == (len(spans) == 2)
    rows = sum(span.length for span in spans)
    q, k, v, dout = (x[:rows] for x in (q, k, v, dout))
    if name == "documents":  # a fake tensor cannot be copied from the host
        (lengths,) = (one.lengths for one in work)
        bounds = [torch.empty(4, dtype=torch.int32, device=q.device) for _ in range(2)]
        idle = torch.empty(rows, dtype=torch.bool, device=q.device)
        lengths._by_device[q.device] = (*bounds, idle)
    out, lse = empty_result(q, value_width)
    kernel.forward(q, k, v, work, Scoring(0.1), out, lse)
    rows = Rows(q, dout, lse, torch.empty_like(lse))
    sums = [torch.zeros(x.shape, device="cuda:0") for x in (q, k, v)]
    kernel.backward(rows, k, v, work, Scoring(0.1), *sums)


with FakeTensorMode():
    shapes = [(4, width), (2, width), (2, value_width), (4, value_width)]
    whole = [
        torch.empty(LENGTH, 2, *shape, dtype=torch.bfloat16, device="cuda:0") for shape in shapes
    ]
    for name in sys.argv[3:]:
        before = entries()
        for mask in masks[name]:
            inputs = whole if name != "documents" else (x[:, :1] for x in whole)
            both_passes(name, mask, *inputs)
        print(name, "kernels", *(b - a for a, b in zip(before, entries(), strict=True)))
    if "causal" in sys.argv[3:]:
        q, k, v, _ = (x.permute(1, 2, 0, 3) for x in whole)
        part, stats = kernel.operator.forward(q, k, v, TileVisibility(causal=True), 1.0)
        assert part.shape == (2, 4, LENGTH, value_width)
        assert (stats.shape, stats.dtype) == ((2, 4, LENGTH), torch.float32)
print("compiled")
