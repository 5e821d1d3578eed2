"""Masks that a user writes with the fewest methods: `visible` and `cover`, nothing else.

Calls equal dense attention of a matrix written by hand, and what ranks see of each other is
derived from `cover` alone: nothing that is seen is lost, and what is hidden does not travel.
"""

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import oracle
import pytest
import torch

import megatron_burst as mb
from megatron_burst.comm.consensus import _pack, identity
from megatron_burst.layout import Spans
from megatron_burst.masks import Cover, Mask, seen
from megatron_burst.plugins.testing import in_process

S = 48
LAYOUTS = ("contiguous", "zigzag", "striped")
ALGORITHMS = ("ring", "burst", "double_ring", "all_gather", "two_way", "tile")


class ChunkedLocal(Mask):
    """Causal attention within chunks of so many positions (Llama 4)."""

    def __init__(self, chunk):
        self.chunk = chunk

    def __repr__(self):
        return f"ChunkedLocal({self.chunk})"

    def visible(self, q, k):
        return (k <= q) & (q // self.chunk == k // self.chunk)

    def cover(self, q_span, k_span):
        q_first, q_last = q_span.start // self.chunk, q_span.last // self.chunk
        k_first, k_last = k_span.start // self.chunk, k_span.last // self.chunk
        if k_span.start > q_span.last or k_last < q_first or q_last < k_first:
            return Cover.EMPTY
        if q_first == q_last == k_first == k_last and k_span.last <= q_span.start:
            return Cover.FULL
        return Cover.PARTIAL


class PrefixLM(Mask):
    """Causal, and all see the first n positions."""

    def __init__(self, n):
        self.n = n

    def __repr__(self):
        return f"PrefixLM({self.n})"

    def visible(self, q, k):
        return (k <= q) | (k < self.n)

    def cover(self, q_span, k_span):
        if k_span.last <= q_span.start or k_span.last < self.n:
            return Cover.FULL
        if k_span.start > q_span.last and k_span.start >= self.n:
            return Cover.EMPTY
        return Cover.PARTIAL


OWN = {
    "chunked local": (ChunkedLocal(10), lambda q, k: k <= q and k // 10 == q // 10),
    "prefix": (PrefixLM(13), lambda q, k: k <= q or k < 13),
    "padded": (  # positions from 40 on see nothing, and nothing sees them
        ChunkedLocal(10) & mb.masks.Documents([0, 40, S], padding=[1]),
        lambda q, k: k <= q < 40 and k // 10 == q // 10,
    ),
}


@pytest.fixture
def all_derived(monkeypatch):
    """As with masks of thousands of pieces: groups of queries are asked about."""
    monkeypatch.setattr(seen, "ALL_PAIRS", 0)


def shards(layout, ranks):
    return [mb.layout.make(layout, cp_size=ranks).spans(rank, S) for rank in range(ranks)]


GRIDS = [(2, 2, algorithm) for algorithm in ALGORITHMS] + [(1, 3, "burst")]


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("nodes", "per_node", "algorithm"), GRIDS)
def test_calls_equal_dense_attention(nodes, per_node, algorithm, layout, name, all_derived):
    mask, rule = OWN[name]
    ranks = nodes * per_node
    torch.manual_seed(3)
    whole = [torch.randn(S, 1, heads, 4, dtype=torch.float64) for heads in (4, 2, 2, 4)]
    visible = torch.tensor([[rule(q, k) for k in range(S)] for q in range(S)])
    out, _, *gradients = oracle.attention(*whole, visible)
    rows = [torch.tensor(each) for each in oracle.permutation(layout, ranks, S)]
    q, k, v, dout = ([x[each].clone() for each in rows] for x in whole)
    leaves = [x.requires_grad_() for x in (*q, *k, *v)]
    groups = in_process.groups(inter=nodes, intra=per_node)
    outs = in_process.attention(
        q, k, v, groups=groups, mask=mask, layout=layout, algorithm=algorithm
    )
    actual = [*outs, *torch.autograd.grad(outs, leaves, dout)]
    expected = [x[each] for x in (out, *gradients) for each in rows]
    for part, truth in zip(actual, expected, strict=True):
        torch.testing.assert_close(part, truth, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", [1, 4, 8])
def test_derived_viewers_lose_nothing(ranks, layout, name, all_derived):
    mask, rule = OWN[name]
    pieces = seen.pieces_of([span for each in shards(layout, ranks) for span in [each]])
    queries = pieces.at(np.argsort(pieces.span.start, kind="stable")).span
    viewers = seen.viewers_of(mask, queries, pieces.span)
    for piece, span in enumerate(zip(*pieces.span, strict=True)):
        keys = span[0] + span[1] * np.arange(span[2])
        for q in range(S):
            if any(rule(q, int(k)) for k in keys):
                assert viewers.first[piece] <= q <= viewers.last[piece]


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_are_those_of_all_pairs(layout, name, monkeypatch):
    """Whether pieces are looked at one by one, or groups of them first."""
    mask, actual = OWN[name][0], []
    for pairs in (0, 1 << 60):
        monkeypatch.setattr(seen, "ALL_PAIRS", pairs)
        actual.append(seen.rows_seen(mask, shards(layout, 8), shards(layout, 8)))
    for one, other in zip(*actual, strict=True):
        for a, b in zip((*one[:4], *one.partial), (*other[:4], *other.partial), strict=True):
            np.testing.assert_array_equal(a, b)


def test_hidden_pieces_are_left_out(all_derived):
    """Ranks that hold a chunk each see nothing of the others, and few pairs are looked at."""
    mask, each = ChunkedLocal(6), shards("contiguous", 8)
    queries, keys = seen.rows_seen(mask, each, each)
    assert (queries.ranks(8) == np.eye(8)).all()
    assert (keys.ranks(8) == np.eye(8)).all()
    spans = Spans(*np.array([span for shard in each for span in shard]).T)
    viewers = seen.viewers_of(mask, spans, spans)
    assert ((viewers.last - viewers.first) < 12).all()


def test_the_last_query_of_a_group_counts(all_derived):
    """A position per rank: the last of a chunk, which ends where a group does, sees itself."""
    each = shards("contiguous", S)
    queries, keys = seen.rows_seen(ChunkedLocal(6), each, each)
    rule = [[k <= q and k // 6 == q // 6 for k in range(S)] for q in range(S)]
    assert (queries.ranks(S) == np.array(rule)).all()
    assert (keys.ranks(S) == np.array(rule).T).all()


def test_a_combined_mask_is_derived_where_one_part_is():
    own, ready = ChunkedLocal(6), mb.masks.Causal()
    assert ready.has_viewers
    assert (ready & mb.masks.Prefix(3)).has_viewers
    assert not own.has_viewers
    assert not (own & ready).has_viewers
    assert not (ready | own).has_viewers


@dataclass(frozen=True, eq=False)
class SameId(Mask):
    """Causal attention between positions with the same id."""

    ids: Any
    others: Any = ()

    def visible(self, q, k):
        ids = np.asarray(self.ids)
        return (ids[q] == ids[k]) & (k <= q)


class Shown(SameId):
    """A subclass with a value that only its own text has."""

    def __init__(self, ids, shown):
        super().__init__(ids)
        object.__setattr__(self, "shown", shown)

    def __repr__(self):
        return f"Shown({self.shown})"


def tables(length=2048):
    """Return two arrays whose texts numpy abbreviates to the same one."""
    first, second = (np.zeros(length, dtype=np.int64) for _ in range(2))
    second[700:900] = 1
    assert repr(first) == repr(second)
    return first, second


def pairs_of_masks():
    (a, b), same = tables(), np.zeros(4)
    yield "arrays", SameId(a), SameId(b)
    yield "tensors", SameId(torch.from_numpy(a)), SameId(torch.from_numpy(b))
    yield "bf16", *(SameId(torch.from_numpy(x).bfloat16()) for x in (a, b))
    yield "rounded", SameId(same), SameId(same + 1e-12)
    yield "in a tuple", SameId(same, (a, [a])), SameId(same, (a, [b]))
    yield "in a dict", SameId(same, {"x": a}), SameId(same, {"x": b})
    yield "in a mask", SameId(same, SameId(a)), SameId(same, SameId(b))
    yield "own text", Shown(same, a), Shown(same, b)
    yield "combined", SameId(a) & mb.masks.Causal(), SameId(b) & mb.masks.Causal()


@pytest.mark.parametrize(
    ("first", "second"), [pytest.param(*x[1:], id=x[0]) for x in pairs_of_masks()]
)
def test_masks_with_other_values_are_other_masks(first, second):
    """Caches of plans compare masks, and ranks compare facts that contain a mask."""
    twin = copy.deepcopy(first)
    assert first == twin
    assert hash(first) == hash(twin)
    assert first != second
    facts = [identity({"mask": mask}) for mask in (first, twin, second)]
    assert facts[0] == facts[1] != facts[2]
    same, other = (_pack({"mask": mask}) for mask in (twin, second))
    assert torch.equal(_pack({"mask": first}), same)
    assert not torch.equal(same, other)


def test_each_mask_of_a_class_is_checked():
    """Also if an earlier mask has the same abbreviated text."""
    good, bad = tables()
    q = torch.zeros(1, 1, 1, 1).expand(len(good), 1, 1, 8)

    class Wrong(SameId):
        def cover(self, q_span, k_span):
            return Cover.FULL if np.asarray(self.ids).any() else Cover.PARTIAL

    groups = mb.Groups.single()
    mb.prepare(q, q, q, groups=groups, layout="contiguous", mask=Wrong(good))
    with pytest.raises(ValueError, match="cover is"):
        mb.prepare(q, q, q, groups=groups, layout="contiguous", mask=Wrong(bad))
