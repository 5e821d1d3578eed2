"""The work of linear attention on one rank: operations of the chunkwise forms, bytes of memory.

Decides what is counted where no table was published: products of chunks of `CHUNK` rows at the rate
of large matrix products, or memory where that takes longer. That is a bound from below, not fitted:
products of 64 rows do not reach that rate. Sources: the chunkwise forms of Mamba-2's SSD
(arXiv 2405.21060, section 6) and of delta rules (2412.06464, section 3).
"""

from __future__ import annotations

from ..account.mixer import CHUNK, chunk_states
from ..account.sizes import B, F, Scan, Sizes
from ..gpus import Gpu

# Backward makes what is inside of chunks again, and has two products for each of forward's.
BACKWARD = 3


def answers(scan: Scan, rows: int) -> float:
    """Operations of a forward that knows the states that enter, over all heads.

    Per row: its chunk's keys times its query, the chunk's values times that, the state read, and
    written. Delta rules: the keys times its own key, the solution of the chunk's triangle (a third
    of its square), what that makes of keys and of values, and the state read for the key as well.
    """
    c, d, w = CHUNK, scan.width, scan.value_width
    each = 2 * c * (d + w) + 4 * d * w
    if scan.delta:
        each += 4 * c * d + 2 * c * w + c * c / 3 + 2 * d * w
    return float(rows * scan.heads * each)


def maps(scan: Scan, rows: int) -> float:
    """Operations of what rows do to any state, which a scan needs first, over all heads: the state
    written; with delta rules the same recurrence of d + w columns instead of w."""
    c, d, w = CHUNK, scan.width, scan.value_width
    each = 2.0 * d * w
    if scan.delta:
        each = 2 * c * d + c * c / 3 + 2 * c * (d + w) + 4 * d * (d + w)
    return rows * scan.heads * each


def moved(x: Sizes, scan: Scan, rows: int) -> float:
    """Bytes of memory that one of both reads and writes: arguments, results, states of chunks
    written and read."""
    given = (scan.keys + scan.values) * B + (scan.decays + scan.heads * scan.delta) * F
    return rows * (given + scan.values * B) + 2 * chunk_states(x, scan, rows)


def linear_seconds(gpu: Gpu, x: Sizes, scan: Scan, rows: int, scanned: bool) -> tuple[float, float]:
    """Of a forward and of a backward. scanned: states come from other ranks."""
    computed = answers(scan, rows) + scanned * maps(scan, rows)
    read = (1 + scanned) * moved(x, scan, rows)
    forward = max(computed / (gpu.peak * gpu.linear), read / gpu.memory_rate)
    return forward, BACKWARD * forward


def memory_bytes(scan: Scan, rows: int) -> tuple[float, float]:
    """Bytes of a forward and a backward of what is around it: the convolution and the norm of keys
    read and write rows, the gated norm reads results and a gate; backward reads gradients too and
    writes those of all that was read."""
    convolved = (scan.keys + scan.values) * (scan.taps > 0) + scan.keys * scan.delta
    return (
        B * rows * (2.0 * convolved + 3 * scan.values),
        B * rows * (3.0 * convolved + 5 * scan.values),
    )
