"""New masks in every step: does a kernel compile again, and how long does each step take?

Training with packed data has new documents in every micro-batch, and reinforcement learning has new
trees. Every kernel gets the same random masks. A step is a plan, a forward and a backward of one
pair of shards, timed by the wall clock until the device is idle. Every result is checked.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from megatron_burst.kernels import registry
from megatron_burst.kernels.base import Kernel, Rows, Scoring
from megatron_burst.kernels.flash import FlashKernel
from megatron_burst.kernels.flex_programs import program
from megatron_burst.kernels.online_softmax import empty_result, row_delta
from megatron_burst.layout import make
from megatron_burst.masks import Causal, Documents, Mask, Tree

from .cases import RANKS, Case
from .clock import Clock, forget
from .ring import kernels
from .rivals import Inputs
from .sample import TOLERANCE, Sample
from .sizes import Sizes

KINDS = ("packs of new documents", "new trees")
NUMBER = 20
PATIENCE = 6.0  # seconds for one kernel after its first step
Record = dict[str, Any]


def measure(kind: str, sizes: Sizes, clock: Clock) -> Record:
    """Return seconds of every step and the number of compiled programs of each kernel."""
    forget(clock.device)
    tokens, (h, k) = sizes.tokens[0], sizes.heads[0]
    torch.manual_seed(0)
    q, k_, v, dout = (
        torch.randn(tokens, 1, n, sizes.width, device=clock.device, dtype=torch.bfloat16)
        for n in (h, k, k, h)
    )
    inputs = Inputs(q, k_, v, dout, sizes.width**-0.5)
    record: Record = {"kind": "packs", "masks": kind, "heads": [h, k], "tokens": tokens}
    record |= {"runs": [], "refused": {}, "failed": {}}
    for who in kernels(clock.device, compiled=True):
        try:
            kernel = registry.make(who, q, k_, v)
            record["runs"].append({"who": who, **_steps(kernel, kind, inputs, clock)})
        except ValueError as reason:
            record["refused"][who] = str(reason)
        except Exception as error:  # after any error the others are measured
            record["failed"][who] = f"{type(error).__name__}: {str(error).splitlines()[0]:.200}"
    return record


def _steps(kernel: Kernel, kind: str, inputs: Inputs, clock: Clock) -> Record:
    """Take one step with each mask until the time is spent."""
    program.cache_clear()
    before = _compilations(kernel)
    seconds: list[float] = []
    begun = time.perf_counter()
    for mask in masks(kind, len(inputs.q)):
        spans = tuple(make("zigzag", cp_size=RANKS).spans(0, RANKS * len(inputs.q)))
        case = Case(kind, mask, spans, spans, None, None)
        clock.finish()
        start = time.perf_counter()
        out, grads, statistics = _step(kernel, case, inputs)
        clock.finish()
        seconds.append(time.perf_counter() - start)
        sample, every = Sample(inputs, case), slice(None)
        error = sample.forward_error(out, every)
        error = max(error, sample.backward_error(grads, statistics, every, every))
        if not error <= TOLERANCE:
            raise ArithmeticError(f"mask {len(seconds)} is off by {error:.3g} of the largest value")
        if len(seconds) == 1:
            begun = time.perf_counter()
        if time.perf_counter() - begun > PATIENCE:
            break
    compiled = _compilations(kernel)
    return {"seconds": seconds, "programs": None if compiled is None else compiled - (before or 0)}


def _compilations(kernel: Kernel) -> int | None:
    """Return the number of programs or graphs that were compiled so far; None if unknown."""
    if kernel.name == "flex":
        return program.cache_info().misses
    if isinstance(kernel, FlashKernel) and kernel.name == "flash4":
        functions = kernel.operator.loaded.forward, kernel.operator.loaded.backward
        return sum(len(call.function.compile_cache.cache) for call in functions)  # pyright: ignore
    graphs = getattr(getattr(kernel, "operator", None), "graphs", None)  # of cuDNN
    return None if graphs is None else len(graphs)


def _step(kernel: Kernel, case: Case, inputs: Inputs) -> tuple[Any, Any, Any]:
    """Return out, the gradients, and (lse, delta)."""
    q, k, v, dout, scale = inputs
    work, scoring = kernel.works_for(case.mask, [(case.q_spans, case.k_spans)])[0], Scoring(scale)
    out, lse = empty_result(q, v.shape[-1])
    kernel.forward(q, k, v, work, scoring, out, lse)
    delta = row_delta(dout, out, lse.dtype)
    dq, dk, dv = (torch.zeros(x.shape, device=x.device) for x in (q, k, v))
    kernel.backward(Rows(q, dout, lse, delta, None), k, v, work, scoring, dq, dk, dv)
    return out, (dq, dk, dv), (lse, delta)


def masks(kind: str, tokens: int) -> Iterator[Mask]:
    """Yield `NUMBER` masks over the whole sequence, the same in every call."""
    random, length = np.random.default_rng(7), RANKS * tokens
    for _ in range(NUMBER):
        cuts = random.choice(np.arange(1, length), size=random.integers(16, 96), replace=False)
        bounds = [0, *sorted(cuts.tolist()), length]
        if kind == KINDS[0]:
            yield Documents(bounds) & Causal()
            continue
        out = np.full(length, length)  # a prompt, then the answers
        for first, end in pairwise(bounds[1:]):
            out[first:end] = end
        yield Tree(out)
