"""The attention half of a layer with linear attention, as operators: what they make and save.

Between projections: a short convolution of queries, keys and values, a norm of queries and keys
(delta rules), decay and beta of each head, linear attention in chunks, a norm with a gate. What
linear attention keeps for backward are its arguments and the states that enter a rank's pieces: the
states of chunks are there while forward runs, and are made again in backward, with their gradients.
"""

from __future__ import annotations

from .core import ATTENTION
from .layer import norm_linear, projection
from .sizes import B, F, Scan, Sizes
from .tape import Half, Op

CHUNK = 64  # rows of a chunk, of our kernel and of flash-linear-attention's
PIECES = 2  # of a rank, with zigzag


def mixer_half(x: Sizes, rows: int, prefix: str = "") -> Half:
    """Norm, projections, linear attention and residual of `rows` rows. A mixer whose form is not
    known has its projections counted only."""
    n, (into, out) = rows / x.tp, x.mixer
    ops = norm_linear(x, rows, "x", "mixed", into, "in")
    if x.scan is None:
        ops += [Op("scan", ("mixed",), {"out": rows * out * B}, ("mixed", "out"))]
        last = "out"
    else:
        ops += _linear_attention(x, x.scan, rows)
        last = "gated"
    ops += [projection(x, rows, last, out, "projected", "proj")]
    ops += [Op("add", ("x", "projected"), {"y": n * x.hidden * B}, adds=True)]
    return Half(ATTENTION, ops, {"x": n * x.hidden * B}, {"x": "add"}, prefix)


def _linear_attention(x: Sizes, scan: Scan, rows: int) -> list[Op]:
    """From the mixed projection to what the last product reads."""
    values, keys = rows * scan.values * B, rows * scan.keys * B
    ops, given = [], "mixed"
    if scan.taps:
        ops.append(Op("convolution", ("mixed",), {"convolved": keys + values}, ("mixed",)))
        given = "convolved"
    reads = [given]
    if scan.delta:
        ops.append(Op("norm of keys", (given,), {"normed keys": keys}, (given,)))
        reads.append("normed keys")
    gates = {"decay": rows * scan.decays * F, "beta": rows * scan.heads * F * scan.delta}
    gates = {name: size for name, size in gates.items() if size}
    if gates:
        ops.append(Op("gates", ("mixed",), gates, ("mixed",)))
        reads += gates
    states, while_there = chunk_states(x, scan, rows), PIECES * scan.batch * scan.state * F
    ops.append(
        Op("linear attention", reads, {"out": values}, reads, {"entering": while_there},
           during={ATTENTION: states + while_there},
           back_before={ATTENTION: 2 * states + while_there})
    )  # fmt: skip
    return [*ops, Op("gated norm", ("out", "mixed"), {"gated": values}, ("out", "mixed"))]


def chunk_states(x: Sizes, scan: Scan, rows: int) -> float:
    """Bytes of the state before every chunk: of flash-linear-attention in the dtype of keys, of our
    own kernel in fp32."""
    return -(-rows // CHUNK) * scan.state * (F if x.cpu else B)
