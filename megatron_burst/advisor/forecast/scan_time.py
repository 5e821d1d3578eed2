"""How long the ranks of one layer of linear attention exchange: states, or heads as Megatron does.

By formula, of the busiest rank; the tables of hops that run are those of `schedule.scans`.
Nothing of it is taken to hide behind computing. Letters: S bytes of the states of one rank's heads,
M of the map of a piece: S and its transition.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from ..account.sizes import B, F, Scan, Sizes
from ..clusters import Cluster
from ..settings import Settings
from .links import all_to_all_seconds, inter_rate, intra_rate, ring_seconds


class Chain(NamedTuple):
    """How the ranks of one sequence follow each other. hops: from rank to rank; crossings: those
    of them to another node; per_node: ranks of it on a node; pieces: of a rank."""

    hops: int
    crossings: int
    per_node: int
    pieces: int

    @classmethod
    def of(cls, cluster: Cluster, run: Settings) -> Chain:
        """Zigzag goes up the ranks and back, and its turn is no hop; others go up only."""
        here = min(run.intra or run.cp, cluster.cp_per_node(run.tp, run.cp))
        ways = 2 if run.layout == "zigzag" else 1
        return cls(ways * (run.cp - 1), ways * (-(-run.cp // here) - 1), here, ways)


def scan_seconds(cluster: Cluster, run: Settings, x: Sizes) -> float:
    """Seconds of one pass, forward or backward: both send the same.

    A scan of states passes them from piece to piece, gradients the other way, and the convolution
    takes its rows from the rank before. Megatron's exchange brings the mixed projection to where
    its heads are, and results back.
    """
    if run.cp == 1 or x.scan is None:
        return 0.0
    if run.linear == "megatron":
        into, out = x.mixer
        sent = (run.rows * into * B, run.rows * out * B)
        return sum(all_to_all_seconds(cluster, run.cp, run.tp, each) for each in sent)
    found = by_algorithm(cluster, run, x.scan)
    states = min(found.values()) if run.linear == "auto" else found[run.linear]
    return states + rows_before(cluster, run, x.scan)


def state_bytes(scan: Scan) -> int:
    """S: fp32."""
    return scan.batch * scan.state * F


def map_bytes(scan: Scan) -> int:
    """M: what a state is multiplied by, one number per head, per row of the state, or a matrix with
    delta rules; and what is added to it."""
    each = {"none": 0, "scalar": 1, "vector": scan.width}[scan.decay]
    each = scan.width**2 if scan.delta else each
    return state_bytes(scan) + scan.batch * scan.heads * each * F


def by_algorithm(cluster: Cluster, run: Settings, scan: Scan) -> Mapping[str, float]:
    """Seconds of the states of one pass, by the algorithm that carries them."""
    state, whole, chain = state_bytes(scan), map_bytes(scan), Chain.of(cluster, run)
    late, intra, inter = cluster.rank_rates().latency, intra_rate(cluster), inter_rate(cluster)
    within = chain.hops - chain.crossings
    slowest = min(intra, inter) if chain.crossings else intra
    # Maps of all pieces come to every rank; of a document's last piece nobody needs one.
    gathered = ring_seconds(cluster, run.cp, run.tp, chain.pieces * run.cp * whole)
    # Pipelined: as many rounds as hops and parts, each as long as the slowest link takes.
    parts = max(1, round(math.sqrt(chain.hops * state / slowest / late))) if late else scan.heads
    rounds = chain.hops + parts - 1
    # Within a node maps go to the rank of their part, and states from it; between, parts travel.
    alone = chain.per_node
    shared = (alone - 1) / alone * chain.pieces * (whole + state) / intra
    return {
        "ring": chain.hops * late + within * state / intra + chain.crossings * state / inter,
        "all_gather": gathered + late * (1 + (chain.crossings > 0)),
        "scan": rounds * (late + state / parts / slowest),
        "two_level": 2 * late + shared + chain.crossings * (late + state / alone / inter),
    }


def rows_before(cluster: Cluster, run: Settings, scan: Scan) -> float:
    """Seconds of the rows before each piece, which the short convolution starts with."""
    if scan.taps < 2:
        return 0.0
    chain = Chain.of(cluster, run)
    size = scan.batch * (scan.taps - 1) * (scan.keys + scan.values) * B * chain.pieces
    rate = inter_rate(cluster) if chain.crossings else intra_rate(cluster)
    return cluster.rank_rates().latency + size / rate
