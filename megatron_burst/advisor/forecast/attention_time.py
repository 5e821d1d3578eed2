"""How long the core attention of one layer takes, forward and backward, on a run's ranks.

From the schedules that the run would execute, timed by `autotune.simulator`, with the links of the
cluster: who shares a NIC follows from where ranks are. Decides nothing: `Settings` say which
algorithm, side and groups there are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...autotune import simulator
from ...autotune.candidates import shared_sizes, sharing
from ...autotune.recording import Recording
from ..clusters import Cluster
from ..settings import Settings
from ..shapes.models import Model
from .disturbed import UNDISTURBED, Disturbed, Group, draws
from .faults import Faults
from .ring_passes import Rings, made, ring_of, sizes_of, topology_of


@dataclass(frozen=True)
class AttentionTime:
    """Seconds of one attention call: all sequences of a micro-batch, one layer, one rank.

    forward, backward: with the all-to-all of ranks that share heads; exchange: that part of each.
    busy: for how long of both the busiest rank's device ("compute") and links ("intra", "inter")
    are in use. spread: standard deviation of the seconds over the draws of jitter.
    """

    forward: float
    backward: float
    exchange: tuple[float, float]
    busy: Mapping[str, float]
    spread: float = 0.0

    @property
    def seconds(self) -> float:
        """Of one forward and one backward."""
        return self.forward + self.backward

    @property
    def bottleneck(self) -> str:
        """What is busy for the longest time: "compute", "intra" or "inter"."""
        return max(self.busy, key=lambda name: self.busy[name])


def attention_time(
    model: Model,
    cluster: Cluster,
    run: Settings,
    faults: Faults | None = None,
    group: Group | None = None,
    rings: Rings | None = None,
    recordings: tuple[Recording | None, Recording | None] = (None, None),
) -> AttentionTime:
    """The time of one attention call of a run, with causal sequences.

    faults: what is slower; then of the slowest of all rings, or of those of one group. rings: where
    schedules are remembered. recordings: told what the ring of each pass does when.

    Raises ValueError for groups that the ranks of a node do not allow.
    """
    rates = cluster.rank_rates()
    sizes = shared_sizes(sizes_of(model, run), run.ulysses)
    ring = ring_of(model, cluster, run)
    passes = made(ring) if rings is None else rings.of(ring)
    assert rates.compute is not None
    flops = 2.0 * sizes.heads * sizes.batch * (sizes.width + sizes.value_width)
    chunks = run.sequence_chunks
    seconds = passes.pairs * (flops / rates.compute / chunks)
    both_passes = (
        (passes.forward, 1.0, recordings[0]), (passes.backward, rates.backward, recordings[1])
    )  # fmt: skip
    topology = topology_of(cluster, run)
    exchange = sharing(topology, sizes, rates, chunks > 1, ring.nodes.per_nic)

    def timed(how: Disturbed) -> AttentionTime:
        there, back = (
            chunks
            * simulator.pass_time(
                each,
                sizes,
                scale * seconds,
                rates,
                run.head_chunks,
                disturbed=disturbed,
                recording=told,
            )
            for (each, scale, told), disturbed in zip(both_passes, how.passes, strict=True)
        )
        shared = [f * each.seconds for f, each in zip(how.exchange, exchange, strict=True)]
        both = there + back + exchange[0] + exchange[1]
        busy = {"compute": both.compute, "intra": both.intra, "inter": both.inter}
        return AttentionTime(
            there.seconds + shared[0], back.seconds + shared[1], (shared[0], shared[1]), busy
        )

    if faults is None:
        return timed(UNDISTURBED)
    found = draws(faults, cluster, run, topology, group)
    return _mean([[timed(each) for each in some] for some in found])


def _mean(drawn: Sequence[Sequence[AttentionTime]]) -> AttentionTime:
    """Over draws, each of several rings: of forward and of backward the slowest counts, as ranks
    wait for one another after either."""
    forward = np.array([max(ring.forward for ring in rings) for rings in drawn])
    backward = np.array([max(ring.backward for ring in rings) for rings in drawn])
    slowest = max(drawn[0], key=lambda ring: ring.seconds)
    return replace(
        slowest,
        forward=float(forward.mean()),
        backward=float(backward.mean()),
        spread=float((forward + backward).std()),
    )
