# SPDX-License-Identifier: Apache-2.0
"""Access to Megatron-Bridge: required functions, and replacement of classes in layer specs."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

from ...config import FIELDS, OFF, BurstConfig
from ...megatron import patching
from ...megatron.checks.problem import Problem
from ...megatron.selection import burst_of, uses_burst

TESTED = "0.6.2"
# Options that take effect in methods of Megatron's layer class, for models with other layers.
OWN_FORWARD: dict[str, str] = dict.fromkeys(
    ("sequence_chunks", "mlp_tiles", "offload"), "whose layers do not run Megatron's forward"
)
S = TypeVar("S")


class Needed(NamedTuple):
    """A function of Bridge that this plugin calls or wraps.

    Attributes:
        module: The module, relative to `megatron.bridge.diffusion`.
        name: The function, or `CLASS.METHOD`.
        parameters: Names of parameters that the function must have.
    """

    module: str
    name: str
    parameters: tuple[str, ...]


def module(name: str) -> Any:
    """Import a module of `megatron.bridge.diffusion`."""
    return importlib.import_module(f"megatron.bridge.diffusion.{name}")


def check_version(model: str, needed: Iterable[Needed]) -> None:
    """Raise an error if the installed Bridge lacks a function that a model needs.

    Args:
        model: The name of the provider, for the message.
        needed: The functions.

    Raises:
        ValueError: Functions are missing or have other parameters; the message names all of them.
    """
    lacks = [text for function in needed if (text := _lack(function))]
    if lacks:
        try:
            version = importlib.metadata.version("megatron-bridge")
        except importlib.metadata.PackageNotFoundError:
            version = "of unknown version"
        raise ValueError(
            f"recipe: {model} of Megatron-Bridge {version} is not supported: {'; '.join(lacks)}. "
            f"Use Megatron-Bridge {TESTED}"
        )


def _lack(needed: Needed) -> str | None:
    """Return a text on the problem with a function of the installed Bridge; None if it fits."""
    try:
        owner = module(needed.module)
    except ImportError as error:
        return f"{needed.module} cannot be imported ({error})"
    for part in needed.name.split("."):
        owner = getattr(owner, part, None)
        if owner is None:
            return f"{needed.module} has no {needed.name}"
    missing = set(needed.parameters) - inspect.signature(owner).parameters.keys()
    return f"{needed.name} has no parameter {', '.join(sorted(missing))}" if missing else None


def splits(model: Any, is_ours: Callable[[Any], bool]) -> bool:
    """Return whether BurstAttention splits the attention of a provider's model over ranks.

    Args:
        model: The provider.
        is_ours: Test for a layer spec of `apply_burst` (`layers.is_ours`).
    """
    spec = model.transformer_layer_spec
    chosen = is_ours(spec) and spec.keywords.get("algorithm") != OFF
    return chosen and model.context_parallel_size > 1


def uses_burst_attention(config: Any) -> bool:
    """Return whether a built model has BurstAttention, which then splits its batches over ranks.

    Args:
        config: The configuration of the model.
    """
    return uses_burst(config, burst_of(config))


def option_problems(
    name: str, burst: BurstConfig, refused: Mapping[str, str] | None = None
) -> Iterator[Problem]:
    """Yield a problem for each option that a model with a fixed mask does not support.

    Args:
        name: The name of the provider.
        burst: The options of the run.
        refused: Further options that the model does not support, each with a reason that begins
            with "whose" or "which".
    """
    for option, reason in (refused or {}).items():
        if option in FIELDS:  # options of a plugin that is not installed are absent
            flag, value = FIELDS[option].flag, getattr(burst, option)
            if value != FIELDS[option].default:
                text = f"{flag} {value} does not work with {name}, {reason}"
                yield Problem(text, remove=(flag,))
    if burst.attention_layout not in (None, burst.layout):
        yield Problem(
            f"--burst-attention-layout {burst.attention_layout} was not tested with {name}",
            remove=("--burst-attention-layout",),
        )
    if burst.mask is not None:
        yield Problem(
            f"--burst-mask {burst.mask} does not work with {name}, which has its own mask",
            remove=("--burst-mask",),
        )


def head_problems(name: str, burst: BurstConfig) -> Iterator[Problem]:
    """Yield a problem for `--burst-lm-head-loss` if the training step itself computes the loss.

    Args:
        name: The name of the provider.
        burst: The options of the run.
    """
    if burst.lm_head_loss != "off":
        yield Problem(
            f"--burst-lm-head-loss {burst.lm_head_loss} does not work with {name}, whose training "
            "step computes the loss from outputs of the model",
            remove=("--burst-lm-head-loss",),
        )


def mean_problems(name: str, transformer: Any, burst: BurstConfig) -> Iterator[Problem]:
    """Yield a problem if losses are averaged per rank before they are averaged over ranks.

    In the models that use this check, ranks have different numbers of tokens with a loss. Layout
    `balanced` is not checked here, because `checks.config` refuses it.

    Args:
        name: The name of the provider.
        transformer: The `TransformerConfig`.
        burst: The options of the run.
    """
    if burst.layout != "balanced" and not transformer.calculate_per_token_loss:
        yield Problem(
            f"calculate_per_token_loss=False with {name}: ranks have different numbers of tokens "
            "with a loss, so the mean over ranks is not the mean over tokens; set "
            "model.calculate_per_token_loss=True and ddp.average_in_collective=False"
        )


def pipeline_problems(name: str, transformer: Any, reason: str) -> Iterator[Problem]:
    """Yield a problem for pipeline parallelism, which Bridge does not support in the model.

    Args:
        name: The name of the provider.
        transformer: The `TransformerConfig`.
        reason: Reason for the message, why Bridge does not support it.
    """
    size = transformer.pipeline_model_parallel_size
    if size > 1:
        yield Problem(
            f"--pipeline-model-parallel-size {size} with {name}: {reason}",
            add=("--pipeline-model-parallel-size=1",),
        )


def log_choice(model: Any, choice: str) -> None:
    """Log how the sequences of a diffusion model are split, once in a run."""
    patching.log_once(patching.run_state(), f"{type(model).__name__}: {choice}")


def as_subclass(value: Any, subclass: Callable[..., S], **fields: Any) -> S:
    """Return an instance of `subclass` with the field values of `value`.

    Args:
        value: Instance of a dataclass.
        subclass: Subclass of the dataclass.
        **fields: Values of the fields that only the subclass has.
    """
    return subclass(**{f.name: getattr(value, f.name) for f in dataclasses.fields(value)}, **fields)


def replaced(spec: Any, replacements: Mapping[type, type]) -> Any:
    """Return a copy of a layer spec in which classes are replaced.

    Args:
        spec: A layer spec, a list of specs, or a value inside a spec.
        replacements: The replacement of each class.
    """
    if isinstance(spec, (list, tuple)):
        return type(spec)(replaced(entry, replacements) for entry in spec)
    if dataclasses.is_dataclass(spec) and not isinstance(spec, type):
        fields = {f.name: getattr(spec, f.name) for f in dataclasses.fields(spec) if f.init}
        changes = {name: replaced(value, replacements) for name, value in fields.items()}
        return dataclasses.replace(spec, **changes)
    return replacements.get(spec, spec) if isinstance(spec, type) else spec


def contains(spec: Any, module_class: type) -> bool:
    """Return whether a layer spec contains a class.

    Args:
        spec: Same as in `replaced`.
        module_class: The class.
    """
    return replaced(spec, {module_class: _Marker}) != spec


class _Marker:
    """Class that no layer spec contains."""
