# SPDX-License-Identifier: Apache-2.0
"""Layers that derive from `TransformerLayer` and have a forward of their own.

What our flags change of a layer is changed in methods of `TransformerLayer`. A class that replaces
such a method, and does not call the one that it replaces, would train without what the flag asks
for, and nothing would say so. Decides, from the code of a class alone, which flags those are; they
are refused when the layer is built.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

from megatron.core.transformer.transformer_layer import TransformerLayer

from ...config import BurstConfig
from ..checks.problem import Problem, report
from ..checks.splitting import attends
from ..patching import PatchSet, given_to, user_error

# (flag, choice, its value where nothing is asked for, the method in which it takes effect)
_TAKE_EFFECT = (
    ("--burst-sequence-chunks", "sequence_chunks", 1, "_forward_attention"),
    ("--burst-mlp-tiles", "mlp_tiles", 1, "_forward_mlp"),
    ("--burst-offload", "offload", 0.0, "forward"),
)


def patch(patches: PatchSet) -> None:
    """Add to a set of patches what refuses flags that a layer would not honour."""
    patches.wrap(TransformerLayer, "__init__", ["config"], _refusing)


def _refusing(original: Callable, self: Any, *args: Any, **named: Any) -> None:
    config = given_to(original, (self, *args), named)["config"]
    burst = getattr(config, "burst", None)
    if burst is not None and attends(config, burst):
        problems = tuple(own_forward_problems(type(self), config, burst))
        if problems:
            raise user_error(report(problems))
    original(self, *args, **named)


def own_forward_problems(layer: type, config: Any, burst: BurstConfig) -> Iterator[Problem]:
    """The choices that would have no effect in layers of this class.

    Of layers that are recomputed whole, what goes to the host goes there around their forward.
    """
    whole = getattr(config, "recompute_granularity", None) == "full"
    for flag, name, unasked, method in _TAKE_EFFECT:
        value = getattr(burst, name)
        around = whole and name == "offload"
        if value != unasked and not around and not _reaches(layer, method):
            yield Problem(
                f"{flag} {value}: layers are {layer.__name__}, whose {method} is not that of "
                "Megatron's TransformerLayer, in which this takes effect",
                remove=(flag,),
            )


def _reaches(layer: type, method: str) -> bool:
    """Whether a forward of the layer runs `TransformerLayer`'s method."""
    whole = _passes_on(layer, "forward") or method in _names(_code(layer, "forward"))
    return _passes_on(layer, method) and whole


def _passes_on(layer: type, method: str) -> bool:
    """Whether each class that replaces the method calls the one that it replaces."""
    derived = layer.__mro__[: layer.__mro__.index(TransformerLayer)]
    own = [_code(cls, method) for cls in derived if method in vars(cls)]
    return all({"super", method} <= _names(code) for code in own)


def _code(cls: type, method: str) -> CodeType:
    return inspect.unwrap(getattr(cls, method)).__code__


def _names(code: CodeType) -> set[str]:
    """Names that a function reads, and those of the functions in it."""
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*map(_names, inner))
