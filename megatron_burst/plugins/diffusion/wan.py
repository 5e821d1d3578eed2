# SPDX-License-Identifier: Apache-2.0
"""Wan, a video model: packed clips, whose tokens attend to their clip and to its text.

Bridge cuts clips and texts over ranks in zigzag order and pads each of them to a multiple of twice
the number of ranks. Here the layout of the run cuts the clips, which may have any length. Every
rank holds all texts, so cross-attention sends nothing. The end of the pack is padded so that all
ranks can hold equal numbers of rows. The padding belongs to the last clip.

The angles of the rotary embedding are computed for the pack, and `data.rope` selects the rows of
the rank. With sequence parallelism, Bridge's projection of the texts gathers them once per
tensor-parallel rank; only the first copy is used, as in Transformer Engine.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.utils import get_model_config
from torch.nn import functional

from ...config import BurstConfig
from ...megatron import patching
from ...megatron.checks.problem import Problem
from ...megatron.data.cut import installed_layout
from ...megatron.data.packed import packs
from ...megatron.data.slicing import context_group, shard_sequence
from . import bridge
from .cross_attention import CrossCoreAttention
from .same_inputs import check_same

PROVIDER = "WanModelProvider"
_MODEL, _LAYERS = "models.wan.wan_model", "models.wan.wan_layer_spec"
_PIPELINE, _CUT = "models.wan.flow_matching.flow_matching_pipeline_wan", "thd_split_inputs_cp"
_DATA = "data.wan.wan_taskencoder"
_SPEC = "get_wan_block_with_transformer_engine_spec"
NEEDED = (
    bridge.Needed(_MODEL, "WanModel.__init__", ("config", "transformer_decoder_layer_spec")),
    bridge.Needed(_LAYERS, _SPEC, ()),
    bridge.Needed(_PIPELINE, "WanFlowMatchingPipeline.step", ("model", "batch")),
    bridge.Needed(_PIPELINE, _CUT, ("x", "cu_seqlens_q_padded", "cp_group")),
)


def layer_spec(config: Any) -> Any:
    """Return Bridge's layer spec of Wan.

    Args:
        config: The provider.
    """
    return getattr(bridge.module(_LAYERS), _SPEC)()


def patch_model(patches: patching.PatchSet, is_ours: Callable[[Any], bool]) -> None:
    """Patch the model to read the layer spec of its provider.

    Args:
        patches: The set of patches.
        is_ours: Test for a layer spec of `apply_burst` (`layers.is_ours`).
    """
    model = bridge.module(_MODEL).WanModel
    patches.wrap(model, "__init__", ["config"], partial(_built, is_ours))


def _built(
    is_ours: Callable[[Any], bool], original: Callable, self: Any, *args: Any, **named: Any
) -> None:
    """Build the model from its provider's layer spec, if `apply_burst` made this spec."""
    bound = patching.bound_to(original, (self, *args), named)
    config = bound.arguments["config"]
    spec: Any = getattr(config, "transformer_layer_spec", None)
    if is_ours(spec):
        bound.arguments["transformer_decoder_layer_spec"] = partial(spec, config)
    original(*bound.args, **bound.kwargs)


def problems(model: Any, transformer: Any, burst: BurstConfig) -> Iterator[Problem]:
    """Yield a problem for each unsupported setting; see `DiffusionRecipes.problems`."""
    name = type(model).__name__
    yield from bridge.option_problems(name, burst, bridge.OWN_FORWARD)
    yield from bridge.head_problems(name, burst)
    yield from bridge.mean_problems(name, transformer, burst)
    reason = "Bridge computes the loss on every stage, from noise that differs between stages"
    yield from bridge.pipeline_problems(name, transformer, reason)
    form = getattr(model, "qkv_format", None)
    if form != "thd":
        yield Problem(f"qkv_format={form} with {name}: set model.qkv_format=thd")


def with_attention(model: Any, layers: Any) -> Any:
    """Return the layer spec with `CrossCoreAttention`, and turn fused rotary embedding off.

    Args:
        model: The provider; `apply_rope_fusion` is changed.
        layers: The layer spec.
    """
    if getattr(model, "apply_rope_fusion", False):
        # The kernel of Transformer Engine indexes angles by the position in the clip.
        model.apply_rope_fusion = False
        patching.log(
            f"model.apply_rope_fusion of {type(model).__name__} is now False: the fused kernel "
            "does not support angles of a pack of clips"
        )
    layout = model.burst.layout
    bridge.log_choice(model, f"clips are cut in layout {layout}, and every rank holds all texts")
    parts = layers.submodules
    cross: Any = getattr(parts, "cross_attention", None)
    if not hasattr(cross, "submodules"):  # layers of GPT have `IdentityOp`
        raise ValueError(
            f"model.transformer_layer_spec of {type(model).__name__} has no cross_attention; use "
            "the layer spec of Megatron-Bridge"
        )
    core = dataclasses.replace(cross.submodules, core_attention=CrossCoreAttention)
    cross = dataclasses.replace(cross, submodules=core)
    return dataclasses.replace(layers, submodules=dataclasses.replace(parts, cross_attention=cross))


def patch_bridge() -> None:
    """Patch Bridge's training step to cut clips in the layout of the run. Idempotent."""
    name = "recipes, clips"
    if patching.installed(name) is None:
        home = bridge.module(_PIPELINE)
        with patching.patch_set(name) as patches:
            patches.wrap(home.WanFlowMatchingPipeline, "step", ["model", "batch"], _step)
    name, data = "recipes, clips of data", sys.modules.get(f"megatron.bridge.diffusion.{_DATA}")
    if data is not None and patching.installed(name) is None:
        with patching.patch_set(name) as patches:
            patches.wrap(data.WanTaskEncoder, "encode_sample", ["sample"], _encoded)


def forward_step(recipe: Any) -> Any:
    """Return Bridge's forward step: for fine-tuning if the recipe has a pretrained checkpoint.

    Args:
        recipe: The recipe.
    """
    mode = "finetune" if recipe.checkpoint.pretrained_checkpoint else "pretrain"
    return bridge.module("models.wan.wan_step").WanForwardStep(mode=mode)


class _OneRankState:
    """Replacement for Megatron's `parallel_state`, so that Bridge pads clips for one rank only."""

    @staticmethod
    def get_context_parallel_world_size() -> int:
        return 1


def _encoded(original: Callable, self: Any, *args: Any, **named: Any) -> Any:
    """Run `WanTaskEncoder.encode_sample`; pad clips for all ranks only in layout zigzag."""
    if installed_layout() in (None, "zigzag"):
        return original(self, *args, **named)
    data = sys.modules[f"megatron.bridge.diffusion.{_DATA}"]
    with patching.instead(data, "parallel_state", _OneRankState):
        return original(self, *args, **named)


def _step(original: Callable, self: Any, *args: Any, **named: Any) -> Any:
    """Run a step of Bridge's pipeline with this rank's rows of the clips and all texts."""
    arguments = patching.given_to(original, (self, *args), named)
    if not bridge.uses_burst_attention(get_model_config(arguments["model"])):
        return original(self, *args, **named)
    batch = arguments["batch"]
    params = batch["packed_seq_params"]
    _fill_up(params, batch["video_latents"].shape[1])
    with patching.instead(bridge.module(_PIPELINE), _CUT, partial(_rows, params)):
        return original(self, *args, **named)


def _fill_up(params: dict[str, Any], rows: int) -> None:
    """Extend the last clip by padding, so that the ranks can hold equal numbers of rows.

    Args:
        params: The `PackedSeqParams` of self-attention and of cross-attention; changed.
        rows: Number of rows of the pack.
    """
    ranks, tensor = context_group().size(), parallel_state.get_tensor_model_parallel_world_size()
    multiple = math.lcm(2 * ranks, ranks * tensor)
    total = -(-rows // multiple) * multiple  # rounded up
    ends = params["self_attention"].cu_seqlens_q_padded
    if total == int(packs().values(ends)[-1]):
        return
    ends = ends.clone()
    ends[-1] = total
    for name, fields in (("self_attention", ("q", "kv")), ("cross_attention", ("q",))):
        for field in fields:
            setattr(params[name], f"cu_seqlens_{field}_padded", ends)


def _rows(params: dict[str, Any], x: torch.Tensor, ends: torch.Tensor, _group: Any) -> torch.Tensor:
    """Return this rank's rows of `x` if `x` has clips; return `x` if it has texts.

    Args:
        params: The `PackedSeqParams` of self-attention and of cross-attention.
        x: [s, b, ...], all rows of the clips or of the texts.
        ends: Boundaries of the clips or texts in `x`.

    Raises:
        ValueError: Ranks have different inputs; all ranks raise the error.
    """
    clips = params["self_attention"]
    if ends is params["cross_attention"].cu_seqlens_kv_padded:
        check_same("Wan", texts=x, text_boundaries=ends)
        return x
    if ends is not clips.cu_seqlens_q_padded:
        raise ValueError(
            f"{_CUT} got boundaries that are not in packed_seq_params; use Megatron-Bridge "
            f"{bridge.TESTED}"
        )
    check_same("Wan", clips=x, clip_boundaries=ends)
    missing = int(packs().values(clips.cu_seqlens_q_padded)[-1]) - len(x)
    x = functional.pad(x, (0, 0) * (x.dim() - 1) + (0, missing))
    return shard_sequence(x, clips, dim=0)
