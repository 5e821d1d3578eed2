"""Masks: `visible` against rules written by hand, `cover` and `band` against `visible`.

The spans of the exhaustive tests are small but of every stride, so an off-by-one has no room.
"""

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_burst.layout import Span, Spans
from megatron_burst.masks import (
    BlockDiffusion,
    BlockSparse,
    Causal,
    Cover,
    Dense,
    Dilated,
    Documents,
    FrameTiles,
    Full,
    Mask,
    Prefix,
    Window,
)
from megatron_burst.masks.seen import cuts

LENGTH = 24
BLOCKS = [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
RANDOM = np.random.default_rng(3).random((LENGTH, LENGTH)) < 0.4
DOCUMENTS = [0, 5, 5, 6, 16, LENGTH]

# mask -> the same rule in plain words of positions
RULES = {
    Full(): lambda q, k: True,
    Causal(): lambda q, k: k <= q,
    Window(3, 0): lambda q, k: q - 3 <= k <= q,
    Window(0, 0): lambda q, k: q == k,
    Window(2, 5): lambda q, k: k in range(q - 2, q + 6),
    Window(None, 4): lambda q, k: k - q < 5,
    Window(4, None): lambda q, k: q - k < 5,
    Window(None, None): lambda q, k: True,
    Dilated(1): lambda q, k: True,
    Dilated(3): lambda q, k: q % 3 == k % 3,
    Prefix(0): lambda q, k: False,
    Prefix(7): lambda q, k: k < 7,
    Documents(DOCUMENTS): lambda q, k: (
        sum(q >= c for c in DOCUMENTS) == sum(k >= c for c in DOCUMENTS)
    ),
    Documents(DOCUMENTS, padding=(2,)): lambda q, k: (
        q != 5 and sum(q >= c for c in DOCUMENTS) == sum(k >= c for c in DOCUMENTS)
    ),
    Documents(DOCUMENTS, padding=(3, 0)): lambda q, k: (
        (q == k == 5) or (16 <= q < LENGTH and 16 <= k < LENGTH)
    ),
    BlockSparse(np.array(BLOCKS), 8): lambda q, k: BLOCKS[q // 8][k // 8] == 1,
    BlockDiffusion(12, 5): lambda q, k: (
        (q < 12 and k < 12 and q // 5 == k // 5)
        or (q < 12 <= k and q // 5 > (k - 12) // 5)
        or 12 <= k <= q
    ),
    BlockDiffusion(12, 4, causal=False): lambda q, k: (
        (q < 12 and k < 12 and q // 4 == k // 4)
        or (q < 12 <= k and q // 4 > (k - 12) // 4)
        or (q >= 12 and k >= 12 and (q - 12) // 4 >= (k - 12) // 4)
    ),
    FrameTiles(LENGTH, 4, 3): lambda q, k: k // 4 in (q // 4, 0, 3),
    FrameTiles(LENGTH, 3, 1): lambda q, k: True,
    FrameTiles(LENGTH, 2, 100): lambda q, k: k // 2 == q // 2 or k < 2,
    Dense(RANDOM): lambda q, k: bool(RANDOM[q, k]),
}
ATOMS = list(RULES)


def test_arguments_of_masks_of_diffusion_models():
    for make, words in (
        (lambda: BlockDiffusion(0, 1), "length must be an integer >= 1, got 0"),
        (lambda: BlockDiffusion(4, 1.5), "block must be an integer, got 1.5"),
        (lambda: BlockDiffusion(4, 2, "yes"), "causal must be True or False, got 'yes'"),
        (lambda: FrameTiles(8, 3, 1), "frame: 3 must divide length, 8"),
        (lambda: FrameTiles(8, 2, 0), "every must be an integer >= 1, got 0"),
        (lambda: BlockDiffusion(4, 2).check(4), "of 8 positions, got 4"),
        (lambda: FrameTiles(8, 2, 2).check(4), "length must be the length of the sequence, 4"),
    ):
        with pytest.raises(ValueError, match=words):
            make()
    BlockDiffusion(4, 2).check(8)
    FrameTiles(8, 2, 2).check(8)


EVERY = [Span(*x) for x in product(range(0, 6), (1, 2, 3), (1, 2, 3, 4))]


def combined(a, b, how):
    mask, rule = (a & b, all) if how == "&" else (a | b, any)
    RULES[mask] = lambda q, k, parts=(RULES[a], RULES[b]): rule(p(q, k) for p in parts)
    return mask


atoms = st.sampled_from(ATOMS)
pairs = st.builds(combined, atoms, atoms, st.sampled_from("&|"))
masks = st.one_of(atoms, pairs, st.builds(combined, pairs, atoms, st.sampled_from("&|")))


@st.composite
def spans(draw):
    start, stride = draw(st.integers(0, LENGTH - 1)), draw(st.integers(1, 7))
    return Span(start, stride, draw(st.integers(1, (LENGTH - 1 - start) // stride + 1)))


def table(mask, q_span, k_span):
    """bool [rows, columns] of a pair of spans, by the handwritten rule."""
    rule = RULES[mask]
    q = [q_span.start + m * q_span.stride for m in range(q_span.length)]
    k = [k_span.start + n * k_span.stride for n in range(k_span.length)]
    return np.array([[rule(a, b) for b in k] for a in q])


def truth(seen):
    return Cover.FULL if seen.all() else Cover.PARTIAL if seen.any() else Cover.EMPTY


def promise(mask, q_span, k_span):
    """`cover`, after checking that it promises nothing that is not so."""
    cover, real = mask.cover(q_span, k_span), truth(table(mask, q_span, k_span))
    assert cover in (real, Cover.PARTIAL), (mask, q_span, k_span)
    return cover, real


@pytest.mark.parametrize("mask", [Full(), Causal(), Documents(DOCUMENTS), Dense(RANDOM)], ids=repr)
def test_cover_is_exact_on_all_small_spans(mask):
    """These answer exactly for any two spans, but documents where strides jump over one."""
    for q_span, k_span in product(EVERY, EVERY):
        cover, real = promise(mask, q_span, k_span)
        if not isinstance(mask, Documents):
            assert cover == real


@pytest.mark.parametrize("mask", [m for m in ATOMS if m != Dilated(3)], ids=repr)
def test_cover_is_exact_on_runs(mask):
    """On runs of neighbours nothing empty is computed or sent; dilated may think a few pairs of
    runs shorter than its stride worth looking at."""
    runs = [Span(start, 1, length) for start, length in product(range(4, 10), range(1, 10))]
    loose = sum(len(set(promise(mask, q, k))) > 1 for q, k in product(runs, runs))
    assert loose == 0


@given(masks, spans(), spans())
def test_visible_is_the_handwritten_rule_and_cover_keeps_its_promises(mask, q_span, k_span):
    q, k = q_span.positions(), k_span.positions()
    seen = mask.visible(q[:, None], k[None, :])
    assert seen.dtype == bool
    assert seen.tolist() == table(mask, q_span, k_span).tolist()
    promise(mask, q_span, k_span)


@given(masks, st.lists(spans(), min_size=1, max_size=4), st.lists(spans(), min_size=1, max_size=4))
def test_many_pairs_at_once_are_the_pairs_one_by_one(mask, q_spans, k_spans):
    q = Span(*np.array(q_spans).T[:, :, None])
    k = Span(*np.array(k_spans).T[:, None, :])
    covers, bands = mask.covers(q, k), mask.bands(q, k)
    for i, j in product(range(len(q_spans)), range(len(k_spans))):
        assert covers[i, j] == mask.cover(q_spans[i], k_spans[j])
        one = mask.band(q_spans[i], k_spans[j])
        assert bands.known[i, j] == (one is not None)
        if one is not None:
            assert (bands.left[i, j], bands.right[i, j]) == one


@given(masks, spans(), spans())
def test_a_band_is_exactly_what_is_visible(mask, q_span, k_span):
    band = mask.band(q_span, k_span)
    if band is not None:
        rows, columns = range(q_span.length), range(k_span.length)
        painted = [[m - band.left <= n <= m + band.right for n in columns] for m in rows]
        assert painted == table(mask, q_span, k_span).tolist()


@pytest.mark.parametrize("mask", [Causal(), Window(3, 0), Window(2, 5), Causal() & Window(4, 9)])
def test_equal_strides_make_a_band(mask):
    RULES.setdefault(mask, lambda q, k: k <= q and q - 4 <= k <= q + 9)
    for q_span, k_span in product(EVERY, EVERY):
        assert (mask.band(q_span, k_span) is None) <= (q_span.stride != k_span.stride)


@given(masks, spans())
def test_between_cuts_rows_of_one_residue_are_alike(mask, span):
    """Breaks and `modulus` are hints, but cuts at breaks must be sorted."""
    found = cuts_of(mask, span)
    assert sorted(set(found)) == found
    assert all(0 < cut < span.length for cut in found)


def cuts_of(mask, *spans):
    index, cut = cuts(mask.breaks, Spans.of(spans))
    assert index.tolist() == sorted(index.tolist())
    return cut.tolist()


def test_cuts_by_hand():
    assert cuts_of(Documents([0, 5, 5, 12, 24]), Span(1, 2, 10)) == [2, 6]
    assert cuts_of(Prefix(7), Span(1, 2, 10)) == [3]
    assert cuts_of(BlockSparse(np.eye(3), 8), Span(6, 1, 12)) == [2, 10]
    assert cuts_of(Prefix(7) | Documents([0, 8, 24]), Span(0, 1, 24)) == [7, 8]
    assert cuts_of(Prefix(7), Span(7, 1, 5), Span(1, 2, 10), Span(0, 1, 7), Span(6, 1, 2)) == [3, 1]
    assert (Dilated(2) & Dilated(3)).modulus == 6


def test_cover_is_ordered_so_that_and_is_min_and_or_is_max():
    assert Cover.EMPTY < Cover.PARTIAL < Cover.FULL


@pytest.mark.parametrize("mask", [Full(), Causal(), Mask(), Causal() & Full()])
def test_a_mask_has_no_truth_value(mask):
    with pytest.raises(TypeError, match="combine masks with & and"):
        bool(mask)


def test_masks_are_values_and_tables_count():
    assert Causal() == Causal() != Full()
    assert repr(Causal() & Window(3, 0)) == "(Causal() & Window(left=3, right=0))"
    assert Documents([0, 3]) == Documents([0, 3]) != Documents([0, 4])
    assert Documents([0, 3], padding=[0]) == Documents([0, 3], padding=(0, 0))
    assert Documents([0, 3]) == Documents([0, 3], padding=()) != Documents([0, 3], padding=[0])
    assert BlockSparse(np.eye(3), 8) != BlockSparse(np.ones((3, 3)), 8)
    other = RANDOM.copy()
    other[0, 0] ^= True
    assert Dense(RANDOM) != Dense(other)
    assert len({Causal(), Causal(), Full()}) == 2


WRONG = [
    (lambda: Window(-1, 0), "left: a window size must be at least 0 or None, got -1"),
    (lambda: Window(0, -2), "right: a window size must be at least 0 or None, got -2"),
    (lambda: Dilated(0), "stride must be at least 1, got 0"),
    (lambda: Prefix(-1), "n: a prefix must have at least 0 positions, got -1"),
    (lambda: Documents([0, 4, 3]), "cu_seqlens must be .* start at 0 and never decrease"),
    (lambda: Documents([1, 4]), "cu_seqlens must be .* start at 0"),
    (lambda: Documents([0]), "cu_seqlens must be .* start at 0"),
    (lambda: Documents(np.array([0, 4, 3], dtype=np.uint32)), "cu_seqlens .*never decrease"),
    (lambda: Documents([0, 4.5, 8]), "cu_seqlens must be integers"),
    (lambda: Documents([0, float("nan"), 8]), "cu_seqlens must be integers"),
    (lambda: Documents(None), "cu_seqlens must be integers .*got None"),
    (lambda: Documents(["a"]), "cu_seqlens must be integers"),
    (lambda: Documents([0, 4], padding=[1]), "padding must hold indices of the 1 doc.*got .1."),
    (lambda: Documents([0, 4], padding=[-1]), "padding must hold indices of the 1 doc.*got .-1."),
    (lambda: Documents([0, 4], padding=0), "padding must hold indices of documents, got 0"),
    (lambda: Documents([0, 4], padding=[0.0]), "padding must be an integer, got 0.0"),
    (lambda: Documents([[0, 1], [2]]), "cu_seqlens must be integers"),
    (lambda: Window(1.5, 0), "left must be an integer, got 1.5"),
    (lambda: Window(0, "a"), "right must be an integer, got 'a'"),
    (lambda: Dilated(2.0), "stride must be an integer, got 2.0"),
    (lambda: Prefix(None), "n must be an integer, got None"),
    (lambda: BlockSparse(np.ones((2, 2)), None), "block must be an integer, got None"),
    (lambda: BlockSparse(np.ones((0, 0)), 2), r"table must be a matrix .*, got shape \(0, 0\)"),
    (lambda: Dense([[1], [1, 0]]), "table must be a matrix"),
    (lambda: Dense([["1", "0"], ["0", "1"]]), "table must hold booleans, got <U1"),
    (
        lambda: Dense(np.where(np.tri(4), 0.0, -np.inf)),
        "table must hold 1 for visible pairs and 0 for hidden pairs, got -inf",
    ),
    (lambda: BlockSparse(np.ones((2, 2)), 0), "block must be at least 1, got 0"),
    (lambda: Dense(np.ones(4)), r"table must be a matrix .*, got shape \(4,\)"),
    (lambda: Window(True, 0), "left must be an integer, got True"),
    (lambda: Window(0, torch.tensor(True)), r"right must be an integer, got tensor\(True\)"),
    (lambda: Dilated(True), "stride must be an integer, got True"),
    (lambda: Prefix(np.True_), "n must be an integer, got (np.)?True"),
    (lambda: Prefix([3]), r"n must be an integer, got \[3\]"),
    (lambda: BlockSparse(np.ones((2, 2)), True), "block must be an integer, got True"),
    (lambda: BlockSparse(None, 4), r"table must be a matrix .*, got shape \(\)"),
    (lambda: BlockSparse(np.ones((2, 2, 2)), 4), r"table must be a matrix .* \(2, 2, 2\)"),
    (lambda: BlockSparse(np.ones((2, 2), complex), 4), "table must hold booleans, got complex"),
    (lambda: BlockSparse(np.full((2, 2), 2), 4), "table must hold 1 .*, got 2"),
    (lambda: Dense(torch.ones(2, 2, requires_grad=True)), r"on the host .*table.bool\(\).cpu\(\)"),
    (lambda: Dense(torch.ones(2, 2).bfloat16()), r"on the host .*table.bool\(\).cpu\(\)"),
    (lambda: Dense(torch.ones(2, 2, device="meta")), r"on the host .*table.bool\(\).cpu\(\)"),
    (
        lambda: Documents(torch.zeros(2, requires_grad=True)),
        "cu_seqlens must be integers",
    ),
    (lambda: Documents([False, True]), "cu_seqlens must be integers .*got .False, True"),
    (lambda: Documents([[0, 4]]), "cu_seqlens must be integers"),
    (lambda: Documents([0, 4, 8, -1]), "cu_seqlens .*never decrease"),
    (lambda: Documents(5), "cu_seqlens must be integers .*got 5"),
]


@pytest.mark.parametrize(("make", "words"), WRONG)
def test_masks_that_mean_nothing_are_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_what_a_mask_was_made_of_may_be_used_again():
    bounds, table = np.array([0, 3, LENGTH]), np.array(RANDOM)
    documents, dense = Documents(bounds), Dense(table)
    names = repr(documents), repr(dense)
    bounds[1], table[:] = 5, False
    assert (repr(documents), repr(dense)) == names
    assert documents.bounds.tolist() == [0, 3, LENGTH]
    with pytest.raises(AttributeError):
        documents.bounds = bounds
    with pytest.raises(AttributeError):
        documents.padding = (0,)
    with pytest.raises(ValueError, match="read-only"):
        documents.bounds[1] = 5


def test_any_kind_of_integer_will_do():
    """A window is the same mask on a rank that read it from numpy: masks compare by name."""
    assert Window(np.int64(3), np.int32(0)) == Window(3, 0)
    assert Prefix(np.int64(3)) == Prefix(3)
    far = 1 << 70
    huge = Window(far, far) & Prefix(far)
    assert huge.visible(np.arange(LENGTH), np.arange(LENGTH)[::-1]).all()
    assert huge.cover(Span(0, 1, LENGTH), Span(0, 3, 8)) == Cover.FULL
    same = Dilated(far) & Dilated((1 << 62) + 1) & Dilated(2)
    q, k = np.arange(LENGTH)[:, None], np.arange(LENGTH)[None, :]
    assert (same.visible(q, k) == (q == k)).all()


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (Documents([0, 4]), "cu_seqlens must end at the length of the sequence, 8, got 4"),
        (BlockSparse(np.ones((2, 2)), 3), "2 blocks of 3 describe 6 positions, .* has 8"),
        (Dense(np.ones((4, 4))), "table describes 4 positions, but the sequence has 8"),
        (Causal() & Documents([0, 4]), "cu_seqlens must end at"),
    ],
)
def test_masks_of_another_length_are_refused(mask, words):
    with pytest.raises(ValueError, match=words):
        mask.check(8)


def test_masks_combine_with_masks_only():
    with pytest.raises(TypeError, match=r"& and \| require two masks"):
        Causal() & True
