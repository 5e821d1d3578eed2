# SPDX-License-Identifier: Apache-2.0
"""Vision-language models of Megatron-Bridge: which ones run, and where their sequences are cut.

Qwen2.5-VL and Qwen3-VL put image embeddings among those of the tokens and compute positions of
three axes, each for the whole sequence, and give all of it to their language model: Bridge cuts
nothing, so that they run on one context-parallel rank only. Here embeddings, labels and loss mask
are cut by the layout of the run where the language model gets them. The positions are cut by
Megatron's rotary embedding (Qwen2.5-VL) or here (Qwen3-VL, which has one of Hugging Face).

Gemma 3 VL cuts its sequences itself, by a function of Megatron that follows the layout. Its masks,
dense ones of the whole sequence, are replaced by the places of the images (`vision.gemma3`).

The first layers of Qwen3-VL add further features of the images to the hidden states ("deepstack"),
as one row per image token; each rank keeps those of its own tokens.

Shape letters: b sequences, s tokens of a sequence, n image tokens of all of them, h hidden size.
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
_DENSE_MASKS = ("_compute_attention_mask", "_compute_attention_biases")  # Bridge 0.3, later ones
_QWEN25 = "Qwen25VLModelProvider"
_QWEN3 = ("Qwen3VLModelProvider", "Qwen3VLMoEModelProvider")
_SPEC = "get_gpt_layer_with_transformer_engine_spec"  # what providers of Qwen3-VL take

_OWN_CUT = "which shares sequences between ranks in its own way"
# By the class of the provider; what is not here has _OWN_CUT.
_REASONS = {
    "Ministral3ModelProvider": "whose layers need Transformer Engine's attention with scales of "
    "their own"
}


def check_provider(model: Any, is_ours: Callable[[Any], bool]) -> None:
    """Raise `ValueError` for a provider of a vision-language model that is not supported.

    Qwen3-VL is from the Bridge versions that leave sequences whole (0.3); later ones cut them in
    zigzag order. Makes its provider take the layers of the recipe, in place of those that it names
    itself, where the recipe's are ours. is_ours: `layers.is_ours`.
    """
    names = [kind.__name__ for kind in type(model).__mro__]
    if _QWEN25 in names or _GEMMA3 in names:
        return
    if any(name in names for name in _QWEN3) and not _cuts_itself():
        _patch_providers(is_ours)
        return
    why = next((_REASONS[name] for name in names if name in _REASONS), _OWN_CUT)
    raise ValueError(
        f"recipe: {type(model).__name__} is a vision-language model, {why}; of these models "
        f"apply_burst supports Gemma 3 VL, Qwen2.5-VL ({_QWEN25}) and, of Bridge 0.3, Qwen3-VL "
        f"({', '.join(_QWEN3)}). In a script of your own "
        "megatron_burst.plugins.vision.images helps with others"
    )


def with_mask(model: Any, choices: dict[str, Any]) -> dict[str, Any]:
    """The choices of `apply_burst`, with the mask that this provider's models need over ranks."""
    names = [kind.__name__ for kind in type(model).__mro__]
    if _GEMMA3 not in names or choices.get("algorithm") == OFF or model.context_parallel_size == 1:
        return choices
    return {"mask": _GEMMA3_MASK} | choices


def problems(model: Any, transformer: Any) -> Iterator[Problem]:
    """What a supported vision-language model excludes besides what every model does."""
    if transformer.context_parallel_size == 1:
        return
    name = type(model).__name__
    if getattr(transformer, "sequence_parallel", False):
        yield Problem(
            f"--sequence-parallel with {name}: it scatters embeddings over tensor-"
            "parallel ranks before context-parallel ranks get theirs",
            remove=("--sequence-parallel",),
        )
    mro = {cls.__name__ for cls in type(model).__mro__}
    stages = getattr(transformer, "pipeline_model_parallel_size", 1)
    if _GEMMA3 in mro and stages > 1:
        yield Problem(
            f"--pipeline-model-parallel-size {stages} with {name}: "
            "later stages get no tokens, among which they could find images",
            add=("--pipeline-model-parallel-size 1",),
        )
    if mro & set(_QWEN3) and getattr(transformer, "recompute_granularity", None) == "full":
        yield Problem(
            f"--recompute-granularity full with {name}: Bridge hands a list of image features to "
            "its checkpoint function, which takes tensors only; use --recompute-granularity "
            "selective, and no store",
            remove=("--recompute-granularity",),
        )


def patch_bridge() -> None:
    """Cut the sequences of Qwen2.5-VL and Qwen3-VL by the layout of the run, and tell attention
    where images of Gemma 3 VL lie, if Bridge's models are loaded. Idempotent. Raises `RuntimeError`
    if they do not have the expected parameters.
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
    """Whether this Bridge's Qwen3-VL cuts its sequences over context-parallel ranks."""
    home = importlib.import_module(_HOMES["Qwen3VLModel"])
    return hasattr(home, "split_data_cp_rank")


def _patch_providers(is_ours: Callable[[Any], bool]) -> None:
    """Make providers of Qwen3-VL take the layers of `apply_burst`. Idempotent."""
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
    """The model of a provider that names its layers itself, with those of its recipe."""
    spec = self.transformer_layer_spec
    if not is_ours(spec):
        return original(self, *args, **named)
    stage = patching.given_to(original, (self, *args), named).get("vp_stage")
    home = sys.modules[original.__module__]
    with patching.instead(home, _SPEC, lambda **_: spec(self, vp_stage=stage)):
        return original(self, *args, **named)


def _cutting(original: Callable, self: Any, *args: Any, **named: Any) -> Any:
    """The output, and the loss mask of this rank's tokens, as Bridge's step takes it."""
    from ...megatron.data.cut import installed_layout
    from ...megatron.data.slicing import context_group, shard_sequence

    if installed_layout() is None or context_group().size() == 1:
        return original(self, *args, **named)
    language, mine = self.language_model, {}
    forward = language.forward
    dims = {"decoder_input": 0, "labels": 1, "loss_mask": 1}
    rotary = type(getattr(language, "rotary_pos_emb", None)).__mro__
    if not any(kind.__name__ == "MultimodalRotaryEmbedding" for kind in rotary):
        dims["position_ids"] = 2

    def of_this_rank(**given: Any) -> Any:
        if given.get("deepstack_visual_embeds") is not None:
            given |= _own_features(given["visual_pos_masks"], given["deepstack_visual_embeds"])
        for name, dim in dims.items():
            if given.get(name) is not None:
                given[name] = mine[name] = shard_sequence(given[name], dim=dim)
        return forward(**given)

    with patching.instead(language, "forward", of_this_rank):
        out = original(self, *args, **named)
    return (out, mine["loss_mask"]) if "loss_mask" in mine else out


def _showing_images(original: Callable, self: Any, *args: Any, **named: Any) -> Any:
    """The forward of Gemma 3 VL, whose layers get the places of the images and no dense masks."""
    from ...megatron.data.cut import installed_layout
    from ...megatron.data.slicing import context_group
    from . import images as vision

    if installed_layout() is None or context_group().size() == 1:
        return original(self, *args, **named)
    given = patching.given_to(original, (self, *args), named)
    tokens = given["input_ids"]
    if given.get("packed_seq_params") is not None:
        raise ValueError(
            "packed_seq_params of Gemma 3 VL: documents with images were never run with "
            "BurstAttention; give one sequence per micro-batch"
        )
    spans = vision.image_spans(tokens, self.config.image_token_id)
    params, language = vision.with_spans(spans, tokens.shape[1]), self.language_model
    forward = language.forward

    def with_images(**given: Any) -> Any:
        return forward(**(given | {"packed_seq_params": params}))

    masks = next(name for name in _DENSE_MASKS if hasattr(self, name))
    with (
        patching.instead(self, masks, lambda *_, **__: None),
        patching.instead(language, "forward", with_images),
    ):
        return original(self, *args, **named)


def _own_features(image: torch.Tensor, features: list[torch.Tensor]) -> dict[str, Any]:
    """What a rank's layers add to its own image tokens.

    image: bool [b, s], which tokens of the whole sequences are of images. features: per layer
    [n, h], in the order of these tokens. A rank without any gets tensors of no rows, so that its
    encoder has gradients of zero.
    """
    from ...megatron.data.slicing import shard_sequence

    rows = (image.flatten().cumsum(0) - 1).view_as(image)  # of features, where there are any
    mine = shard_sequence(image)
    index = shard_sequence(rows)[mine]
    return {
        "visual_pos_masks": mine,
        "deepstack_visual_embeds": [each.index_select(0, index) for each in features],
    }
