# SPDX-License-Identifier: Apache-2.0
"""Predicted time of communication in one layer of linear attention.

Ranks exchange states (a scan), or heads as in Megatron. `schedule.scans` computes the transfers of
a scan and, for algorithm "auto", chooses the scan, as in training. Communication does not overlap
with compute.
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
ACCESSES = 3  # memory accesses per received state: read the state and a map, write a state


def scan_time(
    algorithm: str, layout: str, topology: Topology, sizes: ScanSizes, links: timing.Links
) -> float:
    """Return the seconds until all ranks finish a scan (exchange of linear-attention states)."""
    # The result does not depend on the length of the pieces.
    chain = chains(make(layout, cp_size=topology.size), 2 * topology.size)
    if algorithm == "auto":
        return choose(chain, topology, sizes, links).seconds
    blocks = blocks_for(algorithm, chain, topology, sizes, links)
    hops = SCANS[algorithm](Task(chain, topology, blocks))
    return float(timing.scan_seconds(hops, topology, sizes, blocks, links).max())


def scan_seconds(
    cluster: Cluster, run: Settings, x: LayerSizes, timed: Callable[..., float] = scan_time
) -> float:
    """Return the seconds of communication in forward of a layer. Backward takes equally long.

    A scan sends states from piece to piece, and gradients in the opposite direction. (A piece is
    consecutive positions of a document on one rank.) The short convolution receives rows from the
    previous rank. With `linear="megatron"`, ranks exchange heads: an all-to-all sends the outputs
    of the input projection to the ranks of the heads, and another one sends results back.

    Args:
        cluster: Cluster of GPUs.
        run: Settings of the run.
        x: Sizes of the layer.
        timed: `scan_time`, or a cached version of it.
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
    """Return the sizes of the fp32 states of one rank's heads.

    Args:
        scan: Sizes of linear attention on one rank.
        batch: Sequences of a micro-batch.
    """
    form: Form = "matrix" if scan.delta else scan.decay
    return ScanSizes(batch, scan.heads, scan.width, scan.value_width, form, F)


def links_of(cluster: Cluster) -> timing.Links:
    """Return the rates of a rank's links while all ranks of its node send."""
    rates = cluster.rank_rates()
    return timing.Links(
        *rates_of(cluster), rates.latency, rates.latency,
        cluster.gpu.memory_rate / ACCESSES, rates.posting,
    )  # fmt: skip


def rows_before(topology: Topology, run: Settings, scan: Mixer, links: timing.Links) -> float:
    """Return the seconds in which ranks exchange the rows that a short convolution needs.

    A convolution of n taps needs the n - 1 rows before each piece (consecutive positions of a
    document on one rank).
    """
    if scan.taps < 2:
        return 0.0
    pieces = 2 if run.layout == "zigzag" else 1
    size = run.micro_batch * (scan.taps - 1) * scan.convolved * B * pieces
    if topology.per_node < topology.size:
        return links.inter_latency + size / links.inter
    return links.intra_latency + size / links.intra
