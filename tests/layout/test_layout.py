"""Layouts against positions written by hand, and cutting tensors by them."""

import numpy as np
import oracle
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import megatron_burst as mb
from megatron_burst.plugins.testing import in_process

LAYOUTS = ("contiguous", "zigzag", "striped")

EXAMPLES = {
    "contiguous": ([0, 1, 2, 3], [4, 5, 6, 7]),
    "zigzag": ([0, 1, 6, 7], [2, 3, 4, 5]),
    "striped": ([0, 2, 4, 6], [1, 3, 5, 7]),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_eight_positions_over_two_ranks(name):
    layout = mb.layout.make(name, cp_size=2)
    assert [layout.positions(rank, 8).tolist() for rank in (0, 1)] == list(EXAMPLES[name])


@given(st.sampled_from(LAYOUTS), st.integers(1, 9), st.integers(1, 6))
def test_positions_are_the_handwritten_permutation(name, ranks, pieces):
    length = 2 * ranks * pieces
    layout = mb.layout.make(name, cp_size=ranks)
    got = [layout.positions(rank, length) for rank in range(ranks)]
    assert [x.tolist() for x in got] == oracle.permutation(name, ranks, length)
    assert all(x.dtype == np.int64 for x in got)


@given(st.sampled_from(LAYOUTS), st.integers(1, 9), st.integers(1, 6))
def test_spans_are_affine_runs_in_shard_order(name, ranks, pieces):
    length = 2 * ranks * pieces
    for rank, positions in enumerate(oracle.permutation(name, ranks, length)):
        spans = mb.layout.make(name, cp_size=ranks).spans(rank, length)
        runs = [range(s.start, s.start + s.stride * s.length, s.stride) for s in spans]
        assert [p for run in runs for p in run] == positions
        assert [s.last for s in spans] == [run[-1] for run in runs]
        assert len(spans) == (2 if name == "zigzag" else 1)


def test_zigzag_takes_an_odd_piece():
    layout = mb.layout.make("zigzag", cp_size=2)
    assert layout.positions(0, 12).tolist() == [0, 1, 2, 9, 10, 11]


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("name", LAYOUTS)
def test_shards_are_rows_and_unshard_restores_them(name, dim):
    x = torch.arange(12 * 12 * 12).reshape(12, 12, 12)
    layout = mb.layout.make(name, cp_size=3)
    parts = [mb.shard(x, layout, rank, dim=dim) for rank in range(3)]
    for part, positions in zip(parts, oracle.permutation(name, 3, 12), strict=True):
        assert torch.equal(part, x.index_select(dim, torch.tensor(positions)))
    assert torch.equal(mb.unshard(parts, layout, dim=dim), x)


def test_zigzag_within_documents_by_hand():
    """Two documents of 8 and 4 on two ranks: each document's first and last piece to rank 0."""
    order = mb.layout.make("zigzag", cp_size=2, cu_seqlens=[0, 8, 8, 12])
    assert order.positions(0, 12).tolist() == [0, 1, 6, 7, 8, 11]
    assert order.positions(1, 12).tolist() == [2, 3, 4, 5, 9, 10]
    block = mb.layout.make("block_striped", cp_size=2, block=4)
    assert block.positions(1, 8).tolist() == [1, 3, 5, 7]
    with pytest.raises(ValueError, match="multiple of block=4, got 6"):
        block.positions(0, 6)


def test_unshard_wants_parts_as_long_as_the_layout_says():
    """Two parts of 3 and 5 rows would have been put together in a wrong order, in silence."""
    layout = mb.layout.make("contiguous", cp_size=2)
    with pytest.raises(ValueError, match=r"parts: .* needs \[4, 4\] rows, got \[3, 5\]"):
        mb.unshard([torch.zeros(3), torch.zeros(5)], layout)


def test_layouts_are_equal_by_name_and_size():
    zigzag = mb.layout.make("zigzag", cp_size=2)
    assert zigzag == mb.layout.make("zigzag", cp_size=2)
    assert hash(zigzag) == hash(mb.layout.make("zigzag", cp_size=2))
    assert zigzag != mb.layout.make("zigzag", cp_size=4)
    assert zigzag != mb.layout.make("striped", cp_size=2)


def test_prepare_offers_only_names_that_it_takes():
    """Not block_striped by name: it needs a block, which `prepare` has no argument for."""
    groups, tensors = in_process.groups(intra=2), [[torch.zeros(4, 1, 2, 8)] * 2] * 3
    for name in ("zig", "block_striped"):
        words = f"layout must be one of contiguous, striped, zigzag, or a layout.*got '{name}'"
        with pytest.raises(ValueError, match=words):
            in_process.prepare(*tensors, groups=groups, layout=name)
    made = mb.layout.make("block_striped", cp_size=2, block=4)
    assert in_process.prepare(*tensors, groups=groups, layout=made).layout == made
