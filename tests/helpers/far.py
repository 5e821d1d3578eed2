"""Tensors whose elements lie more than 2^31 apart, in memory that is only reserved.

Pages that nobody touches take no memory, so that a tensor of a few numbers may reach over many GiB,
and an offset in 32 bits lands elsewhere. What lies between the numbers is zero.
"""

import mmap

import torch
from torch.testing import assert_close

from megatron_burst.kernels.aten import stand_in
from megatron_burst.kernels.online_softmax import merge_, row_delta
from megatron_burst.linear_cross_entropy.formula import Formula
from megatron_burst.linear_cross_entropy.rows import Columns, row_stats, softmax_gradient_

APART = (1 << 30) + 64  # elements; fits into 32 bits, and four of them do not
S, B, H, W = 4, 4, 4, 16
AXES = {"rows": 0, "batch": 1, "heads": 2}
NO_RESERVE = 0x4000  # MAP_NORESERVE, which mmap does not name in every Python


def far(values, axis):
    """A copy of `values`, neighbours along `axis` `APART` elements from each other."""
    strides = list(torch.empty(values.shape).stride())
    strides[axis] = APART
    reach = 1 + sum(s * (n - 1) for s, n in zip(strides, values.shape, strict=True))
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
    memory = mmap.mmap(-1, reach * values.element_size(), flags=flags)
    whole = torch.frombuffer(memory, dtype=torch.uint8).view(values.dtype)
    return whole.as_strided(values.shape, strides).copy_(values)


def check_results(axis):
    """Merge, delta and stand-in; torch adds in another order where rows are no neighbours."""
    torch.manual_seed(0)
    out, part = torch.randn(2, S, B, H, W)
    lse, new = torch.randn(2, S, B, H)
    near, apart = (out.clone(), lse.clone()), (far(out, axis), far(lse, axis))
    merge_(*near, part, new)
    merge_(*apart, far(part, axis), far(new, axis))
    for mine, right in zip(apart, near, strict=True):
        assert_close(mine, right)
    delta = row_delta(out, part, torch.float32)
    assert_close(row_delta(far(out, axis), far(part, axis), torch.float32), delta)
    assert_close(stand_in(far(out, axis), far(delta, axis)), stand_in(out, delta))


def check_logits():
    """Statistics and gradient of a tile of logits with far rows."""
    torch.manual_seed(0)
    z, labels, weights = torch.randn(S, 40), torch.tensor([0, 39, 7, -100]), torch.rand(S)
    formula, columns = Formula(40), Columns(0, 40)
    near, apart = z.clone(), far(z, 0)
    stats = [row_stats(x, labels, columns, formula, torch.float32) for x in (near, apart)]
    assert_close(stats[1].lse, stats[0].lse)
    assert_close(stats[1].target, stats[0].target)
    for x in (near, apart):
        softmax_gradient_(x, labels, stats[0].lse, weights, columns, formula)
    assert not torch.equal(near, z)
    assert_close(apart, near)
