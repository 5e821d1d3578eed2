"""Scans at 256 ranks and 8M tokens, the setting of ZeCO (arXiv 2507.01004), simulated.

`schedule.scans.timing` simulates the tables of hops. ZeCO uses a GLA of 1B parameters and 32K
tokens per GPU; the widths here are from the GLA of 1.3B parameters (arXiv 2312.06635).
"""

from __future__ import annotations

from typing import NamedTuple

from benchmarks.report import markdown
from megatron_burst.layout import chains, make
from megatron_burst.schedule.scans import SCANS
from megatron_burst.schedule.scans.choice import blocks_for, choose
from megatron_burst.schedule.scans.hops import Task
from megatron_burst.schedule.scans.sizes import ScanSizes
from megatron_burst.schedule.scans.timing import NOMINAL, Links, scan_seconds
from megatron_burst.schedule.topology import Topology
from megatron_burst.units import duration

RANKS, PER_NODE, TOKENS = 256, 8, 1 << 23
HIDDEN, LAYERS, HEADS, KEYS, VALUES = 2048, 24, 4, 256, 512  # keys and values per head
ITEMSIZE = 2  # of activations: bfloat16
COMPUTE, MEMORY = 400e12, 2.4e12  # FLOP/s that matrix products reach, bytes/s of a GPU's memory
LAYOUTS = ("contiguous", "zigzag")
NAMES = {"all_gather": "all_gather (LASP-2)", "scan": "scan (ZeCO)", "ring": "ring (LASP)"}


class HeadwiseRowBytes(NamedTuple):
    """Bytes of a row that the head-wise exchange sends, of all heads.

    Before the recurrence, queries, keys, values and gates are sent; after it, outputs.
    """

    inputs: int
    outputs: int


def exchange_seconds(
    topology: Topology, rows: int, row_bytes: HeadwiseRowBytes, links: Links
) -> float:
    """Return seconds of the two all-to-alls of a pass that share heads; `rows` is per rank."""
    return sum(_all_to_all(topology, rows * size, links) for size in row_bytes)


def exchange_sent(topology: Topology, rows: int, row_bytes: HeadwiseRowBytes) -> tuple[int, int]:
    """Return bytes that each rank sends within its node and to other nodes in these all-to-alls."""
    per_node, ranks = topology.per_node, topology.size
    size = rows * (row_bytes.inputs + row_bytes.outputs)
    return size * (per_node - 1) // ranks, size * (ranks - per_node) // ranks


def _all_to_all(topology: Topology, size: int, links: Links) -> float:
    """Return seconds of an all-to-all; a rank has `size` bytes and keeps its own share."""
    per_node, ranks = topology.per_node, topology.size
    share = size / ranks
    within = (per_node - 1) * (links.intra_latency + share / links.intra)
    return max(within, (ranks - per_node) * (links.inter_latency + share / links.inter))


class Row(NamedTuple):
    """One row of the table; `sent` is bytes of the busiest rank to its node and to others."""

    name: str
    layout: str
    blocks: int
    sent: tuple[int, int]
    seconds: float


def states() -> ScanSizes:
    """Return the states of one layer."""
    return ScanSizes(1, HEADS, KEYS, VALUES, "vector")


def widths() -> HeadwiseRowBytes:
    """Return bytes of a row: of queries, keys, decays and values, and of outputs."""
    return HeadwiseRowBytes(HEADS * (3 * KEYS + VALUES) * ITEMSIZE, HEADS * VALUES * ITEMSIZE)


def within() -> float:
    """Return seconds of the work of a rank in one layer that needs no state of other ranks.

    It is the work within chunks, which reads and writes each row once.
    """
    return TOKENS // RANKS * (widths().inputs + widths().outputs) / MEMORY


def layer() -> float:
    """Return seconds of one rank's forward through one layer without any exchange.

    It includes projections and feed-forward, 12 x hidden^2 parameters, and the recurrence.
    """
    return TOKENS // RANKS * 2 * 12 * HIDDEN**2 / COMPUTE + within()


def scans() -> list[Row]:
    """Return every algorithm with both layouts."""
    topology, state, rows = Topology(RANKS, PER_NODE), states(), []
    for layout in LAYOUTS:
        layout_chains = chains(make(layout, cp_size=RANKS), TOKENS)
        for name in SCANS:
            blocks = blocks_for(name, layout_chains, topology, state)
            hops = SCANS[name](Task(layout_chains, topology, blocks))
            sent = state.sent(hops, blocks, topology).max(axis=0).tolist()
            seconds = float(scan_seconds(hops, topology, state, blocks, NOMINAL).max())
            rows.append(Row(NAMES.get(name, name), layout, blocks, (sent[0], sent[1]), seconds))
    return rows


def collective() -> Row:
    """Return an all-gather of maps as a library runs it: rings over all NICs, each with a share.

    Every NIC forwards the bytes of all ranks except one, divided by the NICs of its node. A ring's
    first message arrives after as many steps as there are ranks.
    """
    map_bytes, steps, nodes = states().map, RANKS - 1, RANKS // PER_NODE
    inter_bytes = steps * map_bytes // PER_NODE
    links = NOMINAL
    start = nodes * links.inter_latency + (steps - nodes) * links.intra_latency
    seconds = start + inter_bytes / min(links.inter, links.intra / PER_NODE)
    return Row(
        "all-gather by rings over all NICs",
        "any",
        1,
        (steps * map_bytes - inter_bytes, inter_bytes),
        seconds,
    )


def heads_exchanged() -> Row:
    """Return both all-to-alls, for as many heads as ranks; no such model has so many heads."""
    topology, rows = Topology(RANKS, PER_NODE), TOKENS // RANKS
    seconds = exchange_seconds(topology, rows, widths(), NOMINAL)
    name = f"all-to-all of heads (if there were {RANKS})"
    return Row(name, "any", 1, exchange_sent(topology, rows, widths()), seconds)


def _line(row: Row, best: float) -> list[str]:
    hidden = min(row.seconds, within())
    exposed = row.seconds - hidden
    slower = (layer() + row.seconds) / (layer() + best)
    intra, inter = (f"{size / 2**20:.1f}" for size in row.sent)
    return [
        row.name, row.layout, str(row.blocks), f"{intra} + {inter}", duration(row.seconds),
        duration(hidden), duration(exposed), f"{slower:.2f}",
    ]  # fmt: skip


def table() -> str:
    """Return every algorithm, and the choice of `auto`."""
    rows = [*scans(), collective(), heads_exchanged()]
    best = min(row.seconds for row in rows)
    head = [
        "algorithm", "layout", "blocks", "MiB sent", "seconds", "could be hidden", "exposed",
        "layer / best",
    ]  # fmt: skip
    topology = Topology(RANKS, PER_NODE)
    chosen = {
        layout: choose(chains(make(layout, cp_size=RANKS), TOKENS), topology, states()).algorithm
        for layout in LAYOUTS
    }
    return (
        f"Simulated: {RANKS} ranks on {RANKS // PER_NODE} nodes, {TOKENS // 2**20}M tokens, "
        f"forward of one layer of {HEADS} heads of {KEYS} keys and {VALUES} values. MiB of the "
        f"rank that sends most, within its node + to others; `auto` takes {chosen}.\n\n"
        f"{markdown(head, [_line(row, best) for row in rows])}"
    )


if __name__ == "__main__":
    print(table())
