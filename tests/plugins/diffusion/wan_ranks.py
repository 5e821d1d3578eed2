"""Wan of Megatron-Bridge, tiny and random, with Bridge's training step, on the ranks of a pack."""

import functools
import math
from types import SimpleNamespace
from unittest import mock

import torch
from harness import filled, start, training_state, write

CHANNELS, PATCH, WORDS = 4, 2, 16
SIZES = {
    "num_layers": 2, "hidden_size": 48, "ffn_hidden_size": 64, "num_attention_heads": 4,
    "crossattn_emb_size": 32, "in_channels": CHANNELS, "out_channels": CHANNELS, "freq_dim": 16,
    "text_dim": WORDS, "seq_length": 64, "use_cpu_initialization": True, "bf16": False,
    "params_dtype": torch.float32, "pipeline_dtype": torch.float32, "autocast_dtype": None,
    "persist_layer_norm": False, "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False, "bias_activation_fusion": False,
    "bias_dropout_fusion": False, "calculate_per_token_loss": True,
}  # fmt: skip
GRIDS = [[2, 3, 4], [1, 5, 3], [2, 2, 2]]  # frames, height and width of the clips, in patches
TEXTS = [3, 7, 5]


def provider(ranks, **changes):
    import gemma
    from megatron.bridge.diffusion.models.wan.wan_provider import WanModelProvider

    return gemma.of(WanModelProvider, SIZES | {"context_parallel_size": ranks} | changes)


def batch(multiple):
    """Return a pack of clips, each padded to a multiple of this number, as Bridge's data has it."""
    draw, width = torch.Generator().manual_seed(3), CHANNELS * PATCH * PATCH
    lengths = torch.tensor([math.prod(grid) for grid in GRIDS])
    rows = [-(-n // multiple) * multiple for n in lengths.tolist()]
    latents, masks, texts = [], [], []
    for length, padded, words in zip(lengths.tolist(), rows, TEXTS, strict=True):
        clip = torch.randn(length, width, generator=draw)
        latents.append(torch.nn.functional.pad(clip, (0, 0, 0, padded - length)))
        masks.append((torch.arange(padded) < length).float())
        texts.append(torch.randn(words + 1, WORDS, generator=draw))  # the last word is padding
    return {
        "video_latents": torch.cat(latents)[:, None], "loss_mask": torch.cat(masks)[:, None],
        "context_embeddings": torch.cat(texts)[:, None], "grid_sizes": torch.tensor(GRIDS),
        "seq_len_q": lengths, "seq_len_q_padded": torch.tensor(rows),
        "seq_len_kv": torch.tensor(TEXTS), "seq_len_kv_padded": torch.tensor(TEXTS) + 1,
        "video_metadata": {},
    }  # fmt: skip


def cross_params(clips, texts):
    """Return the parameters of cross-attention for boundaries of clips and texts."""
    from megatron.core.packed_seq_params import PackedSeqParams

    clips, texts = (torch.tensor(ends, dtype=torch.int32) for ends in (clips, texts))
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=clips, cu_seqlens_q_padded=clips, cu_seqlens_kv=texts,
        cu_seqlens_kv_padded=texts,
    )  # fmt: skip


class InFloat32(torch.nn.Module):
    """The model with inputs of Bridge's step, which are bf16, in float32."""

    def __init__(self, model):
        super().__init__()
        self.model, self.config = model, model.config

    def forward(self, **named):
        inputs = {
            name: x.float() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
            for name, x in named.items()
        }
        return self.model(**inputs)


def noise(latents, dtype=None):
    """Return noise that depends only on the clips, not on their padding: one draw per clip."""
    out = torch.zeros(latents.shape, dtype=dtype)
    at = 0
    for number, (grid, padded) in enumerate(zip(GRIDS, noise.rows, strict=True)):
        draw, rows = torch.Generator().manual_seed(100 + number), math.prod(grid)
        out[:, at : at + rows] = torch.randn(1, rows, latents.shape[2], generator=draw)
        at += padded
    return out


def built(work, ranks):
    """Return the model of the work."""
    from diffusers.models import embeddings

    changes = dict(work.get("changes", {}))
    if work.get("tensor"):
        changes |= {"tensor_model_parallel_size": work["tensor"], "sequence_parallel": True}
    made = provider(ranks, apply_rope_fusion=False, **changes)
    if ranks > 1 or work.get("apply"):
        from megatron_burst.recipes import apply_burst

        apply_burst(SimpleNamespace(model=made), **work.get("choices", {}))
    made.finalize()
    made.apply_rope_fusion = ranks > 1  # Bridge's default, without its check of the engine
    model = filled(made.provide())
    # Bridge's class casts its input to bf16.
    embedder = model.time_embedder
    embedder.forward = functools.partial(embeddings.TimestepEmbedding.forward, embedder)
    return model


def trained(model, multiple=1, seed=5):
    """Run the training step, and return the loss and its number of tokens."""
    from megatron.bridge.diffusion.models.wan import wan_step
    from megatron.bridge.training import losses

    data = batch(multiple)
    noise.rows = data["seq_len_q_padded"].tolist()
    torch.manual_seed(seed)
    step = wan_step.WanForwardStep()
    randn = mock.patch.object(torch, "randn_like", noise)
    with randn, mock.patch.object(losses, "get_rerun_state_machine"):
        output, loss_function = step(training_state(), iter([data]), InFloat32(model))
        return loss_function(output)[:2]


def run(work):
    """Run one rank; rank 0 writes [loss, {name: norm of the gradient}], summed over ranks."""
    model = built(work, start(work))
    loss, count = trained(model, work.get("multiple", 1))
    write(model, loss, work["output"], count)
