# SPDX-License-Identifier: Apache-2.0
"""How long the ranks of one layer of linear attention exchange: states, or heads as Megatron does.

Decides which links a scan has; its tables, and what "auto" takes of them, are those that run
(`schedule.scans`). Nothing of an exchange is taken to hide behind computing.
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
ACCESSES = 3  # of memory, to fold in what came: a state and a map are read, a state is written


def scan_time(
    algorithm: str, layout: str, topology: Topology, sizes: ScanSizes, links: timing.Links
) -> float:
    """Seconds of a scan of the states of one sequence, until the last rank is done."""
    # How long the pieces of the chain are changes nothing.
    chain = chains(make(layout, cp_size=topology.size), 2 * topology.size)
    if algorithm == "auto":
        return choose(chain, topology, sizes, links).seconds
    blocks = blocks_for(algorithm, chain, topology, sizes, links)
    hops = SCANS[algorithm](Task(chain, topology, blocks))
    return float(timing.scan_seconds(hops, topology, sizes, blocks, links).max())


def scan_seconds(
    cluster: Cluster, run: Settings, x: LayerSizes, timed: Callable[..., float] = scan_time
) -> float:
    """Seconds of one pass of a layer, forward or backward: both send the same.

    A scan of states passes them from piece to piece, gradients the other way, and the convolution
    takes its rows from the rank before. Megatron's exchange brings the mixed projection to where
    its heads are, and results back. timed: `scan_time`, or one that remembers.
    """
    if run.cp == 1 or x.scan is None:
        return 0.0
    if run.linear == "megatron":
        sent = (run.rows * each * B for each in (x.scan.into, x.scan.out))
        return sum(all_to_all_seconds(cluster, run.cp, run.tp, each) for each in sent)
    topology = Topology(run.cp, cluster.cp_per_node(run.tp, run.cp))
    sizes, links = sizes_of(x.scan, run.micro_batch), links_of(cluster)
    found = timed(run.linear, run.layout, topology, sizes, links)
    return found + rows_before(topology, run, x.scan, links)


def sizes_of(scan: Mixer, batch: int) -> ScanSizes:
    """States of one rank's heads, fp32. batch: sequences of a micro-batch."""
    form: Form = "matrix" if scan.delta else scan.decay
    return ScanSizes(batch, scan.heads, scan.width, scan.value_width, form, F)


def links_of(cluster: Cluster) -> timing.Links:
    """Those of a rank while all ranks of its node send."""
    rates = cluster.rank_rates()
    return timing.Links(
        *rates_of(cluster), rates.latency, rates.latency,
        cluster.gpu.memory_rate / ACCESSES, rates.posting,
    )  # fmt: skip


def rows_before(topology: Topology, run: Settings, scan: Mixer, links: timing.Links) -> float:
    """Seconds of the rows before each piece, which the short convolution starts with."""
    if scan.taps < 2:
        return 0.0
    pieces = 2 if run.layout == "zigzag" else 1
    size = run.micro_batch * (scan.taps - 1) * scan.convolved * B * pieces
    if topology.per_node < topology.size:
        return links.inter_latency + size / links.inter
    return links.intra_latency + size / links.intra
