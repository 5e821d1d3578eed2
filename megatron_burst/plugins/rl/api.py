# SPDX-License-Identifier: Apache-2.0
"""Reinforcement learning on trajectories that share prefixes: `mb.rl`.

`logprobs` computes everything, from trajectories to one tensor for each. `TrajectoryBatch` is one
micro-batch, for the loops of other frameworks.
"""

from .batch import TrajectoryBatch
from .step import TrajectoryLogProbs, logprobs

__all__ = ["TrajectoryBatch", "TrajectoryLogProbs", "logprobs"]
