"""LM head and loss, forward and backward, and its three bare matrix products.

`benchmarks/lm_head_case.py` defines the implementations; here they run in turns, in one process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.lm_head_case import (
    eager,
    inputs,
    liger,
    recompute,
    single_pass,
    three_products,
)

from .clock import Clock, Run, extra, forget, interleaved
from .sizes import Sizes

BOUND = "three products"
Record = dict[str, Any]
RUNS: dict[str, Callable[..., Any]] = {
    BOUND: three_products,
    "single pass": single_pass,
    "recompute": recompute,
    "Liger": liger,
    "eager": eager,
}


def measure(sizes: Sizes, clock: Clock) -> Record:
    """Return seconds of every round and extra bytes; name implementations that do not fit."""
    head = sizes.lm_head
    hidden, weight, labels = inputs(*head, torch.bfloat16, clock.device)
    runs, memory, refused = {}, {}, {}
    for name, function in RUNS.items():
        run = _run(function, hidden, weight, labels)
        try:
            memory[name] = extra(run, clock)
            runs[name] = run
        except torch.OutOfMemoryError:
            refused[name] = "out of memory"
        except ImportError as error:
            refused[name] = f"not installed ({error})"
        hidden.grad = weight.grad = None
        forget(clock.device)
    times = interleaved(runs, clock, sizes.repeats, sizes.patience)
    return {
        "kind": "lm head",
        **head._asdict(),
        "flops": 6 * head.tokens * head.width * head.vocabulary,
        "runs": [
            {"who": name, "seconds": times[name], "extra": memory[name]} for name in runs
        ],
        "refused": refused,
        "failed": {},
    }  # fmt: skip


def _run(function: Callable[..., Any], hidden: Any, weight: Any, labels: Any) -> Run:
    def call() -> None:
        loss = function(hidden, weight, labels, {"tile": None})
        if loss is not None:
            loss.backward()

    def before() -> None:
        hidden.grad = weight.grad = None

    return Run(call, before)
