"""Problems, rivals, and cells that combine them, as plain data."""

from __future__ import annotations

from typing import NamedTuple

from .network import Network, Rates

# Emulated compute / time in which burst's links are busy. "hidden" also hides a flat ring's hops.
REGIMES = {"communication": 0.0, "balanced": 1.0, "compute": 3.0, "hidden": 6.0}
# Query and key/value heads. One head is for long sequences, because a CPU computes their attention
# once.
HEADS = {
    "MHA": (16, 16), "GQA 4:1": (16, 4), "GQA 32:8": (32, 8), "MHA 8": (8, 8),
    "MHA 4": (4, 4), "MHA 1": (1, 1),
}  # fmt: skip
WIRES = {"fp32": 4, "bf16": 2}  # dtype of tensors, or of partial results that travel -> bytes


class Problem(NamedTuple):
    """One attention, batch 1.

    Attributes:
        tokens: Tokens per rank.
        mask: Name of the mask (`problems`).
        wire: Key of `WIRES`, the dtype on the wire.
        dtype: Key of `WIRES`, the dtype of the tensors.
    """

    tokens: int
    heads: int
    kv_heads: int
    width: int
    mask: str = "causal"
    wire: str = "fp32"
    dtype: str = "fp32"

    @property
    def flops_per_pair(self) -> int:
        """Return FLOPs of one (query, key) pair in forward, multiply and add counted separately."""
        return 4 * self.heads * self.width


CHOSEN = "chosen"


class Rival(NamedTuple):
    """One way to run `mb.attention`.

    Attributes:
        algorithm: Name of the algorithm; "auto" is chosen in each cell from its rates.
        layout: Key of `cuts.LAYOUTS`, `groups.DYNAMIC`, or CHOSEN for a forecast in each cell.
    """

    name: str
    algorithm: str
    side: str = "kv"
    # how many ranks share heads: "none", "all", "node" (as many as a node has ranks), "nodes", or
    # "chosen" by `mb.choose`
    ulysses: str = "none"
    placement: str = "head_first"
    head_chunks: int = 1
    layout: str = "zigzag"

    def ulysses_size(self, nodes: int, per_node: int) -> int:
        sizes = {"none": 1, "all": nodes * per_node, "node": per_node, "nodes": nodes}
        return sizes[self.ulysses]


RIVALS = (
    Rival("ring", "ring"),
    Rival("ring, 4 head chunks", "ring", head_chunks=4),
    Rival("double_ring, published", "double_ring"),
    Rival("double_ring, overlapped (= burst kv)", "burst", "kv"),
    Rival("burst query", "burst", "query"),
    Rival("double_ring, overlapped, 4 head chunks", "burst", "kv", head_chunks=4),
    Rival("burst query, 4 head chunks", "burst", "query", head_chunks=4),
    Rival("all_gather", "all_gather"),
    Rival("ulysses", "ulysses", ulysses="all"),
    Rival("hybrid, heads in the node", "hybrid", "auto", ulysses="node"),
    Rival(
        "hybrid, heads across nodes", "hybrid", "auto", ulysses="nodes", placement="context_first"
    ),
    Rival("auto", "auto", "auto", ulysses="chosen"),
    Rival("auto, on one ring", "auto", "auto"),
)


class Cell(NamedTuple):
    """One setting; all rivals run in it.

    Attributes:
        wiring: Key of `network.WIRINGS`.
        mask, wire, width, dtype: Same as in `Problem`.
    """

    nodes: int
    per_node: int
    rates: Rates
    heads: str  # a key of HEADS
    regime: str  # a key of REGIMES (emulated compute), or "real"
    tokens: int
    wiring: str = "nic"
    mask: str = "causal"
    wire: str = "fp32"
    width: int = 64
    dtype: str = "fp32"

    @property
    def network(self) -> Network:
        return Network(self.nodes, self.per_node, self.rates, self.wiring)

    @property
    def grid(self) -> str:
        return f"{self.nodes}x{self.per_node}"

    def problem(self) -> Problem:
        return Problem(
            self.tokens, *HEADS[self.heads], self.width, self.mask, self.wire, self.dtype
        )
