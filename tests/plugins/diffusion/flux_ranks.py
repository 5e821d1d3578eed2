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


def built(work, ranks):
    """Return the model of the work."""
    changes = {"tensor_model_parallel_size": work.get("tensor", 1)} | work.get("changes", {})
    made = provider(ranks, **changes)
    if ranks > 1:
        from megatron_burst.recipes import apply_burst

        apply_burst(SimpleNamespace(model=made), **work.get("choices", {}))
    made.finalize()
    return filled(made.provide(), size=0.1)


def trained(model, seed=5):
    """Run the training step, and return the loss and its number of images."""
    from megatron.bridge.diffusion.models.flux import flux_step
    from megatron.bridge.training import losses

    draw = torch.Generator().manual_seed(3)
    data = {
        "latents": torch.randn(2, 4, 8, 12, generator=draw),
        "prompt_embeds": torch.randn(16, 2, 12, generator=draw),
        "pooled_prompt_embeds": torch.randn(2, 8, generator=draw),
        "text_ids": torch.zeros(2, 16, 3),
    }  # fmt: skip
    torch.manual_seed(seed)
    step = flux_step.FluxForwardStep()
    step.autocast_dtype = torch.float32
    with mock.patch.object(losses, "get_rerun_state_machine"):
        output, loss_function = step(training_state(), iter([data]), model)
        return loss_function(output)[:2]


def run(work):
    """Run one rank; rank 0 writes [loss, {name: norm of the gradient}].

    Every rank has the loss of the whole image, so gradients are averaged over ranks.
    """
    model = built(work, start(work))
    loss, count = trained(model)
    write(model, loss, work["output"], count)
