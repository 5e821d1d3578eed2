# SPDX-License-Identifier: Apache-2.0
"""Torch replacements for the operators of mamba_ssm in Megatron's Mamba mixers, for `cpu.enable`.

Megatron builds a mixer only if mamba_ssm is installed, and the kernels of mamba_ssm need a GPU. The
replacements for the gated norm and the fused kernel compute the same results. The fused kernel is
computed token by token.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
import torch.nn.functional as F

from ...megatron import homes
from ...megatron.patching import HYBRID_SINCE, PatchSet, core_version


def patch(patches: PatchSet) -> None:
    """Add the patches for Mamba mixers (Megatron-Core 0.19 or newer) and hybrid stacks on a CPU."""
    if core_version() < HYBRID_SINCE:  # older mixers require triton
        return
    mamba_mixer = homes.module("mamba_mixer")
    if not mamba_mixer.HAVE_MAMBA_SSM:
        patches.replace(mamba_mixer, "HAVE_MAMBA_SSM", True)
        patches.replace(mamba_mixer, "ExtendedRMSNorm", GatedNorm)
    patches.replace(mamba_mixer, "mamba_split_conv1d_scan_combined", split_conv1d_scan)
    models = "megatron.training.models"
    if importlib.util.find_spec("megatron.training") is None:
        return
    if importlib.util.find_spec(models) and importlib.util.find_spec(f"{models}.hybrid"):
        from .local_specs import local_hybrid_stack_spec

        hybrid = importlib.import_module(f"{models}.hybrid")
        patches.replace(hybrid, "default_hybrid_stack_spec", local_hybrid_stack_spec())


class GatedNorm(torch.nn.Module):
    """Grouped RMS norm with the gate silu(z), computed at least in fp32.

    Args:
        hidden_size: Number of channels.
        eps: Added to the mean of squares.
        group_size: Channels of a group; default: all.
        norm_before_gate: True: norm(x) * silu(z). False: norm(x * silu(z)).
        device: Device of the weight.
        dtype: Dtype of the weight.

    Attributes:
        tp_group: Tensor-parallel group, which the mixer sets.
    """

    tp_group: Any

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        group_size: int | None = None,
        norm_before_gate: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        self.eps, self.group, self.before = eps, group_size or hidden_size, norm_before_gate

    def forward(self, x: torch.Tensor, z: torch.Tensor | None = None) -> torch.Tensor:
        """Return the norm of x [..., channels].

        z is the gate before silu, with the shape of x, or None.
        """
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        if z is not None and not self.before:
            wide = wide * F.silu(z.to(wide.dtype))
        groups = wide.unflatten(-1, (-1, self.group))
        groups = groups * (groups.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        out = groups.flatten(-2) * self.weight
        if z is not None and self.before:
            out = out * F.silu(z.to(wide.dtype))
        return out.to(x.dtype)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: Any = None
    ) -> dict:
        """Return the sharded state dict; tensor-parallel ranks split the weight, as in Megatron."""
        from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"weight": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )


def split_conv1d_scan(
    zxbcdt: torch.Tensor,
    conv1d_weight: torch.Tensor,
    conv1d_bias: torch.Tensor,
    dt_bias: torch.Tensor,
    A: torch.Tensor,
    D: torch.Tensor,
    chunk_size: int,
    activation: str = "silu",
    headdim: int | None = None,
    ngroups: int = 1,
    seq_idx: Any = None,
    **unused: Any,
) -> torch.Tensor:
    """Compute mamba_ssm's `mamba_split_conv1d_scan_combined`, without final norm and projection.

    Shape letters: b batch, l tokens, h heads of width p, g groups with state size n.

    Args:
        zxbcdt: Gate z, input x, B, C and step size dt, concatenated, [b, l, 2hp + 2gn + h].
        conv1d_weight: Weight of the convolution of x, B and C, [hp + 2gn, width of the filter].
        conv1d_bias: Bias of the convolution, [hp + 2gn].
        dt_bias: Bias of the step size, [h].
        A: Decay: a token multiplies the state by exp(step size x A), [h].
        D: Factor with which x is added to the output, [h] or [h, p].
        chunk_size: Unused.
        activation: "silu", "swish", or another name for no activation.
        headdim: Width p of a head; default: from D.
        ngroups: Number of groups g.
        seq_idx: Indices of packed documents; must be None.
        **unused: Ignored arguments of the fused kernel.

    Returns:
        Output, [b, l, hp].

    Raises:
        ValueError: The batch is packed.
    """
    if seq_idx is not None:
        raise ValueError(
            "packed batches: Megatron's own Mamba mixer has no operator for them on a CPU; "
            "use --burst-linear auto with --context-parallel-algo burst"
        )
    heads = len(A)
    width = headdim or D.shape[-1]
    states = (conv1d_weight.shape[0] - heads * width) // 2
    z, mixed, dt = zxbcdt.split((heads * width, heads * width + 2 * states, heads), -1)
    rows = F.pad(mixed.transpose(1, 2), (conv1d_weight.shape[1] - 1, 0))
    rows = F.conv1d(rows, conv1d_weight.unsqueeze(1), conv1d_bias, groups=len(conv1d_weight))
    mixed = F.silu(rows.transpose(1, 2)) if activation in ("silu", "swish") else rows.mT
    x, keys, queries = mixed.split((heads * width, states, states), -1)
    x = x.unflatten(-1, (heads, width))
    keys, queries = (
        projected.unflatten(-1, (ngroups, -1)).repeat_interleave(heads // ngroups, 2)
        for projected in (keys, queries)
    )
    dt = F.softplus(dt + dt_bias)
    state = x.new_zeros(x.shape[0], heads, width, keys.shape[-1], dtype=dt.dtype)
    out = []
    for t in range(x.shape[1]):
        step = dt[:, t, :, None, None]
        written = x[:, t, :, :, None] * keys[:, t, :, None]
        state = torch.exp(step * A[:, None, None]) * state + step * written
        out.append(torch.einsum("bhpn,bhn->bhp", state, queries[:, t].to(state.dtype)))
    skipped = x * (D if D.dim() == 2 else D[:, None])
    return ((torch.stack(out, 1) + skipped).flatten(2) * F.silu(z)).to(zxbcdt.dtype)
