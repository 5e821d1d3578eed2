"""LoongTrain's table 4: one attention call on 64 GPUs, fitted with ten constants.

Published: "LoongTrain", arXiv 2406.18485, table 4: 96 rows, of which the eight with 64 ranks in one
ring stand twice. 64 A100, 8 per node, NVLink, 4 HDR NICs of 25 GB/s per node: two GPUs share one.
Flat rings fit: on one ring of 64 ranks 190 hops of 33.5 MB in 296 ms are 21.5 GB/s of the one GPU
that sends to the next node, where the double ring of the paper would keep all NICs busy and need a
tenth of their rate. Gradients travel in bf16, whole chunks go round; keys and values travel.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.advise.fitting import Errors, errors, fit
from megatron_burst.advisor.attention_time import AttentionTime, attention_time
from megatron_burst.advisor.clusters import GB, Cluster, gpu
from megatron_burst.advisor.models import Model, named
from megatron_burst.advisor.ring_passes import Rings
from megatron_burst.advisor.settings import Settings
from megatron_burst.autotune.rates import Rates

TABLE = Path(__file__).parent / "published" / "loongtrain_table4_attention_ms.csv"
GPUS = 64
BACKWARD = 3.0  # time of a backward over a forward's: LoongTrain's own model of time has it
NVLINK = 240 * GB  # four fifths of the datasheet's 300, as nccl-tests report; never what binds
WEIGHT = 0.1  # of the all-to-all's column, whose times are a few percent of the whole

MODELS = {"mha": named("llama2-7b"), "gqa8": replace(named("llama2-7b"), kv_heads=8)}


@dataclass(frozen=True)
class Constants:
    """What was fitted to the table.

    compute: FLOP/s of a long forward. half_rows: rows with which a call reaches half of it.
    launch: seconds of each call besides. start: seconds before each pass. inter: bytes per second
    to another node of a GPU that sends alone by its NIC. nic: of a NIC by which two GPUs send.
    latency: seconds of each message. slowdown: fraction by which computing is slower while links
    carry something. exchange_start: seconds of each all-to-all besides its messages. copying: bytes
    per second at which an all-to-all's tensors are cut up and joined.
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
        """For a cluster."""
        return Rates(intra=NVLINK, backward=BACKWARD, **vars(self))


# What is plausible. FlashAttention-2 is published with 230 of 312 TFLOP/s on A100; a NIC of HDR has
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
    """The 88 different ones."""
    lines = [line for line in TABLE.read_text().splitlines() if not line.startswith("#")]
    found = []
    for row in csv.DictReader(lines):
        if row["hp"] == "1" and row["placement"] == "context_first":
            continue  # the same runs as head_first, with the same times
        placement: Any = row["placement"]
        run = Settings(int(row["seq"]), cp=GPUS, ulysses=int(row["hp"]), placement=placement,
                       algorithm="ring", side="kv", wire="bf16", route="ring")  # fmt: skip
        times = (float(row[name]) / 1e3 for name in ("overall_ms", "seqalltoall_ms"))
        found.append(Cell(row["heads"], run, *times))
    return found


def predicted(cell: Cell, constants: Constants, rings: Rings | None = None) -> AttentionTime:
    """By the released code: what `mb.simulate(..., part="attention")` does. rings: that remember
    schedules."""
    cluster = Cluster(gpu("a100"), GPUS, nics=4, nic_rate=25 * GB, rates=constants.rates)
    return attention_time(cell.model, cluster, cell.run, rings=rings)


def fitted(some: Sequence[Cell], start: Constants = Constants(), rounds: int = 12) -> Constants:
    """The constants that fit these cells."""
    published = np.array([cell.seconds for cell in some])
    shared = np.array([cell.exchange for cell in some])
    has, rings = shared > 0, Rings()

    def residuals(values: np.ndarray) -> np.ndarray:
        found = [predicted(cell, Constants(*values.tolist()), rings) for cell in some]
        whole = np.log(np.array([each.seconds for each in found]) / published)
        part = np.array([sum(each.exchange) for each in found])[has] / shared[has]
        return np.concatenate([whole, WEIGHT * np.log(part)])

    return Constants(*fit(residuals, astuple(start), astuple(LOW), astuple(HIGH), rounds).tolist())


class Choice(NamedTuple):
    """For some heads and a length: the cell with the shortest predicted time, and how much longer
    than the published best its published time is, as a fraction."""

    cell: Cell
    loss: float


def choices(some: Sequence[Cell], times: Sequence[float]) -> list[Choice]:
    """What the prediction would have taken, for each of heads and lengths."""
    found = []
    for key in sorted({(cell.heads, cell.run.seq) for cell in some}):
        group = [(time, cell) for time, cell in zip(times, some, strict=True)
                 if (cell.heads, cell.run.seq) == key]  # fmt: skip
        _, taken = min(group, key=lambda each: each[0])
        best = min(cell.seconds for _, cell in group)
        found.append(Choice(taken, taken.seconds / best - 1))
    return found


LEFT_OUT: dict[str, Callable[[Cell], bool]] = {
    "fitted on MHA, predicts GQA": lambda cell: cell.heads == "mha",
    "fitted on 128K to 512K, predicts 1M": lambda cell: cell.run.seq < 1 << 20,
    "fitted on head_first, predicts context_first": lambda cell: cell.run.placement == "head_first",
}


def leave_out(train: Callable[[Cell], bool], some: Sequence[Cell]) -> Errors:
    """Fit on some cells, and the errors on the others."""
    constants = fitted([cell for cell in some if train(cell)])
    others = [cell for cell in some if not train(cell)]
    found = [predicted(cell, constants).seconds for cell in others]
    return errors(found, [cell.seconds for cell in others])
