"""Bridge's Gemma 3, with and without images, tiny and random, on the ranks of one sequence.

Replacements of Transformer Engine's modules are in `te_modules`.
"""

import dataclasses
from types import SimpleNamespace

import torch
import torch.distributed as dist
from qwen import TEXT, found

LENGTH, IMAGE, BEGIN, END = 64, 60, 62, 63
PLACES = [6, 14, 30, 47]  # first tokens of images of four: over edges of ranks
HOMES = ("gemma.gemma3_provider", "gemma_vl.modeling_gemma3_vl", "gemma_vl.gemma3_vl_provider")
SIZES = TEXT | {
    "kv_channels": 8, "interleaved_attn_pattern": (1, 1), "window_size": 9, "qk_layernorm": True,
    "rotary_base": (100, 10_000), "layernorm_zero_centered_gamma": False,
    "autocast_dtype": torch.float32, "softmax_scale": 0.3,
    "share_embeddings_and_output_weights": True,
}  # fmt: skip


def provider(ranks, images=True, **changes):
    """Return a provider of two layers, the first with a window, and an encoder of one layer."""
    from megatron.bridge.models.gemma.gemma3_provider import Gemma3ModelProvider
    from megatron.bridge.models.gemma_vl import gemma3_vl_provider as vl
    from megatron.core.transformer.enums import AttnBackend
    from transformers import SiglipVisionConfig

    sizes = {**SIZES, "context_parallel_size": ranks, "is_vision_language": images, **changes}
    if not images:
        return of(Gemma3ModelProvider, sizes)
    eyes = SiglipVisionConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        image_size=16, patch_size=4,
    )  # fmt: skip
    between = vl.Gemma3VLMultimodalProjectorConfig(
        input_size=16, hidden_size=32, image_size=16, patch_dim=4, tokens_per_image=4,
        use_cpu_initialization=True,
    )  # fmt: skip
    sizes |= {"vision_config": eyes, "vision_projector_config": between, "image_token_id": IMAGE}
    sizes["attention_backend"] = AttnBackend.auto  # which Bridge 0.6 asks for
    return of(vl.Gemma3VLModelProvider, sizes)


def of(kind, sizes):
    """Return a provider with those of the sizes that it has."""
    names = {field.name for field in dataclasses.fields(kind) if field.init}
    return kind(**{name: value for name, value in sizes.items() if name in names})


def run(work):
    """Run one rank; rank 0 writes [loss, {name: norm of the gradient}], summed over ranks."""
    import te_modules
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel import random

    from megatron_burst.recipes import apply_burst

    te_modules.use(*(f"megatron.bridge.models.{home}" for home in HOMES))
    dist.init_process_group("gloo")
    ranks, images = dist.get_world_size(), work["model"] == "gemma3 vl"
    parallel_state.initialize_model_parallel(context_parallel_size=ranks)
    random.model_parallel_cuda_manual_seed(7)
    made = provider(ranks, images)
    made._pg_collection = ProcessGroupCollection.use_mpu_process_groups()
    if ranks > 1:
        apply_burst(SimpleNamespace(model=made), layout=work["vision"], **work.get("choices", {}))
    made.finalize()
    model = made.provide(True, True)
    for index, (name, weight) in enumerate(sorted(model.named_parameters())):
        noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(index))
        weight.data.copy_(noise * (0.1 if "norm" in name else 0.2))
    tokens, labels, mask, pixels = batch()
    if images:
        out = model(input_ids=tokens, pixel_values=pixels, labels=labels, loss_mask=mask)
        losses, mask = out
    else:
        if ranks > 1:
            from megatron_burst.megatron import shard_sequence

            tokens, labels, mask = (shard_sequence(x) for x in (tokens, labels, mask))
        losses = model(tokens, None, None, labels=labels)
    loss = (losses * mask).sum()
    found(model, loss, work["output"])


def batch():
    draw = torch.Generator().manual_seed(3)
    tokens, labels = torch.randint(0, IMAGE, (2, 1, LENGTH), generator=draw)
    mask = (torch.rand(1, LENGTH, generator=draw) < 0.7).float()
    for at in PLACES:
        tokens[0, at - 1], tokens[0, at + 4] = BEGIN, END
        tokens[0, at : at + 4] = IMAGE
    return tokens, labels, mask, torch.randn(len(PLACES), 3, 16, 16, generator=draw)
