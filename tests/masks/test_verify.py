"""`mb.masks.check`: planted contradictions are named, and masks that are right pass.

Each wrong mask is right but for one method in one place.
"""

import numpy as np
import oracle
import pytest
import torch
from test_masks import ATOMS

import megatron_burst as mb
from megatron_burst.layout import Span
from megatron_burst.masks import Cover, Mask, Tree, verify
from megatron_burst.masks.base import SpanBands
from megatron_burst.plugins.testing import in_process

LENGTHS = (1, 2, 5, 16, 48, 1000, 1 << 20)
FAR_CORNER = 1 << 12
OF_ONE_LENGTH = (
    mb.masks.Documents, mb.masks.Dense, mb.masks.BlockSparse, mb.masks.BlockDiffusion,
    mb.masks.FrameTiles,
)  # fmt: skip


class Causal(Mask):
    """Causal attention; `wrong(q_span, k_span)` returns a cover in place of the right one."""

    def __init__(self, wrong=lambda q_span, k_span: None):
        self.wrong = wrong

    def __repr__(self):
        return f"Causal({id(self)})"

    def visible(self, q, k):
        return k <= q

    def cover(self, q_span, k_span):
        planted = self.wrong(q_span, k_span)
        if planted is not None:
            return planted
        if k_span.last <= q_span.start:
            return Cover.FULL
        return Cover.EMPTY if k_span.start > q_span.last else Cover.PARTIAL


def in_chunks(q, k):
    return (k <= q) & (q // 100 == k // 100)


class Chunks(Causal):
    """Causal in chunks of 100, whose cover forgets the chunks."""

    def visible(self, q, k):
        return in_chunks(q, k)


class Corner(Causal):
    """The last query does not see the first key."""

    def visible(self, q, k):
        return (k <= q) & ~((q == FAR_CORNER - 1) & (k == 0))


class Jump(Causal):
    """A window of 300 keys, whose cover is off by one at its far end."""

    def visible(self, q, k):
        return (k <= q) & (k > q - 300)

    def cover(self, q_span, k_span):
        if k_span.last <= q_span.start and k_span.start > q_span.last - 301:
            return Cover.FULL
        return Cover.PARTIAL


PLANTED = {
    "full where partial": Causal(lambda q, k: Cover.FULL if k.start <= q.start else None),
    "off by one": Causal(lambda q, k: Cover.FULL if k.last <= q.start + 1 else None),
    "empty where visible": Causal(lambda q, k: Cover.EMPTY if k.start >= q.last else None),
    "always empty": Causal(lambda q, k: Cover.EMPTY),
    "empty if strided": Causal(lambda q, k: Cover.EMPTY if q.stride > 1 < k.stride else None),
    "the end": Causal(lambda q, k: Cover.FULL if q.last == FAR_CORNER - 1 else None),
}


@pytest.mark.parametrize("length", [16, FAR_CORNER])
@pytest.mark.parametrize("name", PLANTED)
def test_a_wrong_cover_is_named(name, length):
    if name == "the end" and length == 16:
        return
    with pytest.raises(ValueError, match=r"cover is (FULL|EMPTY) for q_span=Span\(.*query \d+"):
        mb.masks.check(PLANTED[name], length)
    with pytest.raises(ValueError, match="cover is"):
        verify.check_custom(PLANTED[name], length)


@pytest.mark.parametrize("mask", [Chunks(), Corner(), Jump()], ids=lambda m: type(m).__name__)
def test_covers_that_are_wrong_at_a_distance(mask):
    with pytest.raises(ValueError, match="cover is FULL"):
        mb.masks.check(mask, FAR_CORNER)
    with pytest.raises(ValueError, match="cover is FULL"):
        verify.check_custom(mask, FAR_CORNER)


def test_the_pair_that_contradicts_is_in_the_message():
    with pytest.raises(ValueError, match="cover is FULL") as caught:
        mb.masks.check(Causal(lambda q, k: Cover.FULL if (q, k) == (SMALL, LATE) else None), 6)
    assert "q_span=Span(2, 1, 2), k_span=Span(3, 1, 1)" in str(caught.value)
    assert "visible is False for query 2 and key 3" in str(caught.value)


SMALL, LATE = Span(2, 1, 2), Span(3, 1, 1)


class Wrong(Mask):
    """A mask in which one attribute is wrong."""

    breaks = np.empty(0, dtype=np.int64)

    def __init__(self, **wrong):
        for name, value in wrong.items():
            setattr(self, name, value)

    def __repr__(self):
        return "Wrong()"

    def visible(self, q, k):
        return np.less_equal(k, q)


class ByBands(Wrong):
    def bands(self, q_spans, k_spans):
        ahead = np.subtract(q_spans.start, k_spans.start)
        return SpanBands(np.full_like(ahead, 1 << 60), ahead + 1, ahead == ahead)


class ByViewers(Wrong):
    def viewers(self, k_spans):
        found = super().viewers(k_spans)
        return found._replace(first=k_spans.start + self.late, right=np.zeros_like(found.right))


class NoVisible(Mask):
    pass


@pytest.mark.parametrize("length", [12, 5000])
@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (ByBands(), "bands is"),
        (ByViewers(late=1), "viewers is"),
        (ByViewers(late=0) & ByViewers(late=2), "viewers is"),
        (Wrong(visible=lambda q, k: np.subtract(q, k)), "visible must return booleans"),
        (Wrong(visible=lambda q, k: np.less_equal(k, q).all()), "of shape"),
        (Wrong(breaks=np.array([5, 2])), "breaks must be sorted"),
        (Wrong(breaks=np.array([0.5])), "breaks must be integers"),
        (Wrong(cover=lambda q, k: Cover.FULL, covers=lambda q, k: np.array(2)), "covers must"),
        (NoVisible(), "defines no visible"),
    ],
)
def test_other_contradictions(mask, words, length):
    with pytest.raises(ValueError, match=words):
        mb.masks.check(mask, length)


def tree(length):
    """Two branches behind a common beginning, and a row of padding."""
    a, b = max(1, length // 4), max(1, length // 2)
    out = [length - 1] * a + [b] * (b - a) + [length - 1] * (length - 1 - b) + [0]
    return Tree(out[:length])


@pytest.mark.parametrize("length", LENGTHS)
def test_masks_of_the_package_are_right(length):
    bounds = sorted({0, length // 7, length // 3, length})
    spans = [(length // 3, length // 2)] if length >= 6 else []
    actual = [
        *(mask for mask in ATOMS if not isinstance(mask, OF_ONE_LENGTH)),
        mb.masks.Documents(bounds) & mb.masks.Causal(),
        mb.masks.Documents(bounds, padding=[len(bounds) - 2]),
        mb.masks.Causal() | mb.masks.SameSpan(spans),
        mb.masks.BlockSparse(np.tri(1), length),
    ]  # fmt: skip
    half, block = max(1, length // 2), max(1, length // 7)
    if length == 2 * half:
        actual += [mb.masks.BlockDiffusion(half, block, causal) for causal in (True, False)]
    frame = next(n for n in range(max(1, length // 5), 0, -1) if length % n == 0)
    actual.append(mb.masks.FrameTiles(length, frame, 2))
    if length <= 1000:
        actual.append(mb.masks.Dense(np.random.default_rng(0).random((length, length)) < 0.5))
    if 8 <= length <= 1000:
        actual.append(tree(length))
    for mask in actual:
        mb.masks.check(mask, length)


def test_what_check_refuses():
    with pytest.raises(ValueError, match="must be a mask from mb"):
        mb.masks.check(3, 8)
    with pytest.raises(ValueError, match="seq_len"):
        mb.masks.check(Causal(), 0)
    with pytest.raises(ValueError, match="cu_seqlens must end"):
        mb.masks.check(mb.masks.Documents([0, 4]), 8)


# --- at the first plan ----------------------------------------------------------------------


def shards(ranks, length, *heads):
    torch.manual_seed(0)
    return [[torch.randn(length // ranks, 1, h, 4, dtype=torch.float64) for _ in range(ranks)]
            for h in heads]  # fmt: skip


@pytest.mark.parametrize("combined", [False, True])
def test_a_plan_refuses_a_wrong_mask(combined):
    mask = PLANTED["off by one"]
    mask = mask & mb.masks.Full() if combined else mask
    q, k, v = shards(4, 48, 2, 2, 2)
    with pytest.raises(ValueError, match=r"cover is FULL for .* return Cover.PARTIAL"):
        in_process.attention(q, k, v, groups=in_process.groups(inter=2, intra=2), mask=mask)


def test_the_sample_of_a_first_plan_is_small(monkeypatch):
    looked = []
    right = Causal()
    monkeypatch.setattr(
        Causal, "visible", lambda self, q, k: looked.append(np.broadcast(q, k).size) or k <= q
    )
    verify.check_custom(right, 1 << 20)
    # Eight rows and columns whose edges are searched, and the points of the pairs.
    assert sum(looked) <= 2 * 8 * 2 * verify.CANDIDATES * 2 + 2 * verify.FEW_PAIRS * 16


class OnlyVisible(Mask):
    """The causal mask of a user who wrote nothing but `visible`."""

    def __repr__(self):
        return "OnlyVisible()"

    def visible(self, q, k):
        return k <= q


@pytest.mark.parametrize("algorithm", ["burst", "ring"])
@pytest.mark.parametrize("layout", ["zigzag", "striped"])
def test_a_mask_without_cover_is_right(layout, algorithm):
    length, ranks = 48, 4
    whole = [torch.cat(x) for x in shards(ranks, length, 4, 2, 2, 4)]
    out, _, *gradients = oracle.attention(*whole, torch.ones(length, length).tril().bool())
    rows = [torch.tensor(each) for each in oracle.permutation(layout, ranks, length)]
    q, k, v, dout = ([x[each].clone() for each in rows] for x in whole)
    leaves = [x.requires_grad_() for x in (*q, *k, *v)]
    groups = in_process.groups(inter=2, intra=2)
    outs = in_process.attention(
        q, k, v, groups=groups, mask=OnlyVisible(), layout=layout, algorithm=algorithm
    )
    actual = [*outs, *torch.autograd.grad(outs, leaves, dout)]
    expected = [x[each] for x in (out, *gradients) for each in rows]
    for part, truth in zip(actual, expected, strict=True):
        torch.testing.assert_close(part, truth, rtol=0, atol=1e-10)


def test_covers_alone_are_used_for_cover():
    class ByCovers(OnlyVisible):
        def covers(self, q_spans, k_spans):
            return np.where(k_spans.last <= q_spans.start, 2, 1)

    assert ByCovers().cover(Span(4, 1, 2), Span(0, 1, 3)) is Cover.FULL
    assert OnlyVisible().cover(Span(4, 1, 2), Span(0, 1, 3)) is Cover.PARTIAL
