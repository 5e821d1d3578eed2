"""Installation without selection changes no check of a configuration, and no value."""

import dataclasses
import itertools

import pytest
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

import megatron_burst as mb
import megatron_burst.megatron as burst
from megatron_burst.megatron import patching
from megatron_burst.megatron.patching import HYBRID_SINCE

NAMES = {field.name for field in dataclasses.fields(MLATransformerConfig)}
BASE = {"num_layers": 4, "hidden_size": 32, "num_attention_heads": 4}
NETS = {
    "linear_attention_freq": 4, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}  # fmt: skip
DSA = {
    "experimental_attention_variant": "dsa", "add_bias_linear": False, "dsa_indexer_n_heads": 4,
    "dsa_indexer_head_dim": 8, "dsa_indexer_topk": 6,
}  # fmt: skip

new = pytest.mark.skipif(patching.core_version() < HYBRID_SINCE, reason="both from 0.19 on")


def configurations():
    """Return (class, fields), valid and invalid, with and without context parallelism."""
    for cp, kind in itertools.product((1, 2, 4), (None, "p2p", "a2a", "allgather", ["p2p"] * 4)):
        yield TransformerConfig, BASE | {"context_parallel_size": cp, "cp_comm_type": kind}
        yield MLATransformerConfig, BASE | DSA | {"context_parallel_size": cp, "cp_comm_type": kind}
    for cp, heads, variant in itertools.product((1, 4), (2, 3, 4), ("gated_delta_net", "gdn")):
        sizes = {"linear_num_key_heads": heads, "linear_num_value_heads": 4}
        chosen = {"experimental_attention_variant": variant, "context_parallel_size": cp}
        yield TransformerConfig, BASE | NETS | sizes | chosen
    for changes in (
        {"num_query_groups": 3}, {"window_size": (8, 0)}, {"softmax_type": "learnable"},
        {"mtp_num_layers": 1}, {"qk_clip": True}, {"recompute_granularity": "full"},
        {"fp8": "hybrid"}, {"num_moe_experts": 4}, {"sequence_parallel": True},
        {"hierarchical_context_parallel_sizes": [2, 3]},
    ):  # fmt: skip
        yield TransformerConfig, BASE | {"context_parallel_size": 4} | changes


CASES = [(kind, fields) for kind, fields in configurations() if fields.keys() <= NAMES]


def outcome(kind, fields):
    """Return the error of a configuration, or its values."""
    try:
        return repr(kind(**fields))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@pytest.fixture
def clean():
    burst.uninstall()
    yield
    burst.uninstall()


def test_install_alone_changes_no_configuration(clean):
    before = [outcome(*case) for case in CASES]
    assert len(before) > 20
    burst.install()
    after = [outcome(*case) for case in CASES]
    for case, old, new in zip(CASES, before, after, strict=True):
        assert new == old, case


@new
def test_what_choosing_relaxes(clean):
    """Megatron's sparse attention requires an all-gather, and its delta nets enough heads."""
    split = {"context_parallel_size": 4}
    sparse = MLATransformerConfig, BASE | DSA | split
    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    variant = {"experimental_attention_variant": "gated_delta_net"}
    nets = TransformerConfig, BASE | NETS | heads | variant | split
    burst.install()
    for chosen, refused in ((False, True), (True, False)):
        with patching.selecting_burst(chosen):
            for case in (sparse, nets):
                assert outcome(*case).startswith("AssertionError") == refused
    assert outcome(*sparse).startswith("AssertionError")
    plain = TransformerConfig(**BASE | split | {"attention_dropout": 0.0})
    burst.configure(plain, mb.BurstConfig(algorithm="megatron"))
    assert outcome(*nets).startswith("AssertionError")
    burst.configure(plain, mb.BurstConfig())
    for case in (sparse, nets):
        assert not outcome(*case).startswith("AssertionError")
