"""BurstEngine's steps: its tables 2 (ablation), 5 (8 GPUs) and 3 (masks), with five constants.

Published: "BurstEngine", arXiv 2509.19836. The time of a row is taken from its MFU, whose definition
is `step_time.model_operations` (13.3e9 parameters without the embedding, the causal half of
attention): with it the MFU and the token rates of table 2 agree to 0.2 %. Those of table 5 do with
tokens counted in thousands where lengths are in units of 1,024.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from megatron_burst.advisor.clusters import GB, GPUS
from megatron_burst.advisor.models import Model
from megatron_burst.advisor.settings import Settings
from megatron_burst.advisor.step_time import model_operations

TABLES = Path(__file__).parent / "published"
MODEL = Model("BurstEngine 14B", 40, 5120, 40, 40, 13824, 120_000)


@dataclass(frozen=True)
class Constants:
    """What was fitted to the ten rows. attention: fraction of the peak of a long forward; backward:
    its time over a forward's; linear: fraction of the peak of large products; inter: bytes per
    second of one GPU between nodes while all send; host_update: bytes per second of the host memory
    of a node that the optimizer on the host moves."""

    attention: float = 0.68
    backward: float = 2.9
    linear: float = 0.75
    inter: float = 12 * GB
    host_update: float = 200 * GB

    LOW = (0.5, 2.0, 0.5, 2 * GB, 20 * GB)
    HIGH = (0.75, 3.5, 0.9, 25 * GB, 800 * GB)


class Row(NamedTuple):
    """A published configuration: its GPUs, the run, and its seconds per step by the MFU."""

    label: str
    gpus: int
    run: Settings
    mfu: float

    @property
    def seconds(self) -> float:
        tokens = self.run.seq * self.run.dp
        done = model_operations(MODEL, self.run.seq) * tokens
        return done / (self.mfu * self.gpus * GPUS["a800"].peak)


# What each row of the ablation adds. Stores are the authors' 0.5 and all; rows are cumulative, save
# the last two, of which one replaces the other.
ABLATION: Mapping[str, dict] = {
    "baseline": {"algorithm": "ring", "side": "kv", "lm_head_loss": "off"},
    "+backward_comm_opt": {"side": "query"},
    "+topology_aware_ring": {"algorithm": "burst"},
    "+lm_head_loss_fusion": {"lm_head_loss": "single_pass"},
    "+seq_selective_ckpt": {"store": 0.5},
    "selective_ckpt_pp_instead": {"store": 1.0},
}


def published(name: str) -> list[dict[str, str]]:
    """The rows of a table, its comment left out."""
    lines = (TABLES / name).read_text().splitlines()
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))
