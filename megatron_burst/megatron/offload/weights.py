"""Weights that Megatron's linear layers find again in backward, as the objects they were.

torch rebuilds every tensor that was saved under saved-tensor hooks: the same memory, but another
object, without the attributes of Megatron's parameters. With gradient accumulation fusion the
backward of a linear layer reads and sets such attributes (`grad_added_to_main_grad`); on the
rebuilt object they would be lost, and data parallelism would not see a gradient. Transformer Engine
(2.9 and later) keeps a reference of its own.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from megatron.core.tensor_parallel import layers

from megatron_burst.megatron.offload.tier import ASKED
from megatron_burst.megatron.patching.compatibility import require_parameters
from megatron_burst.megatron.patching.registry import PatchSet

_LINEAR = "LinearWithGradAccumulationAndAsyncCommunication"
_WEIGHT = "_burst_weight"


def patch(patches: PatchSet) -> None:
    """Add to a set of patches what hands linear layers their own weight in backward."""
    linear = getattr(layers, _LINEAR)
    require_parameters(linear.forward, ["ctx", "input", "weight"], f"{_LINEAR}.forward")
    require_parameters(linear.backward, ["ctx", "grad_output"], f"{_LINEAR}.backward")
    patches.replace(linear, "forward", staticmethod(_noting(linear.forward, patches)))
    patches.replace(linear, "backward", staticmethod(_restoring(linear.backward)))


def _noting(original: Callable, patches: PatchSet) -> Callable:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def forward(ctx: Any, *args: Any) -> Any:
        if ASKED in patches.notes:
            setattr(ctx, _WEIGHT, signature.bind(ctx, *args).arguments["weight"])
        return original(ctx, *args)

    return forward


def _restoring(original: Callable) -> Callable:
    @functools.wraps(original)
    def backward(ctx: Any, grad_output: Any) -> Any:
        return original(_Restored(ctx) if hasattr(ctx, _WEIGHT) else ctx, grad_output)

    return backward


class _Restored:
    """A context whose second saved tensor is the weight itself; all else is the context's own."""

    def __init__(self, ctx: Any) -> None:
        self.__dict__["_ctx"] = ctx

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        first, _, *others = self._ctx.saved_tensors
        return (first, getattr(self._ctx, _WEIGHT), *others)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_ctx"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__["_ctx"], name, value)
