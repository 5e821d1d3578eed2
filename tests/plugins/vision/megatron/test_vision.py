"""Images among tokens, over context-parallel ranks.

The reference is one rank with Megatron's own attention and the mask as a dense matrix written by
hand.
"""

import types

import documented
import numpy as np
import pytest
import torch
import vision_ranks

from megatron_burst import layout
from megatron_burst.megatron.attention.core_attention import check_pack
from megatron_burst.megatron.data.packed import Packs
from megatron_burst.megatron.patching import HYBRID_SINCE, core_version
from megatron_burst.megatron.users_mask import MaskBatch, MaskLayer
from megatron_burst.plugins.vision import images as vision
from megatron_burst.plugins.vision.images import image_spans

LAYOUTS = ["zigzag", "contiguous", "striped"]
# ranks and layout; the rest of the pairs are slow
WAYS = [(2, "zigzag"), (4, "contiguous"), (4, "striped")]
SLOW = [pytest.param(cp, order, marks=pytest.mark.slow) for cp in (2, 4) for order in LAYOUTS
        if (cp, order) not in WAYS]  # fmt: skip


@pytest.fixture(scope="module")
def one_rank(four):
    """Return `one_rank(function, *args)`, the cached result of one rank."""
    results = {}

    def run(function, *args):
        if (function, args) not in results:
            results[function, args] = four(function, *args)[0]
        return results[function, args]

    return run


def check(found, wanted):
    for losses, grads in found:
        torch.testing.assert_close(losses, wanted[0], rtol=1e-6, atol=0)
        assert grads.keys() == wanted[1].keys()
        for name, grad in grads.items():
            whole = wanted[1][name]
            assert (grad - whole).abs().max() <= 3e-5 * whole.abs().max(), name


@pytest.mark.parametrize(("cp", "order"), [*WAYS, *SLOW])
@pytest.mark.parametrize("name", ["gemma3", "gemma4"])
def test_images_see_all_of_themselves(four, one_rank, name, cp, order):
    wanted = one_rank(vision_ranks.gemma, name)
    recompute = cp == 2
    check(four(vision_ranks.gemma, name, order, cp, recompute), wanted)
    causal = one_rank(vision_ranks.gemma, "causal")
    assert abs(wanted[0][0] / causal[0][0] - 1) > 1e-4  # the mask counts


@pytest.mark.parametrize(("cp", "order"), [*WAYS, *SLOW])
@pytest.mark.parametrize(
    "after", [False, True, "batch", pytest.param("shared", marks=pytest.mark.slow)]
)
def test_positions_of_three_axes_and_images_in_their_places(four, one_rank, order, after, cp):
    check(four(vision_ranks.axes, order, cp, after), one_rank(vision_ranks.axes))


@pytest.mark.parametrize(
    ("cp", "order", "counts", "frozen", "encoded"),
    [
        (2, "zigzag", [9, 3, 5, 4], False, [[0, 1], [2, 3]]),
        (4, "contiguous", [2, 11], False, [[1], [0], [0], [0]]),  # two ranks without an image
        (4, "striped", [1, 2, 3, 4, 5, 6], True, [[5], [4], [0, 3], [1, 2]]),
    ],
)
def test_ranks_that_share_images_equal_ranks_that_encode_all(
    four, cp, order, counts, frozen, encoded
):
    found = four(vision_ranks.shared, order, cp, counts, frozen)
    wanted = four(vision_ranks.shared, order, cp, counts, frozen, True)
    assert [own for _, own, _ in found[:cp]] == encoded
    for (rows, _, grads), (whole, _, all_grads) in zip(found, wanted, strict=True):
        torch.testing.assert_close(rows, whole, rtol=0, atol=1e-10)
        torch.testing.assert_close(grads, all_grads, rtol=0, atol=1e-10)
        assert frozen == (len(grads) == 1)


@pytest.mark.parametrize(
    ("name", "words"),
    [("gemma3", "with_spans to the model, with empty spans"),
     ("causal", "with_spans set spans of images, and no mask reads them")],
)  # fmt: skip
def test_a_mask_and_its_spans_belong_together(four, name, words):
    told = name == "causal"
    for said in four(vision_ranks.error, vision_ranks.gemma, name, "zigzag", 2, False, told):
        assert said.startswith("ValueError")
        assert words in said


def test_axes_of_packed_documents_are_refused(four):
    for said in four(vision_ranks.error, vision_ranks.axes, "contiguous", 2, True, True):
        assert said.startswith("ValueError")
        assert "packed_seq_params with --position-embedding-type mrope" in said


@pytest.mark.parametrize(("cp", "order"), [*WAYS, *SLOW])
def test_layers_may_differ_in_their_heads_and_share_keys(four, one_rank, order, cp):
    check(four(vision_ranks.heads, order, cp), one_rank(vision_ranks.heads))


@pytest.mark.skipif(core_version() < HYBRID_SINCE, reason="requires Megatron-Core 0.19")
@pytest.mark.parametrize("model", ["llava", "mimo"])
@pytest.mark.parametrize(
    ("cp", "order"), [*WAYS[:2], pytest.param(*WAYS[2], marks=pytest.mark.slow)]
)
def test_megatrons_own_models_of_images(four, one_rank, model, cp, order):
    run = getattr(vision_ranks, model)
    check(four(run, order, cp), one_rank(run))


def test_runs_of_image_tokens():
    tokens = torch.tensor([[9, 9, 1, 9, 8, 1, 9]])
    assert image_spans(tokens, 9) == [(0, 2), (3, 4), (6, 7)]
    assert image_spans(tokens[0], [8, 9]) == [(0, 2), (3, 5), (6, 7)]
    assert image_spans(tokens, [8, 9], cu_seqlens=[0, 1, 4, 7]) == [
        (0, 1), (1, 2), (3, 4), (4, 5), (6, 7),
    ]  # fmt: skip
    ends = torch.tensor([[0, 1, 4, 7]], dtype=torch.int32)  # as data loaders give them
    assert image_spans(tokens, np.array([8, 9]), ends) == image_spans(tokens, [8, 9], ends[0])
    assert image_spans(tokens, np.int64(9)) == image_spans(tokens, torch.tensor(9)) == [
        (0, 2), (3, 4), (6, 7),
    ]  # fmt: skip
    assert image_spans(torch.ones(3), 9) == []
    with pytest.raises(ValueError, match="--micro-batch-size 1"):
        image_spans(tokens.expand(2, -1), 9)
    with pytest.raises(ValueError, match=r"cu_seqlens must be integers \[n\], got int32 of \(2, 4"):
        image_spans(tokens, 9, ends.expand(2, -1))
    with pytest.raises(ValueError, match=r"image_tokens must be an integer, got 9\.0"):
        image_spans(tokens, 9.0)
    with pytest.raises(ValueError, match="image_tokens must be an integer, got '9'"):
        image_spans(tokens, "9")


@pytest.mark.parametrize("model", [vision.gemma3, vision.gemma4])
@pytest.mark.parametrize(
    ("causal", "window", "behind", "ahead"),
    [
        (True, None, 16, 0), (True, (3, 0), 3, 0), (True, (3, None), 3, 0),
        (False, None, 16, 16), (False, (3, 2), 3, 2), (False, (None, 2), 16, 2),
    ],
)  # fmt: skip
def test_masks_of_gemma_keep_what_megatron_asks(model, causal, window, behind, ahead):
    mask = model(MaskLayer(1, causal, window), MaskBatch(16, None, ((4, 9),)))
    q, k = np.arange(16)[:, None], np.arange(16)[None]
    image = (q >= 4) & (q < 9) & (k >= 4) & (k < 9) & (model is vision.gemma3 or bool(window))
    without = (k >= q - behind) & (k <= q + ahead)
    assert (mask.visible(q, k) == without | image).all()


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"images": 3}, "images have the shape (3, 4); they must have the shape (2, 4)"),
        ({"positions": [1, 48]}, "positions are from 1 to 48; they must be within the 48 tokens"),
        ({"positions": [-1, 4]}, "positions are from -1 to 4"),
        ({"positions": [5, 5]}, "contains a position twice"),
        ({"positions": [0.5, 1.5]}, "positions must be integers [n], got float64"),
        ({"batch": 2}, "embeddings have the shape (24, 2, 4)"),
        ({"counts": [1, 2]}, "counts: 2 images have 3 tokens in total, but there are 2 positions"),
        ({"counts": [0, 2]}, "counts must be the number of tokens, at least 1"),
        ({"counts": [1, 1], "images": 3}, "encode: rows have the shape (3, 4); they must have"),
        (
            {"spans": [(40, 49)]},
            "spans: the last span ends at 49, after the end of the sequence, 48",
        ),
        ({"seq_len": 96}, "with_spans got seq_len 96, and the batch has 48 tokens"),
    ],
)
def test_what_does_not_fit_is_said(four, wrong, words):
    for said in four(vision_ranks.error, vision_ranks.place, wrong):
        assert said.startswith("ValueError"), said
        assert words in said


def test_tensors_stand_for_one_micro_batch(monkeypatch):
    """Backward of one micro-batch may follow forward of the next, and reads its own spans."""
    known = Packs()
    monkeypatch.setattr(vision, "packs", lambda: known)
    ends = torch.tensor([0, 16, 32], dtype=torch.int32)
    params = types.SimpleNamespace(cu_seqlens_q=ends, cu_seqlens_q_padded=None)
    for _ in range(2):  # chunks of an interleaved pipeline say the same again
        assert vision.with_spans([(2, 6)], 32, params) is params
    with pytest.raises(ValueError, match=r"another micro-batch, .* its own tensors"):
        vision.with_spans([(1, 3)], 32, params)
    assert known.of(32, ends).spans == ((2, 6),)
    ends.copy_(torch.tensor([0, 8, 32]))
    for late in (lambda: known.of(32, ends), lambda: vision.with_spans([(2, 6)], 32, params)):
        with pytest.raises(ValueError, match="changed in place after with_spans"):
            late()


def test_packed_batches_of_llava_are_cut_in_zigzag_order():
    config = types.SimpleNamespace(language_model_type="any")
    with pytest.raises(ValueError, match="packed_seq_params: LLaVAModel cuts every document"):
        check_pack(config, layout.make("contiguous", cp_size=2), 2)
    check_pack(config, layout.make("zigzag", cp_size=2, cu_seqlens=[0, 16]), 2)


def test_blocks_of_the_page(four):
    imports, *blocks = [each.text for each in documented.blocks("docs/vision.md") if each.needs]
    imports = imports.split("if not")[0]  # what follows makes groups, which these ranks have
    blocks = [imports + block for block in blocks]
    said = [four(vision_ranks.documented, text)[0] for text in blocks]
    assert said == ["torch.Size([16, 1, 8])\n"] * 2 + ["[(6, 18)]\n"]
