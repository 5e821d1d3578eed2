"""`mb.rl.logprobs`: a model of Megatron over parallel ranks against each trajectory by itself."""

import documented
import pytest
import trajectories

CP4, CP2 = {"context_parallel_size": 4}, {"context_parallel_size": 2}
TP2, PP2 = CP2 | {"tensor_model_parallel_size": 2}, CP2 | {"pipeline_model_parallel_size": 2}
VPP2 = PP2 | {"virtual_pipeline_model_parallel_size": 2}
PER_TOKEN = {"calculate_per_token_loss": True}
TREES = {"pack": "trees"}
CASES = {  # settings of Megatron, of BurstConfig, arguments
    "cp4": (CP4, {}, {}),
    "cp4, documents": (CP4, {}, {"tree": False}),
    "cp2, dp2": (CP2, {}, {"max_tokens": 20}),
    "cp2, dp2, per token": (CP2 | PER_TOKEN, {"layout": "balanced"}, {"max_tokens": 30}),
    "cp2, tp2": (TP2, {"algorithm": "multicast"}, {}),
    "cp2, tp2, sequence parallel": (TP2 | {"sequence_parallel": True}, {}, {}),
    "cp2, pp2": (PP2, {}, {"max_tokens": 16}),
    "cp2, pp2, documents": (PP2, {}, {"max_tokens": 24, "tree": False}),
    "cp2, pp2, vpp2": (VPP2, {}, {"max_tokens": 24}),
    "dp4": ({}, TREES, {}),
    "dp2, tp2": (
        {"tensor_model_parallel_size": 2, "sequence_parallel": True}, TREES, {"max_tokens": 24}
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def expected(four):
    return four(trajectories.alone)[0]


@pytest.mark.parametrize("case", CASES)
def test_equals_separate_trajectories(four, expected, case):
    found = four(trajectories.worst, *CASES[case][:2], expected, CASES[case][2])
    for errors, *_ in found:
        assert max(errors.values()) < 1e-10
    owned = {index: loss for _, index, loss, _ in found if index}
    assert sorted(i for index in owned for i in index) == list(range(10))
    assert sum(owned.values()) == pytest.approx(float(expected[2]), abs=1e-10)


def test_the_block_of_the_documentation(four):
    (block,) = [each for each in documented.blocks("docs/trees.md") if "mb.rl" in each.text]
    for old, new, gradient in four(trajectories.documented, block.text):
        assert old == new
        assert gradient > 0
