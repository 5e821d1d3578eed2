"""Small random models of Bridge 0.6 on forked ranks, with their real classes.

A plain GPT, and models that Bridge trains on one context-parallel rank only: Gemma 3 VL and
MiMo-V2-Flash. Runs are jobs (`jobs`).
"""

import functools
import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from jobs import serve_jobs
from loaded import BRIDGE, load

sys.path.append(str(Path(__file__).parents[3] / "recipes"))

MIMO = "megatron.bridge.models.mimo_v2_flash"
SIZES = {
    "num_layers": 3, "hybrid_attention_pattern": [0, 1, 1], "window_size": 9, "v_head_dim": 6,
    "kv_channels": 8, "full_attn_num_query_groups": 1, "swa_num_query_groups": 2,
    "attention_value_scale": 0.7, "rotary_base": (100, 10_000), "autocast_dtype": torch.float32,
}  # fmt: skip


def mimo(ranks):
    import gemma
    import qwen
    import te_modules
    from megatron.core.models.gpt import gpt_layer_specs

    te_modules.use(f"{MIMO}.modeling_mimo_v2_flash", f"{MIMO}.mimo_v2_flash_provider")
    layers = importlib.import_module(f"{MIMO}.modeling_mimo_v2_flash")
    # Layers of Megatron for those of Transformer Engine; their attention is Bridge's.
    layers.get_gpt_decoder_block_spec = lambda config, use_transformer_engine: (
        gpt_layer_specs.get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    )
    kind = importlib.import_module(f"{MIMO}.mimo_v2_flash_provider").MiMoV2FlashModelProvider
    return gemma.of(kind, qwen.TEXT | SIZES | {"context_parallel_size": ranks})


# Windows in layers 1 and 3; layers 3 and 4 take the keys of 1 and 2, and 2 has its keys as values.
GEMMA4 = {
    "num_layers": 4, "num_kv_shared_layers": 2, "kv_channels": 8, "global_kv_channels": 16,
    "num_global_query_groups": 1, "attention_k_eq_v": True, "window_size": (8, 0),
    "window_attn_skip_freq": [1, 0, 1, 0], "use_double_wide_mlp": True,
    "per_layer_embed_vocab_size": 64, "per_layer_embed_dim": 8, "final_logit_softcapping": 3.0,
    "autocast_dtype": torch.float32, "share_embeddings_and_output_weights": True,
}  # fmt: skip


def gemma4(ranks):
    import gemma
    import qwen
    from megatron.bridge.models.gemma.gemma4_provider import Gemma4DenseProvider

    return gemma.of(Gemma4DenseProvider, qwen.TEXT | GEMMA4 | {"context_parallel_size": ranks})


GEMMA4_EXPERTS = {
    "num_layers": 4, "kv_channels": 8, "num_query_groups": 2, "global_head_dim": 16,
    "num_global_key_value_heads": 1, "attention_k_eq_v": True, "window_size": 9,
    "interleaved_attn_pattern": (1, 1), "num_moe_experts": 4, "moe_router_topk": 2,
    "moe_ffn_hidden_size": 16, "moe_shared_expert_intermediate_size": 16,
    "moe_grouped_gemm": False, "moe_permute_fusion": False, "moe_aux_loss_coeff": 0.0,
    "moe_router_load_balancing_type": "none", "final_logit_softcapping": 3.0,
    "autocast_dtype": torch.float32,
}  # fmt: skip


def gemma4_experts(ranks):
    import gemma
    import qwen
    import te_modules

    homes = [
        f"megatron.bridge.models.gemma.{name}" for name in ("modeling_gemma4", "gemma4_provider")
    ]
    te_modules.use(*homes)
    layers, providers = (importlib.import_module(home) for home in homes)
    # Layers of Megatron for those of Transformer Engine; their attention is Bridge's.
    spec = functools.partial(layers._gemma4_block_spec, use_transformer_engine=False)
    sizes = {"context_parallel_size": ranks, "transformer_layer_spec": spec}
    return gemma.of(providers.Gemma4ModelProvider, qwen.TEXT | GEMMA4_EXPERTS | sizes)


def gpt(ranks):
    import gemma
    import qwen
    from megatron.bridge.models.gpt_provider import GPTModelProvider, local_layer_spec

    sizes = {"context_parallel_size": ranks, "transformer_layer_spec": local_layer_spec}
    sizes["position_embedding_type"] = "rope"
    return gemma.of(GPTModelProvider, qwen.TEXT | sizes)


def text(provider, work):
    """Write the loss and the gradient norms by name, summed over ranks; only rank 0 writes."""
    import qwen
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel import random

    from megatron_burst.megatron import shard_sequence
    from megatron_burst.recipes import apply_burst

    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    parallel_state.initialize_model_parallel(context_parallel_size=ranks)
    random.model_parallel_cuda_manual_seed(7)
    made = provider(ranks)
    made._pg_collection = ProcessGroupCollection.use_mpu_process_groups()
    if ranks > 1:
        apply_burst(SimpleNamespace(model=made), **work["choices"])
    made.finalize()
    model = made.provide(True, True)
    for index, (name, weight) in enumerate(sorted(model.named_parameters())):
        noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(index))
        weight.data.copy_(noise * (0.1 if "norm" in name else 0.3) + ("norm" in name))
    draw = torch.Generator().manual_seed(3)
    tokens, labels = torch.randint(0, 64, (2, 1, qwen.LENGTH), generator=draw)
    # Which Megatron's own attention needs on one rank.
    hidden = torch.ones(1, 1, qwen.LENGTH, qwen.LENGTH, dtype=torch.bool).triu(1)
    if ranks > 1:
        tokens, labels, hidden = shard_sequence(tokens), shard_sequence(labels), None
    loss = model(tokens, None, hidden, labels=labels).sum()
    qwen.found(model, loss, work["output"])


def vision(work):
    """Write the same for a model of `gemma`."""
    import gemma

    gemma.run(work)


# Model -> (function, arguments, number of ranks, its work) of each run; the first is on one rank.
RUNS = {
    "gemma3 vl": [(vision, (), ranks, {"vision": "zigzag"}) for ranks in (1, 2)],
    "gemma3": [
        (vision, (), 1, {}),
        (vision, (), 2, {"vision": "zigzag", "choices": {"sequence_chunks": 2}}),
        (vision, (), 2, {"vision": "contiguous", "choices": {"algorithm": "all_gather"}}),
    ],
    "gemma4 dense": [
        (text, (gemma4,), 1, {}), (text, (gemma4,), 2, {"choices": {}}),
        (text, (gemma4,), 2, {"choices": {"layout": "contiguous", "algorithm": "all_gather"}}),
        (text, (gemma4,), 2, {"choices": {"mlp_tiles": 2}}),
        (text, (gemma4,), 2, {"choices": {"lm_head_loss": "single_pass"}}),
    ],
    "gemma4 experts": [
        (text, (gemma4_experts,), 1, {}),
        (text, (gemma4_experts,), 2, {"choices": {"layout": "contiguous"}}),
    ],
    "gpt": [(text, (gpt,), 1, {}), (text, (gpt,), 2, {"choices": {}})],
    "mimo": [
        (text, (mimo,), 1, {}), (text, (mimo,), 2, {"choices": {"layout": "contiguous"}}),
        (text, (mimo,), 2, {"choices": {"algorithm": "ulysses"}}),
        (text, (mimo,), 2, {"choices": {"sequence_chunks": 2}}),
    ],
}  # fmt: skip


def job(work):
    function, arguments, _, extra = RUNS[work["model"]][work["number"]]
    function(*arguments, work | extra)


if __name__ == "__main__":
    from megatron_burst.plugins.testing import recipes

    recipes.import_bridge()
    import te_modules

    te_modules.use()  # before Bridge's models are imported
    load([*BRIDGE, "megatron.bridge.models"])
    serve_jobs(job)
