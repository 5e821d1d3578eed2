# SPDX-License-Identifier: Apache-2.0
"""Flux, an image model whose layers attend jointly to the tokens of a text and of an image.

Text and image are cut over ranks separately, in the layout of the run, and a rank holds its rows of
both. Attention has no mask, so its result does not depend on the order of the rows. The output of
the model is gathered, because Bridge's training step computes the loss of whole images. Therefore
ranks must draw the same noise, which is checked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ...config import BurstConfig
from ...megatron import patching
from ...megatron.checks.problem import Problem
from ...megatron.data.slicing import context_group, held_positions, shard_sequence
from . import bridge
from .same_inputs import check_same

PROVIDER = "FluxProvider"
_MODEL, _LAYERS = "models.flux.flux_model", "models.flux.flux_layer_spec"
_SPEC = "get_flux_double_transformer_engine_spec"
_DIMS = {"img": 0, "txt": 0, "img_ids": 1, "txt_ids": 1}
_CONTROL = ("controlnet_double_block_samples", "controlnet_single_block_samples")
NEEDED = (
    bridge.Needed(_MODEL, "Flux.__init__", ("config",)),
    bridge.Needed(_MODEL, "Flux.forward", (*_DIMS, "timesteps", "y", *_CONTROL)),
    bridge.Needed(_LAYERS, _SPEC, ()),
)


def layer_spec(config: Any) -> Any:
    """Return Bridge's spec of the layers with joint attention.

    Args:
        config: The provider.
    """
    return getattr(bridge.module(_LAYERS), _SPEC)()


def patch_model(patches: patching.PatchSet, is_ours: Callable[[Any], bool]) -> None:
    """Patch the model to configure its attention and to cut its inputs.

    Args:
        patches: The set of patches.
        is_ours: Test for a layer spec of `apply_burst` (`layers.is_ours`).
    """
    model = bridge.module(_MODEL).Flux
    patches.wrap(model, "__init__", ["config"], partial(_built, is_ours))
    patches.wrap(model, "forward", [*_DIMS, *_CONTROL], _cut)


def _built(
    is_ours: Callable[[Any], bool], original: Callable, self: Any, *args: Any, **named: Any
) -> None:
    """Configure attention before the model is built, if `apply_burst` made the layer spec."""
    config = patching.given_to(original, (self, *args), named)["config"]
    spec: Any = getattr(config, "transformer_layer_spec", None)
    if is_ours(spec):
        spec(config)
    original(self, *args, **named)


def problems(model: Any, transformer: Any, burst: BurstConfig) -> Iterator[Problem]:
    """Yield a problem for each unsupported setting; see `DiffusionRecipes.problems`."""
    name = type(model).__name__
    refused = bridge.OWN_FORWARD | {"store": "whose layers Bridge does not recompute"}
    yield from bridge.option_problems(name, burst, refused)
    yield from bridge.head_problems(name, burst)
    reason = "every stage would have the whole model"
    yield from bridge.pipeline_problems(name, transformer, reason)
    if burst.layout == "balanced":
        yield Problem(
            f"--burst-layout balanced requires packed documents, which {name} does not have",
            add=("--burst-layout zigzag",),
        )


def with_attention(model: Any, layers: Any) -> Any:
    """Return the layer spec unchanged: BurstAttention replaces the core attention of the layers."""
    layout = model.burst.layout
    bridge.log_choice(model, f"text and image are each cut in layout {layout}")
    return layers


def patch_bridge() -> None:
    """Do nothing: `patch_model` patches the model."""


def forward_step(recipe: Any) -> Any:
    """Return Bridge's forward step.

    Args:
        recipe: The recipe.
    """
    return bridge.module("models.flux.flux_step").FluxForwardStep()


def _cut(original: Callable, self: Any, *args: Any, **named: Any) -> torch.Tensor:
    """Run the model on this rank's rows of text and image, and gather the output rows of all ranks.

    Raises:
        ValueError: The call has outputs of a ControlNet, or ranks have different inputs.
    """
    if not bridge.uses_burst_attention(self.config):
        return original(self, *args, **named)
    bound = patching.bound_to(original, (self, *args), named)
    inputs = bound.arguments
    for name in _CONTROL:
        if inputs.get(name) is not None:
            raise ValueError(f"{name} is not supported over context-parallel ranks; omit it")
    check_same("Flux", **{name: inputs.get(name) for name in (*_DIMS, "timesteps", "y")})
    for name, dim in _DIMS.items():
        inputs[name] = shard_sequence(inputs[name], dim=dim)
    return GatheredRows.apply(original(*bound.args, **bound.kwargs))


class GatheredRows(torch.autograd.Function):
    """All-gather of rows [s, b, d] over the context-parallel ranks, in the order of the sequence.

    Every rank computes the loss of all rows, and Megatron averages gradients over the ranks.
    Therefore the gradient of a row is multiplied by the number of ranks.
    """

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor) -> torch.Tensor:
        """Return [s * ranks, b, d].

        Args:
            ctx: Context of the backward.
            rows: [s, b, d] of this rank.
        """
        group = context_group()
        positions = torch.from_numpy(held_positions(len(rows))).to(rows.device)
        parts = [torch.empty_like(rows) for _ in range(group.size())]
        dist.all_gather(parts, rows.contiguous(), group=group)
        ctx.own, ctx.ranks = positions[group.rank()], group.size()
        out = rows.new_empty(positions.numel(), *rows.shape[1:])
        return out.index_copy_(0, positions.flatten(), torch.cat(parts))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the gradient of this rank's rows [s, b, d].

        Args:
            ctx: Context of the forward.
            grad: [s * ranks, b, d], the same on all ranks.
        """
        return grad.index_select(0, ctx.own) * ctx.ranks
