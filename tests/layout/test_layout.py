"""Layouts against positions written by hand, and cutting tensors by them."""

import numpy as np
import oracle
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import megatron_burst as mb

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


@pytest.mark.parametrize(
    ("name", "ranks", "length", "words"),
    [
        ("zigzag", 2, 10, "positive multiple of 4, got 10; pad to 12"),
        ("zigzag", 4, 0, "positive multiple of 8, got 0; pad to 8"),
        ("striped", 3, 10, "positive multiple of 3, got 10; pad to 12"),
        ("contiguous", 4, 2, "positive multiple of 4, got 2; pad to 4"),
    ],
)
def test_a_length_that_does_not_divide_is_refused_with_the_one_that_would(
    name, ranks, length, words
):
    with pytest.raises(ValueError, match=f"layout {name} over {ranks} ranks.*{words}"):
        mb.layout.make(name, cp_size=ranks).positions(0, length)


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_outside_the_layout_is_refused(rank):
    with pytest.raises(ValueError, match=rf"rank must be in 0..1, got {rank}"):
        mb.layout.make("striped", cp_size=2).positions(rank, 8)


def test_an_unknown_layout_and_no_ranks_are_refused():
    with pytest.raises(ValueError, match=r"one of contiguous, .*balanced, got 'zig'"):
        mb.layout.make("zig", cp_size=2)
    with pytest.raises(ValueError, match="cp_size must be at least 1, got 0"):
        mb.layout.make("zigzag", cp_size=0)


def test_unshard_wants_a_part_of_every_rank():
    with pytest.raises(ValueError, match="layout has 2 ranks, got 1 parts"):
        mb.unshard([torch.zeros(4)], mb.layout.make("striped", cp_size=2))


def test_unshard_wants_parts_as_long_as_the_layout_says():
    """Two parts of 3 and 5 rows would have been put together in a wrong order, in silence."""
    layout = mb.layout.make("contiguous", cp_size=2)
    with pytest.raises(ValueError, match=r"parts: .* rows \[4, 4\], got \[3, 5\]"):
        mb.unshard([torch.zeros(3), torch.zeros(5)], layout)


def test_shard_and_unshard_want_a_layout_and_not_its_name():
    with pytest.raises(ValueError, match=r"layout: .*mb\.layout\.make.*, got 'zigzag'"):
        mb.shard(torch.zeros(8), "zigzag", 0)
    with pytest.raises(ValueError, match=r"layout: .*mb\.layout\.make.*, got 'zigzag'"):
        mb.unshard([torch.zeros(8)], "zigzag")


def test_layouts_are_equal_by_name_and_size():
    zigzag = mb.layout.make("zigzag", cp_size=2)
    assert zigzag == mb.layout.make("zigzag", cp_size=2)
    assert hash(zigzag) == hash(mb.layout.make("zigzag", cp_size=2))
    assert zigzag != mb.layout.make("zigzag", cp_size=4)
    assert zigzag != mb.layout.make("striped", cp_size=2)


MISUSED = {
    "layout must be one of contiguous, .*, got None": lambda: mb.layout.make(None, cp_size=2),
    "cp_size must be an integer, got 2.5": lambda: mb.layout.make("zigzag", cp_size=2.5),
    "cp_size must be an integer, got True": lambda: mb.layout.make("zigzag", cp_size=True),
    "block: layout block_striped needs one, .* got None": lambda: mb.layout.make(
        "block_striped", cp_size=2
    ),
    "block must be an integer, got 2.0": lambda: mb.layout.make(
        "block_striped", cp_size=2, block=2.0
    ),
    "block goes with layout block_striped, got zigzag with block=4": lambda: mb.layout.make(
        "zigzag", cp_size=2, block=4
    ),
    "rank must be an integer, got 1.5": lambda: mb.layout.make("zigzag", cp_size=2).spans(1.5, 8),
    "rank must be an integer, got '0'": lambda: mb.layout.make("zigzag", cp_size=2).spans("0", 8),
    "seq_len must be an integer, got 8.0": lambda: mb.layout.make("zigzag", cp_size=2).spans(
        0, 8.0
    ),
    "kernel must be one of auto, aten, .*, got .'aten'.": lambda: mb.measure_rates(
        mb.Groups.in_process(intra=1), like=[torch.zeros(4, 1, 2, 8)] * 3, kernel=["aten"]
    ),
}


@pytest.mark.parametrize("words", MISUSED)
def test_what_is_no_integer_or_no_name_is_refused(words):
    with pytest.raises(ValueError, match=words):
        MISUSED[words]()


def test_prepare_offers_only_names_that_it_takes():
    """Not block_striped by name: it needs a block, which `prepare` has no argument for."""
    groups, tensors = mb.Groups.in_process(intra=2), [[torch.zeros(4, 1, 2, 8)] * 2] * 3
    for name in ("zig", "block_striped"):
        words = f"layout must be one of contiguous, striped, zigzag, or made, .*make.*got '{name}'"
        with pytest.raises(ValueError, match=words):
            mb.prepare(*tensors, groups=groups, layout=name)
    made = mb.layout.make("block_striped", cp_size=2, block=4)
    assert mb.prepare(*tensors, groups=groups, layout=made).layout == made
