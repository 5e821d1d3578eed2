# SPDX-License-Identifier: Apache-2.0
"""Vision-language models of Megatron-Bridge: which ones run, and where their sequences are cut.

Qwen2.5-VL puts image embeddings among those of the tokens and computes positions of three axes,
each for the whole sequence, and gives all of it to its language model: Bridge cuts nothing, so that
it runs on one context-parallel rank only. Here embeddings, labels and loss mask are cut by the
layout of the run where the language model gets them; its rotary embedding cuts the positions.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

from ..megatron import patching
from ..megatron.checks.problem import Problem

_NAME = "recipes, vision"
_HOME = "megatron.bridge.models.qwen_vl.modeling_qwen25_vl"
_MODEL = "Qwen25VLModel"
_PROVIDER = "Qwen25VLModelProvider"

_OWN_CUT = "which shares sequences between ranks in its own way"
# By the class of the provider; what is not here has _OWN_CUT.
_REASONS = {
    "Gemma3VLModelProvider": "whose layers need Transformer Engine's attention with a dense mask "
    "of the whole sequence",
    "Ministral3ModelProvider": "whose layers need Transformer Engine's attention with scales of "
    "their own",
    "Qwen3VLModelProvider": "whose layers take features of images in between, which Bridge does "
    "not cut by ranks",
    "Qwen3VLMoEModelProvider": "whose layers take features of images in between, which Bridge "
    "does not cut by ranks",
}  # fmt: skip


def is_vision(model: Any) -> bool:
    """Whether this provider of Bridge makes a vision-language model."""
    return any("vision" in name for name in vars(model))


def check_provider(model: Any) -> None:
    """Raise `ValueError` for a provider of a vision-language model that is not supported."""
    names = [kind.__name__ for kind in type(model).__mro__]
    if not is_vision(model) or _PROVIDER in names:
        return
    why = next((_REASONS[name] for name in names if name in _REASONS), _OWN_CUT)
    raise ValueError(
        f"recipe: {type(model).__name__} is a vision-language model, {why}; of these models "
        "apply_burst supports Qwen2.5-VL (Qwen25VLModelProvider). In a script of your own "
        "megatron_burst.megatron.vision helps with others"
    )


def vision_problems(model: Any, transformer: Any) -> Iterator[Problem]:
    """What a supported vision-language model excludes besides what every model does."""
    if not is_vision(model) or transformer.context_parallel_size == 1:
        return
    if getattr(transformer, "sequence_parallel", False):
        yield Problem(
            f"--sequence-parallel with {type(model).__name__}: it scatters embeddings over tensor-"
            "parallel ranks before context-parallel ranks get theirs; remove --sequence-parallel",
            ("--sequence-parallel",),
        )


def patch_bridge() -> None:
    """Cut the sequences of Qwen2.5-VL by the layout of the run, if Bridge's model is loaded.
    Idempotent. Raises `RuntimeError` if it does not have the expected parameters."""
    home = sys.modules.get(_HOME)
    if home is None or patching.installed(_NAME) is not None:
        return
    with patching.patch_set(_NAME) as patches:
        patches.wrap(getattr(home, _MODEL), "forward", ["loss_mask"], _cutting)


def _cutting(original: Callable, self: Any, *args: Any, **named: Any) -> Any:
    """The output, and the loss mask of this rank's tokens, as Bridge's step takes it."""
    from ..megatron.data.cut import installed_layout
    from ..megatron.data.slicing import context_group, shard_sequence

    if installed_layout() is None or context_group().size() == 1:
        return original(self, *args, **named)
    language, mine = self.language_model, {}
    forward = language.forward

    def of_this_rank(**given: Any) -> Any:
        for name, dim in (("decoder_input", 0), ("labels", 1), ("loss_mask", 1)):
            if given.get(name) is not None:
                given[name] = mine[name] = shard_sequence(given[name], dim=dim)
        return forward(**given)

    with patching.instead(language, "forward", of_this_rank):
        out = original(self, *args, **named)
    return (out, mine["loss_mask"]) if "loss_mask" in mine else out
