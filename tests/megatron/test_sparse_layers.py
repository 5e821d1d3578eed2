"""`mb.sparse_layer_spec`: GPT layers with a selection rule train alike at any parallel size."""

import dataclasses

import pytest
import sparse_layers
from sparse_layers import RULES

import megatron_burst as mb
from megatron_burst.sparse import rules

CP2, CP4 = {"context_parallel_size": 2}, {"context_parallel_size": 4}
TP2 = CP2 | {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PP2 = CP2 | {"pipeline_model_parallel_size": 2}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SELECTIVE = {"recompute_granularity": "selective"}
PER_TOKEN = {"calculate_per_token_loss": True}
CASES = {  # rule, settings of Megatron, of BurstConfig
    "moba cp2": ("moba", CP2, {}),
    "moba cp4": ("moba", CP4, {"algorithm": "multicast"}),
    "qsa cp2": ("qsa", CP2 | SELECTIVE, {}),
    "qsa cp4": ("qsa", CP4, {}),
    "qsa tp2": ("qsa", TP2, {}),
    "msa cp4": ("msa", CP4, {}),
    "msa tp2": ("msa", TP2 | FULL, {}),
    "dsa pp2": ("dsa", PP2, {"layout": "striped"}),
    "apart": ("qsa", CP4, {"layout": "contiguous", "attention_layout": "zigzag"}),
}


def compare(found, expected, tolerance):
    for (loss, of_indexers, gradients), (want, wanted, theirs) in zip(found, expected, strict=True):
        assert loss == pytest.approx(want, rel=1e-6)
        assert of_indexers == pytest.approx(wanted, rel=1e-5)  # the tracker is in float32
        for name, gradient in gradients.items():
            assert (gradient - theirs[name]).abs().max() < tolerance, name


@pytest.fixture(scope="module")
def alone(four):
    known = {}

    def run(rule, **more):
        key = rule, *more
        if key not in known:
            known[key] = four(sparse_layers.train, more.get("changes", {}), RULES[rule])[0]
        return known[key]

    return run


@pytest.mark.parametrize("case", CASES)
def test_trains_alike_at_any_size(four, alone, case):
    rule, changes, burst = CASES[case]
    expected = alone(rule)
    assert all((loss > 0) == (rule != "moba") for _, loss, _ in expected)
    # Of a vocabulary over tensor-parallel ranks Megatron sums cross entropy in float32.
    for found in four(sparse_layers.train, changes, RULES[rule], burst):
        compare(found, expected, 1e-7 if "tp2" in case else 1e-12)
