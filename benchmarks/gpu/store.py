"""Time and peak memory of a step on one device, by fraction of the attention store.

It runs the layers of `benchmarks/store_layers.py` on one rank. "none" saves every activation,
"full" recomputes everything, a number is the fraction of attention outputs in the store.
"""

from __future__ import annotations

from typing import Any

import torch

import megatron_burst as mb
from benchmarks.store_layers import MODES, Layer, kept, step

from .clock import Clock, Run, extra, forget, interleaved
from .sizes import Sizes, Stack

Record = dict[str, Any]


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
        needs_grad=(True, True, True), store=kept(mode) or None,
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
