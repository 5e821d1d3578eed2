# SPDX-License-Identifier: Apache-2.0
"""Configurations and models of Hugging Face transformers, offline and without remote code.

`config_of` creates the configuration of a language model. `built` instantiates the model on torch's
meta device, which allocates no memory, and reads its parameters, windows and norms.
"""

from __future__ import annotations

import contextlib
import importlib
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

# Fields on storage and execution of weights, which do not describe the shape.
NOT_SHAPES = (
    "quantization_config", "auto_map", "torch_dtype", "dtype", "attn_implementation",
    "_attn_implementation", "_attn_implementation_internal", "transformers_version", "model_type",
)  # fmt: skip
# Error of transformers' type checks for values that older releases accepted.
OLD_VALUE = re.compile(r"Field '(\w+)' expected .{1,200}?, got (int|NoneType)\b")
NESTED = ("text_config", "llm_config", "language_config", "thinker_config", "language_model_config")


def _transformers(part: str = "") -> Any:
    """Import transformers, or its submodule `part`, such as ".models.auto"."""
    try:
        return importlib.import_module(f"transformers{part}")
    except ImportError as error:
        raise ValueError(
            f"reading a config.json requires transformers, which cannot be imported ({error}): "
            "pip install 'megatron-burst[advise]'"
        ) from None


def is_known(model_type: str) -> bool:
    """Return whether transformers has a configuration class for a model type."""
    _transformers()
    return model_type in _transformers(".models.auto.configuration_auto").CONFIG_MAPPING_NAMES


def version() -> str:
    """Return the version of the installed transformers."""
    return _transformers().__version__


def config_of(fields: dict[str, Any], name: str) -> tuple[Any, bool]:
    """Create transformers' configuration of the language model in a config.json.

    Args:
        fields: Fields of the config.json.
        name: Name of the file, for errors.

    Returns:
        The configuration, and whether it is nested in a multimodal configuration.

    Raises:
        ValueError: transformers rejects the fields, or the model is not a decoder.
    """
    transformers = _transformers()
    kind = fields["model_type"]
    with _quiet(), _refused(name, kind):
        config = _made(transformers, kind, _shapes(fields))
        text = config.get_text_config()
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(
            f"{name}: 'is_encoder_decoder' is true for model_type {kind!r}; only decoders are "
            "supported"
        )
    if not _generates(kind, text):
        raise ValueError(f"{name}: model_type {kind!r} is not a text decoder in transformers")
    if text is not config:
        tied = _stated_tie(fields)
        # Files of transformers 4 rely on the default of the language model's class.
        for part in (text, config):
            tied = getattr(part, "tie_word_embeddings", None) if tied is None else tied
        text.tie_word_embeddings = bool(tied)
    return text, text is not config


def _made(transformers: Any, kind: str, fields: dict[str, Any]) -> Any:
    """Create a configuration; convert values that only older releases of transformers accepted.

    Older releases did not check types, so some files contain null values, or integers instead of
    booleans.
    """
    while True:
        try:
            return transformers.AutoConfig.for_model(kind, **fields)
        except Exception as error:
            old_value = OLD_VALUE.search(str(error))
            retyped = _retyped(fields, *old_value.groups()) if old_value else fields
            if repr(retyped) == repr(fields):
                raise
            fields = retyped


def _retyped(fields: dict[str, Any], key: str, kind: str) -> dict[str, Any]:
    """Return `fields` without the null values of `key`, or with its integers as booleans.

    `kind` is the type to remove or convert: "NoneType" or "int". Nested fields are included.
    """
    retyped = {}
    for name, value in fields.items():
        if isinstance(value, dict):
            retyped[name] = _retyped(value, key, kind)
        elif name != key or type(value).__name__ != kind:
            retyped[name] = value
        elif kind == "int":
            retyped[name] = bool(value)
    return retyped


def _stated_tie(fields: dict[str, Any]) -> bool | None:
    """Return `tie_word_embeddings` of the top level or of a nested object; None if absent."""
    if fields.get("tie_word_embeddings") is not None:
        return bool(fields["tie_word_embeddings"])
    parts = (fields[key] for key in NESTED if isinstance(fields.get(key), dict))
    return next((tied for part in parts if (tied := _stated_tie(part)) is not None), None)


def _generates(kind: str, text: Any) -> bool:
    modeling_auto = _transformers(".models.auto.modeling_auto")
    names = ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "SEQ_TO_SEQ_CAUSAL_LM")
    maps = [getattr(modeling_auto, f"MODEL_FOR_{name}_MAPPING_NAMES", {}) for name in names]
    return any(kind in mapping or text.model_type in mapping for mapping in maps)


def _shapes(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields without those in `NOT_SHAPES`, also in nested `*_config` objects."""
    shapes = {key: value for key, value in fields.items() if key not in NOT_SHAPES}
    for key, value in shapes.items():
        if isinstance(value, dict) and key.endswith("_config"):
            inner = {k: v for k, v in value.items() if k not in NOT_SHAPES or k == "model_type"}
            shapes[key] = inner
    return shapes


def values_of(config: Any) -> dict[str, Any]:
    """Return the values of a configuration: attribute name of its class -> value."""
    values = dict(config.to_dict())
    for key in ("layer_types", "layers_block_type"):
        if key not in values and getattr(config, key, None) is not None:
            values[key] = getattr(config, key)
    values["tie_word_embeddings"] = bool(getattr(config, "tie_word_embeddings", False))
    return values


@dataclass(frozen=True)
class BuiltLayer:
    """Properties of one layer of a model on the meta device.

    Attributes:
        parameters: Number of parameters.
        sparse: Whether the layer has experts.
        window: Sliding window in tokens; 0 for full attention; None if the modules have no such
            attribute.
    """

    parameters: int
    sparse: bool
    window: int | None


@dataclass(frozen=True)
class Built:
    """Properties of a model on the meta device.

    Attributes:
        parameters: Number of parameters, including the LM head.
        layers: Properties of each layer.
        names: Parameter name within a layer -> shape, for the parameters of all layers.
        ends: Parameter name -> shape, for parameters outside the layers.
        norms: Class names of norms.
        buffers: Names of buffers, without the path of the module.
    """

    parameters: int
    layers: tuple[BuiltLayer, ...]
    names: dict[str, tuple[int, ...]]
    ends: dict[str, tuple[int, ...]]
    norms: frozenset[str]
    buffers: frozenset[str] = frozenset()


def built(config: Any, name: str, layers: int) -> Built:
    """Instantiate a language model on torch's meta device, and return its properties.

    Args:
        config: Configuration from `config_of`.
        name: Name of the file, for errors.
        layers: Number of layers of the model.

    Returns:
        The properties of the model.

    Raises:
        ValueError: transformers cannot create the model.
    """
    import torch  # imported late, because the import takes seconds

    transformers = _transformers()
    modeling_auto = _transformers(".models.auto.modeling_auto")
    is_causal_lm = config.model_type in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    with _quiet(), _refused(name, config.model_type), torch.device("meta"):
        if is_causal_lm:
            model = transformers.AutoModelForCausalLM.from_config(config)
        elif type(config) in transformers.AutoModel._model_mapping:
            model = transformers.AutoModel.from_config(config)
        else:
            model = _text_model(type(config))._from_config(config)
    shapes = {key: tuple(p.shape) for key, p in model.named_parameters()}
    total = sum(p.numel() for p in model.parameters())
    if not is_causal_lm and not config.tie_word_embeddings:
        total += config.vocab_size * config.hidden_size
    stack = _stack(model, layers)
    inside = f"{stack}." if stack else "\0"
    stack_layers = list(model.get_submodule(stack).children()) if stack else []
    return Built(
        total,
        tuple(map(_layer, stack_layers)),
        {".".join(key[len(inside) :].split(".")[1:]): x for key, x in shapes.items()
         if key.startswith(inside)},
        {key: x for key, x in shapes.items() if not key.startswith(inside)},
        frozenset(type(part).__name__ for key, part in model.named_modules()
                  if key.split(".")[-1].lower().startswith(("norm", "input_layernorm", "ln_f",
                                                            "final_l"))),
        frozenset(key.split(".")[-1] for key, _ in model.named_buffers()),
    )  # fmt: skip


def _text_model(config_class: type) -> Any:
    """Return the class of a text model that is absent from transformers' auto classes."""
    pretrained = _transformers().PreTrainedModel
    name = config_class.__module__.replace("configuration_", "modeling_")
    for model_class in vars(importlib.import_module(name)).values():
        fits = isinstance(model_class, type) and issubclass(model_class, pretrained)
        if (
            fits
            and model_class.__name__.endswith("TextModel")
            and model_class.config_class is config_class
        ):
            return model_class
    raise TypeError(f"{name} has no model class for configuration {config_class.__name__}")


def _stack(model: Any, layers: int) -> str:
    """Return the name of the `nn.ModuleList` that contains the layers; "" if there is none.

    It is the list of length `layers` with the most parameters.
    """
    from torch import nn

    lists = {
        key: sum(p.numel() for p in part.parameters())
        for key, part in model.named_modules()
        if isinstance(part, nn.ModuleList) and len(part) == layers
    }
    return max(lists, key=lambda key: lists[key], default="")


def _layer(layer: Any) -> BuiltLayer:
    names = [key for key, _ in layer.named_parameters()]
    windows = [
        x.sliding_window * bool(getattr(x, "is_sliding", True)) if x.sliding_window else 0
        for x in layer.modules()
        if hasattr(x, "sliding_window")
    ]
    return BuiltLayer(
        sum(p.numel() for p in layer.parameters()),
        any(part.startswith("expert") for key in names for part in key.split(".")),
        windows[0] if windows else None,
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress Python warnings and logging of transformers below errors."""
    logging = _transformers().logging
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(before)


@contextlib.contextmanager
def _refused(name: str, kind: str) -> Iterator[None]:
    """Convert errors of transformers to ValueError with a message of one line."""
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"{name}: transformers cannot create model_type {kind!r} from these fields: "
            f"{type(error).__name__}: {reason:.300}"
        ) from error
