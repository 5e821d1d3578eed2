# SPDX-License-Identifier: Apache-2.0
"""The layer spec (Megatron's description of a model's layers) of a GPT model with BurstAttention.

Megatron-LM calls `burst_layer_spec` for `--spec megatron_burst.megatron.specs burst_layer_spec`.
That requires 0.19 or newer: older versions accept only finished specs, which cannot read the
configuration. Recipes store `functools.partial(burst_layer_spec, base=..., ...)`.

Megatron calls the function when it builds a model, after every override of the configuration.
Therefore options are completed and checked here, not when they are set.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from .. import flags
from ..config import BurstConfig
from .checks.config import backend_problems
from .configuration import configure_model
from .install import install
from .patching import log, require_function
from .run_options import default_layouts, log_choice, resolve_auto_layout


def burst_layer_spec(
    config: Any, vp_stage: int | None = None, *, base: Any = None, **choices: Any
) -> Any:
    """Return the layer spec of a model, with BurstAttention as core attention.

    Without `choices`, the options of the command line apply, or the defaults of `BurstConfig` if
    the command line does not have our flags. Algorithm "megatron" is then replaced by the default
    algorithm, because the spec itself selects BurstAttention.

    Args:
        config: a `TransformerConfig`, or a model configuration with a `TransformerConfig` as
            `.transformer`.
        vp_stage: the stage of an interleaved pipeline.
        base: the layers without BurstAttention: a `ModuleSpec`, or a function of (config) or
            (config, vp_stage); None for Megatron-LM's default.
        choices: fields of `BurstConfig`.

    Returns:
        The layer spec.

    Raises:
        ValueError: Settings are not supported.
    """
    transformer = transformer_of(config)
    burst = None if choices else getattr(transformer, "burst", None)
    if burst is None:
        burst = choices_with_layout(choices, config)
        layout: Any = burst.layout  # no longer "auto"
        install(layout)
    if burst.algorithm == flags.OFF and not choices:  # only the flag's default
        burst = dataclasses.replace(burst, algorithm=BurstConfig.algorithm)
    length = getattr(config, "seq_length", None)
    burst, why = resolve_auto_layout(transformer, burst, length)  # of a `burst` that a script set
    log_choice(burst, why)
    configure_model(transformer, burst, length, backend_problems(transformer, burst))
    layers = _layers(base, config, vp_stage)
    if transformer.context_parallel_size > 1 and burst.algorithm != flags.OFF:
        _check_layers(layers)
    return layers


def transformer_of(config: Any) -> Any:
    """Return the `TransformerConfig` of a model configuration, or the configuration itself."""
    return getattr(config, "transformer", config)


def choices_with_layout(choices: dict[str, Any], model: Any) -> BurstConfig:
    """Return `BurstConfig(**choices)` with concrete layouts in place of defaults and "auto".

    If `choices` names no layout, the layouts follow from the other options and from Megatron's own
    settings. "auto" is replaced by the layout that suits the model
    (`run_options.resolve_auto_layout`).

    Args:
        choices: fields of `BurstConfig`.
        model: same as `config` in `burst_layer_spec`.
    """
    config, transformer = BurstConfig(**choices), transformer_of(model)
    if not choices.keys() & {"layout", "attention_layout"}:
        config, line = default_layouts(transformer, config)
        if line is not None:
            log(line)
    return resolve_auto_layout(transformer, config, getattr(model, "seq_length", None)).burst


def _layers(base: Any, config: Any, vp_stage: int | None) -> Any:
    if base is None:
        gpt = importlib.import_module("megatron.training.models.gpt")
        base = require_function(gpt, "default_layer_spec", ["config", "vp_stage"])
    if not isinstance(base, Callable) or dataclasses.is_dataclass(base):
        return base
    staged = "vp_stage" in inspect.signature(base).parameters
    return base(config, vp_stage=vp_stage) if staged else base(config)


def _check_layers(layers: Any) -> None:
    """Raise `ValueError` unless a layer spec has Megatron's own attention.

    The attention of Kimi K3 is also accepted; `kimi_delta.enable` prepares its class. An empty list
    of layers is legal: a pipeline stage may have no layers.
    """
    # Imported here: recipes import this module before they need Megatron-Core.
    from megatron.core.transformer.attention import Attention

    if getattr(layers, "layer_specs", None) == []:
        return
    classes = [module for module in _modules(layers) if isinstance(module, type)]
    for cls in classes:
        if cls.__name__ == "KimiK3Attention":
            from .linear import kimi_delta

            return kimi_delta.enable(cls)
    if not any(issubclass(cls, Attention) for cls in classes):
        names = ", ".join(sorted({cls.__name__ for cls in classes})) or repr(layers)
        raise ValueError(
            f"the layer spec has no Megatron attention that BurstAttention can replace, only "
            f"{names:.200}: remove --use-transformer-engine-full-layer-spec, or use "
            "--context-parallel-algo megatron"
        )


def _modules(spec: Any) -> Iterator[Any]:
    """Yield the modules and parameter values in a layer spec, at any depth."""
    if isinstance(spec, (list, tuple)):
        for entry in spec:
            yield from _modules(entry)
    elif dataclasses.is_dataclass(spec) and not isinstance(spec, type):
        for field in dataclasses.fields(spec):
            yield from _modules(getattr(spec, field.name))
    else:
        yield spec
