# SPDX-License-Identifier: Apache-2.0
"""The layer spec (Megatron's description of a model's layers) of a GPT model with BurstAttention.

Megatron-LM calls `burst_layer_spec` for `--spec megatron_burst.megatron.specs burst_layer_spec`.
That needs 0.19 or newer: older versions take only finished specs, which cannot read the
configuration. Recipes hold it as `functools.partial(burst_layer_spec, base=..., ...)`.

Megatron asks for a spec when it builds a model, after every override of the configuration.
Therefore choices are completed and checked here, not when they are stated.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from .. import flags
from ..config import BurstConfig
from .checks.config import backend_problems, configuration_problems
from .checks.problem import refuse
from .install import configure, install
from .layout_choice import settled, unnamed_layouts
from .patching import log, require_function


def burst_layer_spec(
    config: Any, vp_stage: int | None = None, *, base: Any = None, **choices: Any
) -> Any:
    """The layers that the model has anyway, with BurstAttention as their core attention.

    config: a `TransformerConfig`, or a model configuration that holds one as `.transformer`.
    base: those layers, as a `ModuleSpec` or as a function of (config) or (config, vp_stage);
    None for Megatron-LM's default. choices: fields of `BurstConfig`. Without choices the flags of
    the command line decide, if it has them, and the defaults of `BurstConfig` otherwise; the
    algorithm "megatron" then becomes the default one, because the spec itself asks for
    BurstAttention. Raises `ValueError` for settings that cannot be honoured.
    """
    transformer = transformer_of(config)
    chosen = None if choices else getattr(transformer, "burst", None)
    if chosen is None:
        chosen = choices_with_layout(choices, config)
        layout: Any = chosen.layout  # settled by now
        install(layout)
    if chosen.algorithm == flags.OFF and not choices:  # only the flag's default
        chosen = dataclasses.replace(chosen, algorithm=BurstConfig.algorithm)
    length = getattr(config, "seq_length", None)
    refuse(
        [
            *backend_problems(transformer, chosen),
            *configuration_problems(transformer, chosen, length),
        ]
    )
    configure(transformer, chosen, seq_length=length)
    layers = _layers(base, config, vp_stage)
    if transformer.context_parallel_size > 1 and chosen.algorithm != flags.OFF:
        _check_layers(layers)
    return layers


def transformer_of(config: Any) -> Any:
    """The `TransformerConfig` in a model configuration, which may be one itself."""
    return getattr(config, "transformer", config)


def choices_with_layout(choices: dict[str, Any], model: Any) -> BurstConfig:
    """The choices of one configuration, with the layouts that follow from the others, from
    Megatron's own settings, or, for "auto", from the model.
    """
    config, transformer = BurstConfig(**choices), transformer_of(model)
    if not choices.keys() & {"layout", "attention_layout"}:
        layout = flags.layout_for(config.algorithm, config.store)
        config = dataclasses.replace(config, layout=layout)
        config, line = unnamed_layouts(transformer, config)
        if line is not None:
            log(line)
    return settled(transformer, config, getattr(model, "seq_length", None)).burst


def _layers(base: Any, config: Any, vp_stage: int | None) -> Any:
    if base is None:
        gpt = importlib.import_module("megatron.training.models.gpt")
        base = require_function(gpt, "default_layer_spec", ["config", "vp_stage"])
    if not isinstance(base, Callable) or dataclasses.is_dataclass(base):
        return base
    staged = "vp_stage" in inspect.signature(base).parameters
    return base(config, vp_stage=vp_stage) if staged else base(config)


def _check_layers(layers: Any) -> None:
    """Raise `ValueError` unless a layer spec has Megatron's own attention somewhere, or that of
    Kimi K3, which is prepared.

    An empty list of layers is legal: a pipeline stage may have none.
    """
    # Late: recipes import this module before Megatron-Core is needed.
    from megatron.core.transformer.attention import Attention

    if getattr(layers, "layer_specs", None) == []:
        return
    kinds = [one for one in _modules(layers) if isinstance(one, type)]
    for one in kinds:
        if one.__name__ == "KimiK3Attention":
            from .linear import kimi_delta

            return kimi_delta.enable(one)
    if not any(issubclass(one, Attention) for one in kinds):
        names = ", ".join(sorted({one.__name__ for one in kinds})) or repr(layers)
        raise ValueError(
            f"the layer spec has no attention of Megatron's to replace, only {names:.200}: such "
            "as --use-transformer-engine-full-layer-spec asks for; leave that out, or take "
            "--context-parallel-algo megatron"
        )


def _modules(spec: Any) -> Iterator[Any]:
    """Everything that a spec names, at any depth."""
    if isinstance(spec, (list, tuple)):
        for one in spec:
            yield from _modules(one)
    elif dataclasses.is_dataclass(spec) and not isinstance(spec, type):
        for field in dataclasses.fields(spec):
            yield from _modules(getattr(spec, field.name))
    else:
        yield spec
