"""Attention of whole DeepSeek-V4 layers, dense and written by hand: windows, compressed keys, sink.

Nothing here imports megatron_burst. Gradients are torch's, through dense tensors.

Shape letters: S rows of the sequence, T compressed keys, b batch, h query heads, k key heads, d
width, i index heads, m rows of a compressed key.
"""

import math
from dataclasses import dataclass
from itertools import pairwise

import sparse_oracle
import torch

ROWS = "values", "gates", "index_values", "index_gates", "index_q", "index_weights", "q", "kv"
SHARED = "bias", "index_bias", "sink"  # parameters, which all ranks have
INDEX = "index_values", "index_gates", "index_q", "index_weights", "index_bias"


@dataclass(frozen=True)
class LayerShape:
    """One layer of attention.

    Attributes:
        kind: "window", "hca" (all compressed keys) or "csa" (selected compressed keys).
        length: S.
        keys: T.
        ratio: m.
        bounds: Where documents begin, and S.
        key_bounds: Where the compressed keys of documents begin, and the end of the last.
        window: Number of rows before a query that it sees, within its document.
        padding: Documents whose rows have no window.
        overlap: Whether a compressed key also covers the m rows before its own.
    """

    kind: str
    length: int
    keys: int
    ratio: int
    bounds: tuple[int, ...]
    key_bounds: tuple[int, ...]
    window: int
    padding: tuple[int, ...] = ()
    overlap: bool = False
    batch: int = 2
    heads: int = 3
    key_heads: int = 1  # of the window
    compressed_heads: int = 1
    width: int = 6
    index_heads: int = 2
    index_width: int = 4
    top_k: int = 3
    scale: float | None = None
    sink: bool = True

    @property
    def documents(self):
        """(first row, end of rows, first key, end of keys) of every document."""
        ends = self.bounds[1:], self.key_bounds[:-1], self.key_bounds[1:]
        return list(zip(self.bounds[:-1], *ends, strict=True))

    @property
    def factor(self):
        return self.width**-0.5 if self.scale is None else self.scale


def keys_of_documents(bounds, ratio):
    """The cumulative numbers of complete windows of documents."""
    ends = [0]
    for low, high in pairwise(bounds):
        ends.append(ends[-1] + (high - low) // ratio)
    return tuple(ends)


def draw(shape, seed, dtype=torch.float64, ties=False):
    """The tensors of a layer by name; with `ties`, many index scores are equal, and exact."""
    make = torch.Generator().manual_seed(seed)
    series = 1 + shape.overlap
    columns, index_columns = shape.compressed_heads * shape.width, shape.index_width
    rows = {
        "values": (series * columns,), "gates": (series * columns,),
        "index_values": (series * index_columns,), "index_gates": (series * index_columns,),
        "index_q": (shape.index_heads, index_columns), "index_weights": (shape.index_heads,),
        "q": (shape.heads, shape.width), "kv": (shape.key_heads, shape.width),
    }  # fmt: skip
    sizes = {name: (shape.length, shape.batch, *size) for name, size in rows.items()}
    sizes |= {"bias": (shape.ratio, series * columns), "sink": (shape.heads,),
              "index_bias": (shape.ratio, series * index_columns)}  # fmt: skip
    tensors = {name: torch.randn(size, generator=make).double() for name, size in sizes.items()}
    if ties:  # means of equal weights of small integers
        for name in INDEX:
            tensors[name] = tensors[name].round().clamp(-1, 1)
        tensors["index_gates"] *= 0
        tensors["index_bias"] *= 0
    return {name: x.to(dtype) for name, x in tensors.items()}


def normalized(keys):
    """Root mean square norm without weights, as a model applies it to compressed keys."""
    wide = keys.float() if keys.dtype != torch.float64 else keys
    return (wide / (wide.square().mean(-1, keepdim=True) + 1e-2).sqrt()).to(keys.dtype)


def compressed_keys(values, gates, bias, shape):
    """[T, b, columns]: one key per complete window of each document, and zeros for padding."""
    m, width = shape.ratio, values.shape[2] // (1 + shape.overlap)
    before = slice(0, width)
    own = slice(width, 2 * width) if shape.overlap else before
    dtype = torch.float64 if values.dtype == torch.float64 else torch.float32
    keys = []
    for low, high, first, last in shape.documents:
        assert len(keys) == first
        for w in range(last - first):
            begin = low + w * m
            if begin + m > high:  # incomplete: no key
                keys.append(values.new_zeros(values.shape[1], width))
                continue
            parts = [(begin, own)]
            if shape.overlap and w > 0:
                parts.append((begin - m, before))
            logits = torch.cat([
                gates[start : start + m, :, part].to(dtype) + bias[:, None, part].to(dtype)
                for start, part in parts
            ])  # fmt: skip
            terms = torch.cat([values[start : start + m, :, part] for start, part in parts])
            weights = (logits - logits.detach().amax(0)).exp()
            mean = (weights / weights.sum(0) * terms.to(dtype)).sum(0)
            keys.append(mean.to(values.dtype))
    keys += [values.new_zeros(values.shape[1], width)] * (shape.keys - len(keys))
    return torch.stack(keys) if keys else values.new_zeros(0, values.shape[1], width)


def sees_window(shape):
    """bool [S, S]: the row of each query and `window` rows before it, in its document."""
    seen = torch.zeros(shape.length, shape.length, dtype=torch.bool)
    for number, (low, high, _, _) in enumerate(shape.documents):
        for t in range(low, high if number not in shape.padding else low):
            seen[t, max(low, t - shape.window) : t + 1] = True
    return seen


def sees_compressed(shape):
    """bool [S, T]: the compressed keys whose m rows end at the query or before it."""
    seen = torch.zeros(shape.length, shape.keys, dtype=torch.bool)
    for low, high, first, _ in shape.documents:
        for t in range(low, high):
            seen[t, first : first + (t - low + 1) // shape.ratio] = True
    return seen


def index_scores(q, keys, weights):
    """[S, b, T]: sum over index heads of weight * max(0, q . k)."""
    dots = torch.einsum("sbid,tbd->sbit", q, keys)
    return (weights.unsqueeze(-1) * dots * (dots > 0)).sum(2)


def chosen(scores, seen, top_k):
    """For each row a list over the batch: the best top_k keys that it sees, ascending. Of equal
    scores the lower key is the better one."""
    seen, scores = seen.tolist(), scores.tolist()
    rows = []
    for t, of_batch in enumerate(scores):
        visible = [w for w, sees in enumerate(seen[t]) if sees]
        rows.append([
            sorted(sorted(visible, key=lambda w, row=row: (-row[w], w))[:top_k])
            for row in of_batch
        ])  # fmt: skip
    return rows


def table(ids, keys):
    """bool [S, b, T]: True for the keys in the lists."""
    found = torch.zeros(len(ids), len(ids[0]), keys, dtype=torch.bool)
    for t, row in enumerate(ids):
        for b, some in enumerate(row):
            found[t, b, some] = True
    return found


def attention(q, key_sets, scale, sink=None):
    """One softmax over several sets of keys, which are their own values, and a sink.

    Args:
        q: Queries [S, b, h, d].
        key_sets: (keys [t, b, k, d], bool [S, b, t] of what each query sees) per set.
        scale: Factor of the scores.
        sink: Logit [h] without a value, or None.

    Returns:
        out [S, b, h, d] and the weights of all keys, one set after the other, [S, b, h, all t].
    """
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    scores, values = [], []
    for keys, seen in key_sets:
        keys = keys.to(dtype).repeat_interleave(q.shape[2] // keys.shape[2], dim=2)
        logits = torch.einsum("sbhd,tbhd->sbht", q.to(dtype), keys) * scale
        scores.append(logits.masked_fill(~seen.unsqueeze(2), -math.inf))
        values.append(keys)
    sink = q.new_full(q.shape[2:3], -math.inf) if sink is None else sink
    scores.append(sink.to(dtype).view(1, 1, -1, 1).expand(*q.shape[:3], 1))
    scores, values = torch.cat(scores, -1), torch.cat(values)
    most = scores.detach().amax(-1, keepdim=True)
    weights = (scores - torch.where(most == -math.inf, 0.0, most)).exp()
    total = weights.sum(-1, keepdim=True)
    weights = (weights / torch.where(total == 0, 1.0, total))[..., : len(values)]
    return torch.einsum("sbht,tbhd->sbhd", weights, values).to(q.dtype), weights


def solve(shape, tensors, dout, dloss=None, ids=None):
    """Output, selection, loss of the indexer and all gradients of a layer.

    Args:
        shape: The layer.
        tensors: Tensors of the whole sequence by name.
        dout: Gradient of the output.
        dloss: Gradient of the loss [S, b]; None for layers without the loss.
        ids: Selected keys as `chosen` returns them. Default: the best ones.

    Returns:
        Dictionary with out, loss, ids and scores, and the gradient of each tensor by its name.
    """
    leaves = {name: x.detach().requires_grad_() for name, x in tensors.items()}
    sink = leaves["sink"] if shape.sink else None
    near = sees_window(shape)[:, None].expand(-1, shape.batch, -1)
    sets, loss, scores = [(leaves["kv"], near)], None, None
    if shape.kind != "window":
        keys = compressed_keys(*(leaves[name] for name in ("values", "gates", "bias")), shape)
        keys = normalized(keys.unflatten(2, (shape.compressed_heads, -1)))
        seen = sees_compressed(shape)
        visible = seen[:, None].expand(-1, shape.batch, -1)
        if shape.kind == "csa":
            parts = (leaves[f"index_{name}"] for name in ("values", "gates", "bias"))
            index_keys = compressed_keys(*parts, shape)
            wide = [x if x.dtype == torch.float64 else x.float()
                    for x in (leaves["index_q"], index_keys, leaves["index_weights"])]  # fmt: skip
            scores = index_scores(*wide)
            ids = chosen(scores.detach(), seen, shape.top_k) if ids is None else ids
            visible = visible & table(ids, shape.keys)
        sets.append((keys, visible))
        if dloss is not None:
            selected = [(keys.detach(), visible)]
            _, p = attention(leaves["q"].detach(), selected, shape.factor)
            wide = scores.unsqueeze(2).double(), ids, p.double(), 1
            loss = sparse_oracle.indexer_loss(*wide)[:, :, 0]
    out, _ = attention(leaves["q"], sets, shape.factor, sink)
    results = [(out, dout)] + ([] if loss is None else [(loss, dloss)])
    gradients = torch.autograd.grad(
        [x for x, _ in results], list(leaves.values()), [g for _, g in results], allow_unused=True
    )
    return {
        "out": out.detach(), "loss": None if loss is None else loss.detach(), "ids": ids,
        "scores": None if scores is None else scores.detach(),
        **dict(zip(leaves, gradients, strict=True)),
    }  # fmt: skip
