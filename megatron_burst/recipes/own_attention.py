# SPDX-License-Identifier: Apache-2.0
"""Providers of Megatron-Bridge that refuse context parallelism because of their own attention.

Bridge splits no sequences of MiMo-V2-Flash and, in 0.6, of Gemma 3 VL, whose core attentions
need windows and masks that Transformer Engine does not split. BurstAttention takes the place of
these core attentions (`megatron.attention.derived`), so such a provider finds one context-parallel
rank until it asks for its layers, which come from `apply_burst` and are built for all ranks.

Dense models of Gemma 4 name their layers themselves: where they ask for them, they get those of
`apply_burst`, which are their own with BurstAttention as core attention.

Gemma 3 and MiMo-V2-Flash have two rotary embeddings, for layers with and without a window, and
stack their tables. Those of packed batches are made where they are applied (`data.rope`), by what
stands for them until then, which a stack would copy.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

from ..config import OFF
from ..megatron import patching
from ..megatron.checks.problem import Problem

# Core attentions with sinks, which tensor-parallel ranks share like heads.
_SINKS = (
    "BurstCoreAttention",
    "BurstMiMoV2FlashTEDotProductAttention",
    "BurstMiMoV2FlashMTPTEDotProductAttention",
)
_ROPES = {
    "Gemma3RotaryEmbedding": "megatron.bridge.models.gemma.gemma3_provider",
    "MiMoV2FlashRotaryEmbedding": "megatron.bridge.models.mimo_v2_flash.modeling_mimo_v2_flash",
}
_PROVIDERS = ("Gemma3VLModelProvider", "MiMoV2FlashModelProvider")
# Asks a function for its layers, by this name in its module.
_GEMMA4, _GEMMA4_LAYERS = "Gemma4DenseProvider", "get_gemma4_layer_spec"


def patch_provider(model: Any, is_ours: Callable[[Any], bool]) -> None:
    """Let a provider of `_PROVIDERS` make its model for several context-parallel ranks, if its
    layers are ours, and that of dense Gemma 4 models with them. Idempotent. is_ours:
    `layers.is_ours`.
    """
    dense = _gemma4(model)
    if dense is not None:
        home = sys.modules[dense.__module__]
        if not is_ours(model.transformer_layer_spec):
            model.transformer_layer_spec = getattr(home, _GEMMA4_LAYERS)
        name = f"recipes, {_GEMMA4}"
        if patching.installed(name) is None:
            with patching.patch_set(name) as patches:
                built = functools.partial(_with_layers, is_ours, home)
                patches.wrap(dense, "build", ["pre_process", "post_process"], built)
    found = [kind for kind in type(model).__mro__ if kind.__name__ in _PROVIDERS]
    for kind in found:
        name = f"recipes, {kind.__name__}"
        if patching.installed(name) is None:
            with patching.patch_set(name) as patches:
                provided = functools.partial(_provided, is_ours)
                patches.wrap(kind, "provide", ["vp_stage"], provided)


def _gemma4(model: Any) -> type | None:
    """Bridge's class of providers of dense Gemma 4, if this is one."""
    return next((kind for kind in type(model).__mro__ if kind.__name__ == _GEMMA4), None)


def gemma4_problems(model: Any, transformer: Any) -> Iterator[Problem]:
    """What a provider of dense Gemma 4 excludes besides what every model does."""
    if _gemma4(model) and getattr(transformer, "recompute_granularity", None) == "full":
        yield Problem(
            f"--recompute-granularity full with {type(model).__name__}: Bridge hands a pair of "
            "rotary tables to its checkpoint function, which takes tensors only; use "
            "--recompute-granularity selective, and no store",
            remove=("--recompute-granularity",),
        )


def name_to_bridge() -> None:
    """Tell Bridge's conversion of weights how tensor-parallel ranks share the sinks of our core
    attentions, if it is loaded: as they do with those of the classes that these stand for.
    """
    home = sys.modules.get("megatron.bridge.models.conversion.param_mapping")
    if home is not None:
        for name in _SINKS:
            home.AutoMapping.register_module_type(name, "column")


def patch_ropes() -> None:
    """Keep apart what stands for the two rotary tables of a packed batch, if Bridge's models are
    loaded. Idempotent. Raises `RuntimeError` if they do not have the expected parameters.
    """
    for kind, place in _ROPES.items():
        home, name = sys.modules.get(place), f"recipes, {kind}"
        if home is not None and patching.installed(name) is None:
            with patching.patch_set(name) as patches:
                patches.wrap(getattr(home, kind), "forward", ["max_seq_len", "packed_seq"], _both)


def _both(original: Callable, self: Any, *args: Any, **named: Any) -> Any:
    """The tables of both rotary embeddings: a stack of two, or in Bridge 0.3 a tuple."""
    from ..megatron.data.rope import is_blank, tables

    given = patching.given_to(original, (self, *args), named)
    rest = {name: x for name, x in given.items() if name not in ("self", "max_seq_len")}
    if not given.get("packed_seq") or isinstance(original(self, 2, **rest), tuple):
        return original(self, *args, **named)
    length = given["max_seq_len"]
    local = self.rope_local(length, **rest)
    everywhere = type(self.rope_local).forward(self, length, **rest)  # Megatron's
    if not is_blank(everywhere):
        return original(self, *args, **named)
    return tables().pair(local, everywhere)


def _with_layers(
    is_ours: Callable[[Any], bool],
    home: Any,
    original: Callable,
    self: Any,
    *args: Any,
    **named: Any,
) -> Any:
    """A dense Gemma 4, whose layers are those of the recipe where these are ours."""
    spec = self.transformer_layer_spec
    if not is_ours(spec):
        return original(self, *args, **named)
    with patching.instead(home, _GEMMA4_LAYERS, spec):
        return original(self, *args, **named)


def _provided(
    is_ours: Callable[[Any], bool], original: Callable, self: Any, *args: Any, **named: Any
) -> Any:
    """The model, whose provider sees one context-parallel rank until it asks for its layers."""
    spec, ranks = self.transformer_layer_spec, self.context_parallel_size
    if ranks == 1 or not is_ours(spec) or spec.keywords.get("algorithm") == OFF:
        return original(self, *args, **named)

    @functools.wraps(spec.func)  # providers read which arguments it has
    def layers(config: Any, vp_stage: int | None = None) -> Any:
        self.context_parallel_size = ranks
        return spec(config, vp_stage=vp_stage)

    self.transformer_layer_spec, self.context_parallel_size = layers, 1
    try:
        return original(self, *args, **named)
    finally:
        self.transformer_layer_spec, self.context_parallel_size = spec, ranks
