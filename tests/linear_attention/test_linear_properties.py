"""Linear attention on one rank for random lengths, pieces and widths, and its precision.

The tests run a chain of pieces. Each piece starts from the maps of the previous pieces.
"""

import pytest
import recurrences
import torch
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st
from recurrences import SHAPES
from test_linear_decays import strong
from test_linear_forms import FORMS, assert_recurrence, computed, states

from megatron_burst.linear_attention.kernels import chunkwise

SCALE = 0.3
CHUNK = 8  # rows, which is less than what calls take: pieces of many chunks are soon there
LENGTHS = st.one_of(st.integers(0, 6), st.sampled_from([7, 8, 9, 16, 25]))


@st.composite
def calls(draw):
    """Draw form, shape, lengths of pieces, mapped pieces and seed."""
    lengths = tuple(draw(st.lists(LENGTHS, min_size=1, max_size=4)))
    mapped = tuple(draw(st.booleans()) for _ in lengths)
    g, shared = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    b, d, w = (draw(st.integers(1, most)) for most in (2, 5, 5))
    shape = {"b": b, "g": g, "h": g * shared, "d": d, "w": w}
    return draw(st.sampled_from(FORMS)), shape, lengths, mapped, draw(st.integers(0, 99))


@settings(max_examples=25, deadline=None)
@drawn(calls())
def test_any_pieces_are_the_recurrence(call):
    form, shape, lengths, mapped, seed = call
    given = recurrences.case(form, sum(lengths), seed=seed, **shape)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunkwise, "SIZE", CHUNK)
        assert_recurrence(form, "torch", given, (lengths, mapped), states(given, len(lengths)))


@settings(max_examples=15, deadline=None)
@drawn(st.sampled_from(FORMS), st.lists(st.integers(0, 80), min_size=1, max_size=4))
def test_a_chain_of_pieces_is_one_piece(form, lengths):
    """Maps carry the state from piece to piece for any pieces."""
    given = recurrences.case(form, sum(lengths), h=2)
    start = states(given, 1)
    whole, maps = computed(form, "torch", given, ((sum(lengths),), (True,)), start)
    chained, last = chain(form, given, lengths, start)
    torch.testing.assert_close(chained, whole, rtol=1e-10, atol=1e-10)
    end = recurrences.applied(maps, start)
    torch.testing.assert_close(last, end, rtol=1e-10, atol=1e-10)


def chain(form, given, lengths, start):
    """Return outputs of consecutive pieces, and the state [1, b, h, d, w] after the last one."""
    cut = (tuple(lengths), (True,) * len(lengths))
    _, maps = computed(form, "torch", given, cut, start.expand(len(lengths), *start.shape[1:]))
    entering = [start]
    for i in range(len(lengths)):
        stored = None if maps.transition is None else maps.transition[i : i + 1]
        one = maps._replace(transition=stored, increment=maps.increment[i : i + 1])
        entering.append(recurrences.applied(one, entering[-1]))
    out, _ = computed(form, "torch", given, cut, torch.cat(entering[:-1]))
    return out, entering[-1]


# --- precision -----------------------------------------------------------------------------


def distance(got, truth):
    """Return the largest error relative to the largest number of the truth."""
    return ((got.double() - truth).abs().max() / truth.abs().max()).item()


def errors(found, truth):
    """Return one error for each of outputs and gradients."""
    return [distance(own, true) for own, true in zip(found, truth, strict=True)]


def with_gradients(function, given, start):
    """Return outputs and gradients of randomly weighted outputs."""
    expected = (*recurrences.leaves(given), start.clone().requires_grad_())
    out = function(recurrences.Case(*expected[:5]), expected[5])
    return [out, *recurrences.gradients((out,), expected)]


def recurrence(given, start):
    return recurrences.pieces(given, (given.v.shape[0],), start, SCALE)[0]


def truth_of(given, start):
    """Compute the recurrence of the rounded tensors in float64."""
    wide = recurrences.Case(*(None if x is None else x.double() for x in given))
    return with_gradients(recurrence, wide, start.double())


# The largest error seen was 6e-7.
@pytest.mark.parametrize("form", FORMS)
def test_float32_is_as_exact_as_float32(form):
    for given in [recurrences.case(form, 130, h=2, d=16, w=8)] + (
        [strong(form, 130)] if SHAPES[form][0] is not None else []
    ):
        low = recurrences.Case(*(None if x is None else x.float() for x in given))
        start = states(given, 1).float()
        found = with_gradients(
            lambda one, s: computed(form, "torch", one, ((130,), (False,)), s)[0], low, start
        )
        assert max(errors(found, truth_of(low, start))) < 2e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("form", FORMS)
def test_pieces_are_as_precise_as_one_piece(form, dtype):
    """The error is at most twice the error of the chunkwise form on all rows, for gradients too."""
    given = recurrences.case(form, 130, h=2, d=16, w=8, dtype=dtype)
    start = states(given, 1).float()
    truth = truth_of(given, start)

    def one(given, start):
        return computed(form, "torch", given, ((130,), (False,)), start)[0]

    def several(given, start):
        return chain(form, given, (30, 40, 1, 59), start)[0]

    limits = errors(with_gradients(one, given, start), truth)
    found = errors(with_gradients(several, given, start), truth)
    rounding = torch.finfo(dtype).eps / 2
    assert all(own <= 2 * max(limit, rounding) for own, limit in zip(found, limits, strict=True))
    if dtype == torch.bfloat16:  # and what is left is the rounding of the results
        assert max(limits) < 2 * rounding
