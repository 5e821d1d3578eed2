"""Documents that a rank holds whole: tiles end to end are one call."""

from itertools import pairwise

import numpy as np
import oracle
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_runs import assert_exact, run, tensors
from test_tiles import painted
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_burst.kernels.aten import AtenKernel
from megatron_burst.kernels.operators import CpuFlash, CudaFlash, Joined, Lengths, joined
from megatron_burst.layout import Span
from megatron_burst.masks import Causal, Documents, Window
from megatron_burst.masks.tiling import Cutter, Tile

ENDS = [0, 5, 6, 14, 17, 40, 48]


class OneByOne(CpuFlash):
    """Takes many sequences, as FlashAttention does, and computes them one after another."""

    limits = None, None
    windows = joins = True

    def __init__(self):
        self.calls: list[int] = []  # of each, how many sequences

    def _masked(self, q, k, causal, window):
        """A window as a bias, aligned to the last row and column."""
        if window is None:
            return causal, None
        ahead = torch.arange(k.shape[2])[None] - torch.arange(q.shape[2])[:, None]
        ahead -= k.shape[2] - q.shape[2]
        shown = (ahead >= -window[0]) & (ahead <= window[1])
        return False, torch.zeros(shown.shape, dtype=q.dtype).masked_fill(~shown, float("-inf"))

    def forward(self, q, k, v, causal, bias, window, scale):
        self.calls.append(1)
        return super().forward(q, k, v, *self._masked(q, k, causal, window), None, scale)

    def backward(self, dout, q, k, v, out, lse, causal, bias, window, scale):
        masked = self._masked(q, k, causal, window)
        return super().backward(dout, q, k, v, out, lse, *masked, None, scale)

    def forward_joined(self, q, k, v, causal, window, scale, lengths):
        assert q.shape[0] == 1
        parts = [
            self.forward(q[:, :, r], k[:, :, c], v[:, :, c], causal, None, window, scale)
            for r, c in self._sequences(lengths)
        ]
        self.calls[-len(parts) :] = [len(parts)]  # as one
        return tuple(torch.cat(x, dim=2) for x in zip(*parts, strict=True))

    def backward_joined(self, dout, q, k, v, out, lse, causal, window, scale, lengths):
        parts = []
        for r, c in self._sequences(lengths):
            rows = dout[:, :, r], q[:, :, r], k[:, :, c], v[:, :, c], out[:, :, r], lse[:, :, r]
            parts.append(self.backward(*rows, causal, None, window, scale))
        return tuple(torch.cat(x, dim=2) for x in zip(*parts, strict=True))

    def _sequences(self, lengths):
        bounds = [x.tolist() for x in lengths.on(torch.device("cpu"))]
        parts = [[slice(a, b) for a, b in pairwise(x)] for x in bounds]
        longest = tuple(max(s.stop - s.start for s in side) for side in parts)
        assert longest == lengths.longest
        return list(zip(*parts, strict=True))


MASKS = {
    "causal": (Documents(ENDS) & Causal(), lambda p, q: q <= p),
    "all": (Documents(ENDS), lambda p, q: True),
    "window": (Documents(ENDS) & Window(6, 0), lambda p, q: p - 6 <= q <= p),
}


def seen(positions, rule):
    own = [sum(p >= end for end in ENDS) for p in range(ENDS[-1])]
    return torch.tensor([[own[p] == own[q] and rule(p, q) for q in positions] for p in positions])


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("travelling", [False, True], ids=["own", "travelling"])
@pytest.mark.parametrize("name", MASKS)
def test_documents_end_to_end_are_one_call(name, travelling, batch):
    mask, rule = MASKS[name]
    operator = OneByOne()
    inputs = tensors(48, batch, (4, 2), (8, 8))
    truth = oracle.attention(*inputs, seen(range(48), rule))
    got = run(AtenKernel("aten", operator), mask, *inputs, travelling=travelling)
    assert_exact(got, (truth[0], *truth[2:]))
    assert operator.calls[:1] == ([6] if batch == 1 else [1])
    assert sum(operator.calls[: 1 if batch == 1 else 6]) == 6


@pytest.mark.parametrize("name", MASKS)
def test_shares_of_a_document_are_computed_beside_those_that_are_whole(name):
    """The fifth document's two ends, the first two whole, and half of the third."""
    mask, rule = MASKS[name]
    spans = [Span(0, 1, 10), Span(17, 1, 4), Span(36, 1, 4), Span(40, 1, 8)]
    positions = [p for span in spans for p in span.positions().tolist()]
    operator = OneByOne()
    inputs = tensors(len(positions), 1, (4, 2), (8, 8))
    truth = oracle.attention(*inputs, seen(positions, rule))
    got = run(AtenKernel("aten", operator), mask, *inputs, spans=spans)
    assert_exact(got, (truth[0], *truth[2:]))
    if name == "causal":  # all rows' own, and the early share under the late one
        assert sorted(operator.calls[:2]) == [1, 6]


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    cut=st.integers(1, 40),
    left=st.integers(0, 8),
)
def test_joined_tiles_are_the_tiles(lengths, cut, left):
    """Whatever is joined: the same tiles, each in one place, end to end in what they lie in."""
    ends = np.cumsum([0, *lengths])
    spans = [Span(0, 1, min(cut, int(ends[-1])))]
    spans += [Span(cut + 1, 1, int(ends[-1]) - cut - 1)] if cut + 1 < ends[-1] else []
    cutter = Cutter(None, None, windows=True)
    for mask in (Documents(ends) & Causal(), Documents(ends), Documents(ends) & Window(left, 0)):
        tiles = cutter.tiles(mask, spans, spans)
        found = []
        for part in joined(tiles):
            found += part.tiles if isinstance(part, Joined) else [part]
            if isinstance(part, Joined):
                joined_is_right(part)
        assert sorted(map(repr, found)) == sorted(map(repr, tiles))


def joined_is_right(part: Joined):
    rows, columns = part.lengths.on(torch.device("cpu"))
    size = (rows[-1].item(), columns[-1].item())
    assert size == part.whole.shape
    assert rows.dtype == columns.dtype == torch.int32
    for n, tile in enumerate(part.tiles):
        top, left = part.whole.rows.start, part.whole.columns.start
        assert (tile.rows.start, tile.rows.stop) == (top + rows[n], top + rows[n + 1])
        assert (tile.columns.start, tile.columns.stop) == (left + columns[n], left + columns[n + 1])
        # What the call computes of this sequence is what the tile shows.
        inner = Tile(tile.rows, tile.columns, part.whole.triangle, band=part.whole.band)
        shape = tile.rows.stop, tile.columns.stop
        assert np.array_equal(painted([inner], *shape), painted([tile], *shape))


@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, None), (False, (3, 0))])
def test_cudas_operator_takes_the_arguments_we_pass(causal, window):
    """On fake tensors: torch checks the call, and says what comes out."""
    lengths = Lengths([Tile(slice(0, n), slice(0, n)) for n in (5, 1, 10)])
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        device = torch.device("cuda:0")
        lengths._there[device] = tuple(
            torch.empty(4, dtype=torch.int32, device=device) for _ in range(2)
        )
        shard = torch.empty(16, 1, 4, 8, dtype=torch.bfloat16, device=device).permute(1, 2, 0, 3)
        keys = torch.empty(16, 1, 2, 8, dtype=torch.bfloat16, device=device).permute(1, 2, 0, 3)
        operator = CudaFlash()
        out, lse = operator.forward_joined(shard, keys, keys, causal, window, 0.5, lengths)
        grads = operator.backward_joined(
            out, shard, keys, keys, out, lse, causal, window, 0.5, lengths
        )
        assert mode is not None
    assert (out.shape, out.dtype) == ((1, 4, 16, 8), torch.bfloat16)
    assert (lse.shape, lse.dtype) == ((1, 4, 16), torch.float32)
    assert [g.shape for g in grads] == [shard.shape, keys.shape, keys.shape]
