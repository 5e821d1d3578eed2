"""How long the core attention of one layer takes, forward and backward, on a run's ranks.

From the schedules that the run would execute, timed by `autotune.simulator`, with the links of the
cluster. Decides nothing: `Settings` say which algorithm, side and groups there are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..autotune import simulator
from ..autotune.candidates import shared_sizes, sharing
from ..autotune.pair_counts import pairs_seen
from ..autotune.rates import Rates
from ..layout import make
from ..masks import Causal
from ..options import ring_algorithm
from ..schedule import cost
from ..schedule.demand import wanted
from ..schedule.sizes import Sizes
from ..schedule.tables import Grid
from ..schedule.topology import Topology
from .clusters import Cluster
from .disturbed import UNDISTURBED, Disturbed, Group, draws
from .faults import Faults
from .models import Model
from .settings import BYTES, Settings


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
) -> AttentionTime:
    """The time of one attention call of a run, with causal sequences.

    faults: what is slower; then of the slowest of all rings, or of those of one group.

    Raises ValueError for groups that the ranks of a node do not allow.
    """
    topology = Topology(run.cp, cp_per_node(cluster, run), run.ulysses, run.placement)
    heads, kv_heads = model.heads // run.tp, max(1, model.kv_heads // run.tp)
    width = model.head_dim
    own = Sizes(run.seq // run.cp, run.micro_batch, heads, kv_heads, width, width, 2, 4,
                BYTES[run.wire], (True, True, True))  # fmt: skip
    sizes, rates = shared_sizes(own, run.ulysses), rates_of(cluster)
    layout = make(run.layout, cp_size=run.cp)
    spans = cost.ring_spans(layout, topology, run.seq)
    inner = run.inner or topology.intra_size
    grid = Grid(topology.ring_size // inner, inner)
    want, name = wanted(Causal(), spans, spans), ring_algorithm(run.algorithm)
    assert rates.compute is not None
    flops = 2.0 * sizes.heads * sizes.batch * (sizes.width + sizes.value_width)
    seconds = pairs_seen(Causal(), spans) * (flops / rates.compute)
    passes = (
        cost.forward_schedule(name, grid, want, sizes),
        cost.backward_schedule(name, grid, want, sizes, side=run.side),
    )
    exchange = sharing(topology, own, rates)

    def timed(ring: Disturbed) -> AttentionTime:
        there, back = (
            simulator.pass_time(each, sizes, scale * seconds, rates, run.head_chunks, disturbed=how)
            for each, scale, how in zip(passes, (1.0, rates.backward), ring.passes, strict=True)
        )
        shared = [f * each.seconds for f, each in zip(ring.exchange, exchange, strict=True)]
        both = there + back + exchange[0] + exchange[1]
        busy = {"compute": both.compute, "intra": both.intra, "inter": both.inter}
        return AttentionTime(
            there.seconds + shared[0], back.seconds + shared[1], (shared[0], shared[1]), busy
        )

    if faults is None:
        return timed(UNDISTURBED)
    found = draws(faults, cluster, run, topology, group)
    return _mean([[timed(ring) for ring in rings] for rings in found])


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


def cp_per_node(cluster: Cluster, run: Settings) -> int:
    """Ranks of one context-parallel group on each node; tensor-parallel ranks are neighbours."""
    return min(run.cp, max(1, cluster.ranks_per_node // run.tp))


def rates_of(cluster: Cluster) -> Rates:
    """Those of one rank while all ranks of a node send."""
    alone = cluster.rank_rates()
    return replace(alone, inter=alone.inter * cluster.nic_share)
