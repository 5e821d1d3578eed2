"""Models of Megatron Lite split over ranks equal one rank.

Qwen3 MoE with multi-token prediction, Qwen3.5 with its gated delta nets and Kimi K2 with latent
attention, built and run by Megatron Lite. Tested with the source of Megatron-LM's branch dev at
d48bd6be; torch's operators replace Transformer Engine (`te_in_torch`).
"""

from pathlib import Path

import documented
import pytest
import torch

MODELS = ("qwen3_moe", "qwen3_5", "kimi_k2")
PAGE = Path(__file__).parents[3] / "docs" / "megatron-lite.md"
MTP = {"mtp_enable": True, "mtp_enable_train": True}


@pytest.fixture(scope="module")
def alone(lite):
    """Return `alone(model)`, Lite's results on one rank.

    Qwen3.5 runs each document separately, because Lite's packed linear attention needs a GPU.
    """
    known = {}

    def of(name):
        if name not in known:
            whole = ("one_by_one", name)
            if name != "qwen3_5":
                whole = ("trained", name, 1, None, *([MTP] if name == "qwen3_moe" else []))
            (known[name],) = lite(1, *whole)
        return known[name]

    return of


def same(found, reference, gradient=1e-7):
    logs, losses, further, grads = found
    for ours, theirs in zip(logs, reference[0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    for ours, theirs in zip((losses, further), reference[1:3], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
    scale = max(float(x.abs().max()) for x in reference[3].values())
    for name, theirs in reference[3].items():
        error = float((grads[name] - theirs).abs().max())
        assert error <= gradient * scale + 1e-6 * float(theirs.abs().max()), name


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_a_split_model_is_that_of_one_rank(lite, alone, name, world):
    more = MTP if name == "qwen3_moe" else {}
    for found in lite(world, "trained", name, world, {}, more):
        same(found, alone(name))


@pytest.mark.parametrize(
    ("name", "swap", "more"),
    [
        ("qwen3_moe", {"algorithm": "ring", "side": "kv"}, {**MTP, "recompute": ["full"]}),
        ("qwen3_5", {"linear": "ring"}, {"recompute": ["full"]}),
    ],
)
def test_with_choices_and_lites_own_recompute(lite, alone, name, swap, more):
    for found in lite(4, "trained", name, 4, swap, more):
        same(found, alone(name))


def test_the_comparison_can_fail(lite, alone):
    """Weights differ, so losses of another model differ."""
    other = alone("kimi_k2")
    with pytest.raises(AssertionError):
        same(alone("qwen3_moe"), other)


def test_swaps_leave_parameters_and_checkpoints(lite):
    te, ours = (["DotProductAttention"], 2, "te"), (["LiteCoreAttention"], 0, "burst")
    for seen in lite(2, "swapped_back_and_forth"):
        assert seen == [te, ours, te, ours, te]


def test_recompute_of_the_replaced_module_is_refused(lite):
    for said in lite(2, "refused", "qwen3_moe", {"recompute": ["core_attn"]}):
        assert said.startswith("core_attn: Lite's recompute or offload wraps this module")


def test_the_block_of_the_page_runs(lite):
    (block,) = [one for one in documented.blocks("docs/megatron-lite.md") if one.needs]
    lite(2, "documented", block.text)
