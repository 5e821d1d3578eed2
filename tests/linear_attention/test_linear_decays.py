"""Strong, infinite and growing decays of linear attention, against the recurrence."""

import warnings

import pytest
import recurrences
import torch
from recurrences import SHAPES
from test_linear_forms import FORMS, assert_exact, assert_recurrence, computed, states

from megatron_burst.plugins.testing import in_process


def strong(form, rows=70):
    """Return decays that alternate between -50 and 0 over some rows."""
    given = recurrences.case(form, rows)
    turns = (torch.arange(rows) // 5 % 2).bool().reshape(-1, *[1] * (given.decay.dim() - 1))
    if given.decay.dim() == 4:
        turns = turns ^ (torch.arange(given.decay.shape[-1]) % 2).bool()
    return given._replace(decay=torch.where(turns, -50.0, 0.0).expand_as(given.decay).double())


DECAYING = [form for form in FORMS if SHAPES[form][0] is not None]


@pytest.mark.parametrize("form", DECAYING)
def test_strong_decays(form):
    """exp(-50 * 35) is 0, so a division by it would lose all information."""
    given = strong(form)
    assert_recurrence(form, "torch", given, ((70,), (True,)), states(given, 1))


@pytest.mark.parametrize("form", DECAYING)
def test_decays_far_below_what_exp_can_tell_give_numbers(form):
    given = recurrences.case(form, 130, dtype=torch.float32)
    given = given._replace(decay=torch.full_like(given.decay, -1e4))
    own = recurrences.leaves(given)
    starts = states(given, 1).float().requires_grad_()
    out, maps = computed(form, "torch", own, ((130,), (True,)), starts)
    actual = recurrences.gradients((out, maps.increment, maps.transition), (*own, starts))
    assert all(x.isfinite().all() for x in (out, *maps, *actual))


def forgetting(form, rows, dtype=torch.float64):
    """Return decays that clear the whole state in some rows, and single heads or rows in others."""
    given = recurrences.case(form, rows, dtype=dtype)
    decay = given.decay.clone()
    decay[0] = decay[-1] = decay[20:22] = float("-inf")
    decay[5, 0, 1] = decay[40, 1, 2:][..., :2] = float("-inf")
    return given._replace(decay=decay)


@pytest.mark.parametrize("form", DECAYING)
@pytest.mark.parametrize("lengths", [(70,), (20, 1, 129)], ids=str)
def test_decays_of_minus_infinity_forget_all(form, lengths):
    given, cut = forgetting(form, sum(lengths)), (lengths, (True,) * len(lengths))
    assert_recurrence(form, "torch", given, cut, states(given, len(lengths)))
    own = recurrences.leaves(given)
    _, maps = computed(form, "torch", own, cut, states(given, len(lengths)))
    _, others = computed(form, "reference", own, cut, states(given, len(lengths)))
    assert_exact(maps, others)
    actual = (recurrences.gradients(x, own[1:]) for x in (maps, others))
    assert_exact(*actual)


def errors_in_float32(form, given, rows):
    """Return the largest error of each result and gradient relative to its largest number."""
    own = recurrences.leaves(given)
    true = recurrences.leaves(recurrences.Case(*(x if x is None else x.double() for x in given)))
    starts, cut = states(given, 1), ((rows,), (True,))
    out, maps = computed(form, "torch", own, cut, starts.float())
    truth, others = computed(form, "reference", true, cut, starts)
    results = (out, *maps), (truth, *others)
    got, expected = (
        (*x, *recurrences.gradients(x, y)) for x, y in zip(results, (own, true), strict=True)
    )
    return [
        ((one - other).abs().max() / other.abs().max().clamp(min=1)).item()
        for one, other in zip(got, expected, strict=True)
    ]


@pytest.mark.parametrize("form", DECAYING)
def test_decays_of_minus_infinity_in_float32(form):
    assert max(errors_in_float32(form, forgetting(form, 130, torch.float32), 130)) < 2e-6


@pytest.mark.parametrize("strength", [80.0, 1e4])
@pytest.mark.parametrize("form", DECAYING)
def test_strong_decays_leave_weak_ones_their_digits(form, strength):
    """Sums of decays are large, but only their small differences matter."""
    given = recurrences.case(form, 130, dtype=torch.float32)
    seldom = torch.arange(130).reshape(-1, *[1] * (given.decay.dim() - 1)) % 5 == 0
    given = given._replace(decay=torch.where(seldom, given.decay - strength, given.decay))
    assert max(errors_in_float32(form, given, 130)) < 2e-6


@pytest.mark.parametrize("form", DECAYING)
def test_growing_decays_are_computed_and_told(form):
    given = recurrences.case(form, 40)
    given = given._replace(decay=-given.decay)
    with pytest.warns(UserWarning, match="decay has positive logarithms: states grow"):
        assert_recurrence(form, "torch", given, ((40,), (True,)), states(given, 1))


def test_other_decays_warn_of_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for form in FORMS:
            given = recurrences.case(form, 3)
            computed(form, "torch", given, ((3,), (True,)), states(given, 1))


@pytest.mark.parametrize("algorithm", ["ring", "all_gather"])
@pytest.mark.parametrize("form", DECAYING)
def test_a_decay_that_grows_leaves_a_state_of_zero_at_zero(form, algorithm):
    """A growing decay does not change a state or a gradient of zero.

    Over 260 rows of a rank e^3.25 exceeds float64. The values begin on the last rank, whose first
    row clears the state.
    """
    rows, ranks = 260, 3
    given = recurrences.case(form, rows * ranks, b=1, g=1, h=1)
    decay, v = given.decay.clone(), given.v.clone()
    decay[:-rows], decay[-rows], v[:-rows] = 3.25, -2000.0, 0
    given = given._replace(decay=decay, v=v)
    own, true = recurrences.leaves(given), recurrences.leaves(given)
    expected, _ = recurrences.pieces(true, (rows * ranks,), states(given, 1) * 0, 1.0)
    lists = {n: None if x is None else list(x.split(rows)) for n, x in own._asdict().items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "decay has positive logarithms")
        outs = in_process.linear_attention(
            **lists, groups=in_process.groups(intra=ranks), layout="contiguous", scale=1.0,
            algorithm=algorithm,
        )  # fmt: skip
    assert_exact((torch.cat(outs),), (expected,))
    actual = recurrences.gradients((torch.cat(outs)[-rows:],), own)
    assert_exact(actual, recurrences.gradients((expected[-rows:],), true))
