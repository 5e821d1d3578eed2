"""The layer spec of a GPT model with BurstAttention, for whoever takes a function that makes one.

Owns: the one function that Megatron-LM calls by `--spec megatron_burst.megatron.specs
burst_layer_spec` (from 0.19 on; before, it takes only specs that are already made, and those cannot
look at the configuration), and that recipes hold as ``functools.partial(burst_layer_spec,
base=..., ...)``. Must not know: attention, recipes.

A spec is asked for when a model is built, which is after every override of a configuration; so
choices are settled and checked here and not when they are stated.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from megatron_burst import flags
from megatron_burst.config import BurstConfig
from megatron_burst.megatron.install import configure, install
from megatron_burst.megatron.patching.compatibility import require_function


def burst_layer_spec(
    config: Any, vp_stage: int | None = None, *, base: Any = None, **choices: Any
) -> Any:
    """The layers that the model would have without us, with our attention between ranks.

    config: a ``TransformerConfig``, or a model configuration that holds one as ``.transformer``.
    base: what makes those layers: a ``ModuleSpec``, a function of (config) or (config, vp_stage),
    or None for Megatron-LM's default. choices: fields of `BurstConfig`. With none, our flags count
    where they were added, but for the algorithm "megatron"; otherwise it is `BurstConfig` as it
    stands. Raises ``ValueError`` for what cannot be honoured.
    """
    transformer = transformer_of(config)
    chosen = None if choices else getattr(transformer, "burst", None)
    if chosen is None:
        chosen = settled(choices, transformer)
        install(chosen.layout)
    if chosen.algorithm == flags.OFF and not choices:  # no flag asks for it; this spec does
        chosen = dataclasses.replace(chosen, algorithm=BurstConfig.algorithm)
    check_backend(transformer, chosen)
    configure(transformer, chosen, seq_length=getattr(config, "seq_length", None))
    layers = _layers(base, config, vp_stage)
    if transformer.context_parallel_size > 1 and chosen.algorithm != flags.OFF:
        _check_layers(layers)
    return layers


def transformer_of(config: Any) -> Any:
    """The ``TransformerConfig`` in a model configuration, which may be one itself."""
    return getattr(config, "transformer", config)


def check_backend(transformer: Any, chosen: BurstConfig) -> None:
    """Raise ``ValueError`` for the backend that stands for another core attention.

    Builders put Megatron's own unfused attention over whatever a spec names where they see it.
    """
    backend = getattr(transformer, "attention_backend", None)
    split = transformer.context_parallel_size > 1 and chosen.algorithm != flags.OFF
    if split and getattr(backend, "name", backend) == "local":
        raise ValueError(
            "--attention-backend local asks for Megatron's own unfused attention, which "
            "BurstAttention replaces: leave it unset, or take --context-parallel-algo megatron"
        )


def settled(choices: dict[str, Any], transformer: Any) -> BurstConfig:
    """The choices of one configuration, with the layout that follows from them."""
    config = BurstConfig(**choices)
    if "layout" in choices:
        return config
    layout = flags.layout_for(config.algorithm, config.store, transformer.mtp_num_layers)
    return dataclasses.replace(config, layout=layout)


def _layers(base: Any, config: Any, vp_stage: int | None) -> Any:
    if base is None:
        gpt = importlib.import_module("megatron.training.models.gpt")
        base = require_function(gpt, "default_layer_spec", ["config", "vp_stage"])
    if not isinstance(base, Callable) or dataclasses.is_dataclass(base):
        return base
    staged = "vp_stage" in inspect.signature(base).parameters
    return base(config, vp_stage=vp_stage) if staged else base(config)


def _check_layers(layers: Any) -> None:
    """Raise ``ValueError`` unless Megatron's own attention is somewhere in a layer spec.

    An empty list of layers is that of a pipeline stage without any.
    """
    from megatron.core.transformer.attention import Attention

    if getattr(layers, "layer_specs", None) == []:
        return
    kinds = [one for one in _modules(layers) if isinstance(one, type)]
    if not any(issubclass(one, Attention) for one in kinds):
        names = ", ".join(sorted({one.__name__ for one in kinds})) or repr(layers)
        raise ValueError(
            f"the layer spec has no attention of Megatron's to replace, only {names:.200}: such "
            "as --use-transformer-engine-full-layer-spec asks for; leave that out, or take "
            "--context-parallel-algo megatron"
        )


def _modules(spec: Any) -> Iterator[Any]:
    """All that is named in a spec, at any depth."""
    if isinstance(spec, (list, tuple)):
        for one in spec:
            yield from _modules(one)
    elif dataclasses.is_dataclass(spec) and not isinstance(spec, type):
        for field in dataclasses.fields(spec):
            yield from _modules(getattr(spec, field.name))
    else:
        yield spec
