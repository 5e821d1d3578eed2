"""What the attention store costs and saves: time and peak memory of a step on one device.

Layers of a model (a norm, attention, an MLP four times as wide) on one rank. "none" saves every
activation, "full" recomputes everything, a number is the fraction of attention results in the
store. Decides what is compared; the checkpoint is `mb.checkpoint`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

import megatron_burst as mb

from .clock import Clock, Run, extra, forget, interleaved
from .sizes import Sizes, Stack

MODES = ("none", "full", "0.25", "0.5", "1.0")
Record = dict[str, Any]


class Layer(nn.Module):
    """Attention and an MLP, each behind a norm and with a residual."""

    def __init__(self, stack: Stack, plan: mb.Plan, device: torch.device):
        super().__init__()
        (h, k), d = stack.heads, stack.width
        self.plan, self.counts = plan, (h, k, k)
        full = h * d
        options: dict[str, Any] = {"bias": False, "device": device, "dtype": torch.bfloat16}
        self.norms = nn.ModuleList(
            nn.RMSNorm(full, device=device, dtype=torch.bfloat16) for _ in range(2)
        )
        self.qkv = nn.Linear(full, (h + 2 * k) * d, **options)
        self.out = nn.Linear(full, full, **options)
        self.mlp = nn.Sequential(
            nn.Linear(full, 4 * full, **options), nn.GELU(), nn.Linear(4 * full, full, **options)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[s, 1, width] -> the same"""
        heads = self.qkv(self.norms[0](x)).unflatten(2, (sum(self.counts), -1))
        q, k, v = heads.split(self.counts, dim=2)
        (attended,) = mb.attention([q], [k], [v], plan=self.plan)
        x = x + self.out(attended.flatten(2))
        return x + self.mlp(self.norms[1](x))


def measure(sizes: Sizes, clock: Clock) -> Record:
    """Seconds and extra bytes of a step in every mode."""
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
    """A step of forward and backward, and bytes that the stores of all layers hold by formula."""
    torch.manual_seed(0)
    (h, k), d = stack.heads, stack.width
    q, keys = (
        torch.empty(stack.tokens, 1, n, d, device=clock.device, dtype=torch.bfloat16)
        for n in (h, k)
    )
    keep = None if mode == "none" else 0.0 if mode == "full" else float(mode)
    plan = mb.prepare(
        [q], [keys], [keys], groups=mb.Groups.in_process(intra=1), layout="striped",
        needs_grad=(True, True, True), store=keep or None,
    )  # fmt: skip
    layers = [Layer(stack, plan, clock.device) for _ in range(stack.layers)]
    x = torch.randn(stack.tokens, 1, h * d, device=clock.device, dtype=torch.bfloat16)
    x.requires_grad_()

    def before() -> None:
        x.grad = None
        for layer in layers:
            layer.zero_grad()

    return Run(lambda: _step(layers, x, keep), before), stack.layers * plan.store_bytes


def _step(layers: Sequence[Layer], x: torch.Tensor, keep: float | None) -> None:
    for layer in layers:
        x = layer(x) if keep is None else mb.checkpoint(layer, x, keep=keep)
    x.float().square().mean().backward()
