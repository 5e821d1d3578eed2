"""Nemotron Labs Diffusion of Megatron-Bridge, tiny and random, with Bridge's training step."""

import contextlib
import math
from types import SimpleNamespace
from unittest import mock

import torch
from harness import filled, start, training_state, write
from qwen import TEXT

LENGTH, BLOCK = 48, 5  # blocks cross the boundaries of ranks, and the last block is shorter
ROPE = {
    "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
    "original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.3, "mscale": 1.0,
    "mscale_all_dim": 1.0,
}  # fmt: skip


def provider(ranks, **changes):
    import gemma
    from megatron.bridge.diffusion.models.nemotron_labs_diffusion import (
        nemotron_labs_diffusion_provider as providers,
    )
    from megatron.bridge.models.gpt_provider import local_layer_spec

    text = SimpleNamespace(
        max_position_embeddings=64, rope_parameters=dict(ROPE), head_dim=8, hidden_size=32,
        num_attention_heads=4, standardize_rope_params=lambda: None,
    )  # fmt: skip
    sizes = TEXT | {
        "context_parallel_size": ranks, "transformer_layer_spec": local_layer_spec,
        "seq_length": LENGTH, "mask_token_id": 63, "block_size": BLOCK, "kv_channels": 8,
        "hf_config": SimpleNamespace(text_config=text), "ar_loss_weight": 0.7,
        "yarn_rotary_scaling_factor": ROPE["factor"],
    }  # fmt: skip
    return gemma.of(providers.NemotronLabsDiffusionModelProvider, sizes | changes)


def dense(query, key, value, block_mask):
    """Attention with Bridge's rule of which pairs are visible, as a dense matrix."""
    places = torch.arange(query.shape[2])
    visible = block_mask.mask_mod(0, 0, places[:, None], places)
    logits = query @ key.transpose(2, 3) / math.sqrt(query.shape[3])
    return logits.masked_fill(~visible, -torch.inf).softmax(3) @ value


@contextlib.contextmanager
def on_cpu():
    """Return a context in which Bridge makes generators and dense attention for the CPU."""
    from megatron.bridge.diffusion.models.common import (
        nemotron_labs_diffusion_attention as attention,
    )

    generator = torch.Generator
    made = mock.patch.object(torch, "Generator", lambda **_: generator())  # noqa: PT008
    with made, mock.patch.object(attention, "fused_flex_attention", dense):
        yield


def built(work, ranks):
    """Return the model of the work."""
    made = provider(ranks, **work.get("changes", {}))
    if ranks > 1:
        from megatron_burst.recipes import apply_burst

        apply_burst(SimpleNamespace(model=made), **work.get("choices", {}))
    made.finalize()
    with on_cpu():
        return filled(made.provide(True, True))


def trained(model, seed=11):
    """Run the training step, and return the loss and its number of tokens."""
    from megatron.bridge.diffusion.models.common import dgpt_step
    from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator

    init_num_microbatches_calculator(0, None, 2, 2, 1)
    draw = torch.Generator().manual_seed(3)
    tokens, labels = torch.randint(0, 63, (2, 2, LENGTH), generator=draw)
    mask = (torch.rand(2, LENGTH, generator=draw) < 0.8).float()
    batch = {
        "tokens": tokens, "labels": labels, "loss_mask": mask,
        "position_ids": torch.arange(LENGTH).expand(2, -1), "attention_mask": None,
    }  # fmt: skip
    step = dgpt_step.DGPTStep(seed=seed)
    with on_cpu(), mock.patch.object(dgpt_step, "get_rerun_state_machine"):
        output, loss_function = step(training_state(), iter([batch]), model)
        return loss_function(output)[:2]


def run(work):
    """Run one rank; rank 0 writes [loss, {name: norm of the gradient}], summed over ranks."""
    model = built(work, start(work))
    loss, count = trained(model)
    write(model, loss, work["output"], count)
