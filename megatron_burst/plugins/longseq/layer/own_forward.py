# SPDX-License-Identifier: Apache-2.0
"""Check for flags that would have no effect in subclasses of `TransformerLayer`.

Some flags take effect in a method of `TransformerLayer`. A subclass that overrides this method and
does not call the inherited method would train without the flag, and without an error. `_STILL_RUN`
lists the subclasses in which the inherited method runs in spite of an override. For every other
class with an override, an error is raised when the layer is built.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from megatron.core.transformer.transformer_layer import TransformerLayer

from ....megatron.checks.problem import Problem, report
from ....megatron.patching import PatchSet, given_to, path_of, user_error
from ....megatron.selection import burst_of, uses_burst
from ..options import LongSequenceOptions

_HOME = "megatron.core.transformer.transformer_layer"
# Class name -> methods of TransformerLayer that run although the class overrides them or `forward`.
_STILL_RUN = {
    f"{_HOME}.MoETransformerLayer": ("_forward_mlp",),
    # The forward of this class calls both methods, but not the inherited forward.
    f"{_HOME}.HyperConnectionTransformerLayer": ("_forward_attention", "_forward_mlp"),
}
# (flag, option, its default, the method in which it takes effect)
_TAKE_EFFECT = (
    ("--burst-sequence-chunks", "sequence_chunks", 1, "_forward_attention"),
    ("--burst-mlp-tiles", "mlp_tiles", 1, "_forward_mlp"),
    ("--burst-offload", "offload", 0.0, "forward"),
)


def patch(patches: PatchSet) -> None:
    """Patch the constructor of `TransformerLayer` to check the class of each layer."""
    patches.wrap(TransformerLayer, "__init__", ["config"], _refusing)


def _refusing(original: Callable, self: Any, *args: Any, **named: Any) -> None:
    config = given_to(original, (self, *args), named)["config"]
    burst: Any = burst_of(config)
    if uses_burst(config, burst):
        problems = tuple(own_forward_problems(type(self), config, burst))
        if problems:
            raise user_error(report(problems))
    original(self, *args, **named)


def own_forward_problems(layer: type, config: Any, burst: LongSequenceOptions) -> Iterator[Problem]:
    """Yield a `Problem` for each option that may have no effect in layers of this class.

    Offloading is not checked with full recomputation, because it then takes place outside the
    layer's forward.
    """
    fully_recomputed = getattr(config, "recompute_granularity", None) == "full"
    for flag, option, default, method in _TAKE_EFFECT:
        value = getattr(burst, option)
        if value == default or (fully_recomputed and option == "offload"):
            continue
        override = _override_of(layer, method)
        if override is not None:
            yield Problem(
                f"{flag} {value}: layers are {layer.__name__}, whose {override} may not run "
                f"TransformerLayer.{method}, in which the flag takes effect",
                remove=(flag,),
            )


def _override_of(layer: type, method: str) -> str | None:
    """Return the name of the override in `layer` that may not call `TransformerLayer.method`.

    Return None if the inherited method runs.
    """
    for cls in layer.__mro__[: layer.__mro__.index(TransformerLayer)]:
        if method in _STILL_RUN.get(path_of(cls), ()):
            continue
        for name in (method, "forward"):
            if name in vars(cls):
                return f"{name} ({path_of(cls)})"
    return None
