"""Settings that exclude --burst-offload, and its arithmetic and messages, without ranks."""

import dataclasses

import pytest
from megatron.core.transformer.transformer_config import TransformerConfig

import megatron_burst as mb
from megatron_burst.plugins.longseq.checks import offload_problems
from megatron_burst.plugins.longseq.offload.demand import (
    HostDemand,
    HostNode,
    line,
    passes_in_flight,
    too_small,
)
from megatron_burst.units import size_of

MOVED = mb.BurstConfig(offload=1.0)


def config(**changes):
    made = TransformerConfig(num_layers=2, hidden_size=32, num_attention_heads=4)
    for name, value in changes.items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize(
    ("setting", "flag"),
    [
        ({"cpu_offloading": True}, "--cpu-offloading-num-layers"),
        ({"cpu_offloading_num_layers": 1}, "--cpu-offloading-num-layers"),
        ({"fine_grained_activation_offloading": True}, "--fine-grained-activation-offloading"),
        ({"distribute_saved_activations": True}, "--distribute-saved-activations"),
        ({"overlap_moe_expert_parallel_comm": True}, "--overlap-moe-expert-parallel-comm"),
        ({"delay_wgrad_compute": True}, "--delay-wgrad-compute"),
        ({"moe_paged_stash": True}, "--moe-paged-stash"),
        ({"tp_comm_overlap": True}, "--tp-comm-overlap"),
        ({"fp8": "hybrid"}, "--fp8-format"),
        ({"fp4": "e2m1"}, "--fp4-format"),
        ({"use_megatron_fsdp": True}, "--use-megatron-fsdp"),
        ({"use_torch_fsdp2": True}, "--use-torch-fsdp2"),
        ({"gtp_weight_remat_size": 2}, "--tensor-parallel-num-weight-shards"),
        ({"enable_cuda_graph": True}, "--enable-cuda-graph"),
        ({"cuda_graph_impl": "local"}, "--cuda-graph-impl"),
    ],
)
def test_what_moves_or_frees_activations_besides_is_refused_by_name(setting, flag):
    (problem,) = offload_problems(config(**setting), MOVED)
    assert problem.reason.startswith(f"--burst-offload 1.0 with {flag}")
    assert problem.remove == (flag,)
    assert not [*offload_problems(config(**setting), mb.BurstConfig())]


def test_modules_whose_outputs_megatron_frees_itself_are_refused():
    modules = {"recompute_granularity": "selective", "recompute_modules": ["mlp", "layernorm"]}
    (problem,) = offload_problems(config(**modules), MOVED)
    assert "--recompute-modules layernorm: Megatron frees outputs" in problem.reason
    for fine in (
        {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]},
        {"recompute_granularity": "full", "recompute_modules": ["layernorm"]},
        {},
    ):
        assert not [*offload_problems(config(**fine), MOVED)]


def test_a_limit_of_nothing():
    (problem,) = offload_problems(config(), mb.BurstConfig(host_memory="1TB"))
    assert problem.reason.startswith("--burst-host-memory 1TB limits --burst-offload")
    assert problem.add == ("--burst-offload auto",)
    assert not [*offload_problems(config(), mb.BurstConfig(host_memory="1TB", offload="auto"))]


def test_the_names_refused_are_those_of_megatron():
    """A rule with a name that no version of Megatron has would refuse nothing."""
    from megatron_burst.plugins.longseq.checks import OFFLOAD

    known = {field.name for field in dataclasses.fields(TransformerConfig)}
    scripts = {"use_megatron_fsdp", "use_torch_fsdp2"}  # of Megatron-LM's command line only
    newer = {"moe_paged_stash"}  # not in 0.16
    assert {rule.when for rule in OFFLOAD if isinstance(rule.when, str)} - scripts - newer <= known


@pytest.mark.parametrize(
    ("warmup", "total", "passes"), [(0, 8, 1), (3, 8, 4), (8, 8, 8), (12, 8, 8)]
)
def test_passes_in_flight(warmup, total, passes):
    assert passes_in_flight(warmup, total) == passes


def test_a_host_that_is_too_small_is_told_with_the_sizes_that_would_do():
    node = HostNode(limit=8 << 20, ranks=4)
    told = [(HostDemand(1 << 20, 0.1, 1 << 20, passes, passes > 1), node) for passes in (3, 4, 1)]
    words = too_small(0.5, told)
    assert "--burst-offload 0.5 moves up to 4 MiB per rank (1 MiB for each of 4 micro-" in words
    assert "allows 2 MiB per rank (8 MiB per node of 4 ranks)" in words
    assert "set --burst-host-memory 16MiB or --burst-offload 0.25" in words
    # What is advised does.
    total = told[1][0].total
    assert 0.25 / 0.5 * total <= node.share
    assert size_of("16MiB", "") // 4 >= total
    assert too_small(0.5, [(one._replace(cut=False), node) for one, node in told]) is None


def test_the_line_says_the_choice_with_its_numbers():
    mine, node = HostDemand(2 << 20, 0.25, 4 << 20, 3, False), HostNode(64 << 20, 4)
    words = line(0.5, mine, node, link=float(4 << 20))
    for part in (
        "--burst-offload auto: 0.5 of saved activations",
        "saves 2 MiB and takes 250 ms",
        "copies 4.19 MB/s with 4 ranks of a node: fraction 0.5 overlaps with compute, and",
        "at most 6 MiB per rank (3 micro-batches in flight); 16 MiB per rank allowed (64 MiB",
    ):
        assert part in words
    fixed = line(0.5, mine, node)
    assert "link" not in fixed
    assert "at most 12 MiB per rank" in fixed  # what was measured was half of it already
