"""Model and optimizer of `pretrain_gpt.py`, from parts of Megatron-Core.

The module assigns flags to fields of Megatron's configurations.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig


def model_config(args: Namespace) -> TransformerConfig:
    """Return the configuration of a Llama model: RMSNorm, SwiGLU, no biases, no hidden dropout."""
    config_class, fields = TransformerConfig, {}
    if args.multi_latent_attention:
        config_class, fields = MLATransformerConfig, _latent_fields(args)
    return config_class(
        **fields,
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        ffn_hidden_size=args.ffn_hidden_size,
        num_attention_heads=args.num_attention_heads,
        num_query_groups=args.num_query_groups,
        kv_channels=args.kv_channels,
        qk_layernorm=args.qk_layernorm,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        window_size=args.window_size,
        window_attn_skip_freq=args.window_attn_skip_freq,
        softmax_type=args.softmax_type,
        mtp_num_layers=args.mtp_num_layers,
        attention_dropout=args.attention_dropout,
        init_method_std=args.init_method_std,
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=args.num_virtual_stages_per_pipeline_rank,
        microbatch_group_size_per_vp_stage=args.pipeline_model_parallel_size,
        # With batched transfers, two interleaved stages would swap gradients and activations.
        batch_p2p_comm=args.num_virtual_stages_per_pipeline_rank is None,
        overlap_p2p_comm=args.num_virtual_stages_per_pipeline_rank is not None,
        context_parallel_size=args.context_parallel_size,
        hierarchical_context_parallel_sizes=args.hierarchical_context_parallel_sizes,
        sequence_parallel=args.sequence_parallel,
        recompute_granularity=args.recompute_granularity,
        recompute_method=args.recompute_method,
        recompute_num_layers=args.recompute_num_layers,
        recompute_modules=args.recompute_modules,
        # Otherwise each context-parallel rank divides its loss by its own number of tokens.
        calculate_per_token_loss=True,
        bf16=args.bf16,
        params_dtype=torch.bfloat16 if args.bf16 else torch.float32,
        pipeline_dtype=torch.bfloat16 if args.bf16 else torch.float32,
        use_cpu_initialization=not torch.cuda.is_available(),
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
    )


def _latent_fields(args: Namespace) -> dict[str, Any]:
    return {
        "q_lora_rank": None,
        "kv_lora_rank": args.kv_lora_rank,
        "qk_head_dim": args.qk_head_dim,
        "qk_pos_emb_head_dim": args.qk_pos_emb_head_dim,
        "v_head_dim": args.v_head_dim,
        "rope_type": "rope",
        "rotary_base": args.rotary_base,
    }


def build_model(args: Namespace, config: TransformerConfig) -> list[DistributedDataParallel]:
    """Return the model stages of this rank, each wrapped in Megatron's data parallelism.

    An interleaved pipeline has several stages per rank.
    """
    virtual = args.num_virtual_stages_per_pipeline_rank
    return [_stage(args, config, i) for i in (range(virtual) if virtual else [None])]


def build_gpt(
    args: Namespace, config: TransformerConfig, virtual: int | None = None, **options: Any
) -> GPTModel:
    """Return a model stage of this rank.

    Args:
        args: Arguments of `arguments.parse_args`.
        config: Configuration of the model.
        virtual: Number of the virtual stage; None without an interleaved pipeline.
        **options: Further arguments of `GPTModel`.
    """
    stage: dict[str, Any] = {"vp_stage": virtual}
    local = args.transformer_impl == "local"
    kind = {
        "qk_layernorm": args.qk_layernorm,
        "multi_latent_attention": args.multi_latent_attention,
    }
    if local:
        layers = get_gpt_layer_local_spec(normalization=config.normalization, **kind)
    else:
        layers = get_gpt_layer_with_transformer_engine_spec(**kind)
    mtp_block = None
    if args.mtp_num_layers:
        mtp_block = get_gpt_mtp_block_spec(
            config, layers, use_transformer_engine=not local, **stage
        )
    multiple = args.make_vocab_size_divisible_by
    return GPTModel(
        config,
        layers,
        vocab_size=-(-args.vocab_size // multiple) * multiple,
        max_sequence_length=args.seq_length,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, **stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, **stage),
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type="rope",
        rotary_base=args.rotary_base,
        mtp_block_spec=mtp_block,
        **stage,
        **options,
    ).to(torch.cuda.current_device(), config.params_dtype)


def _stage(
    args: Namespace, config: TransformerConfig, virtual: int | None
) -> DistributedDataParallel:
    gpt: torch.nn.Module = build_gpt(args, config, virtual)
    if args.bf16:
        gpt = Float16Module(config, gpt)
    data_parallel = DistributedDataParallelConfig(
        use_distributed_optimizer=args.use_distributed_optimizer, grad_reduce_in_fp32=args.bf16
    )
    return DistributedDataParallel(config, data_parallel, gpt)


def build_optimizer(
    args: Namespace, config: TransformerConfig, stages: list[DistributedDataParallel]
):
    """Return AdamW, and a schedule with warm-up and cosine decay over the run."""
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=args.lr,
            min_lr=args.min_lr,
            weight_decay=args.weight_decay,
            adam_beta2=args.adam_beta2,
            clip_grad=args.clip_grad,
            bf16=args.bf16,
            params_dtype=config.params_dtype,
            use_distributed_optimizer=args.use_distributed_optimizer,
        ),
        stages,
    )
    schedule = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=args.lr,
        min_lr=args.min_lr,
        lr_warmup_steps=args.lr_warmup_iters * args.global_batch_size,
        lr_decay_steps=args.train_iters * args.global_batch_size,
        lr_decay_style="cosine",
        start_wd=args.weight_decay,
        end_wd=args.weight_decay,
        wd_incr_steps=args.train_iters * args.global_batch_size,
        wd_incr_style="constant",
    )
    config.finalize_model_grads_func = finalize_model_grads
    return optimizer, schedule
