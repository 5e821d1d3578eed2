"""The work of one layer on one rank beside its core attention: products, and bytes of memory.

Letters: R rows of a context-parallel rank, n = R / TP of them with sequence parallelism, h hidden.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ..account.layer import B, Sizes
from ..gpus import Gpu
from ..settings import Settings
from ..shapes.model import MIXER, Model, Part
from . import linear_work


class Product(NamedTuple):
    """A matrix product [rows, inner] x [inner, columns] of a layer, on one rank, `times` over.
    again: how many times more chunks or tiles run it in forward, and in backward."""

    rows: float
    inner: int
    columns: int
    times: float = 1.0
    again: tuple[float, float] = (0.0, 0.0)


def products(model: Model, run: Settings, part: Part) -> Iterator[Product]:
    """The products of a layer's forward on one rank; backward has two of each.

    Chunks of rows compute queries, keys and values twice in forward and three times more in
    backward, and what follows once more in backward, as tiles of rows do with the MLP.
    """
    x = Sizes.of(model, run, part.sparse)
    if part.attention == MIXER:
        into, out = x.mixer
        yield Product(run.rows, x.hidden, into)
        yield Product(run.rows, out, x.hidden)
    elif part.attention is not None:
        yield from _projections(model, x, run)
    if part.mlp:
        yield from _mlp(model, x, run, part.sparse)


def _projections(model: Model, x: Sizes, run: Settings) -> Iterator[Product]:
    chunks = run.sequence_chunks
    rows = run.rows / chunks
    cut = (1.0, 3.0) if chunks > 1 else (0.0, 0.0)
    if low := model.latent:
        n = rows / run.tp  # the narrow part is whole on every rank, for its share of rows
        yield Product(n, x.hidden, x.latent, chunks, cut)
        if low.q_rank:
            yield Product(rows, low.q_rank, x.query, chunks, cut)
        else:
            yield Product(rows, x.hidden, x.query, chunks, cut)
        yield Product(rows, low.kv_rank, x.up, chunks, cut)
    else:
        yield Product(rows, x.hidden, x.query * (1 + x.gate) + x.kv, chunks, cut)
    yield Product(rows, x.out, x.hidden, chunks, (0.0, float(chunks > 1)))


def _mlp(model: Model, x: Sizes, run: Settings, sparse: bool) -> Iterator[Product]:
    tiles = run.mlp_tiles
    rows, tiled = run.rows / tiles, (0.0, float(tiles > 1))
    widths = [(x.ffn * run.tp, rows, tiles)]
    if sparse:
        yield Product(rows / run.tp, x.hidden, model.experts, tiles, tiled)  # the router
        here = model.experts // run.ep
        widths = [(model.ffn, rows * model.top_k * run.ep / model.experts, tiles * here)]
        widths += [(model.shared, rows, tiles)] * bool(model.shared)
    for ffn, seen, count in widths:
        each = max(1, ffn // run.tp)
        yield Product(seen, x.hidden, each * (2 if x.gated else 1), count, tiled)
        yield Product(seen, each, x.hidden, count, tiled)


def product_seconds(gpu: Gpu, product: Product) -> float:
    """Of one product: its operations at the rate of large ones, longer where a size is small; at
    least as long as memory takes for its three matrices."""
    m, k, n = product.rows, product.inner, product.columns
    lost = gpu.small * (1 / m + 1 / k + 1 / n)
    computing = 2 * m * k * n / (gpu.peak * gpu.linear) * (1 + lost)
    return max(computing, B * (m * k + k * n + m * n) / gpu.memory_rate)


def memory_bytes(model: Model, run: Settings, part: Part) -> tuple[float, float]:
    """Bytes that a forward and a backward of a layer read and write outside products and attention.

    Norms read and write rows, and residuals read two and write one, in each half; rope reads and
    writes queries and keys; the activation reads what it turns into half as much (gated) or as
    much. Backward: the norm reads its input too; the activation reads its input and a gradient, and
    writes one. Rows are copied to experts and back. Of linear attention: what is around it.
    """
    x = Sizes.of(model, run, part.sparse)
    n = run.rows / run.tp
    halves = (part.attention is not None) + part.mlp
    there, back = 5.0 * halves * n * x.hidden, 6.0 * halves * n * x.hidden
    if part.attention not in (None, MIXER):
        there += 2 * run.rows * (x.query + x.keys)
        back += 2 * run.rows * (x.query + x.keys)
    if part.attention == MIXER and x.scan is not None:
        around = linear_work.memory_bytes(x.scan, run.rows)
        there, back = there + around[0] / B, back + around[1] / B
    if part.mlp:
        narrow = run.rows * x.ffn
        wide = narrow * (2 if x.gated else 1)
        there += wide + narrow
        back += 2 * wide + narrow
    if part.sparse:
        there += 4 * n * model.top_k * x.hidden
        back += 4 * n * model.top_k * x.hidden
    return B * there, B * back
