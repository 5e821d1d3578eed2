"""BurstEngine's steps: its tables 2 (ablation) and 5 (8 GPUs) with five constants; table 3 (masks).

Published: "BurstEngine", arXiv 2509.19836: 14B, A800 with 8 GPUs per node, FSDP. Everything is
recomputed except what a row stores. The time of a row is computed from its MFU, as defined in
`step_time.model_operations`. With this definition (13.3e9 parameters without the embedding, and the
causal half of attention) the token rates of all ten rows give their MFU within 0.2 %, if table 5
counts 32,000 tokens per 32,768.

Assumptions: zigzag (named in table 3); gradients are sent in fp32; rows before the topology-aware
ring have a flat ring. Results of half the sequence are stored, as in the authors' code; in table 5
all results are stored, because they fit into memory and the times include no recomputed attention.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from benchmarks.advise import attention_fit
from benchmarks.advise.fitting import fit
from benchmarks.advise.published_tables import table
from benchmarks.advise.section import Figure, Point, Section, rows_of, spread
from megatron_burst.autotune.clusters import GB, Cluster
from megatron_burst.autotune.gpus import GPUS
from megatron_burst.autotune.rates import Rates
from megatron_burst.plugins.tools.advise.forecast.attention_time import (
    AttentionTime,
    RingsOf,
    attention_time,
    cached_ring_passes,
    ring_passes,
)
from megatron_burst.plugins.tools.advise.forecast.layer_time import visible
from megatron_burst.plugins.tools.advise.forecast.step_time import (
    StepTime,
    model_operations,
    step_time,
)
from megatron_burst.plugins.tools.advise.settings import Settings
from megatron_burst.plugins.tools.advise.shapes.models import Model

MODEL = Model("BurstEngine 14B", 40, 5120, 40, 40, 13824, 120_000)
PER_GPU = 32 << 10  # tokens of table 5
NVLINK = 160 * GB  # four fifths of the 200 per direction in the datasheet
KERNELS = attention_fit.Constants()  # the slowdown of small chunks is from LoongTrain's table 4


@dataclass(frozen=True)
class Constants:
    """Constants that were fitted to the ten rows.

    Attributes:
        attention: Fraction of the peak that a long forward reaches.
        backward: Time of backward / time of forward.
        linear: Fraction of the peak that large products reach.
        inter: Bytes per second of one GPU between nodes.
        slowdown: Slowdown of compute during transfers, a fraction.
    """

    attention: float = 0.6628
    backward: float = 2.573
    linear: float = 0.7161
    inter: float = 11.8 * GB
    slowdown: float = 0.177


LOW = Constants(0.5, 2.0, 0.5, 2 * GB, 0.001)
HIGH = Constants(0.75, 3.5, 0.9, 25 * GB, 0.3)


class Row(NamedTuple):
    """A published configuration: its GPUs, the run and its MFU."""

    label: str
    gpus: int
    run: Settings
    mfu: float

    @property
    def seconds(self) -> float:
        """Return seconds of a step, from the MFU."""
        done = model_operations(MODEL, self.run.seq) * self.run.seq * self.run.dp
        return done / (self.mfu * self.gpus * GPUS["a800"].peak)


BASE = Settings(seq=1 << 20, cp=32, fsdp=True, gradients="bf16", algorithm="ring", side="kv",
                lm_head_loss="off")  # fmt: skip
# Changes of each row of the ablation.
ABLATION: Mapping[str, dict[str, Any]] = {
    "baseline": {},
    "+backward_comm_opt": {"side": "query"},
    "+topology_aware_ring": {"algorithm": "burst"},
    "+lm_head_loss_fusion": {"lm_head_loss": "single_pass"},
    "+seq_selective_ckpt": {"store": 0.5},
    "selective_ckpt_pp_instead": {"store": 1.0},
}


def published() -> list[Row]:
    """Return the six rows of table 2 and the four rows of table 5."""
    rows, run = [], BASE
    for row in table("burstengine_table2_ablation"):
        run = replace(run, **ABLATION[row["configuration"]])
        rows.append(Row(row["configuration"], 32, run, float(row["mfu_percent"]) / 100))
    for row in table("burstengine_table5_intra_node"):
        cp = int(row["cp"])
        few = replace(run, seq=PER_GPU * cp, cp=cp, dp=8 // cp, optimizer_offload=1.0)
        rows.append(Row(f"CP {cp}, {few.seq >> 10}K", 8, few, float(row["mfu_percent"]) / 100))
    return rows


def cluster(gpus: int, constants: Constants) -> Cluster:
    """Return a cluster with nodes of eight A800."""
    gpu = replace(GPUS["a800"], linear=constants.linear, attention=constants.attention)
    rates = Rates(NVLINK, constants.inter, KERNELS.latency, gpu.peak * gpu.attention,
                  KERNELS.launch, backward=constants.backward, slowdown=constants.slowdown,
                  half_rows=KERNELS.half_rows)  # fmt: skip
    return Cluster(gpu, gpus, rates=rates)


def predicted(
    row: Row, constants: Constants = Constants(), rings: RingsOf = ring_passes
) -> StepTime:
    """Return the forecast of the released code; `rings` is a cache of schedules."""
    attention = partial(attention_time, rings=rings)
    return step_time(MODEL, cluster(row.gpus, constants), row.run, attention=attention)


def fitted(
    rows: Sequence[Row], start: Constants = Constants(), rings: RingsOf | None = None
) -> Constants:
    """Return the constants that fit these rows."""
    measured_seconds, rings = np.array([row.seconds for row in rows]), rings or cached_ring_passes()

    def residuals(values: np.ndarray) -> np.ndarray:
        constants = Constants(*values.tolist())
        return np.log([predicted(row, constants, rings).seconds for row in rows] / measured_seconds)

    return Constants(*fit(residuals, astuple(start), astuple(LOW), astuple(HIGH)).tolist())


def leave_one_out(rows: Sequence[Row]) -> list[Point]:
    """Return each row, predicted by the constants that fit the others."""
    points, rings = [], cached_ring_passes()
    for index, row in enumerate(rows):
        constants = fitted([*rows[:index], *rows[index + 1 :]], rings=rings)
        points.append(Point(row.label, row.seconds, predicted(row, constants, rings).seconds))
    return points


# --- table 3: masks ------------------------------------------------------------------------------

WINDOW = 32 << 10
MASKS = ("attention_masking", "causal_zigzag", "sliding_window_32k_blockwise_balanced")


def pairs_of(mask: str, seq: int) -> float:
    """Return the pairs that an implementation computes over the pairs of a causal mask.

    "attention_masking" computes all pairs. The block-wise window, with blocks as long as the
    window, computes the pairs of a block with itself (causal) and with the previous block.
    """
    if mask == "causal_zigzag":
        return 1.0
    blocks = seq // WINDOW
    shown = seq if mask == "attention_masking" else WINDOW * (0.5 + (blocks - 1) / blocks)
    return shown / visible(seq)


def masked(mask: str, constants: Constants = Constants()) -> float:
    """Return seconds of a step of 256K tokens on 8 GPUs, table 5's last row with another mask."""
    row = published()[-1]
    share = pairs_of(mask, row.run.seq)

    def attention(model: Model, where: Cluster, run: Settings, *_: Any, **__: Any) -> AttentionTime:
        core = attention_time(model, where, run)  # on one node only compute takes time
        return replace(core, forward=core.forward * share, backward=core.backward * share)

    return step_time(MODEL, cluster(8, constants), row.run, attention=attention).seconds


def speedups(constants: Constants = Constants()) -> list[Point]:
    """Return table 3: speedups over a masked full computation."""
    plain = masked(MASKS[0], constants)
    rows = {row["implementation"]: float(row["speedup"]) for row in
            table("burstengine_table3_sparse")}  # fmt: skip
    return [Point(mask, rows[mask], plain / masked(mask, constants)) for mask in MASKS[1:]]


def run(fit: bool = False) -> Section:
    """Return the tables and their predictions."""
    rows = published()
    constants = fitted(rows) if fit else Constants()
    points = [Point(r.label, r.seconds, predicted(r, constants).seconds) for r in rows]
    off = spread(points)
    left = leave_one_out(rows)
    out = spread(left)
    masks = speedups(constants)
    worst = max(abs(p.error) for p in masks)
    return Section(
        name="burstengine-steps",
        title="BurstEngine, tables 2, 3 and 5: steps of a 14B model",
        intro=("Seconds per step, from the published MFU: 1M tokens on 32 A800 (table 2), 32K "
               "tokens per GPU on 8 (table 5). Speedups over a masked full computation (table 3) "
               "follow from the same constants.",),
        columns=("row", "published", "predicted", "error"),
        rows=[*rows_of(points), *rows_of(masks)],
        figures=(
            Figure("Time, median error", f"{off.median:.2%}, worst {off.worst:.1%}", "3 %",
                   off.median <= 0.03),
            Figure("Each row by constants of the other nine",
                   f"median {out.median:.2%}, worst {out.worst:.1%}"),
            Figure("Speedups of table 3, worst error", f"{worst:.1%}", "10 %", worst <= 0.1),
        ),
        constants=(
            f"attention {constants.attention:.3f} of the peak for a long forward",
            f"backward {constants.backward:.2f} times a forward's time",
            f"linear {constants.linear:.3f} of the peak for large matrix products",
            f"inter {constants.inter / GB:.1f} GB/s of one GPU between nodes",
            f"slowdown {constants.slowdown:.3f} of computing while links carry something",
        ),
        notes=("Table 5's rows are predicted with all attention results stored: with half of them "
               "as in table 2's row 5, its last one would take 11 % longer (8 % if fitted so). "
               "Table 2's row 5 saves two thirds of attention's recompute and holds 36 % of what "
               "row 6 holds, which is a store of 0.4; the paper states no fraction, the authors' "
               "code has 0.5. Table 3's window is taken to be computed in blocks as long as "
               "itself. What small chunks lose is taken from LoongTrain's table 4.",),
    )  # fmt: skip
