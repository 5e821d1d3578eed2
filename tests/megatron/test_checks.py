"""Settings of Megatron that BurstAttention does not support are named, never ignored."""

import dataclasses
from types import SimpleNamespace

import pytest
from megatron.core.transformer.transformer_config import TransformerConfig
from parsed import problems_of

import megatron_burst as mb
from megatron_burst.megatron.checks import command_line
from megatron_burst.megatron.checks.config import check_layer, kernel_problems, layer_problems
from megatron_burst.megatron.checks.cuda_graphs import (
    captured,
    contain_attention,
    graph_problems,
)

MODULES = {field.name for field in dataclasses.fields(TransformerConfig)}
SCOPE = "cuda_graph_modules" if "cuda_graph_modules" in MODULES else "cuda_graph_scope"


def config(cp=2, **changes):
    """Return a configuration of this Megatron-Core.

    Fields that it lacks, or does not accept without a GPU, are set afterwards.
    """
    settings = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
    made = TransformerConfig(**settings, context_parallel_size=cp, attention_dropout=0.0)
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def told(burst=None, **changes):
    burst = burst or mb.BurstConfig(kernel="reference")
    return [
        (problem.reason, problem.remove) for problem in layer_problems(config(**changes), burst)
    ]


@pytest.mark.parametrize(
    ("impl", "modules", "inside"),
    [
        ("local", [], True),
        ("local", ["attn"], True),
        ("local", ["mlp"], True),  # Megatron's own graphs of it are those of the layer
        ("local", ["mamba", "moe"], True),
        ("local", ["moe_router", "moe_preprocess"], False),
        ("transformer_engine", [], True),
        ("transformer_engine", ["attn", "mlp"], True),
        ("transformer_engine", ["mlp", "moe"], False),
        ("none", ["attn"], False),
    ],
)
def test_graphs_of_layers_may_contain_attention_with_one_plan(impl, modules, inside):
    for given in (modules, ",".join(modules), [SimpleNamespace(name=one) for one in modules]):
        asked = {"cuda_graph_impl": impl, SCOPE: given}
        assert contain_attention(config(**asked)) == inside
        assert told(**asked) == []
        assert len(told(**asked, qk_clip=True)) == inside


@pytest.mark.parametrize(
    ("impl", "modules"),
    [("full_iteration", []), ("local", ["full_iteration"]), ("a newer one", ["mlp"])],
)
def test_graphs_of_whole_iterations_are_refused(impl, modules):
    ((reason, remove),) = told(cuda_graph_impl=impl, **{SCOPE: modules})
    assert reason.startswith("--cuda-graph-impl captures whole iterations, in which Python cuts")
    assert remove == ("--cuda-graph-impl",)
    assert not told(cuda_graph_impl=impl, **{SCOPE: modules}, cp=1)


@pytest.mark.parametrize(
    ("changes", "burst", "words"),
    [
        (
            {},
            {"pack": "documents"},
            "--burst-pack documents: every micro-batch has its own documents",
        ),
        ({}, {"mask": "masks:mine"}, "--burst-mask masks:mine is called for every batch"),
        ({}, {"attention_layout": "striped"}, "--burst-attention-layout striped exchanges rows"),
        ({"sft": True}, {}, "with --sft: every micro-batch has its own documents"),
        ({"reset_attention_mask": True}, {}, "--reset-attention-mask: every micro-batch has"),
        ({"dataloader_inter_document_masking": True}, {}, "--dataloader-inter-document-masking"),
        ({"hybrid_context_parallel": True}, {}, "--hybrid-context-parallel: groups change with"),
        ({"dynamic_context_parallel": True}, {}, "--dynamic-context-parallel: groups change w"),
        ({"log_max_attention_logit": True}, {}, "--log-max-attention-logit: the optimizer step"),
        ({"qk_clip": True}, {}, "with --qk-clip: the optimizer step replaces the tensor"),
        (
            {"experimental_attention_variant": "dsa"},
            {},
            "variant: the model has layers that were not",
        ),
        ({"is_hybrid_model": True}, {}, "--hybrid-layer-pattern: the model has layers"),
    ],
)
def test_what_changes_from_call_to_call_is_in_no_graph(changes, burst, words):
    chosen = mb.BurstConfig(kernel="reference", **burst)
    asked = config(cuda_graph_impl="transformer_engine", **{SCOPE: ["attn"]}, **changes)
    (reason,) = [p.reason for p in graph_problems(asked, chosen)]
    assert reason.startswith("--cuda-graph-impl captures attention, ")
    assert words in reason
    apart = config(cuda_graph_impl="transformer_engine", **{SCOPE: ["mlp"]}, **changes)
    assert not [*graph_problems(apart, chosen)]


def test_graphs_of_layers_that_pass_states_are_refused():
    (problem,) = graph_problems(
        config(cuda_graph_impl="local", **{SCOPE: []}), mb.BurstConfig(), states=True
    )
    assert "whole layers of a model whose linear layers pass states" in problem.reason
    assert "--cuda-graph-impl may capture moe_router, moe_preprocess (--cuda-" in problem.reason


@pytest.mark.parametrize("older", ["enable_cuda_graph", "external_cuda_graph"])
def test_older_names_of_graphs_are_known(older):
    # Megatron's own constructor turns them into the newer ones.
    made = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, context_parallel_size=2,
        attention_dropout=0.0, **{older: True, SCOPE: []},
    )  # fmt: skip
    assert made.cuda_graph_impl != "none"
    made.qk_clip = True
    (problem,) = layer_problems(made, mb.BurstConfig(kernel="reference"))
    assert problem.remove == (f"--{older.replace('_', '-')}",)


@pytest.mark.parametrize(
    ("impl", "modules"),
    [("transformer_engine", ["mlp"]), ("transformer_engine", ["moe_router", "moe_preprocess"]),
     ("local", ["moe_router", "moe_preprocess"]), ("local", ["mamba"]), ("none", ["attn"]),
     ("none", "full")],
)  # fmt: skip
def test_graphs_beside_attention_are_let_be_but_not_with_a_store(impl, modules):
    assert told(cuda_graph_impl=impl, **{SCOPE: modules}) == []
    if impl == "none":
        return
    kept = mb.BurstConfig(kernel="reference", store=0.5)
    ((reason, _),) = told(
        kept, cuda_graph_impl=impl, **{SCOPE: modules}, recompute_granularity="full"
    )
    assert "--burst-attention-store 0.5 needs Python in every step" in reason


def test_the_default_scope_of_this_megatron_is_whole_layers():
    made = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, cuda_graph_impl="local"
    )
    assert captured(made) == set()


@pytest.mark.parametrize(
    ("name", "flag", "words"),
    [  # Megatron-LM has no flag for the first two settings
        ("fp8_dot_product_attention", "fp8_dot_product_attention", "attention in fp8"),
        ("fp8_multi_head_attention", "fp8_multi_head_attention", "attention in fp8"),
        ("sequence_packing_scheduler", "--sequence-packing-scheduler", "cuts packed batches"),
        ("use_kitchen_attention", "--use-kitchen-attention", "replaces the attention"),
        (
            "batch_invariant_mode",
            "--batch-invariant-mode",
            "its rounding depends on the number of ranks",
        ),
        (
            "overlap_moe_expert_parallel_comm",
            "--overlap-moe-expert-parallel-comm",
            "interleaving the layers of two micro-batches",
        ),
    ],
)
def test_a_setting_of_other_attention_is_named(name, flag, words):
    ((reason, remove),) = told(**{name: True})
    assert reason.startswith(f"{flag}: ")
    assert words in reason
    assert remove == (flag,)


BALANCED = mb.BurstConfig(kernel="reference", layout="balanced")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"calculate_per_token_loss": False}, "divides each rank's loss by this number"),
        (
            {"position_embedding_type": "rope", "apply_rope_fusion": True},
            "fused rope requires zigzag within",
        ),
        (
            {"multi_latent_attention": True, "apply_rope_fusion": True},
            "fused rope of latent attention requires",
        ),
        ({"linear_attention_freq": 4}, "--linear-attention-freq: --burst-layout balanced"),
        (
            {"experimental_attention_variant": "csa"},
            "--experimental-attention-variant csa requires",
        ),
    ],
)
def test_what_excludes_layout_balanced_is_named(changes, words):
    ((reason, _),) = told(BALANCED, **{"calculate_per_token_loss": True} | changes)
    assert words in reason
    assert not told(BALANCED, calculate_per_token_loss=True)
    assert not told(BALANCED, cp=1, **changes)


def test_tensor_parallel_ranks_share_the_tokens_of_a_rank():
    changes = {"tensor_model_parallel_size": 4, "calculate_per_token_loss": True}
    made = config(**changes, sequence_parallel=True)
    (problem,) = layer_problems(made, BALANCED, 20)
    assert "20 is not divisible by --context-parallel-size (2) x --tensor" in problem.reason
    for fits, length in ((made, 24), (config(**changes), 20)):
        assert not [*layer_problems(fits, BALANCED, length)]


@pytest.mark.parametrize("name", ["hybrid_context_parallel", "dynamic_context_parallel"])
@pytest.mark.parametrize("cp", [1, 2])
def test_groups_that_change_with_the_micro_batch(name, cp):
    """A loop on Megatron-Core may use them; features that use the group of the model are named."""
    flag, per_token = f"--{name.replace('_', '-')}", {"calculate_per_token_loss": True}
    given = {name: True, "cp": cp, **per_token}
    assert not told(**given)
    for setting, words in (
        ("multi_latent_attention", "Megatron's latent attention does not support"),
        ("mtp_num_layers", "in the group with which the model was built"),
        ("is_hybrid_model", "Mamba layers"),
    ):
        ((reason, remove),) = told(**given, **{setting: 1})
        assert reason.startswith(flag)
        assert words in reason
        assert remove == (flag,)
    ((reason, _),) = told(**given | {"calculate_per_token_loss": False})
    assert "requires --calculate-per-token-loss: without it" in reason
    staged = told(**given, pipeline_model_parallel_size=2)
    assert bool(staged) == (name == "hybrid_context_parallel")


@pytest.mark.parametrize("cp", [1, 2])
def test_scripts_of_megatron_lm_cannot_change_groups(cp):
    for name, words in (
        ("hybrid_context_parallel", "Megatron-LM's training loop does not work with it: its rerun"),
        ("dynamic_context_parallel", "cuts batches with Transformer Engine"),
    ):
        (problem,) = launch(**{name: True, "context_parallel_size": cp})
        assert words in problem.reason
        assert problem.remove == (f"--{name.replace('_', '-')}",)


def test_a_store_and_memory_that_is_freed_beneath_it():
    kept = mb.BurstConfig(kernel="reference", store=0.5)
    changes = {"fine_grained_activation_offloading": True, "recompute_granularity": "full"}
    ((reason, _),) = told(kept, **changes)
    assert "keeps outputs whose memory --fine-grained-activation-offloading frees" in reason
    assert not told(**changes)


@pytest.mark.parametrize("name", ["qk_clip", "log_max_attention_logit"])
def test_largest_logits_need_a_kernel_that_tells_them(name):
    flag = f"--{name.replace('_', '-')}"
    made = config(**{name: True})
    words = rf"{flag} needs .*aten does .*use triton, flex or reference.*add --burst-kernel auto"
    with pytest.raises(ValueError, match=words):
        check_layer(made, mb.BurstConfig(kernel="aten"))
    assert told(mb.BurstConfig(kernel="flex"), **{name: True}) == []
    (problem,) = kernel_problems(made, mb.BurstConfig())
    assert problem.add == ("--burst-kernel reference",)  # there is no CUDA here
    assert flag in problem.reason
    assert "requires Transformer Engine 2.9.0 or later" in problem.reason  # Megatron's own words
    for without in (config(cp=1, **{name: True}), config()):
        assert not [*kernel_problems(without, mb.BurstConfig())]
    assert not [*kernel_problems(made, mb.BurstConfig(algorithm="megatron"))]
    assert told(**{name: True}) == []


def test_flags_that_choose_a_kernel_of_other_attention_are_told_to_do_nothing():
    args, burst = SimpleNamespace(context_parallel_size=2), mb.BurstConfig()
    line = command_line.idle(
        args, burst, ["--attention-backend", "fused", "--flash-attention-version=3"]
    )
    assert line is not None
    assert line.startswith("--attention-backend, --flash-attention-version choose a kernel of")
    assert command_line.idle(args, burst, ["--burst-kernel", "aten"]) is None


def test_the_flag_is_idle_on_one_rank_unless_packs_are_trees():
    args = SimpleNamespace(context_parallel_size=1)
    line = command_line.idle(args, mb.BurstConfig(), [])
    assert line is not None
    assert "has no effect at --context-parallel-size 1" in line
    assert command_line.idle(args, mb.BurstConfig(pack="trees"), []) is None


def launch(**given):
    """Return the launcher's problems for these arguments, completed as in the launcher."""
    given = {"context_parallel_algo": "burst", "context_parallel_size": 2} | given
    return problems_of(SimpleNamespace(**given))


@pytest.mark.parametrize("given", [{"cuda_graph_impl": "local"}, {"enable_cuda_graph": True}])
def test_without_cuda_a_graph_is_told_of_once(monkeypatch, given):
    sft = [each.reason for each in launch(**given, sft=True)]
    assert sum("attention, which does not work with --sft" in reason for reason in sft) == 1
    monkeypatch.setattr(command_line.patching, "installed", lambda name: name == "cpu")
    (problem,) = launch(**given)
    assert "records CUDA kernels, which --cpu does not use" in problem.reason
    assert problem.remove == tuple(f"--{name.replace('_', '-')}" for name in given)


def test_options_of_nccl_on_another_backend_are_refused_before_a_model_is_built():
    (problem,) = launch(distributed_backend="gloo", burst_nccl_max_ctas=4)
    assert problem.reason.startswith("--burst-nccl-max-ctas 4 has an effect only with NCCL")
    assert problem.remove == ("--burst-nccl-max-ctas",)
    for backend in ("nccl", "cpu:gloo,cuda:nccl"):
        assert not launch(distributed_backend=backend, burst_nccl_max_ctas=4)
    assert not launch(distributed_backend="gloo")


@pytest.mark.parametrize("pack", ["off", "documents"])
def test_documents_packed_anew_lose_the_padding_that_fused_rope_needs(pack):
    settings = SimpleNamespace(sft=True, position_embedding_type="rope", apply_rope_fusion=True)
    found = [str(each) for each in command_line._packed(settings, mb.BurstConfig(pack=pack))]
    assert len(found) == (pack == "documents")
    assert all("fused rope does not work with --sft and --burst-pack" in each for each in found)
