"""The header that ranks compare before they send anything: differences raise the same error."""

from functools import partial

import pytest
import torch

from megatron_burst.comm.consensus import HEADER_BYTES, agree
from megatron_burst.plugins.testing.local import RankSwitch

FACTS = {"q": (4, 2), "layout": "zigzag", "softmax_scale": 0.125}


def everyone(*facts):
    """Run `agree` on ranks with these facts; all must end the same way."""
    switch, seen = RankSwitch(), []

    def one(rank, fact):
        def gather(header):
            seen.append(header)
            return switch.all_gather(rank, len(facts), header)

        try:
            return agree(fact, gather)
        except ValueError as error:
            return error

    ended = switch.run([partial(one, *given) for given in enumerate(facts)])
    assert len({repr(end) for end in ended}) == 1
    if ended[0] is not None:
        raise ended[0]
    return seen


def test_equal_facts_pass():
    everyone(FACTS, dict(FACTS), dict(FACTS))


def test_a_header_is_small_and_of_fixed_size():
    seen = everyone(FACTS, {**FACTS, "layout": "zigzag"})
    assert [(h.dtype, h.shape) for h in seen] == [(torch.uint8, (HEADER_BYTES,))] * 2
    assert HEADER_BYTES <= 2048


@pytest.mark.parametrize("name", FACTS)
def test_the_fact_that_differs_is_named_with_both_values(name):
    other = {**FACTS, name: "different"}
    with pytest.raises(ValueError, match="ranks disagree") as caught:
        everyone(FACTS, FACTS, other)
    message = str(caught.value)
    assert f"{name} {FACTS[name]!r}" in message
    assert f"{name} 'different'" in message
    assert "rank 2" in message
    assert not any(f"{quiet} " in message for quiet in FACTS if quiet != name)


def test_floats_that_print_alike_at_a_glance_differ():
    with pytest.raises(ValueError, match="softmax_scale"):
        everyone(FACTS, {**FACTS, "softmax_scale": 0.125 + 1e-16 * 2**4})


def test_a_rank_with_bad_arguments_tells_everyone():
    with pytest.raises(ValueError, match=r"^rank 1: q must be 4-dimensional$"):
        everyone(FACTS, ValueError("q must be 4-dimensional"), FACTS)


def test_the_first_bad_rank_is_quoted_whatever_else_differs():
    with pytest.raises(ValueError, match=r"^rank 0: no$"):
        everyone(ValueError("no"), {**FACTS, "q": ()}, ValueError("neither"))


def test_a_single_rank_is_not_numbered():
    with pytest.raises(ValueError, match=r"^no$"):
        everyone(ValueError("no"))


@pytest.mark.parametrize("length", [900, 5000])
def test_texts_longer_than_a_header_are_cut_not_compared(length):
    """Text that does not fit still counts, because digests cover the whole value."""
    long = {"first": "x" * length, "second": 1}
    everyone(long, dict(long))
    with pytest.raises(ValueError, match="ranks disagree"):
        everyone(long, {**long, "second": 2})
    with pytest.raises(ValueError, match="ranks disagree"):
        everyone(long, {**long, "first": "x" * (length - 1) + "y"})


def test_a_long_value_does_not_crowd_out_the_others():
    """A mask of a thousand documents is a long text; later values are still quoted."""
    facts = {"mask": "x" * 5000, "softcap": None}
    with pytest.raises(ValueError, match=r"rank 0 has softcap None, rank 1 has softcap 0.5;"):
        everyone(facts, {**facts, "softcap": 0.5})
    with pytest.raises(ValueError, match=r"mask 'x+\.\.\.x+', rank 1 has mask 'x+\.\.\.x*y'"):
        everyone(facts, {**facts, "mask": "x" * 4999 + "y"})


def test_a_value_of_several_lines_is_one_value():
    facts = {"mask": Lines(), "softcap": None}
    with pytest.raises(ValueError, match=r"rank 0 has softcap None, rank 1 has softcap 0.5;"):
        everyone(facts, {**facts, "softcap": 0.5})


class Lines:
    def __repr__(self):
        return "[[1, 0],\n [1, 1]]"


def test_a_long_error_with_letters_of_several_bytes_survives():
    with pytest.raises(ValueError, match=r"^é+$"):
        everyone(ValueError("é" * 4000))


@pytest.mark.parametrize("number", [31, 32, 62, 63, 100])
def test_any_number_of_facts_is_compared(number):
    facts = {f"f{index}": 0 for index in range(number)}
    assert len(everyone(facts, dict(facts))[0]) == HEADER_BYTES
    for changed in (0, number // 2, number - 1):
        with pytest.raises(ValueError, match=rf"ranks disagree: .*\bf{changed} 0\b"):
            everyone(facts, {**facts, f"f{changed}": 1})
