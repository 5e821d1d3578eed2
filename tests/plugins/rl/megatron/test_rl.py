"""`mb.rl.logprobs`: a model of Megatron over parallel ranks against each trajectory alone."""

import importlib.util

import documented
import pytest
import trajectories

HYBRID = importlib.util.find_spec("megatron.core.models.hybrid")
CP4, CP2 = {"context_parallel_size": 4}, {"context_parallel_size": 2}
TP2, PP2 = CP2 | {"tensor_model_parallel_size": 2}, CP2 | {"pipeline_model_parallel_size": 2}
VPP2 = PP2 | {"virtual_pipeline_model_parallel_size": 2}
PER_TOKEN = {"calculate_per_token_loss": True}
TREES = {"pack": "trees"}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
CASES = {  # settings of Megatron, of BurstConfig, arguments
    "cp4": (CP4, {}, {}),
    "cp4, documents": (CP4, {}, {"tree": False}),
    "cp2, dp2": (CP2, {}, {"max_tokens": 20}),
    "cp2, dp2, per token": (CP2 | PER_TOKEN, {"layout": "balanced"}, {"max_tokens": 30}),
    "cp4, per token, 72 rows": (CP4 | PER_TOKEN, {}, {"tree": False}),
    "cp2, tp2": (TP2, {"algorithm": "multicast"}, {}),
    "cp2, tp2, sequence parallel": (TP2 | {"sequence_parallel": True}, {}, {}),
    "cp2, pp2": (PP2, {}, {"max_tokens": 16}),
    "cp2, pp2, documents": (PP2, {}, {"max_tokens": 24, "tree": False}),
    "cp2, pp2, vpp2": (VPP2, {}, {"max_tokens": 24}),
    "dp4": ({}, TREES, {}),
    "dp2, tp2": (
        {"tensor_model_parallel_size": 2, "sequence_parallel": True}, TREES, {"max_tokens": 24}
    ),
    "cp4, store and offload": (CP4 | FULL, {"store": 0.5, "offload": 0.5}, {}),
    "cp4, head chunks": (CP4, {"head_chunks": 2, "side": "query", "intra_size": 2}, {}),
}  # fmt: skip
WINDOWED = {"window_size": (3, 0)}
ROUTED = {
    "num_moe_experts": 4, "moe_router_topk": 2, "moe_aux_loss_coeff": 0.0,
    "moe_router_dtype": "fp64", "add_bias_linear": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def expected(four):
    return four(trajectories.alone, {})[0]


@pytest.mark.parametrize("case", CASES)
def test_equals_separate_trajectories(four, expected, case):
    actual = four(trajectories.worst, *CASES[case][:2], expected, CASES[case][2])
    for errors, *_ in actual:
        assert max(errors.values()) < 1e-10
    owned = {index: loss for _, index, loss, _ in actual if index}
    assert sorted(i for index in owned for i in index) == list(range(10))
    assert sum(owned.values()) == pytest.approx(float(expected[2]), abs=1e-10)


@pytest.mark.parametrize("options", [{}, {"tree": False}])
def test_windows_count_along_the_path(four, options):
    expected = four(trajectories.alone, {}, 3)[0]
    for errors, *_ in four(trajectories.worst, CP4 | WINDOWED, {}, expected, options):
        assert max(errors.values()) < 1e-10


@pytest.mark.skipif(HYBRID is None, reason="this Megatron-Core has no HybridModel")
@pytest.mark.parametrize("pattern", ["*-*-", "M*-M"])
def test_hybrid_models_take_trees(four, pattern):
    for merged, apart, of_logprobs, of_gradients in four(trajectories.hybrid, pattern):
        assert (merged, apart) == (27, 48)
        assert max(of_logprobs, of_gradients) < 1e-10


def test_experts_are_exact_given_the_routes(four):
    expected = four(trajectories.alone, ROUTED)[0]
    for errors, *_ in four(trajectories.worst, CP2 | ROUTED, {}, expected, {"max_tokens": 24}):
        assert errors.pop("gradients") < 1e-5  # Megatron's router rounds them to float32
        assert max(errors.values()) < 1e-10


def test_the_balance_of_experts_weighs_as_in_megatrons_own_steps(four):
    """Division by the tokens of all ranks equals division by micro-batches.

    Up to 0.18 it is a CP-th of that, because Megatron multiplies by the rows of one rank.
    """
    from megatron.core.package_info import __version__

    old = tuple(map(int, __version__.split(".")[:2])) < (0, 19)
    balance = ROUTED | CP4 | {"moe_aux_loss_coeff": 0.5}
    mean, per_token = (
        four(trajectories.router_gradient, balance | {"calculate_per_token_loss": each})[0]
        for each in (False, True)
    )
    assert mean > 1e-3
    assert per_token == pytest.approx(mean / 4 if old else mean, rel=1e-5)


def test_old_values_record_nothing_for_backward(four):
    assert four(trajectories.recorded) == [False] * 4


@pytest.mark.slow
def test_the_block_of_the_documentation(four):
    (block,) = [each for each in documented.blocks("docs/trees.md") if "mb.rl" in each.text]
    for old, new, gradient in four(trajectories.documented, block.text):
        assert old == new
        assert gradient > 0


ONE = [[1, 2, 3]] * 4
REFUSED = {  # settings of Megatron, of BurstConfig, arguments, trajectories of each rank, words
    "no plugin": ({}, None, {}, None, ["BurstAttention is off"]),
    "one rank": ({}, {}, {}, None, ['BurstConfig(pack="trees")']),
    "dropout": (CP4 | {"hidden_dropout": 0.1}, {}, {}, None, ["--hidden-dropout must be 0"]),
    "too long": (CP4, {}, {"max_tokens": 15}, None, ["max_tokens", "16"]),
    "several at once": (
        CP4, {}, {"temperature": 0.0, "entropy": 1, "tree": "no", "loss": 3}, [[["a"]]] * 4,
        ["temperature", "entropy", "tree", "loss must be", "trajectories[0]"],
    ),
    "no such token": (CP4, {}, {}, [[[1, 2], [3, 40]]] * 4, ["trajectories[1]", "token 40"]),
    "a padded token": (CP4, {}, {"vocab_size": 30}, [[[1, 31]]] * 4, ["token 31"]),
    "a loss that is none": (CP4, {}, {"loss": trajectories.no_scalar}, None, ["a scalar"]),
    "other trajectories": (CP4, {}, {}, [*[ONE] * 3, [[1, 2]]], ["ranks disagree"]),
    "wrong on one rank": (CP4, {}, {}, [*[ONE] * 3, [[-1]]], ["rank 3", "trajectories[0]"]),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_honoured_is_refused_on_every_rank(four, case):
    *how, words = REFUSED[case]
    for actual in four(trajectories.message, *how):
        assert actual is not None
        for word in words:
            assert word in actual


def test_gradients_need_megatrons_data_parallelism(four):
    actual = four(trajectories.message, CP4, {}, {"loss": trajectories.the_loss}, None, False)
    assert all("DistributedDataParallel" in each for each in actual)


def test_a_loss_under_no_grad_is_refused(four):
    options = {"loss": trajectories.the_loss}
    actual = four(trajectories.message, CP4, {}, options, None, True, False)
    assert all("torch.no_grad or inference_mode is active" in each for each in actual)


def test_parameters_of_a_tree_mean_nothing_to_others(four):
    equal, hashes, different, error = four(trajectories.read_by_others)[0]
    assert (equal, hashes, different) == (True, True, False)
    assert "is a copy of the cu_seqlens of a prefix tree" in error


def test_trees_of_megatrons_pull_request_are_refused_by_name():
    from types import SimpleNamespace

    from megatron.core.transformer.enums import AttnMaskType

    from megatron_burst.megatron.attention.core_attention import check_call
    from megatron_burst.megatron.data.cut import BatchCut

    params = type("TreePackedSeqParams", (SimpleNamespace,), {})(qkv_format="thd")
    with pytest.raises(ValueError, match=r"TreePackedSeqParams .*mb\.rl\.logprobs"):
        check_call(AttnMaskType.causal, {}, params, BatchCut("zigzag"))
