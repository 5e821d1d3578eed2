"""Kimi K3 of Megatron-Bridge, which trains it on one context-parallel rank: BRIDGE=path."""

import json
from pathlib import Path

import pytest
from conftest import found_by

SCRIPT = Path(__file__).with_name("kimi.py")
RECOMPUTE = {
    "recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1,
}  # fmt: skip
# what is compared -> (ranks, choices, tensor-parallel ranks, settings of both)
CASES = {
    "zigzag": (2, {}, 1, {}),
    "contiguous": (2, {"layout": "contiguous", "linear": "scan"}, 1, {}),
    "four-ranks": (4, {"linear": "ring"}, 1, {}),
    "two-layouts": (2, {"layout": "contiguous", "attention_layout": "zigzag"}, 1, {}),
    "tensor-parallel": (4, {}, 2, {}),
    "fused-loss": (2, {"lm_head_loss": "single_pass"}, 1, {}),
    "store": (2, {"store": 1.0}, 1, RECOMPUTE),
}


@pytest.fixture(scope="module")
def run(request, server):
    """`run(ranks, choices, ...)` -> [loss, norms] on rank 0, remembered."""
    checkout = request.config.getoption("--bridge", default="")
    if not checkout:
        pytest.skip("needs a checkout of Megatron-Bridge: make test-te BRIDGE=path")
    known = {}

    def run(ranks, *arguments):
        words = json.dumps([str(Path(checkout).resolve()), *arguments])
        if (ranks, words) not in known:
            done = server.run(ranks, ["losses", words], script=SCRIPT)
            known[ranks, words] = found_by(done)[0]
        return known[ranks, words]

    return run


def same(ours, theirs):
    (loss, norms), (whole, wanted) = ours, theirs
    assert loss == pytest.approx(whole, rel=1e-6)
    assert norms.keys() == wanted.keys()
    assert norms == pytest.approx(wanted, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_over_ranks_equals_one_rank(run, case):
    ranks, choices, tensor, settings = CASES[case]
    theirs = run(tensor, None, False, tensor, settings)
    same(run(ranks, choices, False, tensor, settings), theirs)
    for part in ("A_log", "dt_bias", "k_conv1d.weight", "o_norm.weight"):
        assert theirs[1][f"decoder.layers.0.self_attention.{part}"] > 0.1


def test_packed_documents_like_each_alone(run):
    alone = run(1, None, True)
    same(run(2, {}, True), alone)
    assert abs(alone[0] / run(1, None, False, 1, {})[0] - 1) > 1e-3


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ({"layout": "striped"}, "Kimi K3 with layout striped"),
        (
            {"linear": "megatron"},
            "linear megatron: Megatron's own layers of Kimi K3 support only one",
        ),
        ({"mlp_tiles": 2, "offload": 0.5}, "KimiK3TransformerLayer, whose _forward_mlp is not"),
    ],
)
def test_what_would_not_run_is_refused(run, server, request, choices, words):
    checkout = request.config.getoption("--bridge")
    done = server.run(2, ["losses", json.dumps([checkout, choices])], script=SCRIPT)
    assert done.codes == [1, 1]
    assert done.lines(words)
