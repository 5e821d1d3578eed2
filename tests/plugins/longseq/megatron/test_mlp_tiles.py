"""MLP halves in tiles of rows equal MLP halves without tiles.

Compared are outputs, gradients of inputs and parameters, auxiliary losses and counters. Each
parameter gets one gradient per backward.
"""

import offloading
import pytest
import session
import tiled_layers as layers
import torch
from test_parity import TOLERANCE, worst
from workers import WorkerError

SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
SWIGLU = {"gated_linear_unit": True, "add_bias_linear": False, "normalization": "RMSNorm"}
DENSE = {
    "plain": layers.DENSE,
    "swiglu": layers.DENSE | SWIGLU,
    "tp2": layers.DENSE | {"tensor_model_parallel_size": 2},
    "tp2-sp": layers.DENSE | SP | SWIGLU,
}


def check(four, settings, tiles, options=(), given=(), share=0.0, bound=1e-10):
    results = four(layers.compare, settings, tiles, options, given, share)
    for errors, sizes, stock, ours, moved in results:
        assert max(errors.values()) < bound, errors
        assert (moved > 0) == (share > 0)
        assert min(sizes[name] for name in sizes if "bias" not in name) > 0, sizes
        assert ours == stock  # once per micro-batch, and once more where it is the last
        arrived, ready = ours
        assert set(arrived.values()) == {2}
        assert set(ready.values()) == {1}


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize("tiles", [3, 64])
def test_dense(four, name, tiles):
    check(four, DENSE[name], tiles)


def test_with_the_distributed_optimizer(four):
    check(four, DENSE["tp2-sp"], 4, {"use_distributed_optimizer": True})


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_with_fused_weight_gradients(four, share):
    """Each tile adds to main_grad itself and returns a tensor that is not a gradient."""
    fused = {"gradient_accumulation_fusion": True, "params_dtype": torch.float32}
    check(four, DENSE["tp2-sp"] | fused, 4, share=share, bound=2e-5)


@pytest.mark.parametrize("share", [0.3, 1.0])
@pytest.mark.parametrize("name", ["tp2-sp", "experts"])
def test_tiles_on_the_host(four, name, share):
    settings = DENSE.get(name) or layers.MOE | EP
    check(four, settings, 4, share=share)


def test_training_with_tiles_on_the_host(four, common):
    """Losses equal those without tiles; moved and recomputed tiles give equal bits."""
    flags = [*common, "--context-parallel-size", "2", "--burst-mlp-tiles", "3"]
    recomputed = four(session.train, flags)
    stock = four(session.train, flags[:-2])
    assert worst(recomputed[0], stock[0]) < TOLERANCE
    for history, told, tiers in four(offloading.train, [*flags, "--burst-offload", "0.5"], {}):
        assert history == recomputed[0]
        ((_, out, back, _, left),) = tiers
        assert 0 < out <= back <= 1.25 * out
        assert left == 0
        assert not told or any("MLP tiles: 3 tiles of" in line for line in told)


EP = {"expert_model_parallel_size": 2}
PADDING = {"padding_mask": "third"}
SHARED = {"moe_shared_expert_intermediate_size": 8}
EXPERTS = {
    "ep2": (EP, ()),
    "ep2-allgather": (EP | {"moe_token_dispatcher_type": "allgather"}, ()),
    # gloo gathers no unequal parts, which experts split over TP ranks need with alltoall.
    "tp2-ep2": (EP | SP | {"expert_tensor_parallel_size": 1}, ()),
    "tp2-ep2-shared": (EP | SP | SHARED | {"expert_tensor_parallel_size": 1}, ()),
    # Shared experts beside this dispatcher are refused: gradients differed from no tiles.
    "tp2-allgather": (SP | {"moe_token_dispatcher_type": "allgather"}, ()),
    "capacity-probs": (EP | {"moe_expert_capacity_factor": 0.6}, ()),
    "capacity-position": (
        {"moe_expert_capacity_factor": 0.6, "moe_token_drop_policy": "position"}, ()
    ),
    "losses": (
        EP | {
            "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss", "global_aux_loss"],
            "moe_aux_loss_coeff": [0.1, 0.2, 0.3], "calculate_per_token_loss": True,
        }, (),
    ),
    "expert-bias": (
        EP | SHARED | {
            "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True,
            "moe_router_load_balancing_type": "none", "moe_router_dtype": "fp64",
            "gated_linear_unit": True,
        }, (),
    ),
    "padding": (EP, PADDING),
    "sinkhorn": (
        {"moe_router_load_balancing_type": "sinkhorn", "moe_aux_loss_coeff": 0.0,
         "moe_router_topk": 1}, (),
    ),
}  # fmt: skip
LONG = ("tp2-ep2-shared", "expert-bias")


@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=pytest.mark.slow) if x in LONG else x for x in EXPERTS],
)
def test_experts(four, name):
    settings, given = EXPERTS[name]
    check(four, layers.MOE | settings, 4, given=given)


def test_fewer_rows_than_tiles(four):
    check(four, layers.MOE, layers.ROWS + 2)
    with pytest.raises(WorkerError, match="--burst-mlp-tiles 13 is more than this rank's 11 rows"):
        four(layers.compare, layers.MOE | EP, layers.ROWS + 2)
