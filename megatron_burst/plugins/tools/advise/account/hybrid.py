# SPDX-License-Identifier: Apache-2.0
"""The attention half of a layer with DeepSeek-V4's hybrid attention, as a list of operators.

The attention half is norm, projections, attention and residual. The operators match
`plugins.sparse.megatron.hybrid_layers`. Queries and outputs are split over tensor-parallel ranks.
Each of these ranks computes keys, latents and the indexer for all rows. The indexer's loss is not
counted.
"""

from __future__ import annotations

from ..shapes.layer_kinds import HCA
from .operators import ATTENTION, RING, B, Core, F, LayerSizes, projection
from .tape import Half, Op


def hybrid_half(x: LayerSizes, kind: str | None, rows: int, core: Core, prefix: str = "") -> Half:
    """Return the attention half: norm, projections, compressed keys, core attention and residual.

    Args:
        x: Sizes of the layer.
        kind: Kind of the layer, one of `layer_kinds.HYBRID`.
        rows: Number of rows.
        core: Memory of core attention, in addition to queries, keys and outputs.
        prefix: Prefix of the tensor names on the tape (the simulated memory).
    """
    of = x.hybrid
    assert of is not None
    n, q, kv = rows / x.tp, rows * x.query * B, rows * x.width * B
    source, low = "normed", rows * of.q_rank * B
    ops = [Op("norm", ("x",), {"normed": n * x.hidden * B}, ("x",), {"rstd": n * F})]
    if x.tp > 1:
        ops += [Op("gather", ("normed",), {"hidden": rows * x.hidden * B})]
        source = "hidden"
    ops += [
        Op("q down", (source,), {"low": low}, (source,)),
        Op("norm of low", ("low",), {"latents": low}, ("low",), {"rstd of low": rows * F}),
        Op("q up", ("latents",), {"mixed": q}, ("latents",)),
        Op("norm of q", ("mixed",), {"q": q}, ("mixed",)),
        Op("kv", (source,), {"kv": kv}, (source,)),
        Op("norm of kv", ("kv",), {"normed kv": kv}, ("kv",)),
        Op("rope", ("q", "normed kv"), {"q2": q, "k2": kv}),
        *_compressed(x, kind, rows, source, core),
    ]
    reads = ["q2", "k2", *(["keys 0"] if of.ratio_of(kind) else [])]
    out, lse, count = rows * x.out, rows * x.heads * F, core.keys * x.kv
    kernel = (rows * x.query + count) * (B + F)
    narrow = rows * of.groups * of.out_rank // x.tp * B
    ops += [
        Op("core", reads, {"out": out * B}, (*reads, "out"), {"lse": lse},
           during={ATTENTION: out * F, RING: core.forward},
           back_before={ATTENTION: core.sums + kernel + lse, RING: core.backward},
           back={ATTENTION: core.sums + lse}),
        Op("rope of out", ("out",), {"turned": out * B}),
        Op("groups", ("turned",), {"narrow": narrow}, ("turned",)),
        projection(x, rows, "narrow", of.groups * of.out_rank // x.tp, "projected", "proj"),
        Op("add", ("x", "projected"), {"y": n * x.hidden * B}, adds=True),
    ]  # fmt: skip
    return Half(ATTENTION, ops, {"x": n * x.hidden * B}, {"x": "add"}, prefix)


def _compressed(x: LayerSizes, kind: str | None, rows: int, source: str, core: Core) -> list[Op]:
    """Return the operators of compressed keys, index keys and the key selection.

    `mb.compress` computes in fp32 and saves its weights and its input rows.
    """
    of, ops = x.hybrid, []
    assert of is not None
    for number, columns in enumerate(of.compressors(kind, x.width)):
        made, wide, narrow = f"rows {number}", rows * columns * F, rows * columns * B
        key = (columns if kind == HCA else columns // 2) * B
        ops += [
            Op("projections of rows", (source,), {made: 2 * narrow}, (source,)),
            Op("compress", (made,), {f"keys {number}": rows // of.ratio_of(kind) * key}, (),
               {f"weights {number}": wide, f"wide {number}": wide}, during={ATTENTION: 2 * wide},
               back={ATTENTION: 2 * wide}),
        ]  # fmt: skip
    if (index := of.index_of(kind)) is not None:
        chosen, share = rows * index.top_k * 4, index.width / x.width
        ops += [
            Op("index queries", ("latents",), {"index q": rows * index.heads * index.width * B}),
            Op("select", ("index q", "keys 1"), {}, (), {"ids": chosen},
               during={ATTENTION: 3 * chosen, RING: core.forward * share}),
        ]  # fmt: skip
    return ops
