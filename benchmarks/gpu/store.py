"""Time and peak memory of a step on one device, by fraction of the attention store.

"none" saves every activation, "full" recomputes everything, a number is the fraction of attention
outputs in the store.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

import megatron_burst as mb

from .clock import Clock, Run, extra, forget, interleaved
from .sizes import Sizes, Stack

Record = dict[str, Any]
# Fraction of attention outputs that a mode keeps; None without checkpointing.
MODES: dict[str, float | None] = {"none": None, "full": 0.0, "0.25": 0.25, "0.5": 0.5, "1.0": 1.0}


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


def step(layers: Sequence[Layer], x: torch.Tensor, mode: str) -> None:
    """Run forward and backward of all layers."""
    keep = MODES[mode]
    for layer in layers:
        x = layer(x) if keep is None else mb.checkpoint(layer, x, keep=keep)
    x.float().square().mean().backward()


def measure(sizes: Sizes, clock: Clock) -> Record:
    """Return seconds and extra bytes of a step in every mode."""
    stack = sizes.stack
    runs, memory, stored, refused = {}, {}, {}, {}
    for mode in MODES:
        try:
            run, stored[mode] = _run(stack, mode, clock)
            memory[mode] = extra(run, clock)
            runs[mode] = run
        except torch.OutOfMemoryError:
            refused[mode] = "out of memory"
        forget(clock.device)
    times = interleaved(runs, clock, sizes.repeats, sizes.patience)
    return {
        "kind": "store",
        **stack._asdict(),
        "runs": [
            {"who": mode, "seconds": times[mode], "extra": memory[mode], "stored": stored[mode]}
            for mode in runs
        ],
        "refused": refused,
        "failed": {},
    }


def _run(stack: Stack, mode: str, clock: Clock) -> tuple[Run, int]:
    """Return a step of forward and backward, and the bytes of all stores by the formula."""
    torch.manual_seed(0)
    (h, k), d = stack.heads, stack.width
    q, keys = (
        torch.empty(stack.tokens, 1, n, d, device=clock.device, dtype=torch.bfloat16)
        for n in (h, k)
    )
    plan = mb.prepare(
        q, keys, keys, groups=mb.Groups.single(), layout="striped",
        needs_grad=(True, True, True), store=MODES[mode] or None,
    )  # fmt: skip
    kind = {"device": clock.device, "dtype": torch.bfloat16}
    layers = [Layer(stack.heads, d, plan, **kind) for _ in range(stack.layers)]
    x = torch.randn(stack.tokens, 1, h * d, device=clock.device, dtype=torch.bfloat16)
    x.requires_grad_()

    def before() -> None:
        x.grad = None
        for layer in layers:
            layer.zero_grad()

    return Run(lambda: step(layers, x, mode), before), stack.layers * plan.store_bytes
