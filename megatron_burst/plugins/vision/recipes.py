# SPDX-License-Identifier: Apache-2.0
"""Support for Megatron-Bridge's vision-language models: checks, and cutting of their sequences.

Qwen2.5-VL and Qwen3-VL compute embeddings (text and images) and position ids (three per token) of
the whole sequence, and pass them to the language model. Bridge does not cut them over ranks, so
without this module these models support only one context-parallel rank. This module cuts
embeddings, labels and loss mask in the layout of the run when the language model gets them.
Megatron's rotary embedding cuts the position ids of Qwen2.5-VL. Qwen3-VL uses Hugging Face's rotary
embedding, so this module cuts its position ids.

Gemma 3 VL cuts its sequences with a function of Megatron, which our patches adapt to the layout of
the run. The mask `plugins.vision.images.gemma3` replaces its dense masks of the whole sequence.

The first layers of Qwen3-VL add further image features ("deepstack"), one row per image token, to
the hidden states. Each rank keeps the rows of its own tokens.

Shape letters: b sequences, s tokens of a sequence, n image tokens of all sequences, h hidden size.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from ...config import OFF
from ...megatron import patching
from ...megatron.checks.problem import Problem

_NAME = "recipes, vision"
_BUILD = "recipes, vision, layers"
_HOMES = {
    "Qwen25VLModel": "megatron.bridge.models.qwen_vl.modeling_qwen25_vl",
    "Qwen3VLModel": "megatron.bridge.models.qwen_vl.modelling_qwen3_vl.model",
    "Gemma3VLModel": "megatron.bridge.models.gemma_vl.modeling_gemma3_vl",
}
_GEMMA3 = "Gemma3VLModelProvider"
_GEMMA3_MASK = "megatron_burst.plugins.vision.images:gemma3"
_DENSE_MASKS = ("_compute_attention_mask", "_compute_attention_biases")  # Bridge 0.3; newer
_QWEN25 = "Qwen25VLModelProvider"
_QWEN3 = ("Qwen3VLModelProvider", "Qwen3VLMoEModelProvider")
_SPEC = "get_gpt_layer_with_transformer_engine_spec"  # function that providers of Qwen3-VL call

_OWN_CUT = "which splits sequences between ranks in its own way"
# Reasons by the class of the provider; the reason for all other classes is _OWN_CUT.
_REASONS = {
    "Ministral3ModelProvider": "whose layers need Transformer Engine's attention with their own "
    "scales"
}


def check_provider(model: Any, is_ours: Callable[[Any], bool]) -> None:
    """Raise an error if the vision-language model of a provider is not supported.

    Qwen3-VL is supported in Bridge 0.3; later versions cut the sequences in zigzag order
    themselves. The provider of Qwen3-VL is patched to use the recipe's layer spec if `apply_burst`
    made this spec.

    Args:
        model: the provider.
        is_ours: test for a layer spec of `apply_burst` (`layers.is_ours`).

    Raises:
        ValueError: The model is not supported.
    """
    names = [kind.__name__ for kind in type(model).__mro__]
    if _QWEN25 in names or _GEMMA3 in names:
        return
    if any(name in names for name in _QWEN3) and not _cuts_itself():
        _patch_providers(is_ours)
        return
    why = next((_REASONS[name] for name in names if name in _REASONS), _OWN_CUT)
    raise ValueError(
        f"recipe: {type(model).__name__} is a vision-language model, {why}; apply_burst supports "
        f"Gemma 3 VL, Qwen2.5-VL ({_QWEN25}) and, in Bridge 0.3, Qwen3-VL ({', '.join(_QWEN3)}). "
        "For other models use megatron_burst.plugins.vision.images in your own script"
    )


def with_mask(model: Any, choices: dict[str, Any]) -> dict[str, Any]:
    """Return `choices` (fields of `BurstConfig`), with the mask that Gemma 3 VL requires.

    The mask is added only if BurstAttention splits the sequence, and only if `choices` has no mask.
    """
    names = [kind.__name__ for kind in type(model).__mro__]
    if _GEMMA3 not in names or choices.get("algorithm") == OFF or model.context_parallel_size == 1:
        return choices
    return {"mask": _GEMMA3_MASK} | choices


def problems(model: Any, transformer: Any) -> Iterator[Problem]:
    """Yield a problem for each setting that these models do not support but others do."""
    if transformer.context_parallel_size == 1:
        return
    name = type(model).__name__
    if getattr(transformer, "sequence_parallel", False):
        yield Problem(
            f"--sequence-parallel with {name}: it scatters embeddings over tensor-parallel ranks "
            "before they are cut over context-parallel ranks",
            remove=("--sequence-parallel",),
        )
    mro = {cls.__name__ for cls in type(model).__mro__}
    stages = getattr(transformer, "pipeline_model_parallel_size", 1)
    if _GEMMA3 in mro and stages > 1:
        yield Problem(
            f"--pipeline-model-parallel-size {stages} with {name}: "
            "later stages get no token ids, so the positions of images are unknown there",
            add=("--pipeline-model-parallel-size 1",),
        )
    if mro & set(_QWEN3) and getattr(transformer, "recompute_granularity", None) == "full":
        yield Problem(
            f"--recompute-granularity full with {name}: Bridge passes a list of image features to "
            "its checkpoint function, which supports only tensors; use --recompute-granularity "
            "selective, and no store",
            remove=("--recompute-granularity",),
        )


def patch_bridge() -> None:
    """Patch loaded vision-language models of Bridge to cut sequences over ranks. Idempotent.

    Patched models of Qwen2.5-VL and Qwen3-VL cut sequences in the layout of the run. Patched models
    of Gemma 3 VL pass the positions of images to attention.

    Raises:
        RuntimeError: Bridge's models do not have the expected parameters.
    """
    for model, place in _HOMES.items():
        home, name = sys.modules.get(place), f"{_NAME}, {model}"
        if home is None or patching.installed(name) is not None:
            continue
        if model == "Qwen3VLModel" and _cuts_itself():
            continue
        with patching.patch_set(name) as patches:
            forward = _showing_images if model == "Gemma3VLModel" else _cutting
            patches.wrap(getattr(home, model), "forward", ["loss_mask"], forward)


def _cuts_itself() -> bool:
    """Return True if Qwen3-VL in the installed Bridge splits sequences across ranks."""
    home = importlib.import_module(_HOMES["Qwen3VLModel"])
    return hasattr(home, "split_data_cp_rank")


def _patch_providers(is_ours: Callable[[Any], bool]) -> None:
    """Patch providers of Qwen3-VL to use the layer spec of `apply_burst`. Idempotent."""
    if patching.installed(_BUILD) is not None:
        return
    home: Any = importlib.import_module("megatron.bridge.models.qwen_vl.qwen3_vl_provider")
    patching.require_function(home, _SPEC, ["num_experts", "qk_layernorm"])
    with patching.patch_set(_BUILD) as patches:
        for name in _QWEN3:
            patches.wrap(getattr(home, name), "provide", ["vp_stage"], partial(_provided, is_ours))


def _provided(
    is_ours: Callable[[Any], bool], original: Callable, self: Any, *args: Any, **named: Any
) -> Any:
    """Call `provide` with the recipe's layer spec, if `apply_burst` made this spec."""
    spec = self.transformer_layer_spec
    if not is_ours(spec):
        return original(self, *args, **named)
    stage = patching.given_to(original, (self, *args), named).get("vp_stage")
    home = sys.modules[original.__module__]
    with patching.instead(home, _SPEC, lambda **_: spec(self, vp_stage=stage)):
        return original(self, *args, **named)


def _cutting(original: Callable, self: Any, *args: Any, **named: Any) -> Any:
    """Run the forward of a Qwen-VL model; the language model gets only this rank's tokens.

    Returns:
        The output; if the model gets a loss mask, the pair (output, loss mask of this rank's
            tokens), which Bridge's step expects.
    """
    from ...megatron.data.cut import installed_layout
    from ...megatron.data.slicing import context_group, shard_sequence

    if installed_layout() is None or context_group().size() == 1:
        return original(self, *args, **named)
    language, local_entries = self.language_model, {}
    forward = language.forward
    dims = {"decoder_input": 0, "labels": 1, "loss_mask": 1}
    rotary = type(getattr(language, "rotary_pos_emb", None)).__mro__
    if not any(kind.__name__ == "MultimodalRotaryEmbedding" for kind in rotary):
        dims["position_ids"] = 2

    def forward_of_rank(**arguments: Any) -> Any:
        if arguments.get("deepstack_visual_embeds") is not None:
            features = arguments["deepstack_visual_embeds"]
            arguments |= _own_features(arguments["visual_pos_masks"], features)
        for name, dim in dims.items():
            if arguments.get(name) is not None:
                arguments[name] = local_entries[name] = shard_sequence(arguments[name], dim=dim)
        return forward(**arguments)

    with patching.instead(language, "forward", forward_of_rank):
        out = original(self, *args, **named)
    return (out, local_entries["loss_mask"]) if "loss_mask" in local_entries else out


def _showing_images(original: Callable, self: Any, *args: Any, **named: Any) -> Any:
    """Run the forward of Gemma 3 VL; pass the positions of images instead of dense masks."""
    from ...megatron.data.cut import installed_layout
    from ...megatron.data.slicing import context_group
    from . import images as vision

    if installed_layout() is None or context_group().size() == 1:
        return original(self, *args, **named)
    arguments = patching.given_to(original, (self, *args), named)
    tokens = arguments["input_ids"]
    if arguments.get("packed_seq_params") is not None:
        raise ValueError(
            "packed_seq_params of Gemma 3 VL: documents with images were not tested with "
            "BurstAttention; use one sequence per micro-batch"
        )
    spans = vision.image_spans(tokens, self.config.image_token_id)
    params, language = vision.with_spans(spans, tokens.shape[1]), self.language_model
    forward = language.forward

    def with_images(**arguments: Any) -> Any:
        return forward(**(arguments | {"packed_seq_params": params}))

    masks = next(name for name in _DENSE_MASKS if hasattr(self, name))
    with (
        patching.instead(self, masks, lambda *_, **__: None),
        patching.instead(language, "forward", with_images),
    ):
        return original(self, *args, **named)


def _own_features(image: torch.Tensor, features: list[torch.Tensor]) -> dict[str, Any]:
    """Return the "deepstack" features of this rank's image tokens, as arguments of the layers.

    A rank without image tokens gets tensors of 0 rows, so that its encoder has zero gradients.

    Args:
        image: bool [b, s], True for image tokens in the whole sequences.
        features: a tensor [n, h] per layer, rows in the order of the image tokens.
    """
    from ...megatron.data.slicing import shard_sequence

    rows = (image.flatten().cumsum(0) - 1).view_as(image)  # row in `features` of each image token
    local_image = shard_sequence(image)
    index = shard_sequence(rows)[local_image]
    return {
        "visual_pos_masks": local_image,
        "deepstack_visual_embeds": [layer.index_select(0, index) for layer in features],
    }
