"""Row chunks: their rows, calls chunk by chunk, and bytes by formula.

`test_every.py` draws whole calls with row chunks.
"""

import itertools

import numpy as np
import oracle
import pytest
import row_chunk_cases as rows
import torch
from row_chunk_cases import Case

from megatron_burst import masks
from megatron_burst.layout import make
from megatron_burst.layout.row_chunks import chunk_runs, row_chunks
from megatron_burst.plugins.testing import in_process
from megatron_burst.schedule.dry_run import held_bytes

ONE_BY_ONE = [
    Case(grid=(2, 2, 1), algorithm="burst", chunks=3, side="query", layout="balanced", sink=True),
    Case(grid=(2, 4, 1), algorithm="double_ring", chunks=4, side="kv", mask="window", rows=6,
         layout="striped", blocks=2),
    Case(grid=(1, 3, 1), algorithm="ring", chunks=5, mask="blind", layout="contiguous",
         heads=(3, 1), kernel="reference"),
    Case(grid=(2, 2, 2), algorithm="hybrid", chunks=2, mask="packed", heads=(8, 4), sink=True),
    Case(grid=(1, 4, 1), algorithm="tile", chunks=13, mask="full", batch=2, head_chunks=0),
    Case(grid=(1, 2, 1), algorithm="multicast", chunks=2, layout="documents", widths=(5, 6)),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(ONE_BY_ONE)))
def test_chunks_one_by_one(number):
    """`plan.chunked`, with backward in another order and by another object."""
    case = ONE_BY_ONE[number]
    results = rows.one_by_one(case, again=number % 2 == 1)
    assert rows.error(case, results) < 1e-10, case


def on_ranks(cases):
    return [rows.error_on_rank(case) for case in cases]


def test_on_real_ranks(ranks):
    """Every message has an envelope with its row chunk's pass and the call."""
    cases = [
        Case(grid=(1, 2, 1), algorithm="burst", chunks=3, side="query", sink=True),
        Case(grid=(1, 2, 1), algorithm="ring", chunks=2, side="kv", layout="striped", blocks=2),
        Case(grid=(1, 2, 2), algorithm="ulysses", chunks=4, side="auto", sink=True),
    ]
    for errors in ranks(2).run(on_ranks, cases):
        assert max(errors) < 1e-10


# --- which rows ---------------------------------------------------------------------------------


def test_zigzag_takes_a_piece_of_each_half():
    found = row_chunks(make("zigzag", cp_size=2), 12, 3)
    assert [x.tolist() for x in found] == [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]


def test_blocks_give_equally_many_rows():
    found = row_chunks(make("zigzag", cp_size=2), 12, 2, 3)  # blocks 0-3, 4-7 (both halves), 8-11
    assert [x.tolist() for x in found] == [[0, 1, 4, 7, 10, 11], [2, 3, 5, 6, 8, 9]]
    found = row_chunks(make("striped", cp_size=2), 12, 2, 2)
    assert [x.tolist() for x in found] == [[0, 1, 2, 6, 7, 8], [3, 4, 5, 9, 10, 11]]


def test_documents_are_mirrored_one_by_one():
    layout = make("zigzag", cp_size=2, cu_seqlens=[0, 8, 24])  # 2 + 2 rows, then 4 + 4
    found = row_chunks(layout, 12, 3)
    assert [x.tolist() for x in found] == [[0, 1, 2, 3], [4, 5, 10, 11], [6, 7, 8, 9]]


@pytest.mark.parametrize("lengths", [[24], [8, 16], [4, 0, 20], [16, 4, 4]])
def test_rows_have_their_turns_from_both_ends_of_a_document_inwards(lengths):
    """Also if a block has more of one end, and a cut splits a pair: each block is sorted."""
    bounds = np.cumsum([0, *lengths])
    turn = {}  # document, how far from its nearer end, and is it that behind?
    for document, (first, stop) in enumerate(itertools.pairwise(bounds)):
        for row in range(first, stop):
            turn[row] = document, min(row - first, stop - 1 - row), 2 * row >= first + stop
    for blocks, count in itertools.product((1, 2, 3, 4, 6), (1, 2, 5, 7, 30)):
        found = row_chunks(make("zigzag", cp_size=2, cu_seqlens=[*(2 * bounds)]), 24, count, blocks)
        each = 24 // blocks
        wanted = [[] for _ in range(count)]
        for first in range(0, 24, each):
            order = sorted(range(first, first + each), key=turn.get)
            for c in range(count):
                wanted[c] += order[each * c // count : each * (c + 1) // count]
        assert [x.tolist() for x in found] == [sorted(rows) for rows in wanted]


def test_runs_of_a_shard_of_any_length():
    zigzag, size = make("zigzag", cp_size=2), 10**15
    assert chunk_runs(zigzag, size, 2) == [
        [(0, size // 4), (3 * size // 4, size)], [(size // 4, 3 * size // 4)]
    ]  # fmt: skip


@pytest.mark.parametrize(("size", "blocks"), [(7, 1), (12, 3), (12, 4)])
@pytest.mark.parametrize("count", [1, 2, 5, 13])
def test_a_partition_of_nearly_equal_chunks(size, blocks, count):
    for name in ("contiguous", "striped", *(["zigzag"] * (size % 2 == 0))):
        found = row_chunks(make(name, cp_size=2), size, count, blocks)
        assert sorted(np.concatenate(found).tolist()) == list(range(size))
        each = size // blocks
        shares = {tuple(int(((x // each) == b).sum()) for b in range(blocks)) for x in found}
        assert all(len(set(share)) == 1 for share in shares)
        assert max(s[0] for s in shares) - min(s[0] for s in shares) <= 1


def test_chunks_of_zigzag_are_balanced():
    """Over ranks and row chunks: visible pairs under a causal mask, by hand."""
    size, length, count = 4, 256, 4
    pairs = []
    for positions in oracle.permutation("zigzag", size, length):
        found = row_chunks(make("zigzag", cp_size=size), length // size, count)
        pairs.append([sum(positions[i] + 1 for i in chunk) for chunk in found])
    assert len({value for each in pairs for value in each}) == 1


# --- bytes and memory --------------------------------------------------------------------------


def tensors(size, each, heads=(8, 8), width=16, dtype=torch.float32):
    shapes = [(each, 1, n, width) for n in (heads[0], heads[1], heads[1])]
    return [[torch.zeros(shape, dtype=dtype) for _ in range(size)] for shape in shapes]


def prepared(chunks, heads=(8, 8), each=32, **choices):
    groups = in_process.groups(inter=2, intra=2)
    choices = {"mask": masks.Full(), "needs_grad": (True,) * 3} | choices
    return in_process.prepare(
        *tensors(4, each, heads), groups=groups, sequence_chunks=chunks, **choices
    )


def test_bytes_by_formula():
    """With a full mask, keys are sent once per row chunk, queries once."""
    for side, factor in (("kv", 4), ("query", 1)):
        one, four = (prepared(n, side=side).traffic() for n in (1, 4))
        assert four[0].total == 4 * one[0].total
        # Gradients of the keys travel as often as the keys.
        assert four[1].total == factor * one[1].total


def test_side_auto_counts_every_round_of_the_keys():
    """Eight query heads per key head: keys are fewer bytes in one pass, but not in 32."""
    chosen = {n: prepared(n, heads=(8, 1)).side for n in (1, 2, 32)}
    assert chosen == {1: "kv", 2: "kv", 32: "query"}
    for chunks in (2, 32):
        plan = prepared(chunks, heads=(8, 1)).ranks[0]
        other = {"kv": "query", "query": "kv"}[plan.side]
        assert plan.traffic()[1].total < plan.traffic(other)[1].total


def test_side_auto_counts_every_chunk():
    """The first half of every rank's rows sees only itself.

    So in the first row chunk both sides send nothing; in the second, queries are fewer bytes than
    the same number of keys.
    """
    seen = np.ones((128, 128), dtype=bool)
    early = np.arange(128) % 32 < 16
    seen[early] = np.eye(128, dtype=bool)[early]
    plan = prepared(2, mask=masks.Dense(seen), layout="contiguous").ranks[0]
    assert plan.side == "query"


def test_what_a_rank_holds_shrinks_with_the_chunks():
    held = [prepared(n, side="query").held_bytes for n in (1, 2, 4)]
    backward = [held_bytes(prepared(n, side="query").passes[0][1], 0) for n in (1, 2, 4)]
    assert held[0] >= held[1] >= held[2]
    assert backward == [backward[0], backward[0] // 2, backward[0] // 4]


def test_the_plan_says_what_runs():
    plan = prepared(4, side="query")
    text = plan.describe()
    assert "| 4 row chunks (forward with keys in host memory " in text
    assert "row chunks" not in prepared(1).describe()
    assert [len(x) for x in plan.row_chunks] == [8] * 4
    assert plan.identity != prepared(2, side="query").identity
