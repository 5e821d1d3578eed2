"""Bounds on the errors of a rival whose tensors or partial results are bf16.

The bound of each entry follows from the roundings that the rival performs. Let u = 2^-8 be the unit
roundoff of bf16, and g(n) = n u / (1 - n u) the relative error of n roundings (Higham, Accuracy and
Stability of Numerical Algorithms, lemma 3.1). A sum of terms t whose terms or partial sums are
rounded n times has an error of at most g(n) sum |t|. With S = scale Q K^T, P = softmax(S),
D = rowsum(dO * O), dP = dO V^T and dS = P * (dP - D), a rival computes:

    O  = P V            P is rounded for the product, the result of each kernel call, each partial
                        output that travels, and the final output.
    D                   from the rounded O. A stand-in for O, which the stock backward takes on
                        other ranks, is rounded once more.
    dV = P^T dO         P is rounded for the product. torch's CPU kernel adds the products of
    dK = scale dS^T Q   successive blocks of queries (for dQ: of keys) to a bf16 gradient, and so
    dQ = scale dS K     rounds once per block. Each gradient that travels is rounded once per hop,
                        and the final gradient once.

An error e of D changes dS by P e. So, with e = g(out + 1) rowsum(|dO| * P |V|):

    |error of O|   <=  g(out) P |V|
    |error of dV|  <=  g(key) P^T |dO|
    |error of dK|  <=  g(key) scale |dS|^T |Q| + (1 + g(key)) scale (P e)^T |Q|
    |error of dQ|  <=  g(query) scale |dS| |K| + (1 + g(query)) scale (P e) |K|

`out`, `key` and `query` are the numbers of roundings (`bounds` counts them). Scores, lse, D and the
sums over kernel calls and ranks are fp32. Their errors are bounded by `FP32` times the largest
entry of the tensor.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

import megatron_burst as mb
from megatron_burst.schedule.tables import FAMILIES, Transfers

from .cells import Problem
from .problems import ROWS, mask_of, pieces

UNIT = 2.0**-8  # unit roundoff of bf16, whose significand has 8 bits
FP32 = 2e-5  # relative to the largest entry; the order of fp32 sums differs


class Roundings(NamedTuple):
    """Number of roundings of a rival.

    Upper bounds: blocks of queries and of keys in a kernel call, and hops of a partial output, of a
    partial dQ, and of a partial dK and dV.
    """

    query_blocks: int = 1
    key_blocks: int = 1
    out_hops: int = 0
    query_hops: int = 0
    key_hops: int = 0

    def most(self, other: Sequence[int]) -> Roundings:
        """Return the larger of both counts, field by field."""
        return Roundings(*map(max, self, other))


class Sums(NamedTuple):
    """Sums of absolute terms, in fp32 with the shapes of the results.

    Attributes:
        out: P |V|.
        dq, dk, dv: scale |dS| |K|, scale |dS|^T |Q| and P^T |dO|.
        dq_of_delta, dk_of_delta: Effect of an error of rowsum(|dO| * P |V|) in D on dQ and dK.
    """

    out: torch.Tensor
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    dq_of_delta: torch.Tensor
    dk_of_delta: torch.Tensor


def roundings(plan: mb.Plan) -> Roundings:
    """Count the roundings of this rank's kernel calls, and the hops of all ranks."""
    tiles = [item.tile.shape for run in (plan.rank_plan.forward, plan.rank_plan.backward)
             for step in run.steps for call in step.calls for item in call.work]  # fmt: skip
    forward, backward = (schedule.tables.transfers for schedule in plan.schedules)
    return Roundings(
        max((query_blocks(rows) for rows, _ in tiles), default=1),
        max((math.ceil(columns / 512) for _, columns in tiles), default=1),
        _hops(forward, "out"), _hops(backward, "dquery"), _hops(backward, "dkv"),
    )  # fmt: skip


def query_blocks(rows: int) -> int:
    """Return the number of blocks of queries in torch's CPU backward (FlashAttentionKernel.cpp).

    Keys come in blocks of 512.
    """
    return math.ceil(rows / (256 if rows >= 768 else 64 if rows >= 192 else 32))


def _hops(transfers: Transfers, family: str) -> int:
    """Bound the hops of a partial result: a rank sends what it added for an owner at most once."""
    family_transfers = transfers.where(transfers.family == FAMILIES.index(family))
    senders = set(zip(family_transfers.owner.tolist(), family_transfers.src.tolist(), strict=True))
    return max(Counter(owner for owner, _ in senders).values(), default=0)


def bounds(
    problem: Problem, roundings: Roundings, truth: Sequence[torch.Tensor], sums: Sums | None
) -> list[torch.Tensor]:
    """Bound the error of each entry of out, dq, dk and dv.

    Args:
        truth: out, dq, dk, dv of this rank, NaN where unknown.
        sums: Sums of the same rows; None if nothing is bf16.
    """
    exact = [FP32 * x.nan_to_num().abs().max() for x in truth]
    if sums is None:
        return [x.expand(y.shape) for x, y in zip(exact, truth, strict=True)]
    kernel, wire = problem.dtype == "bf16", problem.wire == "bf16"
    # The last summand is the all-to-all of ranks that share heads, which may round fp32 gradients.
    query = kernel * (2 + roundings.key_blocks) + wire * (roundings.query_hops + 1)
    key = kernel * (2 + roundings.query_blocks) + wire * (roundings.key_hops + 1)
    out = 3 * kernel + wire * roundings.out_hops
    delta = _error(out + kernel)
    of_terms = (
        _error(out) * sums.out,
        _error(query) * sums.dq + (1 + _error(query)) * delta * sums.dq_of_delta,
        _error(key) * sums.dk + (1 + _error(key)) * delta * sums.dk_of_delta,
        _error(key) * sums.dv,
    )
    return [x + y for x, y in zip(of_terms, exact, strict=True)]


def _error(count: int) -> float:
    """Return the largest relative error of `count` roundings to bf16.

    Raises:
        ValueError: The count is so large that any result would be within the bound.
    """
    if count * UNIT >= 0.5:
        raise ValueError(
            f"results of {count} roundings to bf16 cannot be checked, at most 127 can: use fewer "
            "tokens per rank"
        )
    return count * UNIT / (1 - count * UNIT)


def absolute_sums(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    out: torch.Tensor,
    text: str,
) -> Sums:
    """Compute the sums of the absolute terms of a whole sequence in fp32.

    q, dout, out [s, 1, h, d]; k, v [s, 1, n, d]. text: the name of the mask.
    """
    scale, group = q.shape[-1] ** -0.5, q.shape[2] // k.shape[2]
    sums = Sums(*(torch.zeros(x.shape) for x in (q, q, k, v, q, k)))
    for head in range(q.shape[2]):
        of_keys = head // group
        total = Sums(*(x[:, 0, n] for x, n in zip(
            sums, (head, head, of_keys, of_keys, head, of_keys), strict=True)))  # fmt: skip
        head_tensors = [x[:, 0, n].float() for x, n in (
            (q, head), (k, of_keys), (v, of_keys), (dout, head), (out, head))]  # fmt: skip
        for rows, keys, hidden in _blocks(text, q.shape[0]):
            _add_block(total, head_tensors, rows, keys, hidden, scale)
    return sums


def _add_block(
    total: Sums,
    head_tensors: Sequence[torch.Tensor],
    rows: slice,
    keys: slice,
    hidden: torch.Tensor,
    scale: float,
) -> None:
    """Add the terms of some queries of a head and all keys that they see."""
    q, dout, out = (x[rows] for x in (head_tensors[0], head_tensors[3], head_tensors[4]))
    k, v = (x[keys] for x in head_tensors[1:3])
    scores = (scale * q @ k.T).masked_fill_(hidden, -math.inf)
    p = scores.softmax(-1)
    ds = (p * (dout @ v.T - (dout * out).sum(-1, keepdim=True))).abs_()
    of_out = p @ v.abs()
    error = (dout.abs() * of_out).sum(-1, keepdim=True)
    total.out[rows] += of_out
    total.dq[rows] += scale * ds @ k.abs()
    total.dk[keys] += scale * ds.T @ q.abs()
    total.dv[keys] += p.T @ dout.abs()
    total.dq_of_delta[rows] += scale * error * (p @ k.abs())
    total.dk_of_delta[keys] += scale * p.T @ (error * q.abs())


def _blocks(text: str, length: int) -> Iterator[tuple[slice, slice, torch.Tensor]]:
    """Yield at most `ROWS` queries, the keys that they may see, and a mask of hidden pairs."""
    mask = mask_of(text, length)
    for piece in pieces(text, length):
        for first in range(*piece.rows, ROWS):
            stop = min(first + ROWS, piece.rows[1])
            end = stop if piece.kind == "causal" else piece.keys[1]
            keys = np.arange(piece.keys[0], end)
            visible = mask.visible(np.arange(first, stop)[:, None], keys[None])
            hidden = torch.from_numpy(~np.broadcast_to(visible, (stop - first, len(keys))))
            yield slice(first, stop), slice(piece.keys[0], end), hidden
