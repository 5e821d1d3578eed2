"""`mb.rl.logprobs`: a model of Megatron over parallel ranks against each trajectory by itself."""

import pytest
import trajectories

CP2 = {"context_parallel_size": 2}
TP2 = CP2 | {"tensor_model_parallel_size": 2}
PP2 = CP2 | {"pipeline_model_parallel_size": 2}
CASES = {  # settings of Megatron, of BurstConfig, arguments
    "cp4": ({"context_parallel_size": 4}, {}, {}),
    "cp4, documents": ({"context_parallel_size": 4}, {}, {"tree": False}),
    "cp2, dp2": (CP2, {}, {"max_tokens": 20}),
    "cp2, dp2, loss per token": (CP2 | {"calculate_per_token_loss": True}, {"layout": "balanced"}, {"max_tokens": 30}),
    "cp2, tp2": (TP2, {"algorithm": "multicast"}, {}),
    "cp2, tp2, sequence parallel": (TP2 | {"sequence_parallel": True}, {}, {}),
    "cp2, pp2": (PP2, {}, {"max_tokens": 16}),
    "cp2, pp2, documents": (PP2, {}, {"max_tokens": 24, "tree": False}),
    "cp2, pp2, vpp2": (PP2 | {"virtual_pipeline_model_parallel_size": 2}, {}, {"max_tokens": 24}),
    "dp4": ({}, {"pack": "trees"}, {}),
    "dp2, tp2": (
        {"tensor_model_parallel_size": 2, "sequence_parallel": True},
        {"pack": "trees"},
        {"max_tokens": 24},
    ),
}


@pytest.fixture(scope="module")
def expected(four):
    return four(trajectories.alone)[0]


@pytest.mark.parametrize("case", CASES)
def test_equals_separate_trajectories(four, expected, case):
    found = four(trajectories.worst, *CASES[case][:2], expected, CASES[case][2])
    print(found)
    for errors, *_ in found:
        assert max(errors.values()) < 1e-10
