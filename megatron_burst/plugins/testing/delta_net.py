# SPDX-License-Identifier: Apache-2.0
"""Torch replacements for the GPU operators of Megatron's gated delta nets, for `cpu.enable`.

Megatron builds a gated delta net only from Transformer Engine's modules, and only if
flash-linear-attention, which requires a GPU, can be imported. The last norm of a hybrid stack is
also a module of Transformer Engine. The replacements in this module compute the same results.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from ...megatron import homes
from ...megatron.patching import PatchSet

_SPECS = "megatron.core.models.gpt.experimental_attention_variant_module_specs"
# Modules of hybrid stacks: since 0.18, and before.
_STACKS = ("megatron.core.models.hybrid.hybrid_block", "megatron.core.ssm.mamba_block")


def patch(patches: PatchSet) -> None:
    """Add the patches that let gated delta nets and hybrid stacks run on a CPU."""
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    stack = next(filter(None, map(_module, _STACKS)), None)
    if stack is not None:
        patches.replace(stack, "TENorm", WrappedTorchNorm)
    # Since 0.19; before, delta nets are in one module, which needs no patch.
    parts = [homes.find(f"gated_delta_net.{part}") for part in ("common", "gdn")]
    if all(parts):
        _patch_delta_net(patches, *parts)
        _patch_builder(patches, importlib.import_module(_SPECS))


def _module(name: str) -> Any:
    """Import and return the named module; return None if this version of Megatron lacks it."""
    parent = name.rpartition(".")[0]
    spec = importlib.util.find_spec(parent)
    if spec is None or spec.submodule_search_locations is None:
        return None
    return importlib.import_module(name) if importlib.util.find_spec(name) else None


def _patch_delta_net(patches: PatchSet, common: Any, gdn: Any) -> None:
    patches.replace(common, "HAVE_FLA", True)
    stand_ins = {
        "l2norm": l2norm,
        "causal_conv1d": causal_conv1d,
        "chunk_gated_delta_rule": gdn.torch_chunk_gated_delta_rule,
    }
    gdn2 = homes.find("gated_delta_net.gdn2")  # from 0.20 on
    if gdn2 is not None:
        stand_ins["chunk_gdn2"] = gdn2.torch_chunk_gdn2
    for module in filter(None, (common, gdn, gdn2)):
        for name in stand_ins.keys() & vars(module).keys():
            patches.replace(module, name, stand_ins[name])


def l2norm(x: torch.Tensor, dim: int = -1, eps: float = 1e-6) -> torch.Tensor:
    """Return x / sqrt(sum of x squared along `dim` + eps), in the dtype of x.

    Args:
        x: Tensor of any shape and floating-point dtype; the sum is computed at least in fp32.
        dim: Dimension of the sum.
        eps: Added to the sum.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * (wide.square().sum(dim, keepdim=True) + eps).rsqrt()).to(x.dtype)


def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    cu_seqlens: torch.Tensor | None = None,
    **unused: Any,
) -> tuple[torch.Tensor, None]:
    """Apply a causal depthwise convolution along the sequence, then the activation.

    Args:
        x: Tensor [batch, sequence, channels].
        weight: Tensor [channels, width of the filter].
        bias: Tensor [channels] or None.
        activation: "silu", "swish" or None.
        cu_seqlens: Boundaries of packed documents; must be None.
        **unused: Ignored arguments of the GPU operator.

    Returns:
        The output, shaped like x, and None in place of the final state.

    Raises:
        ValueError: The batch is packed.
    """
    if cu_seqlens is not None:
        raise ValueError(
            "packed batches: Megatron's own gated delta net has no operator for them on a CPU; "
            "use --burst-linear auto with --context-parallel-algo burst"
        )
    width = weight.shape[1]
    rows = F.pad(x.transpose(1, 2), (width - 1, 0))
    out = F.conv1d(rows, weight.unsqueeze(1), bias, groups=len(weight)).transpose(1, 2)
    return (F.silu(out) if activation in ("silu", "swish") else out), None


def _patch_builder(patches: PatchSet, specs: Any) -> None:
    """Patch `--transformer-impl local` to build gated delta nets from Megatron's local modules."""
    name = "get_transformer_block_with_experimental_attention_variant_spec"
    original: Callable[..., Any] = getattr(specs, name)

    @functools.wraps(original)
    def block_spec(config: Any, vp_stage: int | None = None, pp_rank: int | None = None) -> Any:
        from .local_specs import local_block_spec

        if getattr(config, "transformer_impl", None) != "local":
            return original(config, vp_stage=vp_stage, pp_rank=pp_rank)
        return local_block_spec(config, vp_stage=vp_stage, pp_rank=pp_rank)

    patches.replace_function(specs, name, block_spec)
