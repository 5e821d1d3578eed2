"""FlexAttention behind --burst-kernel flex: tables, programs and results, on the CPU in float64.

On the CPU torch's operators compute densely and ignore block lists; so the lists are compared with
dense masks here, and `test_flex_inductor` runs what Inductor writes for a GPU.
"""

import importlib.util
import math
import random
from itertools import product

import numpy as np
import oracle
import pytest
import torch
from kernel_runs import assert_exact, tensors
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import megatron_burst as mb
from megatron_burst.kernels import flex_programs, registry
from megatron_burst.kernels.base import Rows, Scoring
from megatron_burst.kernels.flex import FlexKernel
from megatron_burst.kernels.flex_tables import BLOCK, block_lists, mask_arrays, rounded
from megatron_burst.kernels.online_softmax import empty_result
from megatron_burst.kernels.tile_grid import tile_grid
from megatron_burst.layout import Span
from megatron_burst.plugins.testing import in_process

LENGTH, RANKS = 304, 2
BOUNDS = (0, 40, 41, 130, 250, 304)
P = np.arange(LENGTH)
QUERY, KEY = P[:, None], P[None, :]
CAUSAL = KEY <= QUERY
OUT = np.array([40] * 10 + [25] * 15 + [40] * 15 + [0] * 4 + [304] * 60 + [200] * 96 + [304] * 104)
SPARSE = np.random.default_rng(1).random((38, 38)) < 0.3
SPARSE[5], SPARSE[:, 7] = False, False
ANY = np.random.default_rng(2).random((LENGTH, LENGTH)) < 0.2
ANY[100:180] = False


def same_document(bounds):
    number = np.searchsorted(bounds, P, side="right")
    return number[:, None] == number[None, :]


DOCUMENTS = mb.masks.Documents(BOUNDS) & mb.masks.Causal()
# name -> (mask, the same as a matrix)
MASKS = {
    "full": (mb.masks.Full(), np.ones((LENGTH, LENGTH), dtype=bool)),
    "causal": (mb.masks.Causal(), CAUSAL),
    "window": (mb.masks.Window(60, 0), CAUSAL & (QUERY - KEY <= 60)),
    "both ways": (mb.masks.Window(9, 30), (QUERY - KEY <= 9) & (KEY - QUERY <= 30)),
    "documents": (DOCUMENTS, same_document(BOUNDS) & CAUSAL),
    "documents, window": (
        mb.masks.Documents(BOUNDS) & mb.masks.Window(33, 0),
        same_document(BOUNDS) & CAUSAL & (QUERY - KEY <= 33),
    ),
    "prefix": (mb.masks.Causal() | mb.masks.Prefix(77), CAUSAL | (KEY < 77)),
    "tree": (mb.masks.Tree(OUT), CAUSAL & (OUT[None, :] > QUERY)),
    "dilated": (mb.masks.Dilated(3) & mb.masks.Causal(), CAUSAL & ((QUERY - KEY) % 3 == 0)),
    "blocks": (mb.masks.BlockSparse(SPARSE, 8), np.kron(SPARSE, np.ones((8, 8))) > 0),
    "table": (mb.masks.Dense(ANY), ANY),
}
# masks whose function needs tables over some pair of these shards
WITH_TABLES = {"dilated", "blocks", "table"}
LAYOUTS = ("zigzag", "striped", "balanced")


def spans_of(layout, bounds=BOUNDS):
    more = {"cu_seqlens": bounds} if layout == "balanced" else {}
    made = mb.layout.make(layout, cp_size=RANKS, **more)
    return [made.spans(rank, LENGTH) for rank in range(RANKS)]


def positions(spans):
    return np.concatenate([np.arange(s.length) * s.stride + s.start for s in spans])


class Ring:
    """All pairs of shards by hand: forward, then backward of the merged result."""

    def __init__(self, mask, layout, inputs, softcap=None, bounds=BOUNDS):
        self.spans = spans_of(layout, bounds)
        order = torch.from_numpy(np.concatenate([positions(s) for s in self.spans]))
        self.inputs = [x[order] for x in inputs]
        self.inverse = order.argsort()
        self.scoring = Scoring(inputs[0].shape[-1] ** -0.5, softcap)
        self.kernel = registry.make("flex", *inputs[:3], softcap=softcap)
        self.works = {
            (i, j): self.kernel.works_for(mask, [(q, k)])[0]
            for i, q in enumerate(self.spans)
            for j, k in enumerate(self.spans)
        }

    def run(self, side):
        """out, lse, dq, dk, dv in the order of positions."""
        q, k, v, dout = (x.chunk(RANKS) for x in self.inputs)
        results = [empty_result(x, v[0].shape[-1]) for x in q]
        works = [(pair, work) for pair, work in self.works.items() if work is not None]
        for (i, j), work in works:
            self.kernel.forward(q[i], k[j], v[j], work, self.scoring, *results[i])
        sums = [[torch.zeros_like(x) for x in chunks] for chunks in (q, k, v)]
        for (i, j), work in works:
            out, lse = results[i]
            rows = Rows(q[i], dout[i], lse, (dout[i] * out).sum(-1), out if side == "kv" else None)
            dq, dk, dv = sums[0][i], sums[1][j], sums[2][j]
            self.kernel.backward(rows, k[j], v[j], work, self.scoring, dq, dk, dv)
        parts = [*zip(*results, strict=True), *sums]
        return [torch.cat(list(x))[self.inverse] for x in parts]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mask", MASKS)
def test_every_mask_over_two_ranks_is_the_oracle(mask, layout):
    made, seen = MASKS[mask]
    inputs = tensors(LENGTH, 1, (2, 1), (5, 3))
    wanted = oracle.attention(*inputs, torch.from_numpy(seen))
    ring = Ring(made, layout, inputs)
    for side in ("kv", "query"):
        for got, right in zip(ring.run(side), wanted, strict=True):
            blind = right == -math.inf
            assert torch.equal(got == -math.inf, blind)
            assert oracle.worst(got.masked_fill(blind, 0), right.masked_fill(blind, 0)) < 1e-11


@pytest.mark.parametrize("mask", ["documents", "tree"])
def test_a_softcap_over_two_ranks(mask):
    made, seen = MASKS[mask]
    inputs = tensors(LENGTH, 2, (2, 2), (4, 4))
    out, _, *grads = oracle.attention(*inputs, torch.from_numpy(seen), softcap=0.7)
    got, _, *mine = Ring(made, "zigzag", inputs, 0.7).run("query")
    assert_exact((got, *mine), (out, *grads))


@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("mask", ["causal", "blocks"])
def test_the_largest_score_of_each_head(mask, softcap):
    q, k, v, _ = tensors(LENGTH, 2, (4, 2), (4, 4))
    made, seen = MASKS[mask]
    kernel = registry.make("flex", q, k, v, softcap=softcap, maximum=True)
    work = kernel.works_for(made, [([Span(0, 1, LENGTH)], [Span(0, 1, LENGTH)])])[0]
    found = torch.full((4,), -math.inf, dtype=torch.float64)
    found[3] = 99.0
    kernel.forward(q, k, v, work, Scoring(0.3, softcap), *empty_result(q, 4), found)
    scores = torch.einsum("sbhd,tbhd->hbst", q, k.repeat_interleave(2, dim=2)) * 0.3
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    wanted = scores.masked_fill(~torch.from_numpy(seen), -math.inf).amax((1, 2, 3))
    wanted[3] = 99.0
    assert oracle.worst(found, wanted) < 1e-12


# --- tables --------------------------------------------------------------------------------


def listed(count, blocks):
    """{(block, other)} of lists of blocks."""
    return {(i, int(j)) for i, n in enumerate(count) for j in blocks[i, :n]}


def evaluated(grid, lengths):
    """The mask function at all places, as torch evaluates it in a partly visible block."""
    arrays = mask_arrays(grid, lengths)
    function = flex_programs.MASK_FUNCTIONS[arrays.kind]
    m, n = torch.arange(lengths[0])[:, None], torch.arange(lengths[1])[None, :]
    tensors = (torch.from_numpy(x) for x in arrays[1:])
    return function(torch.tensor(0), torch.tensor(0), m, n, *tensors).numpy()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mask", MASKS)
def test_lists_and_mask_functions_are_the_dense_mask(mask, layout):
    made, seen = MASKS[mask]
    for q_spans, k_spans in product(spans_of(layout), repeat=2):
        rows, columns = positions(q_spans), positions(k_spans)
        lengths = rounded(len(rows)), rounded(len(columns))
        dense = np.zeros(lengths, dtype=bool)
        dense[: len(rows), : len(columns)] = seen[np.ix_(rows, columns)]
        grid = tile_grid(made, q_spans, k_spans, BLOCK, BLOCK)
        by_rows, by_columns = (block_lists(grid, lengths, side) for side in (0, 1))
        partial, full = listed(*by_rows[:2]), listed(*by_rows[2:])
        assert {(i, j) for j, i in listed(*by_columns[:2])} == partial
        assert {(i, j) for j, i in listed(*by_columns[2:])} == full
        assert not partial & full
        for i, j in product(*(range(n // BLOCK) for n in lengths)):
            block = dense[: len(rows)][i * BLOCK : (i + 1) * BLOCK, j * BLOCK : (j + 1) * BLOCK]
            assert block.any() == ((i, j) in partial | full)
            assert block.all() == ((i, j) in full) or not block.any()
        assert (evaluated(grid, lengths) == dense)[: len(rows)].all()
        if mask not in WITH_TABLES:
            kind = mask_arrays(grid, lengths).kind
            assert kind == "rows" or (kind == "columns" and mask == "tree")


def test_a_row_with_a_gap_between_blocks_needs_tables():
    """Each of its blocks alone has consecutive columns."""
    seen = np.zeros((10, 384), dtype=bool)
    seen[:, 100:128] = seen[:, 256:] = True
    seen[3] = False  # a gap in every column
    mask = mb.masks.Dense(np.concatenate([seen, np.zeros((374, 384), dtype=bool)]))
    grid = tile_grid(mask, [Span(0, 1, 10)], [Span(0, 1, 384)], BLOCK, BLOCK)
    assert mask_arrays(grid, (128, 384)).tables == 4  # full, two partial, empty
    assert (evaluated(grid, (128, 384))[:10] == seen).all()


@pytest.mark.parametrize(
    ("length", "wanted"),
    [(1, 128), (128, 128), (129, 256), (1024, 1024), (1025, 1152), (2048, 2048), (2049, 2304),
     (4096, 4096), (5000, 5120), (32768, 32768), (32769, 36864), (40000, 40960)],
)  # fmt: skip
def test_few_different_lengths_occur(length, wanted):
    assert rounded(length) == wanted


# --- programs ------------------------------------------------------------------------------


def pack(rng):
    """The ends of random documents that fill the sequence."""
    cuts = rng.choice(np.arange(4, LENGTH, 4), size=rng.integers(1, 20), replace=False)
    return [0, *sorted(cuts.tolist()), LENGTH]


@pytest.mark.parametrize("layout", ["zigzag", "balanced"])
def test_twenty_packs_need_one_program_per_pass(layout):
    rng = np.random.default_rng(4)
    inputs = tensors(LENGTH, 1, (2, 1), (4, 4), torch.float32)
    flex_programs.program.cache_clear()
    for _ in range(20):
        bounds = pack(rng)
        mask = mb.masks.Documents(bounds) & mb.masks.Causal()
        Ring(mask, layout, inputs, bounds=bounds).run("query")
    assert flex_programs.program.cache_info().misses == 2


def plant(rng, out, first, end):
    """A tree on these rows: a stem, then branches, each of them a tree."""
    stem = rng.randint(first + 1, end)
    out[first:stem] = end
    while stem < end:
        branch = rng.randint(stem + 1, end)
        plant(rng, out, stem, branch)
        stem = branch


def test_twenty_trees_need_few_programs():
    """Intervals of columns for pairs of shards without branches, else intervals of rows."""
    rng = random.Random(6)
    inputs = tensors(LENGTH, 1, (2, 1), (4, 4), torch.float32)
    flex_programs.program.cache_clear()
    for _ in range(20):
        out = np.zeros(LENGTH, dtype=int)
        plant(rng, out, 0, LENGTH)
        Ring(mb.masks.Tree(out), "zigzag", inputs).run("query")
    assert flex_programs.program.cache_info().misses <= 2 * 2


def test_twenty_masks_with_tables_need_few_programs():
    """The number of tables is rounded up to a power of two."""
    rng = np.random.default_rng(6)
    inputs = tensors(LENGTH, 1, (2, 1), (4, 4), torch.float32)
    flex_programs.program.cache_clear()
    for _ in range(20):
        table = rng.random((38, 38)) < rng.random() ** 2
        Ring(mb.masks.BlockSparse(table, 8), "zigzag", inputs).run("query")
    assert flex_programs.program.cache_info().misses <= 2 * 5  # intervals; 2, 4 or 8 tables


@pytest.mark.parametrize(("mask", "tables"), [("rows", 0), ("columns", 0), ("tables", 4)])
@pytest.mark.parametrize("softcap", [None, 0.7])
def test_a_traced_program_computes_the_same(softcap, mask, tables):
    """Inductor gets the traced program."""
    shape = flex_programs.ProgramShape(
        torch.device("cpu"), torch.float32, 2, (4, 2), (16, 8), (128, 256), mask, tables, 0.3,
        softcap, True,
    )  # fmt: skip
    for kind in (flex_programs.ForwardProgram, flex_programs.BackwardProgram):
        made = kind(shape)
        with FakeTensorMode():
            examples = made.examples()
        graph = make_fx(made.__call__)(*examples)
        torch.manual_seed(0)
        inputs = [
            torch.randint(0, max(tables, 1), x.shape, dtype=x.dtype)
            if x.dtype == torch.int32
            else torch.randn(x.shape)
            for x in examples
        ]
        if not tables:
            inputs[-1] += 100  # the end of the visible columns of each row
        got, wanted = graph(*inputs), made(*inputs)
        assert len(got) == len(wanted) == 3
        for a, b in zip(got, wanted, strict=True):
            assert torch.equal(a.nan_to_num(), b.nan_to_num())


# --- the whole call ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("choices", "ranks"),
    [
        ({"layout": "zigzag", "algorithm": "ring", "side": "kv"}, {"intra": 4}),
        ({"layout": "zigzag", "algorithm": "burst", "side": "query"}, {"inter": 2, "intra": 2}),
        ({"layout": "striped", "algorithm": "double_ring", "side": "query"}, {"intra": 2}),
        ({"layout": "balanced", "algorithm": "burst", "side": "query"}, {"intra": 2}),
        ({"layout": "zigzag", "algorithm": "ulysses"}, {"intra": 2, "ulysses": 2}),
    ],
    ids=str,
)
@pytest.mark.parametrize("mask", ["documents", "tree"])
def test_attention_over_ranks_is_the_oracle(mask, choices, ranks):
    made, seen = MASKS[mask]
    inputs = tensors(LENGTH, 1, (4, 2), (5, 3))
    wanted = oracle.attention(*inputs, torch.from_numpy(seen))
    groups = in_process.groups(**ranks)
    more = {"cu_seqlens": BOUNDS} if choices["layout"] == "balanced" else {}
    layout = mb.layout.make(choices["layout"], cp_size=groups.size, **more)
    places = [positions(layout.spans(rank, LENGTH)) for rank in range(groups.size)]
    *shards, douts = ([x[p].clone() for p in places] for x in inputs)
    leaves = [x.requires_grad_() for xs in shards for x in xs]
    outs = in_process.attention(
        *shards, groups=groups, mask=made, kernel="flex", **{**choices, "layout": layout}
    )
    grads = torch.autograd.grad(outs, leaves, douts)
    parts = [outs, *(grads[i : i + groups.size] for i in range(0, len(grads), groups.size))]
    inverse = torch.from_numpy(np.concatenate(places)).argsort()
    got = [torch.cat(list(part))[inverse] for part in parts]
    assert_exact(got, (wanted[0], *wanted[2:]))


# --- what it refuses -----------------------------------------------------------------------


def test_it_refuses_what_it_cannot_compute(monkeypatch):
    x = torch.zeros(8, 1, 2, 16)
    with pytest.raises(ValueError, match=r"kernel flex runs on cuda and cpu tensors, got meta"):
        registry.make("flex", *[x.to("meta")] * 3)
    with pytest.raises(ValueError, match=r"kernel flex supports .*bfloat16.*, got torch.int64"):
        registry.make("flex", *[x.long()] * 3)
    with FakeTensorMode():
        narrow, wide = (torch.empty(8, 1, 2, w, device="cuda") for w in (8, 512))
    kernel = FlexKernel()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert kernel.refusal(narrow, narrow, narrow) == "needs the package triton on cuda tensors"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    for x in (narrow, wide):
        assert "requires widths from 16 to 256, got" in kernel.refusal(x, x, x)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("mask", ["causal", "documents", "window", "tree"])
def test_auto_never_takes_a_kernel_that_never_ran_on_a_gpu(mask, device, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    assert "flex" not in registry.automatic(torch.device(device), MASKS[mask][0])
