"""A transformer layer in row chunks equals the layer: output and every gradient, in fp64."""

import layer_ranks
import pytest
import torch
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

import megatron_burst as mb
from megatron_burst.plugins.longseq.checks import chunk_problems
from megatron_burst.plugins.longseq.layer.forward_attention import bytes_per_row, chunk_count

EXACT = 1e-10
GQA = {"num_query_groups": 2, "qk_layernorm": True}
SP = {"tp": 2, "sequence_parallel": True}
CASES = {
    "zigzag-2": {"chunks": 2},
    "striped-3": {"chunks": 3, "layout": "striped"},
    "contiguous-8": {"chunks": 8, "layout": "contiguous"},
    "uneven-7": {"chunks": 7},
    "gqa": {"chunks": 3, **GQA},
    "tensor-parallel": {"chunks": 2, "tp": 2, **GQA},
    "sequence-parallel": {"chunks": 3, **SP, **GQA},
    "sequence-parallel-striped": {"chunks": 2, "layout": "striped", **SP},
    "packed": {"chunks": 3, "packed": True},
    "packed-alone": {"chunks": 3, "packed": "alone", "layout": "striped"},
    "packed-sequence-parallel": {"chunks": 4, "packed": True, "layout": "striped", **SP},
    "sinks": {"chunks": 2, "softmax_type": "learnable", "window_size": (12, 0)},
    "latent": {"chunks": 3, "latent": True},
    "recompute-0": {"chunks": 3, "keep": 0.0},
    "recompute-0.5": {"chunks": 3, "keep": 0.5, "layout": "striped"},
    "recompute-1": {"chunks": 2, "keep": 1.0},
    "in-flight": {"chunks": 2, "times": 3},
    "in-flight-recompute": {"chunks": 2, "times": 2, "keep": 0.5},
    "gate": {"chunks": 2, "attention_output_gate": True, **GQA},
    "largest-logits": {
        "chunks": 2,
        "log_max_attention_logit": True,
        "options": {"kernel": "reference"},
    },
    "few-groups": {"chunks": 2, "num_query_groups": 1, **SP},
    "latent-sequence-parallel": {"chunks": 2, "latent": True, **SP},
    "latent-packed": {"chunks": 3, "latent": True, "packed": True, "layout": "striped"},
    "biases": {"chunks": 2, "add_bias_linear": True, "normalization": "RMSNorm"},
    "ulysses": {"chunks": 3, "options": {"algorithm": "ulysses"}},
    "all-gather": {"chunks": 3, "options": {"algorithm": "all_gather"}},
    "query-side-4": {"chunks": 3, "cp": 4, "options": {"side": "query", "intra_size": 2}},
    "double-ring-4": {
        "chunks": 2,
        "cp": 4,
        "options": {"algorithm": "double_ring", "intra_size": 2},
    },
    "on-the-host": {"chunks": 3, "around": layer_ranks.on_the_host},
    "in-our-checkpoint": {
        "chunks": 3,
        "around": layer_ranks.in_our_checkpoint,
        "options": {"store": 0.5},
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
    "adapters": {"chunks": 2, "change": layer_ranks.with_adapters},
    "frozen": {"chunks": 2, "freeze": ("linear_qkv", "input_layernorm")},
}


# Which differ from another one in what other tests of chunks, layouts and algorithms try.
SLOW = (
    "striped-3", "contiguous-8", "tensor-parallel", "sequence-parallel", "packed-alone", "latent",
    "recompute-0", "recompute-1", "in-flight", "ulysses", "all-gather", "double-ring-4",
)  # fmt: skip


@pytest.mark.parametrize(
    "case", [pytest.param(x, marks=pytest.mark.slow) if x in SLOW else x for x in CASES]
)
def test_a_layer_in_chunks_is_the_layer(four, case):
    for errors in four(layer_ranks.in_case, CASES[case]):
        worst = max(errors, key=errors.get)
        assert errors[worst] < EXACT, (worst, errors[worst])


def test_nothing_but_input_output_and_their_gradients_is_as_long_as_the_rows(four):
    whole, cut = (four(layer_ranks.whole_tensors, chunks)[0] for chunks in (1, 8))
    assert sum(whole["backward"][1].values()) > 6
    assert cut["forward"][1] == {"outside": 1, "aten.new_empty.default": 1}
    assert cut["backward"][1] == {
        "outside": 1, "aten.new_empty.default": 1, "aten.ones_like.default": 1,
        "aten.zeros_like.default": 1,
    }  # fmt: skip
    assert cut["backward"][0] < whole["backward"][0]


def test_auto_chooses_from_the_shapes_and_says_what_once(four):
    calls, lines = four(layer_ranks.automatic)[0]
    assert calls == [6, 6]  # of 24 rows, of at least four
    (line,) = lines
    assert line.startswith("--burst-sequence-chunks auto: 6 chunks of 4 rows in attention halves")


def told(config=None, burst=None, cp=2, latent=False, **changes):
    kind = MLATransformerConfig if latent else TransformerConfig
    settings = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "hidden_dropout": 0}
    made = kind(**settings, context_parallel_size=cp)
    for name, value in changes.items():
        setattr(made, name, value)
    found = chunk_problems(made, mb.BurstConfig(**{"sequence_chunks": 4} | (burst or {})))
    return [(one.reason, *one.add, *one.remove) for one in found]


REFUSED = {
    "fp8": ({"fp8": "e4m3"}, "--fp8-format"),
    "fp4": ({"fp4": "e2m1"}, "--fp4-format"),
    "overlap": ({"tp_comm_overlap": True}, "--tp-comm-overlap"),
    "dropout": ({"hidden_dropout": 0.1}, "--hidden-dropout 0"),
    "graphs": ({"cuda_graph_impl": "local"}, "--cuda-graph-impl"),
    "offloading": ({"fine_grained_activation_offloading": True},
                   "--fine-grained-activation-offloading"),
    "cpu-offloading": ({"cpu_offloading": True}, "--cpu-offloading-num-layers"),
    "wgrad": ({"delay_wgrad_compute": True}, "--delay-wgrad-compute"),
    "expert-overlap": ({"overlap_moe_expert_parallel_comm": True},
                       "--overlap-moe-expert-parallel-comm"),
    "selective": ({"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]},
                  "--recompute-modules mlp"),
    "selective-alone": ({"recompute_granularity": "selective", "recompute_modules": None},
                        "--recompute-granularity"),
    "one-rank": ({"cp": 1}, "--burst-sequence-chunks"),
    "latent-fused-rope": ({"latent": True, "apply_rope_fusion": True}, "--no-rope-fusion"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_cut_is_refused_by_name(case):
    changes, flag = REFUSED[case]
    ((reason, *flags),) = told(**changes)
    assert "--burst-sequence-chunks" in reason
    assert flag in flags
    burst = changes.get("burst", {}) | {"sequence_chunks": 1}
    assert not told(**changes | {"burst": burst})
    assert not told()


@pytest.mark.parametrize(("rows", "count"), [(8191, 1), (16384, 2), (65536, 8), (625_000, 12)])
def test_auto_takes_chunks_until_they_are_a_quarter_of_the_rest_or_too_short(rows, count):
    like = torch.empty((), dtype=torch.bfloat16)
    q, k, v = (like.expand(rows, 1, heads, 128) for heads in (32, 8, 8))  # of Llama 3 8B
    found, line = chunk_count(q, k, v, width=4096, blocks=1)
    assert found == count
    assert line.startswith(f"{count} chunks of ")
    chunk, whole = bytes_per_row(q, k, v, 4096, 1)
    if rows > 100_000:
        assert chunk / count <= whole / 4 < chunk / (count - 1)
