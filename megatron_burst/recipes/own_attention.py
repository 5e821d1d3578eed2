# SPDX-License-Identifier: Apache-2.0
"""Patches of Megatron-Bridge for models with their own attention: MiMo-V2-Flash, Gemma 3 and 4.

A provider is Bridge's class that configures and builds a model. Bridge refuses context parallelism
for MiMo-V2-Flash and, in 0.6, for Gemma 3 VL, because Transformer Engine does not split their
windows and masks over ranks. BurstAttention replaces the core attentions of these models
(`megatron.attention.derived`). To pass the provider's check, `context_parallel_size` is 1 until the
provider calls the layer spec of `apply_burst`. The layers are then built for all ranks.

Providers of dense Gemma 4 models get their layer spec from a function of their module. A function
that returns the layer spec of `apply_burst` replaces it.

Gemma 3 and MiMo-V2-Flash have two rotary embeddings, for layers with and without a window, and
stack the two tables. For packed batches, `data.rope` passes placeholders (blanks) instead of the
tables, and `torch.stack` would copy the blanks. `RotaryTables.pair` replaces the stack.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

from ..config import OFF
from ..megatron import patching
from ..megatron.checks.problem import Problem

# Core attentions whose sinks are split over tensor-parallel ranks like the heads.
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
# The class of the provider, and the function in its module that returns the layers.
_GEMMA4, _GEMMA4_LAYERS = "Gemma4DenseProvider", "get_gemma4_layer_spec"


def patch_provider(model: Any, is_ours: Callable[[Any], bool]) -> None:
    """Patch the provider class of a recipe to accept several context-parallel ranks.

    Only the classes in `_PROVIDERS` and the provider of dense Gemma 4 models are patched. The patch
    changes only recipes whose layer spec `apply_burst` made. Idempotent.

    Args:
        model: the provider, which is the recipe's model configuration.
        is_ours: test for a layer spec of `apply_burst` (`layers.is_ours`).
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
    providers = [cls for cls in type(model).__mro__ if cls.__name__ in _PROVIDERS]
    for cls in providers:
        name = f"recipes, {cls.__name__}"
        if patching.installed(name) is None:
            with patching.patch_set(name) as patches:
                provided = functools.partial(_provided, is_ours)
                patches.wrap(cls, "provide", ["vp_stage"], provided)


def _gemma4(model: Any) -> type | None:
    """Return Bridge's provider class of dense Gemma 4 if `model` derives from it, or None."""
    return next((kind for kind in type(model).__mro__ if kind.__name__ == _GEMMA4), None)


def gemma4_problems(model: Any, transformer: Any) -> Iterator[Problem]:
    """Yield a problem for each setting that is unsupported only in dense Gemma 4 models."""
    if _gemma4(model) and getattr(transformer, "recompute_granularity", None) == "full":
        yield Problem(
            f"--recompute-granularity full with {type(model).__name__}: Bridge passes a pair of "
            "rotary tables to its checkpoint function, which supports only tensors; use "
            "--recompute-granularity selective without an attention store",
            remove=("--recompute-granularity",),
        )


def name_to_bridge() -> None:
    """Register our core attention classes in Bridge's weight conversion, if Bridge is loaded.

    Bridge then splits their sinks over tensor-parallel ranks, as it does for the replaced classes.
    """
    home = sys.modules.get("megatron.bridge.models.conversion.param_mapping")
    if home is not None:
        for name in _SINKS:
            home.AutoMapping.register_module_type(name, "column")


def patch_ropes() -> None:
    """Wrap Bridge's classes that stack two rotary tables, for packed batches.

    The tables of a packed batch are placeholders (blanks), and a copy of a blank is invalid. The
    wrapper therefore stacks blanks without a copy. Only loaded modules are patched. Idempotent.

    Raises:
        RuntimeError: Bridge's models do not have the expected parameters.
    """
    for kind, place in _ROPES.items():
        home, name = sys.modules.get(place), f"recipes, {kind}"
        if home is not None and patching.installed(name) is None:
            with patching.patch_set(name) as patches:
                patches.wrap(
                    getattr(home, kind), "forward", ["max_seq_len", "packed_seq"], _table_pair
                )


def _table_pair(original: Callable, self: Any, *args: Any, **named: Any) -> Any:
    """Return the rotary tables of layers with and without a window, as Bridge's `forward` does.

    The result is one stacked tensor, or in Bridge 0.3 a tuple. For a packed batch, a placeholder
    (blank) replaces the stacked tensor.
    """
    from ..megatron.data.rope import is_blank, tables

    arguments = patching.given_to(original, (self, *args), named)
    other_arguments = {
        name: x for name, x in arguments.items() if name not in ("self", "max_seq_len")
    }
    if not arguments.get("packed_seq") or isinstance(original(self, 2, **other_arguments), tuple):
        return original(self, *args, **named)
    length = arguments["max_seq_len"]
    local = self.rope_local(length, **other_arguments)
    # Megatron's own forward, for layers without a window.
    everywhere = type(self.rope_local).forward(self, length, **other_arguments)
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
    """Build a dense Gemma 4 model; use the recipe's layer spec if `apply_burst` made it."""
    spec = self.transformer_layer_spec
    if not is_ours(spec):
        return original(self, *args, **named)
    with patching.instead(home, _GEMMA4_LAYERS, spec):
        return original(self, *args, **named)


def _provided(
    is_ours: Callable[[Any], bool], original: Callable, self: Any, *args: Any, **named: Any
) -> Any:
    """Call `provide` with `context_parallel_size` 1 until the provider calls the layer spec."""
    spec, ranks = self.transformer_layer_spec, self.context_parallel_size
    if ranks == 1 or not is_ours(spec) or spec.keywords.get("algorithm") == OFF:
        return original(self, *args, **named)

    @functools.wraps(spec.func)  # providers inspect its signature
    def layers(config: Any, vp_stage: int | None = None) -> Any:
        self.context_parallel_size = ranks
        return spec(config, vp_stage=vp_stage)

    self.transformer_layer_spec, self.context_parallel_size = layers, 1
    try:
        return original(self, *args, **named)
    finally:
        self.transformer_layer_spec, self.context_parallel_size = spec, ranks
