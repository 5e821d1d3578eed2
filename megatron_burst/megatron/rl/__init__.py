# SPDX-License-Identifier: Apache-2.0
"""Reinforcement learning on trajectories that share prefixes: `mb.rl`.

`logprobs` is the whole way, from trajectories to one tensor each; `batch` is one micro-batch, for
loops of other frameworks.
"""

from .batch import TrajectoryBatch
from .step import TrajectoryLogProbs, logprobs

__all__ = ["TrajectoryBatch", "TrajectoryLogProbs", "logprobs"]
