"""Ranks of `test_mtp_gradients.py`: a whole GPT with MTP heads.

It uses Megatron's schedule, data-parallel wrapper and finalizing of gradients.
"""

import torch
from session import parallel

SEQUENCE, VOCABULARY = 32, 61
MASKS = {
    "all": range(SEQUENCE),
    "none": (),
    "first": (0,),
    "last": (SEQUENCE - 1,),
    "one shard": (9, 10),  # both in a chunk of rank 2
    "prefix": range(13),
    "thirds": range(1, SEQUENCE, 3),
}


def gradients(mask_name, depth, per_token, context):
    """Return the gradient of every parameter after two micro-batches, by name.

    kept: a name in MASKS; the second micro-batch has its mirror image. context: number of ranks, of
    four, that share a sequence; further ranks repeat it.
    """
    from megatron.core.distributed import DistributedDataParallel as Wrapper
    from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    with parallel("zigzag", context_parallel_size=context):
        config = _config(depth, per_token, context)
        model = Wrapper(
            config,
            DistributedDataParallelConfig(use_distributed_optimizer=False),
            _model(config),
        )
        config.finalize_model_grads_func = finalize_model_grads
        config.grad_scale_func = None
        try:
            get_forward_backward_func()(
                forward_step_func=_step(per_token), data_iterator=iter(_batches(mask_name)),
                model=model, num_microbatches=2, seq_length=SEQUENCE, micro_batch_size=1,
                forward_only=False,
            )  # fmt: skip
        finally:
            MTPLossLoggingHelper.tracker.clear()
        return {
            name.removeprefix("module."): parameter.main_grad.clone()
            for name, parameter in model.named_parameters()
        }


def _config(depth, per_token, context):
    from megatron.core.transformer.transformer_config import TransformerConfig

    import megatron_burst as mb

    config = TransformerConfig(
        num_layers=1, hidden_size=32, ffn_hidden_size=48, num_attention_heads=4,
        mtp_num_layers=depth, mtp_loss_scaling_factor=0.3, calculate_per_token_loss=per_token,
        context_parallel_size=context, attention_dropout=0.0, hidden_dropout=0.0,
        init_method_std=0.3, use_cpu_initialization=True, gradient_accumulation_fusion=False,
        persist_layer_norm=False, bias_activation_fusion=False, bias_dropout_fusion=False,
        masked_softmax_fusion=False, apply_rope_fusion=False, pipeline_dtype=torch.float32,
    )  # fmt: skip
    if context == 1:
        return config
    return mb.megatron.configure(config, mb.BurstConfig(), seq_length=SEQUENCE)


def _model(config):
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_local_spec,
        get_gpt_mtp_block_spec,
    )
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    torch.manual_seed(3)
    model_parallel_cuda_manual_seed(3)
    layer = get_gpt_layer_local_spec()
    return GPTModel(
        config, layer, VOCABULARY, SEQUENCE, position_embedding_type="rope",
        mtp_block_spec=get_gpt_mtp_block_spec(config, layer, use_transformer_engine=False),
    )  # fmt: skip


def _batches(mask_name):
    draw = torch.Generator().manual_seed(5)
    for number in range(2):
        tokens = torch.randint(VOCABULARY, (1, SEQUENCE + 1), generator=draw)
        mask = torch.zeros(1, SEQUENCE)
        mask[:, list(MASKS[mask_name])] = 1
        yield {
            "tokens": tokens[:, :-1], "labels": tokens[:, 1:],
            "loss_mask": mask.flip(-1) if number else mask,
            "position_ids": torch.arange(SEQUENCE)[None],
        }  # fmt: skip


def _step(per_token):
    """Return a forward step.

    With `per_token` the loss function returns a sum and a count, otherwise this rank's share of the
    mean over the whole sequence.
    """
    import megatron_burst.megatron as burst

    def step(batches, model):
        batch = next(batches)
        count = batch["loss_mask"].sum()
        part = {name: burst.shard_sequence(x, None, dim=1) for name, x in batch.items()}
        losses = model(
            part["tokens"], part["position_ids"], None, labels=part["labels"],
            loss_mask=part["loss_mask"],
        )  # fmt: skip

        def loss(losses):
            total = (losses * part["loss_mask"]).sum()
            if per_token:
                return total, part["loss_mask"].sum().int(), {}
            return total / count.clamp(min=1), {}

        return losses, loss

    return step
