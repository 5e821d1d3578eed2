"""Flux of Megatron-Bridge, tiny and random, with its training step, on the ranks of an image."""

from types import SimpleNamespace
from unittest import mock

import torch
from harness import filled, start, training_state, write

SIZES = {
    "num_joint_layers": 2, "num_single_layers": 2, "hidden_size": 48, "ffn_hidden_size": 64,
    "num_attention_heads": 4, "in_channels": 16, "context_dim": 12, "model_channels": 16,
    "axes_dims_rope": [4, 4, 4], "vec_in_dim": 8, "seq_length": 64, "bf16": False,
    "guidance_embed": True, "params_dtype": torch.float32, "pipeline_dtype": torch.float32,
    "autocast_dtype": None, "persist_layer_norm": False, "masked_softmax_fusion": False,
    "bias_activation_fusion": False, "bias_dropout_fusion": False,
}  # fmt: skip


def provider(ranks, **changes):
    import gemma
    from megatron.bridge.diffusion.models.flux.flux_provider import FluxProvider

    return gemma.of(FluxProvider, SIZES | {"context_parallel_size": ranks} | changes)


def run(work):
    """Run one rank; rank 0 writes [loss, {name: norm of the gradient}].

    Every rank has the loss of the whole image, so gradients are averaged over ranks.
    """
    from megatron.bridge.diffusion.models.flux import flux_step
    from megatron.bridge.training import losses

    ranks = start(work)
    made = provider(ranks, **work.get("changes", {}))
    if ranks > 1:
        from megatron_burst.recipes import apply_burst

        apply_burst(SimpleNamespace(model=made), **work.get("choices", {}))
    made.finalize()
    model = filled(made.provide(), size=0.1)
    draw = torch.Generator().manual_seed(3)
    data = {
        "latents": torch.randn(2, 4, 8, 12, generator=draw),
        "prompt_embeds": torch.randn(16, 2, 12, generator=draw),
        "pooled_prompt_embeds": torch.randn(2, 8, generator=draw),
        "text_ids": torch.zeros(2, 16, 3),
    }  # fmt: skip
    torch.manual_seed(5)
    step = flux_step.FluxForwardStep()
    step.autocast_dtype = torch.float32
    with mock.patch.object(losses, "get_rerun_state_machine"):
        output, loss_function = step(training_state(), iter([data]), model)
        loss, count, _ = loss_function(output)
    write(model, loss, work["output"], count)
