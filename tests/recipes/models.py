"""Eight models from Megatron-Bridge's providers, made tiny, and trained for two steps."""

import functools
import importlib
import json
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist

MOE = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 32}
MOE |= {"moe_grouped_gemm": False, "moe_permute_fusion": False, "moe_aux_loss_coeff": 0.0}
MLA = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_head_dim": 8, "qk_pos_emb_head_dim": 8}
MLA |= {"v_head_dim": 8, "num_query_groups": 4, "add_bias_linear": False}
MLA |= {"gated_linear_unit": True, "normalization": "RMSNorm"}
# As docs/nemo.md calls it -> the module of its provider, its name, and what makes it tiny.
MODELS = {
    "Llama 3.1": ("llama.llama_provider", "Llama31ModelProvider", {}),
    "Qwen3": ("qwen.qwen_provider", "Qwen3ModelProvider", {}),
    "Qwen3 MoE": ("qwen.qwen_provider", "Qwen3MoEModelProvider", MOE),
    "OLMoE": ("olmoe.olmoe_provider", "OlMoEModelProvider", {**MOE, "num_query_groups": 4}),
    "gpt-oss": ("gpt_oss.gpt_oss_provider", "GPTOSSProvider", {**MOE, "window_size": (10, 0)}),
    "DeepSeek-V3": (
        "deepseek.deepseek_provider", "DeepSeekV3ModelProvider",
        {**MOE, **MLA, "moe_router_num_groups": 2, "moe_router_group_topk": 1,
         "moe_layer_freq": [0, 1], "moe_shared_expert_intermediate_size": 32},
    ),
    "Qwen3-Next": ("qwen.qwen_provider", "Qwen3NextModelProvider", MOE),
    "Nemotron-H": (
        "nemotronh.nemotron_h_provider", "NemotronHModelProvider",
        {"hybrid_override_pattern": "M*"},
    ),
}  # fmt: skip
TINY = {
    "num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 64, "num_attention_heads": 4,
    "num_query_groups": 2, "kv_channels": 16, "vocab_size": 128, "seq_length": 64,
    "make_vocab_size_divisible_by": 128, "hidden_dropout": 0.0, "attention_dropout": 0.0,
    # What a GPU has.
    "use_cpu_initialization": True, "bf16": False, "params_dtype": torch.float32,
    "pipeline_dtype": torch.float32, "autocast_dtype": torch.float32, "apply_rope_fusion": False,
    "persist_layer_norm": False, "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False, "bias_activation_fusion": False, "bias_dropout_fusion": False,
    "cross_entropy_loss_fusion": False,
}  # fmt: skip


def run(work):
    """Run one rank of a job, and return name -> losses of two steps or the error."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.tensor_parallel import layers
    from megatron.core.transformer.moe import moe_utils

    dist.init_process_group("gloo")
    size = dist.get_world_size()
    parallel_state.initialize_model_parallel(context_parallel_size=size)
    tensor_parallel.model_parallel_cuda_manual_seed(0)
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # which Megatron-Core 0.16 forgets without the package
    # One rank returns its input, to which local experts then add their biases in place.
    layers.reduce_from_tensor_model_parallel_region = lambda x, *_, **__: x.clone()
    found = {}
    for name in MODELS:
        if size == 1 and name in work["refused"]:
            continue
        try:
            found[name] = losses(name, size)
        except ValueError as error:
            found[name] = str(error)
    if dist.get_rank() == 0:
        Path(work["output"]).write_text(json.dumps(found))
    dist.destroy_process_group()


def losses(name, size):
    """Return the losses of two steps of a model, on one rank or with BurstAttention on several."""
    from megatron.core.utils import get_batch_on_this_cp_rank

    from megatron_burst.recipes import apply_burst, validate

    provider = made(name)
    provider.context_parallel_size = size
    if size > 1:
        recipe = apply_burst(SimpleNamespace(model=provider, dist=None))
        validate.check(recipe)  # as Bridge does, with the rest of a recipe
    torch.manual_seed(0)
    module = importlib.import_module(type(provider).__module__)
    # Else gpt-oss takes attention that is not fused.
    with mock.patch.object(module, "is_te_min_version", return_value=True, create=True):
        model = provided(provider)
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(128, (1, 65), generator=draw)
    whole = {
        "tokens": tokens[:, :-1], "labels": tokens[:, 1:], "position_ids": torch.arange(64)[None],
        "loss_mask": (torch.rand(1, 64, generator=draw) < 0.8).float(), "attention_mask": None,
    }  # fmt: skip
    batch = get_batch_on_this_cp_rank(dict(whole))
    found = []
    for _ in range(2):
        mask = torch.ones(1, 1, 64, 64, dtype=torch.bool).triu(1) if size == 1 else None
        out = model(batch["tokens"], batch["position_ids"], mask, labels=batch["labels"])
        loss = (out * batch["loss_mask"]).sum() / whole["loss_mask"].sum()
        loss.backward()
        total = loss.detach().clone()
        dist.all_reduce(total)
        found.append(float(total))
        for weight in model.parameters():
            if weight.grad is not None:
                dist.all_reduce(weight.grad)
                weight.data -= 0.5 * weight.grad
                weight.grad = None
    return found


def made(name):
    """Return the provider, tiny and for a CPU."""
    place, kind, sizes = MODELS[name]
    module = importlib.import_module(f"megatron.bridge.models.{place}")
    cls = getattr(module, kind)
    known = cls.__dataclass_fields__
    sizes = TINY | sizes
    provider = cls(**{field: value for field, value in sizes.items() if field in known})
    spec = getattr(provider, "transformer_layer_spec", None)
    if getattr(spec, "__name__", "") in ("default_layer_spec", "olmoe_layer_spec"):
        own = getattr(module, "OLMoESelfAttention", None)
        provider.transformer_layer_spec = functools.partial(local, attention=own)
    return provider


def local(config, attention=None):
    """Return Megatron's local layers in place of Transformer Engine's."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    block = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    for layer in block.layer_specs if attention else ():
        layer.submodules.self_attention.module = attention
    return block


def provided(provider):
    from megatron.core.process_groups_config import ProcessGroupCollection

    provider._pg_collection = ProcessGroupCollection.use_mpu_process_groups()
    finalize = getattr(provider, "finalize", None)
    if finalize is not None:
        finalize()
    return provider.provide(pre_process=True, post_process=True)
