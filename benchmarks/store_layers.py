"""Layers of a model whose attention outputs are kept or recomputed.

Both benchmarks of the attention store run them: on CPU ranks (`checkpoint.py`) and on one GPU
(`gpu/store.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

import megatron_burst as mb

MODES = ("none", "full", "0.25", "0.5", "1.0")  # no checkpoint; full recomputation; fractions


class Layer(nn.Module):
    """Attention and an MLP of four times the width, each after a norm and with a residual."""

    def __init__(self, heads: tuple[int, int], width: int, plan: mb.Plan, **kind: Any):
        """Create the layer.

        Args:
            heads: Numbers of query and key heads, each `width` wide.
            kind: Device and dtype of parameters.
        """
        super().__init__()
        (h, k), full = heads, heads[0] * width
        self.plan, self.counts = plan, (h, k, k)
        self.norms = nn.ModuleList(nn.RMSNorm(full, **kind) for _ in range(2))
        self.qkv = nn.Linear(full, (h + 2 * k) * width, bias=False, **kind)
        self.out = nn.Linear(full, full, bias=False, **kind)
        self.mlp = nn.Sequential(
            nn.Linear(full, 4 * full, bias=False, **kind),
            nn.GELU(),
            nn.Linear(4 * full, full, bias=False, **kind),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [s, 1, width] to [s, 1, width]."""
        heads = self.qkv(self.norms[0](x)).unflatten(2, (sum(self.counts), -1))
        q, k, v = heads.split(self.counts, dim=2)
        x = x + self.out(mb.attention(q, k, v, plan=self.plan).flatten(2))
        return x + self.mlp(self.norms[1](x))


def kept(mode: str) -> float | None:
    """Return the fraction of attention outputs that a mode keeps; None without checkpointing."""
    return {"none": None, "full": 0.0}[mode] if mode in ("none", "full") else float(mode)


def step(layers: Sequence[Layer], x: torch.Tensor, mode: str) -> None:
    """Run forward and backward of all layers."""
    keep = kept(mode)
    for layer in layers:
        x = layer(x) if keep is None else mb.checkpoint(layer, x, keep=keep)
    x.float().square().mean().backward()
