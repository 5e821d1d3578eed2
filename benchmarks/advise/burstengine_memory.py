"""BurstEngine's memory, in its tables 2 (ablation) and 5 (8 GPUs). No constant is fitted.

Published: "BurstEngine", arXiv 2509.19836. The account has unfused modules (norms in fp32, rope,
SwiGLU and weight gradients as separate operators), as in the authors' code. Parameters, gradients
in fp32 and optimizer states are sharded over all GPUs; the parameters of two layers are gathered.

    python -m benchmarks.advise.burstengine_memory
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from benchmarks.advise.fitting import Errors
from benchmarks.advise.fpdt import RESERVE
from benchmarks.advise.published_tables import table
from benchmarks.advise.section import Figure, Point, Section, rows_of, spread
from megatron_burst.autotune.clusters import GB
from megatron_burst.plugins.tools.advise.account.memory import account
from megatron_burst.plugins.tools.advise.settings import Settings
from megatron_burst.plugins.tools.advise.shapes.models import Model

MODEL = Model("BurstEngine 14B", 40, 5120, 40, 40, 13824, 120_000)
# If the loss is not fused with the LM head: logits, their softmax and its gradient in bf16.
COMMON: Mapping[str, Any] = {"intra": 8, "fsdp": True, "path": "cpu", "logits_bytes": 6}
STEPS: Mapping[str, Mapping[str, Any]] = {
    "baseline": {"algorithm": "ring", "side": "kv", "lm_head_loss": "off"},
    "+backward_comm_opt": {"side": "query"},
    "+topology_aware_ring": {"algorithm": "burst"},
    "+lm_head_loss_fusion": {"lm_head_loss": "single_pass"},
    "+seq_selective_ckpt": {"store": 0.5},
    "selective_ckpt_pp_instead": {"store": 1.0},
}
PER_GPU = 32768  # tokens, in both tables


class Row(NamedTuple):
    """A published row: its bytes, and the bytes of the account."""

    label: str
    published: float
    counted: float

    def error(self, reserve: float) -> float:
        return (self.counted + reserve) / self.published - 1


def runs() -> dict[str, tuple[Settings, float]]:
    """Map each label to the run and the published bytes of its row. A GB is 10^9 bytes.

    Table 5 does not state how many attention outputs its runs keep. The account assumes all
    (selective checkpoint++): at CP 8 memory and states then equal table 2's last row within 1 %.
    """
    by_label, run = {}, Settings(seq=32 * PER_GPU, cp=32, **COMMON)
    for row in table("burstengine_table2_ablation"):
        run = replace(run, **STEPS[row["configuration"]])
        by_label[row["configuration"]] = run, float(row["memory_gb"]) * GB
    for row in table("burstengine_table5_intra_node"):
        cp = int(row["cp"])
        run = Settings(seq=cp * PER_GPU, cp=cp, dp=8 // cp, side="query", store=1.0,
                       optimizer_offload=1.0, **COMMON)  # fmt: skip
        by_label[f"8 GPUs, CP {cp}"] = run, float(row["memory_gb"]) * GB
    return by_label


def rows() -> list[Row]:
    """Return the ten rows with the bytes of the account."""
    return [Row(label, published, account(MODEL, run, every=False).peak.bytes)
            for label, (run, published) in runs().items()]  # fmt: skip


def fitted(measured_rows: Sequence[Row]) -> float:
    """Return the reserve with the smallest largest error."""
    tried = np.arange(0, 10 * GB, 0.05 * GB)
    return float(
        min(tried, key=lambda reserve: max(abs(row.error(reserve)) for row in measured_rows))
    )


def left_out(measured_rows: Sequence[Row]) -> list[Point]:
    """Return each row, predicted with the reserve that fits the nine others."""
    return [
        _point(row, fitted([another for another in measured_rows if another is not row]))
        for row in measured_rows
    ]


def _point(row: Row, reserve: float) -> Point:
    return Point(row.label, row.published / GB, (row.counted + reserve) / GB)


def run(fit: bool = False) -> Section:
    """Return the ten rows, with the fitted reserve if `fit`, else with the stated reserve."""
    measured_rows = rows()
    best = fitted(measured_rows)
    reserve = best if fit else RESERVE
    points = [_point(row, reserve) for row in measured_rows]
    here, out = spread(points), spread(left_out(measured_rows))
    return Section(
        name="burstengine_memory",
        title="BurstEngine's memory (its tables 2 and 5)",
        intro=[
            "14B on 32 and on 8 A800, 32K tokens per GPU, GB of 10^9 bytes. "
            "The modules are counted unfused, parameters, gradients (fp32) and optimizer sharded "
            "over all GPUs; logits without the fused loss take 6 bytes each (logits, softmax and "
            "gradient in bf16).",
        ],
        figures=[
            Figure("Error of memory", str(here), "median 5 %, worst 7 %", _met(here)),
            Figure("Error of each row, if the reserve is fitted without it", str(out)),
        ],
        columns=["row", "published GB", "predicted GB", "error"],
        rows=rows_of(points),
        constants=[f"reserve {reserve / GB:.2f} GB of a GPU that are no tensors of the account "
                   "(CUDA's context, NCCL's buffers, fragmentation): stated, the same as for "
                   f"FPDT's table; fitted to the ten rows it would be {best / GB:.2f} GB"],
        notes=[
            "Table 5 does not say what is kept of attention's results. All (selective "
            "checkpoint++) is taken, as its times say too: with half, its rows would be 6.8 GB "
            "smaller, 11 to 17 % too small. "
            "Its memory falls as CP rises, at the same rows, states and working sets: nothing in "
            "the account does that, and the row of CP 1 has the largest error. The row of "
            "sequence-level checkpointing adds 4.5 GB where half of all results take 6.8.",
            "What the paper leaves open was chosen with the tables in view: unfused modules, "
            "gradients in fp32, 6 bytes per logit, GB of 10^9 bytes.",
        ],
    )  # fmt: skip


def _met(errors: Errors) -> bool:
    return errors.median <= 0.05 and errors.worst <= 0.07


if __name__ == "__main__":
    print(run().markdown())
