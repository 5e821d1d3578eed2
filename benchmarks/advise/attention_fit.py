"""LoongTrain's table 4: one attention call on 64 GPUs, fitted with ten constants.

Published: "LoongTrain", arXiv 2406.18485, table 4: 96 rows; the eight with 64 ranks in one ring
appear twice. 64 A100, 8 per node, NVLink, 4 HDR NICs of 25 GB/s per node, one per two GPUs. The
times match flat rings: on one ring of 64 ranks, 190 hops of 33.5 MB take 296 ms, which is 21.5 GB/s
for the one GPU that sends to the next node. The paper's double ring would use all NICs and take 120
ms. Gradients are sent in bf16; whole chunks of keys and values are sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from benchmarks.advise.fitting import Errors, errors, fit
from benchmarks.advise.published_tables import table
from benchmarks.advise.section import Figure, Point, Section, rows_of, spread
from megatron_burst.autotune.clusters import GB, Cluster, gpu
from megatron_burst.autotune.rates import Rates
from megatron_burst.plugins.tools.advise.forecast.attention_time import (
    AttentionTime,
    RingsOf,
    attention_time,
    cached_ring_passes,
    ring_passes,
)
from megatron_burst.plugins.tools.advise.settings import Settings
from megatron_burst.plugins.tools.advise.shapes.models import Model, named

GPUS = 64
BACKWARD = 3.0  # time of backward / time of forward, as in LoongTrain's own time model
NVLINK = 240 * GB  # four fifths of the datasheet's 300, as nccl-tests report; never the bottleneck
WEIGHT = 0.1  # weight of the all-to-all column; its times are a few percent of the total

MODELS = {"mha": named("llama2-7b"), "gqa8": replace(named("llama2-7b"), kv_heads=8)}


@dataclass(frozen=True)
class Constants:
    """Constants that were fitted to the table.

    Attributes:
        compute: FLOP/s of a long forward.
        half_rows: Rows with which a call reaches half of `compute`.
        launch: Additional seconds of each call.
        start: Seconds before each pass.
        inter: Bytes per second to another node, for a GPU that does not share its NIC.
        nic: Bytes per second of a NIC that two GPUs share.
        latency: Seconds of each message.
        slowdown: Slowdown of computing during transfers, a fraction.
        exchange_start: Seconds of each all-to-all in addition to its messages.
        copying: Bytes per second at which tensors of an all-to-all are split and joined.
    """

    compute: float = 229.0e12
    half_rows: float = 488.0
    launch: float = 131e-6
    start: float = 2.33e-3
    inter: float = 20.49 * GB
    nic: float = 22.76 * GB
    latency: float = 17.3e-6
    slowdown: float = 0.0876
    exchange_start: float = 0.338e-3
    copying: float = 121 * GB

    @property
    def rates(self) -> Rates:
        """Return the rates for a cluster."""
        return Rates(intra=NVLINK, backward=BACKWARD, **vars(self))


# Plausible bounds. FlashAttention-2 is published with 230 of 312 TFLOP/s on A100; a NIC of HDR has
# 25 GB/s; starting a kernel or a message takes from microseconds to tenths of milliseconds.
LOW = Constants(150e12, 50.0, 5e-6, 1e-4, 15 * GB, 18 * GB, 2e-6, 0.005, 2e-5, 40 * GB)
HIGH = Constants(240e12, 2000.0, 3e-4, 6e-3, 25 * GB, 25 * GB, 5e-5, 0.3, 1e-3, 400 * GB)


class Cell(NamedTuple):
    """One row of the table: its run, and its published times in seconds."""

    heads: str
    run: Settings
    seconds: float
    exchange: float

    @property
    def model(self) -> Model:
        return MODELS[self.heads]

    @property
    def label(self) -> str:
        run = self.run
        ring = run.cp // run.ulysses
        return f"{self.heads}, {run.placement}, {run.ulysses} x {ring}, {run.seq >> 10}K"


def cells() -> list[Cell]:
    """Return the 88 different cells."""
    table_cells = []
    for row in table("loongtrain_table4_attention_ms"):
        if row["hp"] == "1" and row["placement"] == "context_first":
            continue  # the same runs as head_first, with the same times
        placement: Any = row["placement"]
        run = Settings(int(row["seq"]), cp=GPUS, ulysses=int(row["hp"]), placement=placement,
                       algorithm="ring", side="kv", wire="bf16", route="ring")  # fmt: skip
        times = (float(row[name]) / 1e3 for name in ("overall_ms", "seqalltoall_ms"))
        table_cells.append(Cell(row["heads"], run, *times))
    return table_cells


def predicted(
    cell: Cell, constants: Constants, rings: RingsOf = ring_passes, nic_of: str = Cluster.nic_of
) -> AttentionTime:
    """Return the forecast of the released code, `mb.simulate(..., part="attention")`.

    Args:
        rings: Cache of schedules.
        nic_of: Rule for GPUs that share a NIC.
    """
    cluster = Cluster(gpu("a100"), GPUS, nics=4, nic_rate=25 * GB, rates=constants.rates,
                      nic_of=nic_of)  # fmt: skip
    return attention_time(cell.model, cluster, cell.run, rings=rings)


def fitted(
    cells_to_fit: Sequence[Cell], start: Constants = Constants(), rounds: int = 12
) -> Constants:
    """Return the constants that fit these cells."""
    published = np.array([cell.seconds for cell in cells_to_fit])
    shared = np.array([cell.exchange for cell in cells_to_fit])
    has, rings = shared > 0, cached_ring_passes()

    def residuals(values: np.ndarray) -> np.ndarray:
        forecasts = [predicted(cell, Constants(*values.tolist()), rings) for cell in cells_to_fit]
        overall = np.log(np.array([forecast.seconds for forecast in forecasts]) / published)
        part = np.array([sum(forecast.exchange) for forecast in forecasts])[has] / shared[has]
        return np.concatenate([overall, WEIGHT * np.log(part)])

    return Constants(*fit(residuals, astuple(start), astuple(LOW), astuple(HIGH), rounds).tolist())


class Choice(NamedTuple):
    """Cell with the shortest predicted time for some heads and a length.

    Attributes:
        loss: Published time of the cell / shortest published time, minus one.
    """

    cell: Cell
    loss: float


def choices(all_cells: Sequence[Cell], times: Sequence[float]) -> list[Choice]:
    """Return the cell that the prediction chooses, for each kind of heads and length."""
    choices_made = []
    for key in sorted({(cell.heads, cell.run.seq) for cell in all_cells}):
        group = [(time, cell) for time, cell in zip(times, all_cells, strict=True)
                 if (cell.heads, cell.run.seq) == key]  # fmt: skip
        _, taken = min(group, key=lambda candidate: candidate[0])
        best = min(cell.seconds for _, cell in group)
        choices_made.append(Choice(taken, taken.seconds / best - 1))
    return choices_made


LEFT_OUT: dict[str, Callable[[Cell], bool]] = {
    "error on GQA, fitted to MHA": lambda cell: cell.heads == "mha",
    "error on 1M, fitted to 128K to 512K": lambda cell: cell.run.seq < 1 << 20,
    "error on context_first, fitted to head_first": lambda cell: cell.run.placement == "head_first",
}


# Errors of the cells left out: median, p90 and largest (`python -m benchmarks.advise --fit`).
LEAVE_OUT = {
    "error on GQA, fitted to MHA": Errors(0.0138, 0.083, 0.224),
    "error on 1M, fitted to 128K to 512K": Errors(0.0037, 0.012, 0.014),
    "error on context_first, fitted to head_first": Errors(0.0124, 0.038, 0.053),
}


def leave_out(train: Callable[[Cell], bool], all_cells: Sequence[Cell]) -> Errors:
    """Fit on some cells and return the errors on the others."""
    constants = fitted([cell for cell in all_cells if train(cell)])
    left_out = [cell for cell in all_cells if not train(cell)]
    seconds = [predicted(cell, constants).seconds for cell in left_out]
    return errors(seconds, [cell.seconds for cell in left_out])


def run(fit: bool = False) -> Section:
    """Return the table and its predictions."""
    table_cells, rings = cells(), cached_ring_passes()
    constants = fitted(table_cells) if fit else Constants()
    forecasts = [predicted(cell, constants, rings) for cell in table_cells]
    points = [
        Point(cell.label, 1e3 * cell.seconds, 1e3 * forecast.seconds)
        for cell, forecast in zip(table_cells, forecasts, strict=True)
    ]
    shared = [
        (sum(forecast.exchange), cell.exchange)
        for cell, forecast in zip(table_cells, forecasts, strict=True)
        if cell.exchange
    ]
    lost = [
        choice.loss for choice in choices(table_cells, [forecast.seconds for forecast in forecasts])
    ]
    mean, worst = float(np.mean(lost)), max(lost)
    by_stride = errors(
        [predicted(cell, constants, rings, "stride").seconds for cell in table_cells],
        [cell.seconds for cell in table_cells],
    )
    off, part = spread(points), errors(*zip(*shared, strict=True))
    figures = [
        Figure("Median error", f"{off.median:.2%}", "1.5 %", off.median <= 0.015),
        Figure("Error of 90 % of cells, at most", f"{off.p90:.1%}", "3.5 %", off.p90 <= 0.035),
        Figure("Worst cell", f"{off.worst:.1%}"),
        Figure("Had GPUs a stride apart shared a NIC", str(by_stride)),
        Figure("All-to-all's own column", f"median {part.median:.1%}, p90 {part.p90:.1%}"),
        Figure("Picked setting, slower than the fastest by", f"mean {mean:.2%}", "0.5 %",
               mean <= 0.005),
        Figure("The same, worst case", f"{worst:.2%}", "2 %", worst <= 0.02),
    ]  # fmt: skip
    left_out = (
        {title: leave_out(train, table_cells) for title, train in LEFT_OUT.items()}
        if fit
        else LEAVE_OUT
    )
    for title, forecast in left_out.items():
        value = f"median {forecast.median:.2%}, p90 {forecast.p90:.1%}, worst {forecast.worst:.1%}"
        value += "" if fit else " (by `--fit`)"
        figures.append(
            Figure(title[0].upper() + title[1:], value, "median 2.5 %", forecast.median <= 0.025)
        )
    return Section(
        name="attention-fit",
        title="LoongTrain, table 4: one attention call on 64 GPUs",
        intro=(
            "Milliseconds of one forward and backward of 2D attention, 32 heads of 128 (MHA) or 8 "
            "key/value heads (GQA): 88 different cells. Labels: heads, placement, ranks that share "
            "heads x ranks of a ring, length.",
        ),
        columns=("cell", "published", "predicted", "error"),
        rows=rows_of(points),
        figures=figures,
        constants=described(constants),
        notes=(
            "A flat ring of whole chunks fits, in which the one GPU that sends to the next node "
            "has its NIC to itself, or shares it with a neighbour's ring: rings of two and of four "
            "neighbours take up to twice as long as GPUs of a stride apart would. LoongTrain's "
            "double ring does not: fitted with inner rings that are nodes, the median is 1.9 % and "
            "the p90 30 %, with inner rings of four 2.4 % and 30 %.",
        ),
    )


UNITS = {
    "compute": (1e12, "TFLOP/s of a long forward"),
    "half_rows": (1, "rows of a chunk with which a call reaches half of that"),
    "launch": (1e-6, "microseconds of each call besides"),
    "start": (1e-3, "milliseconds before each pass"),
    "inter": (GB, "GB/s between nodes of a GPU alone on its NIC"),
    "nic": (GB, "GB/s of a NIC by which two GPUs send"),
    "latency": (1e-6, "microseconds of each message"),
    "slowdown": (1, "of computing, while links carry something"),
    "exchange_start": (1e-3, "milliseconds of each all-to-all besides its messages"),
    "copying": (GB, "GB/s at which tensors of an all-to-all are cut up and joined"),
}


def described(constants: Constants) -> list[str]:
    """Return a line per constant with its unit, then the stated constants."""
    lines = [f"{name} {getattr(constants, name) / unit:.4g} {words}"
             for name, (unit, words) in UNITS.items()]  # fmt: skip
    stated = f"stated: backward {BACKWARD:g} times a forward, NVLink {NVLINK / GB:g} GB/s"
    return [*lines, stated]
