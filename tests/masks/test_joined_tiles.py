"""Tiles that follow each other in rows and columns are one call."""

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

import megatron_burst as mb
from megatron_burst.kernels import registry
from megatron_burst.kernels.aten import AtenKernel
from megatron_burst.kernels.joined import JoinedTiles, joined
from megatron_burst.kernels.operators import CpuFlash, Lengths, TileVisibility
from megatron_burst.kernels.operators_cuda import CudaFlash
from megatron_burst.layout import Span
from megatron_burst.masks import Causal, Documents, Window
from megatron_burst.masks.tiles import Tile
from megatron_burst.masks.tiling import Cutter
from megatron_burst.plugins.testing import in_process
from megatron_burst.schedule.cost import ring_spans
from megatron_burst.schedule.topology import Topology

ENDS = [0, 5, 6, 14, 17, 40, 48]


class OneByOne(CpuFlash):
    """Takes many sequences, as FlashAttention does, and computes them one after another. unseen:
    the lse of a row without columns, +inf in torch's."""

    limits = None, None
    windows = joins = True

    def __init__(self, unseen=float("inf")):
        self.unseen = unseen
        self.calls: list[int] = []  # of each, how many sequences

    def forward(self, q, k, v, shown, scale):
        if shown.lengths is None:
            self.calls.append(1)
            return self._one_forward(q, k, v, shown, scale)
        assert q.shape[0] == 1
        parts = [
            self._one_forward(q[:, :, r], k[:, :, c], v[:, :, c], shown, scale)
            for r, c in self._sequences(shown.lengths)
        ]
        self.calls.append(len(parts))
        return tuple(torch.cat(x, dim=2) for x in zip(*parts, strict=True))

    def backward(self, dout, q, k, v, out, lse, shown, scale):
        if shown.lengths is None:
            return self._one_backward(dout, q, k, v, out, lse, shown, scale)
        parts = []
        for r, c in self._sequences(shown.lengths):
            rows = dout[:, :, r], q[:, :, r], k[:, :, c], v[:, :, c], out[:, :, r], lse[:, :, r]
            parts.append(self._one_backward(*rows, shown, scale))
        return tuple(torch.cat(x, dim=2) for x in zip(*parts, strict=True))

    def _one_forward(self, q, k, v, shown, scale):
        if not q.shape[2] or not k.shape[2]:
            return torch.zeros_like(q), q.new_full(q.shape[:3], self.unseen)
        return super().forward(q, k, v, self._masked(q, k, shown), scale)

    def _one_backward(self, dout, q, k, v, out, lse, shown, scale):
        if not q.shape[2] or not k.shape[2]:
            return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        return super().backward(dout, q, k, v, out, lse, self._masked(q, k, shown), scale)

    def _masked(self, q, k, shown):
        """A window as a bias, aligned to the last row and column."""
        if shown.window is None:
            return shown
        left, right = shown.window
        ahead = torch.arange(k.shape[2])[None] - torch.arange(q.shape[2])[:, None]
        ahead -= k.shape[2] - q.shape[2]
        hidden = (ahead < -left) | (ahead > right)
        bias = torch.zeros(hidden.shape, dtype=q.dtype).masked_fill(hidden, float("-inf"))
        return TileVisibility(bias=bias)

    def _sequences(self, lengths):
        bounds = [x.tolist() for x in lengths.on(torch.device("cpu"))[:2]]
        parts = [[slice(a, b) for a, b in pairwise(x)] for x in bounds]
        sizes = [[s.stop - s.start for s in side] for side in parts]
        rows, columns = map(max, sizes)
        # Where the longest has one row, FlashAttention 2 takes it that all have one.
        assert lengths.longest == (rows if min(sizes[0]) else max(rows, 2), columns)
        assert lengths.idle == (min(sizes[1]) == 0)
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
    if name == "causal":  # the shares are one triangle, and with the other documents one call
        assert operator.calls[0] == 5


PADDED = np.cumsum([0, 12, 24, 12, 36, 60, 12])  # multiples of 2 x 3 ranks
ODD = [0, 5, 6, 31, 80, 81, 99, 156]


@pytest.mark.parametrize("side", ["kv", "query"])
@pytest.mark.parametrize(
    ("layout", "ends"),
    [("zigzag of documents", PADDED), ("zigzag", ODD), ("striped", ODD), ("striped", PADDED),
     ("balanced", ODD), ("contiguous", PADDED)],
    ids=lambda x: x if isinstance(x, str) else "odd" if x is ODD else "padded",
)  # fmt: skip
@pytest.mark.parametrize("window", [None, 7])
def test_a_call_over_three_ranks_by_joined_tiles(layout, ends, side, window):
    """Rows and columns between the sequences of a call change nothing."""
    mask = Documents(ends) & (Causal() if window is None else Window(window, 0))
    length = int(ends[-1])
    given = {"cu_seqlens": ends} if layout in ("zigzag of documents", "balanced") else {}
    layout = mb.layout.make(layout.partition(" ")[0], cp_size=3, **given)
    own = np.searchsorted(ends, np.arange(length), side="right")
    place = np.arange(length)
    seen = (own[:, None] == own) & (place[:, None] >= place)
    seen &= place[:, None] - place <= (length if window is None else window)
    q, k, v, dout = tensors(length, 1, (4, 2), (8, 8))
    out, _, *grads = oracle.attention(q, k, v, dout, torch.from_numpy(seen))
    parts = [[mb.shard(x, layout, r, dim=0) for r in range(3)] for x in (q, k, v, dout)]
    shards = [[part.clone().requires_grad_() for part in each] for each in parts[:3]]
    groups = in_process.groups(intra=3)
    options = {"layout": layout, "mask": mask, "side": side}
    kernel = AtenKernel("aten", OneByOne())
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(registry.KERNELS, "aten", lambda device, beside_rings: kernel)
        outs = in_process.attention(
            *shards, groups=groups, algorithm="ring", kernel="aten", **options
        )
    torch.autograd.backward(outs, parts[3])
    assert oracle.worst(mb.unshard(outs, layout, dim=0), out) < 1e-11
    for each, expected in zip(shards, grads, strict=True):
        assert oracle.worst(mb.unshard([x.grad for x in each], layout, dim=0), expected) < 1e-11
    assert max(kernel.operator.calls) > 3


# Calls of an operator that takes many sequences, of the rank with most, per layer and pass: 100
# documents over 8 ranks in a ring, in ulysses groups of 4, and in one group of all.
CALLS = {
    "padded zigzag": (8, 2, 1),
    "padded striped": (8, 14, 1),
    "odd zigzag": (3, 2, 1),
    "odd striped": (8, 14, 1),
    "odd balanced": (5, 3, 1),
    "odd contiguous": (2, 2, 1),
    "dense zigzag": (8, 2, 1),
    "dense striped": (8, 14, 1),
}


def calls(name, size, ulysses):
    """name: of `CALLS`."""
    kind, _, layout = name.partition(" ")
    lengths = np.random.default_rng(0).lognormal(7, 1, 100).astype(int) + 1
    multiple = 2 * size
    ends = np.cumsum([0, *(-(-lengths // multiple) * multiple if kind == "padded" else lengths)])
    ends[-1] += -ends[-1] % multiple
    mask = Causal() if kind == "dense" else Documents(ends) & Causal()
    given = {"cu_seqlens": ends} if name in ("padded zigzag", "odd balanced") else {}
    made = mb.layout.make(layout, cp_size=size, **given)
    spans = ring_spans(made, Topology(size, size, ulysses), int(ends[-1]))
    kernel = AtenKernel("aten", CudaFlash())
    return max(sum(len(kernel.works_for(mask, [(q, k)])[0] or ()) for k in spans) for q in spans)


@pytest.mark.parametrize("name", CALLS)
def test_calls_per_layer_and_pass(name):
    assert tuple(calls(name, 8, ulysses) for ulysses in (1, 4, 8)) == CALLS[name]


def test_more_ranks_make_as_many_calls_as_pairs():
    assert calls("padded zigzag", 32, 1) == 32


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
        actual = []
        for part in joined(tiles):
            actual += part.tiles if isinstance(part, JoinedTiles) else [part]
            if isinstance(part, JoinedTiles):
                joined_is_right(part)
        assert sorted(map(repr, actual)) == sorted(map(repr, tiles))


def joined_is_right(part: JoinedTiles):
    rows, columns, idle = part.lengths.on(torch.device("cpu"))
    size = (rows[-1].item(), columns[-1].item())
    assert size == part.span.shape
    assert rows.dtype == columns.dtype == torch.int32
    computes = torch.zeros(size[0], dtype=torch.bool)
    for tile in part.tiles:
        computes[tile.rows.start - part.span.rows.start : tile.rows.stop - part.span.rows.start] = 1
    assert torch.equal(idle, ~computes)
    top, left = part.span.rows.start, part.span.columns.start
    bounds = (rows + top).tolist(), (columns + left).tolist()
    sequences = zip(*map(pairwise, bounds), strict=True)
    computed = [each for each in sequences if all(a < b for a, b in each)]
    assert computed == [
        ((tile.rows.start, tile.rows.stop), (tile.columns.start, tile.columns.stop))
        for tile in part.tiles
    ]
    for tile in part.tiles:
        # What the call computes of this sequence is what the tile shows.
        inner = Tile(tile.rows, tile.columns, part.span.triangle, band=part.span.band)
        shape = tile.rows.stop, tile.columns.stop
        assert np.array_equal(painted([inner], *shape), painted([tile], *shape))


@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, None), (False, (3, 0))])
def test_cudas_operator_takes_the_arguments_we_pass(causal, window):
    """On fake tensors: torch checks the call, and says what comes out."""
    lengths = Lengths([(n, n) for n in (5, 1, 10)])
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        device = torch.device("cuda:0")
        ends = [torch.empty(4, dtype=torch.int32, device=device) for _ in range(2)]
        lengths._by_device[device] = *ends, torch.empty(16, dtype=torch.bool, device=device)
        shard = torch.empty(16, 1, 4, 8, dtype=torch.bfloat16, device=device).permute(1, 2, 0, 3)
        keys = torch.empty(16, 1, 2, 8, dtype=torch.bfloat16, device=device).permute(1, 2, 0, 3)
        operator, shown = CudaFlash(), TileVisibility(causal, None, window, lengths)
        out, lse = operator.forward(shard, keys, keys, shown, 0.5)
        grads = operator.backward(out, shard, keys, keys, out, lse, shown, 0.5)
        assert mode is not None
    assert (out.shape, out.dtype) == ((1, 4, 16, 8), torch.bfloat16)
    assert (lse.shape, lse.dtype) == ((1, 4, 16), torch.float32)
    assert [g.shape for g in grads] == [shard.shape, keys.shape, keys.shape]
