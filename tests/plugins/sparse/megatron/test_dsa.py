"""Megatron's sparse attention (DSA) on a ring equals its own all-gather and one rank."""

import dsa_ranks
import pytest
import torch

pytest.importorskip("megatron.core.transformer.experimental_attention_variant.absorbed_mla")

GATHER = {"cp_comm_type": "allgather"}
CP2, CP4 = {"context_parallel_size": 2}, {"context_parallel_size": 4}
TENSOR = CP2 | {"tensor_model_parallel_size": 2, "sequence_parallel": True}
STAGES = {"pipeline_model_parallel_size": 2}
FULL = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
# Layers 1 and 3 select, layers 2 and 4 take their selections.
SHARE = {"num_layers": 4, "dsa_indexer_topk_freq": 2}
DOCUMENTS = (16, 24, 8, 16)


@pytest.fixture(scope="module")
def ran(four):
    """Return a function that runs `dsa_ranks.run` on all ranks and caches the results."""
    cached = {}

    def run(sizes, chosen=None, changes=None, **extra):
        key = repr((sizes, chosen, changes, extra))
        if key not in cached:
            arguments = {"lengths": None, "pattern": None, "count": 1} | extra
            cached[key] = four(dsa_ranks.run, sizes, chosen, changes or {}, *arguments.values())
        return cached[key]

    return run


def worst(found, expected):
    """Return the largest relative difference of losses and norm, and of gradients."""
    losses, grads = 0.0, 0.0
    for actual, reference in zip(found, expected, strict=True):
        for name in ("loss", "indexer", "norm"):
            losses = max(losses, relative(actual[name], reference[name]))
        assert actual["grads"].keys() == reference["grads"].keys()
        for name, grad in reference["grads"].items():
            assert grad.abs().max() > 0
            grads = max(grads, relative(actual["grads"][name], grad))
    return losses, grads


def relative(a, b):
    a, b = (torch.as_tensor(x, dtype=torch.float64) for x in (a, b))
    return float((a - b).abs().max() / b.abs().max())


def check(found, expected):
    losses, grads = worst(found, expected)
    assert losses < 1e-6
    assert grads < 1e-5  # of the largest gradient of a parameter, in fp32


def test_four_ranks_as_megatrons_gather_and_as_one(ran):
    actual = ran(CP4, {})
    check(actual, ran(CP4, None, GATHER))
    check(actual, ran({}))
    (line,) = actual[0]["lines"]
    assert line.startswith(
        "DSA: index keys and latents by multicast | 4 x 1 | layout zigzag | "
        "bytes per layer of rank 0: "
        # 16 rows of 8 numbers in fp32, of which half the ranks need half.
        "index keys "
    )
    assert "latents forward" in line
    assert actual[1]["lines"] == []


@pytest.mark.parametrize("coefficient", [None, 0.0, 0.5])
def test_two_steps_with_overlapped_reductions(four, coefficient):
    """Megatron's data parallelism asserts a gradient of each parameter that requires one."""
    changes = {"dsa_indexer_loss_coeff": coefficient}
    found = four(dsa_ranks.overlapped, CP2, {}, changes)
    for rank in found:
        assert len(rank["losses"]) == 2
        assert rank["losses"][0] != rank["losses"][1]
        assert bool(rank["trained"]) == bool(coefficient)
    lines = [line for line in found[0]["lines"] if "DSA indexers are frozen" in line]
    assert len(lines) == (0 if coefficient else 1)
    if not coefficient:
        assert f"--dsa-indexer-loss-coeff is {coefficient}" in lines[0]


def test_tensor_parallel_ranks_sum_what_their_heads_look_at(ran):
    check(ran(TENSOR, {}), ran(TENSOR, None, GATHER))
    assert relative(ran(TENSOR, {})[0]["indexer"], ran({})[0]["indexer"]) < 1e-6


def test_documents_do_not_see_each_other(ran):
    actual = ran(CP2, {}, lengths=DOCUMENTS)
    check(actual, ran(CP2, None, GATHER, lengths=DOCUMENTS))
    check(actual, ran({}, lengths=DOCUMENTS))
    assert relative(actual[0]["loss"], ran({})[0]["loss"]) > 1e-3


@pytest.mark.parametrize("store", [None, 1.0])
def test_layers_share_selections_in_a_pipeline_that_recomputes(ran, store):
    """Other micro-batches pass the source layer between forward and recomputation of a layer.

    Megatron's own layers would use their selection, so the reference runs without recomputation.
    """
    actual = ran(STAGES | CP2, {"store": store}, SHARE | FULL, count=3)
    check(actual, ran(STAGES, None, SHARE, count=3))


def test_a_loss_over_all_keys_without_relu_not_per_token(ran):
    """These are the settings of Megatron's default and of GLM-5."""
    changes = {
        "dsa_indexer_use_sparse_loss": False,
        "dsa_indexer_scoring_relu": False,
        "calculate_per_token_loss": False,
    }
    actual = ran(CP4, {}, changes, lengths=DOCUMENTS[::-1])
    check(actual, ran(CP4, None, changes | GATHER, lengths=DOCUMENTS[::-1]))
    assert relative(actual[0]["indexer"], ran({}, lengths=DOCUMENTS[::-1])[0]["indexer"]) > 1e-3


def test_layers_of_a_hybrid_model(ran):
    hybrid = {"is_hybrid_model": True, "num_layers": 4}
    check(
        ran(CP2, {"layout": "contiguous"}, hybrid, pattern="D-D-"),
        ran(CP2, None, hybrid | GATHER, pattern="D-D-"),
    )


@pytest.mark.parametrize(
    ("chosen", "changes"),
    [
        ({"sparse": "megatron"}, {}),
        ({"sparse": "all_gather"}, FULL),
        pytest.param({"sparse": "ring"}, {}, marks=pytest.mark.slow),
        pytest.param({"algorithm": "double_ring"}, {}, marks=pytest.mark.slow),
        pytest.param(
            {},
            {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_other_ways(ran, chosen, changes):
    actual = ran(CP4, chosen, changes)
    check(actual, ran(CP4, None, changes | GATHER))
    name = chosen.get("sparse") or chosen.get("algorithm") or "multicast"
    words = {
        "megatron": "cp_comm_type changed from None to allgather, for --burst-sparse megatron",
        "ring": "DSA: index keys and latents by burst |",
    }
    assert actual[0]["lines"][0].startswith(
        words.get(name, f"DSA: index keys and latents by {name} |")
    )
