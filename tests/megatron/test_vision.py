"""Images among tokens, over context-parallel ranks: equal to one rank with Megatron's own attention
and the mask as a dense matrix written by hand."""

import pytest
import torch
import vision_ranks

LAYOUTS = ["zigzag", "contiguous", "striped"]


@pytest.fixture(scope="module")
def one(four):
    """`one(function, *args)` -> what one rank makes of it, remembered."""
    known = {}

    def run(function, *args):
        if (function, args) not in known:
            known[function, args] = four(function, *args)[0]
        return known[function, args]

    return run


def check(found, wanted):
    for losses, grads in found:
        torch.testing.assert_close(losses, wanted[0], rtol=1e-6, atol=0)
        assert grads.keys() == wanted[1].keys()
        for name, grad in grads.items():
            torch.testing.assert_close(grad, wanted[1][name], rtol=2e-5, atol=2e-5, msg=name)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["gemma3", "gemma4"])
@pytest.mark.parametrize(("cp", "recompute"), [(2, True), (4, False)])
def test_images_see_all_of_themselves(four, one, name, layout, cp, recompute):
    wanted = one(vision_ranks.gemma, name)
    check(four(vision_ranks.gemma, name, layout, cp, recompute), wanted)
    causal = one(vision_ranks.gemma, "causal")
    assert abs(wanted[0][0] / causal[0][0] - 1) > 1e-4  # the mask counts


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("cp", [2, 4])
def test_positions_of_three_axes_and_images_in_their_places(four, one, layout, after, cp):
    check(four(vision_ranks.axes, layout, cp, after), one(vision_ranks.axes))


@pytest.mark.parametrize(
    ("name", "words"),
    [("gemma3", "with_spans, with no spans where it has no image"),
     ("causal", "with_spans told where images lie, and no mask reads it")],
)  # fmt: skip
def test_a_mask_and_its_spans_belong_together(four, name, words):
    told = name == "causal"
    for said in four(vision_ranks.error, vision_ranks.gemma, name, "zigzag", 2, False, told):
        assert said.startswith("ValueError")
        assert words in said


def test_axes_of_packed_documents_are_refused(four):
    for said in four(vision_ranks.error, vision_ranks.axes, "zigzag", 2, True, True):
        assert said.startswith("ValueError: packed_seq_params with --position-embedding-type mrope")
