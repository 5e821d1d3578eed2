# SPDX-License-Identifier: Apache-2.0
"""What one device does by itself: attention at several chunk sizes, products, copies.

All ranks measure at the same time, since clocks drop when a whole node heats and draws power. The
times are fitted to the formulas that the simulator uses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from ....autotune.candidates import adding
from ....autotune.measure import LocalCalls, local_calls
from ....kernels.base import Scoring
from ....kernels.registry import make
from ....masks import Full
from ....schedule.sizes import Sizes
from ..advise.shapes.models import Model
from .ranks import Measured, Ranks, middle, repeated, worst

CHUNKS = {"cuda": (1024, 2048, 4096, 8192, 16384), "cpu": (64, 128, 256, 512)}  # rows
EMPTY = 8  # rows of a tile that is all launching
PRODUCTS = {"cuda": (512, 1024, 2048, 4096, 8192), "cpu": (128, 256, 512, 1024)}  # rows
WIDEST = {"cuda": 2**20, "cpu": 2048}  # of a product's other two sizes
COPY = {"cuda": 2**29, "cpu": 2**26}  # bytes
HEADS = {"cuda": 2**20, "cpu": 4}  # query heads at most


def dtype(ranks: Ranks) -> torch.dtype:
    """In which products and attention are measured."""
    return torch.bfloat16 if ranks.cuda else torch.float32


def heads(model: Model, ranks: Ranks) -> tuple[int, int]:
    """Query and key/value heads of the measured calls: the model's, on a CPU fewer of both."""
    group = model.heads // model.kv_heads
    kv = max(1, min(model.kv_heads, HEADS[ranks.device.type] // group))
    return kv * group, kv


def tile(ranks: Ranks, model: Model, rows: int) -> LocalCalls:
    """`rows` queries that see as many keys, batch 1, with the kernel that "auto" takes."""
    (h, k), width = heads(model, ranks), model.head_dim
    like = {"device": ranks.device, "dtype": dtype(ranks)}
    q, keys, values = (torch.empty((rows, 1, n, width), **like) for n in (h, k, k))
    kernel = make("auto", q, keys, values, mask=Full(), beside_rings=ranks.size > 1)
    return local_calls(kernel, Scoring(width**-0.5), Full(), (q, keys, values), rows)


def _median(ranks: Ranks, call: Callable[[], object]) -> tuple[float, float]:
    """The median of a call's seconds, and its spread."""
    took = repeated(ranks.repeats(call), "")
    return took.value, took.spread or 0.0


def attention(ranks: Ranks, model: Model, rate: float) -> dict[str, Measured]:
    """compute, launch, half_rows and backward of `Rates`, fitted to tiles of several sizes. rate:
    `Rates.adding`: what tiles take to add their results, which the simulator counts apart.
    """
    rows = (EMPTY, *CHUNKS[ranks.device.type])

    def measure() -> list[float]:
        medians, spreads = [], []
        for each in rows:
            calls = tile(ranks, model, each)
            for call in (calls.forward, calls.backward):
                mid, spread = _median(ranks, call)
                medians.append(mid)
                spreads.append(spread)
        return [*medians, *spreads]

    of_ranks = ranks.locally("attention", measure)
    took = np.array(middle(of_ranks)).reshape(2, len(rows), 2)
    h, k = heads(model, ranks)
    # A forward is two products of multiplications and additions.
    flops = [4.0 * h * model.head_dim * each**2 for each in rows]
    fit = fitted(rows, flops, *(took[0] - _adding(ranks, model, rows, rate)).T)
    name = str(dtype(ranks)).removeprefix("torch.")
    how = (
        f"fit to forward and backward of {rows[1]} to {rows[-1]} rows, {h}:{k} heads of "
        f"{model.head_dim}, {name}, all visible, off by {fit.off:.1%} at most; ranks differ by "
        f"{worst([one[: 2 * len(rows)] for one in of_ranks]):.1%} at most"
    )
    spread = float(np.median(took[1, 1:]))
    launch = f"a tile of {EMPTY} rows, forward and backward / 2"
    return {
        "compute": Measured(fit.compute, spread, how),
        "half_rows": Measured(fit.half_rows, None, "of the same fit"),
        "backward": Measured(fit.backward, None, "of the same fit"),
        "launch": Measured(fit.launch, float(took[1, 0].max()), launch),
    }


def _adding(ranks: Ranks, model: Model, rows: Sequence[int], rate: float) -> np.ndarray:
    """Seconds that a forward and a backward of each size take to add their results [sizes, 2]."""
    (h, k), width, itemsize = heads(model, ranks), model.head_dim, dtype(ranks).itemsize
    sizes = Sizes(1, 1, h, k, width, width, itemsize, 4, 4, (True, True, True))
    each = np.array([adds.queries + adds.keys for adds in adding(sizes, rate)])
    return np.outer(rows, each)


class KernelFit(NamedTuple):
    """The result of `fitted`; off: the largest error of its times, as a fraction."""

    compute: float
    half_rows: float
    launch: float
    backward: float
    off: float


def fitted(
    rows: Sequence[int], flops: Sequence[float], forward: np.ndarray, backward: np.ndarray
) -> KernelFit:
    """Least squares of relative errors: a forward takes launch + flops / compute * (1 + half_rows /
    rows), as `Rates` say, a backward `backward` times the latter; the first size is all launch.
    """
    launch = float(forward[0] + backward[0]) / 2
    size, work = np.array(rows[1:], dtype=float), np.array(flops[1:], dtype=float)
    first, second = (np.maximum(each[1:] - launch, each[1:] / 10) for each in (forward, backward))
    # A geometric mean, since both passes have the same form.
    ratio = float(np.exp(np.mean(np.log(second / first))))
    flop_rates = np.concatenate([work / first, work * ratio / second])
    rate, per_row, off = _two_constants(flop_rates, 1 / np.tile(size, 2))
    return KernelFit(rate, per_row, launch, ratio, off)


def _two_constants(flop_rates: np.ndarray, less: np.ndarray) -> tuple[float, float, float]:
    """(rate, c, off): least squares of flop_rates = rate / (1 + c * less), by relative errors, of
    which the largest is off.
    """
    table = np.stack([flop_rates, flop_rates * less], axis=1)
    per_flop, per_row = np.linalg.lstsq(table, np.ones(len(flop_rates)), rcond=None)[0]
    if per_row < 0 or per_flop <= 0:  # small sizes are not slower: one constant
        per_flop, per_row = flop_rates.sum() / (flop_rates @ flop_rates), 0.0
    off = float(np.abs(table @ [per_flop, per_row] - 1).max())
    return 1 / float(per_flop), float(per_row / per_flop), off


def products(ranks: Ranks, model: Model) -> tuple[Measured, Measured]:
    """(FLOP/s of large matrix products, `Gpu.small`), fitted to products of the MLP's sizes."""
    kind = ranks.device.type
    inner, outer = (min(WIDEST[kind], size) for size in (model.hidden, model.ffn))
    sizes = [(rows, inner, outer) for rows in PRODUCTS[kind]]
    like = {"device": ranks.device, "dtype": dtype(ranks)}

    @torch.no_grad()
    def measure() -> list[float]:
        taken = []
        for m, k, n in sizes:
            left, right = torch.rand((m, k), **like), torch.rand((k, n), **like)
            into = torch.empty((m, n), **like)
            taken.append(_median(ranks, lambda a=left, b=right, c=into: torch.mm(a, b, out=c)))
        return [mid for mid, _ in taken] + [spread for _, spread in taken]

    of_ranks = ranks.locally("matrix products", measure)
    took, spreads = np.array(middle(of_ranks)).reshape(2, -1)
    flops = np.array([2.0 * m * k * n for m, k, n in sizes])
    less = np.array([1 / m + 1 / k + 1 / n for m, k, n in sizes])
    rate, small, off = _two_constants(flops / took, less)
    rows = f"{PRODUCTS[kind][0]} to {PRODUCTS[kind][-1]} rows"
    how = f"fit to {rows} x {inner} x {outer}, off by {off:.1%} at most"
    return (
        Measured(rate, float(np.median(spreads)), how),
        Measured(small, None, "of the same fit"),
    )


def memory(ranks: Ranks, model: Model) -> tuple[Measured, Measured, Measured]:
    """Bytes per second of a device's own memory, read and written together, those of a tensor
    whose heads are dealt out to ranks, and those of results that are added to fp32 sums.
    """
    size, (count, _) = COPY[ranks.device.type], heads(model, ranks)

    def measure() -> list[float]:
        data = torch.zeros(size, dtype=torch.uint8, device=ranks.device)
        into = torch.empty_like(data)
        half = count // 2 or 1
        rows = size // (2 * half * model.head_dim)
        shape = rows, 2, half, model.head_dim
        cut = data[: np.prod(shape)].view(shape).transpose(0, 1)
        joined = into[: np.prod(shape)].view(cut.shape)
        plain = _median(ranks, lambda: into.copy_(data))
        dealt = _median(ranks, lambda: joined.copy_(cut))
        sums, part = into.view(torch.float32), data.view(dtype(ranks))[: size // 4]
        return [*plain, *dealt, cut.numel(), *_median(ranks, lambda: sums.add_(part))]

    took, spread, cutting, varies, moved, adds, differs = middle(ranks.locally("memory", measure))
    how, name = f"{size >> 20} MiB on all ranks at once", str(dtype(ranks)).removeprefix("torch.")
    added = size // 4 * (8 + dtype(ranks).itemsize)
    return (
        Measured(2 * size / took, spread, f"copies of {how}"),
        Measured(moved / cutting, varies, f"copies of {how}, by heads"),
        Measured(added / adds, differs, f"{name} added to fp32 sums of {how}"),
    )
