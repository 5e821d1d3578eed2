# SPDX-License-Identifier: Apache-2.0
"""Public names of `mb.rl`: reinforcement learning on trajectories that share prefixes.

`logprobs` performs the complete computation, from trajectories to one tensor per trajectory.
`TrajectoryBatch` is one micro-batch, for the loops of other frameworks.
"""

from .batch import TrajectoryBatch
from .step import TrajectoryLogProbs, logprobs

__all__ = ["TrajectoryBatch", "TrajectoryLogProbs", "logprobs"]
