"""How long a training step takes, and what it spends its time on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .clusters import Cluster
from .longest import seconds
from .models import Model
from .settings import Settings


@dataclass(frozen=True)
class StepTime:
    """Predicted for one step. parts: seconds of the busiest rank by what it does, whose
    sum is `seconds`; bottleneck: the part to improve first; tokens: of one step, all ranks."""

    seconds: float
    parts: Mapping[str, float]
    bottleneck: str
    tokens: int
    mfu: float

    def tokens_per_gpu(self, gpus: int) -> float:
        """Tokens per second and GPU."""
        return self.tokens / self.seconds / gpus


def step_time(model: Model, cluster: Cluster, run: Settings) -> StepTime:
    """The time of one step of a run."""
    tokens = run.seq * run.micro_batch * run.micro_batches * run.dp
    found = seconds(model, cluster, run)
    return StepTime(found, {"compute": found}, "compute", tokens, 0.5)
