# SPDX-License-Identifier: Apache-2.0
"""Measurements of one device: attention at several chunk sizes, matrix products, and copies.

All ranks measure at the same time, because GPU clocks are lower when all GPUs of a node are busy.
Constants of the simulator's formulas are then fitted to the measured times.
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
from .ranks import Measurement, Ranks, middle, repeated, worst

CHUNKS = {"cuda": (1024, 2048, 4096, 8192, 16384), "cpu": (64, 128, 256, 512)}  # rows
EMPTY = 8  # rows of an attention call that is so small that its time is the launch time
PRODUCTS = {"cuda": (512, 1024, 2048, 4096, 8192), "cpu": (128, 256, 512, 1024)}  # rows
WIDEST = {"cuda": 2**20, "cpu": 2048}  # maximum inner size and number of columns of a product
COPY = {"cuda": 2**29, "cpu": 2**26}  # bytes of a copy
HEADS = {"cuda": 2**20, "cpu": 4}  # maximum number of query heads


def dtype(ranks: Ranks) -> torch.dtype:
    """Return the dtype in which matrix products and attention are measured."""
    return torch.bfloat16 if ranks.cuda else torch.float32


def heads(model: Model, ranks: Ranks) -> tuple[int, int]:
    """Return the numbers of query heads and of key/value heads to measure.

    On a GPU they are the model's numbers. On a CPU there are at most `HEADS` query heads.
    """
    group = model.heads // model.kv_heads
    kv = max(1, min(model.kv_heads, HEADS[ranks.device.type] // group))
    return kv * group, kv


def tile(ranks: Ranks, model: Model, rows: int) -> LocalCalls:
    """Return the forward and backward calls of kernel "auto" for one pair of chunks.

    There are `rows` queries and `rows` keys. All pairs are visible; the batch is 1.
    """
    (h, k), width = heads(model, ranks), model.head_dim
    like = {"device": ranks.device, "dtype": dtype(ranks)}
    q, keys, values = (torch.empty((rows, 1, n, width), **like) for n in (h, k, k))
    kernel = make("auto", q, keys, values, mask=Full(), beside_rings=ranks.size > 1)
    return local_calls(kernel, Scoring(width**-0.5), Full(), (q, keys, values), rows)


def _median(ranks: Ranks, call: Callable[[], object]) -> tuple[float, float]:
    """Return the median seconds of repeated calls, and their spread as a fraction of the median."""
    seconds = repeated(ranks.repeats(call), "")
    return seconds.value, seconds.spread or 0.0


def attention(ranks: Ranks, model: Model, rate: float) -> dict[str, Measurement]:
    """Measure the fields compute, launch, half_rows and backward of `Rates`.

    The measured calls are attention of equally many queries and keys, for several numbers of rows.

    Args:
        ranks: Ranks that measure.
        model: Model whose heads are measured.
        rate: `Rates.adding`, in bytes per second. The time of adding partial results is subtracted,
            because the simulator has another term for it.

    Returns:
        Field of `Rates` -> measurement.
    """
    rows = (EMPTY, *CHUNKS[ranks.device.type])

    def measure() -> list[float]:
        medians, spreads = [], []
        for count in rows:
            calls = tile(ranks, model, count)
            for call in (calls.forward, calls.backward):
                mid, spread = _median(ranks, call)
                medians.append(mid)
                spreads.append(spread)
        return [*medians, *spreads]

    of_ranks = ranks.locally("attention", measure)
    times = np.array(middle(of_ranks)).reshape(2, len(rows), 2)
    h, k = heads(model, ranks)
    # A forward has two matrix products, each with a multiplication and an addition per element.
    flops = [4.0 * h * model.head_dim * count**2 for count in rows]
    # On a busy machine a call may take less time than the measured rate of adding predicts.
    own = np.maximum(times[0] - _adding(ranks, model, rows, rate), times[0] / 10)
    fit = fitted(rows, flops, *own.T)
    name = str(dtype(ranks)).removeprefix("torch.")
    method = (
        f"fit to forward and backward of {rows[1]} to {rows[-1]} rows, {h}:{k} heads of "
        f"{model.head_dim}, {name}, all visible, largest error {fit.off:.1%}; ranks differ by at "
        f"most {worst([figures[: 2 * len(rows)] for figures in of_ranks]):.1%}"
    )
    spread = float(np.median(times[1, 1:]))
    launch = f"a tile of {EMPTY} rows, forward and backward / 2"
    return {
        "compute": Measurement(fit.compute, spread, method),
        "half_rows": Measurement(fit.half_rows, None, "from the same fit"),
        "backward": Measurement(fit.backward, None, "from the same fit"),
        "launch": Measurement(fit.launch, float(times[1, 0].max()), launch),
    }


def _adding(ranks: Ranks, model: Model, rows: Sequence[int], rate: float) -> np.ndarray:
    """Return the seconds of adding partial results, as an array [sizes, (forward, backward)]."""
    (h, k), width, itemsize = heads(model, ranks), model.head_dim, dtype(ranks).itemsize
    sizes = Sizes(1, 1, h, k, width, width, itemsize, 4, 4, (True, True, True))
    per_row = np.array([adds.queries + adds.keys for adds in adding(sizes, rate)])
    return np.outer(rows, per_row)


class KernelFit(NamedTuple):
    """Result of `fitted`.

    Attributes:
        compute: FLOP/s of large calls.
        half_rows: Number of rows at which a call reaches half of this rate.
        launch: Seconds for launching a call, which do not depend on its size.
        backward: Time of backward divided by time of forward, without `launch`.
        off: Largest relative error of the fit.
    """

    compute: float
    half_rows: float
    launch: float
    backward: float
    off: float


def fitted(
    rows: Sequence[int], flops: Sequence[float], forward: np.ndarray, backward: np.ndarray
) -> KernelFit:
    """Fit four constants of `Rates` by least squares of relative errors.

    They are launch, compute, half_rows and backward in these formulas:

        seconds of forward = launch + flops / compute * (1 + half_rows / rows)
        seconds of backward = launch + backward * flops / compute * (1 + half_rows / rows)

    The first size is so small that its time is `launch`.

    Args:
        rows: Number of queries of each size, which is also the number of keys.
        flops: FLOPs of forward for each size.
        forward: Seconds of forward for each size.
        backward: Seconds of backward for each size.
    """
    launch = float(forward[0] + backward[0]) / 2
    size, work = np.array(rows[1:], dtype=float), np.array(flops[1:], dtype=float)
    first, second = (
        np.maximum(times[1:] - launch, times[1:] / 10) for times in (forward, backward)
    )
    # A geometric mean, because forward and backward have the same formula.
    ratio = float(np.exp(np.mean(np.log(second / first))))
    flop_rates = np.concatenate([work / first, work * ratio / second])
    rate, per_row, off = _two_constants(flop_rates, 1 / np.tile(size, 2))
    return KernelFit(rate, per_row, launch, ratio, off)


def _two_constants(flop_rates: np.ndarray, overhead: np.ndarray) -> tuple[float, float, float]:
    """Fit flop_rates = rate / (1 + c * overhead) by least squares of relative errors.

    Returns:
        The rate, c, and the largest relative error.
    """
    table = np.stack([flop_rates, flop_rates * overhead], axis=1)
    per_flop, per_row = np.linalg.lstsq(table, np.ones(len(flop_rates)), rcond=None)[0]
    if per_row < 0 or per_flop <= 0:  # small sizes are not slower: fit only the rate
        per_flop, per_row = flop_rates.sum() / (flop_rates @ flop_rates), 0.0
    off = float(np.abs(table @ [per_flop, per_row] - 1).max())
    return 1 / float(per_flop), float(per_row / per_flop), off


def products(ranks: Ranks, model: Model) -> tuple[Measurement, Measurement]:
    """Measure matrix products with the sizes of the model's MLP.

    Returns:
        The FLOP/s of large products, and `Gpu.small`, the slowdown constant of small products.
    """
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
    seconds, spreads = np.array(middle(of_ranks)).reshape(2, -1)
    flops = np.array([2.0 * m * k * n for m, k, n in sizes])
    overhead = np.array([1 / m + 1 / k + 1 / n for m, k, n in sizes])
    rate, small, off = _two_constants(flops / seconds, overhead)
    rows = f"{PRODUCTS[kind][0]} to {PRODUCTS[kind][-1]} rows"
    method = f"fit to {rows} x {inner} x {outer}, largest error {off:.1%}"
    return (
        Measurement(rate, float(np.median(spreads)), method),
        Measurement(small, None, "from the same fit"),
    )


def memory(ranks: Ranks, model: Model) -> tuple[Measurement, Measurement, Measurement]:
    """Measure the bytes/s that a device reads from and writes to its memory.

    Returns:
        Three rates: of plain copies (bytes read and written), of copies that reorder heads for an
            all-to-all (bytes copied), and of adding results to fp32 sums (bytes read and written).
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
        by_heads = _median(ranks, lambda: joined.copy_(cut))
        sums, part = into.view(torch.float32), data.view(dtype(ranks))[: size // 4]
        return [*plain, *by_heads, cut.numel(), *_median(ranks, lambda: sums.add_(part))]

    plain, spread, cutting, cutting_spread, moved, adds, adds_spread = middle(
        ranks.locally("memory", measure)
    )
    amount = f"{size >> 20} MiB on all ranks at once"
    name = str(dtype(ranks)).removeprefix("torch.")
    added = size // 4 * (8 + dtype(ranks).itemsize)
    return (
        Measurement(2 * size / plain, spread, f"copies of {amount}"),
        Measurement(moved / cutting, cutting_spread, f"copies of {amount}, by heads"),
        Measurement(added / adds, adds_spread, f"{name} added to fp32 sums of {amount}"),
    )
