# SPDX-License-Identifier: Apache-2.0
"""The time of the exchange of one layer of linear attention: states, or heads as in Megatron.

This module decides which links a scan has. The tables of scans and the choice of "auto" are those
of a run (`schedule.scans`). An exchange never overlaps with computing.
"""

from __future__ import annotations

from collections.abc import Callable

from .....autotune.clusters import Cluster
from .....layout import make
from .....layout.pieces import chains
from .....schedule.scans import SCANS, timing
from .....schedule.scans.choice import blocks_for, choose
from .....schedule.scans.hops import Task
from .....schedule.scans.sizes import Form, ScanSizes
from .....schedule.topology import Topology
from ..account.operators import B, F, LayerSizes
from ..settings import Settings
from ..shapes.layer_kinds import Mixer
from .links import all_to_all_seconds, rates_of

States = Callable[[Cluster, Settings, LayerSizes], float]  # called as `scan_seconds`
ACCESSES = 3  # of memory per received state: a state and a map are read, a state is written


def scan_time(
    algorithm: str, layout: str, topology: Topology, sizes: ScanSizes, links: timing.Links
) -> float:
    """Return the seconds of a scan of the states of one sequence, until the last rank ends."""
    # The length of the chain's pieces changes nothing.
    chain = chains(make(layout, cp_size=topology.size), 2 * topology.size)
    if algorithm == "auto":
        return choose(chain, topology, sizes, links).seconds
    blocks = blocks_for(algorithm, chain, topology, sizes, links)
    hops = SCANS[algorithm](Task(chain, topology, blocks))
    return float(timing.scan_seconds(hops, topology, sizes, blocks, links).max())


def scan_seconds(
    cluster: Cluster, run: Settings, x: LayerSizes, timed: Callable[..., float] = scan_time
) -> float:
    """Return the seconds of one pass of a layer; forward and backward send the same.

    A scan sends states from piece to piece and gradients in the opposite direction. The convolution
    receives its rows from the previous rank. Megatron's exchange sends the mixed projection to the
    ranks of its heads and returns the results.

    Args:
        cluster: The cluster.
        run: The run.
        x: Sizes of the layer.
        timed: `scan_time`, or a cached function.
    """
    if run.cp == 1 or x.scan is None:
        return 0.0
    if run.linear == "megatron":
        sent = (run.rows * width * B for width in (x.scan.into, x.scan.out))
        return sum(all_to_all_seconds(cluster, run.cp, run.tp, width) for width in sent)
    topology = Topology(run.cp, cluster.cp_per_node(run.tp, run.cp))
    sizes, links = sizes_of(x.scan, run.micro_batch), links_of(cluster)
    scan = timed(run.linear, run.layout, topology, sizes, links)
    return scan + rows_before(topology, run, x.scan, links)


def sizes_of(scan: Mixer, batch: int) -> ScanSizes:
    """Return the sizes of the states of one rank's heads in fp32.

    Args:
        scan: The rank's part of the mixer.
        batch: Sequences of a micro-batch.
    """
    form: Form = "matrix" if scan.delta else scan.decay
    return ScanSizes(batch, scan.heads, scan.width, scan.value_width, form, F)


def links_of(cluster: Cluster) -> timing.Links:
    """Return the links of a rank while all ranks of its node send."""
    rates = cluster.rank_rates()
    return timing.Links(
        *rates_of(cluster), rates.latency, rates.latency,
        cluster.gpu.memory_rate / ACCESSES, rates.posting,
    )  # fmt: skip


def rows_before(topology: Topology, run: Settings, scan: Mixer, links: timing.Links) -> float:
    """Return the seconds of the rows before each piece with which the short convolution starts."""
    if scan.taps < 2:
        return 0.0
    pieces = 2 if run.layout == "zigzag" else 1
    size = run.micro_batch * (scan.taps - 1) * scan.convolved * B * pieces
    if topology.per_node < topology.size:
        return links.inter_latency + size / links.inter
    return links.intra_latency + size / links.intra
