"""Bridge's Qwen2.5-VL and Qwen3-VL, tiny and random, on the ranks of one sequence."""

import json
import os
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist

LENGTH = 64
IMAGE, VIDEO, BEGIN, END = 60, 61, 62, 63
GRIDS = [[1, 8, 4], [1, 4, 4], [1, 8, 8]]  # patches; four are one token
PLACES = [(0, 12), (0, 30), (1, 40)]  # row, first token: over edges of ranks


TEXT = {
    "num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 48, "num_attention_heads": 4,
    "num_query_groups": 2, "vocab_size": 64, "seq_length": LENGTH, "image_token_id": IMAGE,
    "video_token_id": VIDEO, "vision_start_token_id": BEGIN, "vision_end_token_id": END,
    "normalization": "RMSNorm", "gated_linear_unit": True, "add_bias_linear": False,
    "share_embeddings_and_output_weights": False, "make_vocab_size_divisible_by": 4,
    "calculate_per_token_loss": True, "use_cpu_initialization": True, "bf16": False,
    "params_dtype": torch.float32, "pipeline_dtype": torch.float32, "apply_rope_fusion": False,
    "persist_layer_norm": False, "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False, "bias_activation_fusion": False, "bias_dropout_fusion": False,
    "cross_entropy_loss_fusion": False, "hidden_dropout": 0.0, "attention_dropout": 0.0,
}  # fmt: skip
EYES = {
    "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "in_channels": 3,
    "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 32,
}  # fmt: skip
MOE = {
    "num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 16,
    "moe_grouped_gemm": False, "moe_permute_fusion": False, "moe_aux_loss_coeff": 0.0,
    "moe_router_load_balancing_type": "none", "freeze_vision_model": False,
    "freeze_language_model": False,
}  # fmt: skip


def provider(ranks, model="qwen2.5", **changes):
    """Return the provider of a language model of two layers and an encoder of two layers."""
    from megatron.bridge.models import qwen_vl
    from megatron.bridge.models.gpt_provider import local_layer_spec
    from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig

    sizes = {**TEXT, "context_parallel_size": ranks, "transformer_layer_spec": local_layer_spec}
    if model == "qwen2.5":
        eyes = Qwen2_5_VLVisionConfig(window_size=16, fullatt_block_indexes=[1], **EYES)
        sizes |= {"vision_config": eyes, "mrope_section": [1, 1, 2], "add_qkv_bias": True}
        return qwen_vl.Qwen25VLModelProvider(**(sizes | changes))
    from transformers.models.qwen3_vl.configuration_qwen3_vl import (
        Qwen3VLTextConfig,
        Qwen3VLVisionConfig,
    )

    kind = qwen_vl.Qwen3VLModelProvider
    if model == "qwen3 moe":
        kind, sizes = qwen_vl.Qwen3VLMoEModelProvider, sizes | MOE
    # Both layers of the language model add features of the encoder's layers.
    eyes = Qwen3VLVisionConfig(num_position_embeddings=64, deepstack_visual_indexes=[0, 1], **EYES)
    words = Qwen3VLTextConfig(
        hidden_size=32, num_attention_heads=4, head_dim=8,
        rope_scaling={"rope_type": "default", "mrope_section": [2, 1, 1]},
    )  # fmt: skip
    sizes |= {"vision_config": eyes, "hf_text_config": words, "mrope_section": [2, 1, 1]}
    return kind(**(sizes | changes))


def run(work):
    """Run one rank; rank 0 writes [loss, {name: norm of the gradient}], summed over ranks."""
    from megatron.bridge.models.qwen_vl import qwen3_vl_provider
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils

    from megatron_burst.recipes import apply_burst

    moe_utils.te_general_gemm = None  # which Megatron-Core 0.16 forgets without the package
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    parallel_state.initialize_model_parallel(context_parallel_size=ranks)
    random.model_parallel_cuda_manual_seed(7)
    made = provider(ranks, work["model"])
    made._pg_collection = ProcessGroupCollection.use_mpu_process_groups()
    own = made.transformer_layer_spec
    if ranks > 1:
        apply_burst(SimpleNamespace(model=made), layout=work["vision"])
    made.finalize()
    # Qwen3-VL's own layers, in which CPUs have no Transformer Engine.
    name = "get_gpt_layer_with_transformer_engine_spec"
    with mock.patch.object(qwen3_vl_provider, name, return_value=own(made)):
        model = made.provide(True, True)
    for index, (name, weight) in enumerate(sorted(model.named_parameters())):
        norm = "norm" in name
        noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(index))
        weight.data.copy_(noise * (0.1 if norm else 0.2) + norm)
    tokens, labels, mask, pixels = batch()
    with mock.patch.multiple(torch.cuda.nvtx, range_push=mock.DEFAULT, range_pop=mock.DEFAULT):
        out = model(
            input_ids=tokens, pixel_values=pixels, image_grid_thw=torch.tensor(GRIDS),
            labels=labels, loss_mask=mask,
        )  # fmt: skip
    losses, mask = out if ranks > 1 else (out, mask)
    loss = (losses * mask).sum()
    found(model, loss, work["output"])


def found(model, loss, output):
    """Write [loss, {name: norm of the gradient}], summed over ranks, on rank 0."""
    from megatron.core import parallel_state

    loss.backward()
    grads = {name: x.grad for name, x in model.named_parameters() if x.grad is not None}
    group = parallel_state.get_context_parallel_group()
    total = loss.detach()
    for value in (total, *grads.values()):
        dist.all_reduce(value, group=group)
    if os.environ["RANK"] == "0":
        norms = {name: x.double().norm().item() for name, x in grads.items()}
        Path(output).write_text(json.dumps([total.item(), norms]))


def batch():
    draw = torch.Generator().manual_seed(3)
    tokens, labels = torch.randint(0, IMAGE, (2, 2, LENGTH), generator=draw)
    mask = (torch.rand(2, LENGTH, generator=draw) < 0.7).float()
    for (row, at), (frames, high, wide) in zip(PLACES, GRIDS, strict=True):
        count = frames * high * wide // 4
        tokens[row, at - 1], tokens[row, at + count] = BEGIN, END
        tokens[row, at : at + count] = IMAGE
    patches = sum(frames * high * wide for frames, high, wide in GRIDS)
    return tokens, labels, mask, torch.randn(patches, 3 * 2 * 4 * 4, generator=draw)
