# SPDX-License-Identifier: Apache-2.0
"""Public names of `mb.rl`: reinforcement learning on trajectories that share prefixes.

`logprobs` computes one tensor of log-probabilities per trajectory, and supports all types of
parallelism in Megatron. `TrajectoryBatch` is one micro-batch, for training loops of other
frameworks.
"""

from .batch import TrajectoryBatch
from .step import TrajectoryLogProbs, logprobs

__all__ = ["TrajectoryBatch", "TrajectoryLogProbs", "logprobs"]
