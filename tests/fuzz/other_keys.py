"""Random keys of another sequence: lengths, layouts and masks, with handwritten tables."""

import random
from dataclasses import dataclass, field

import numpy as np
import oracle

import megatron_burst as mb
from megatron_burst import masks

from . import rules

SHARE = 0.35  # of the calls without a planted misuse
KINDS = (
    "full", "causal", "window", "dilated", "documents", "documents", "windows", "windows of packs",
    "prefix", "spans", "table", "same length", "same length",
)  # fmt: skip


@dataclass(frozen=True)
class Keys:
    """Keys of another sequence.

    Attributes:
        length: Number of keys of the whole sequence.
        positions: Positions of the keys of each rank.
        summed: Whether each rank's gradients cover the queries of all ranks.
    """

    length: int
    positions: list = field(repr=False)
    summed: bool = True


class Table(masks.Mask):
    """A mask of a user that reads a table; without `cover`, every rank may see every key."""

    def __init__(self, table):
        self.table = table

    def __repr__(self):
        return f"Table({self.table.shape}, {hash(self.table.tobytes())})"

    def visible(self, q, k):
        return self.table[q, k]


def draw(rng: random.Random, size: int, queries: int):
    """(Keys, value of `key_layout`, name of the layout). `queries`: length of their sequence."""
    most = 8 * queries // size
    rows = rng.choice([0, 1, 2, 2, queries // size, queries // size, rng.randint(0, most), most])
    if rng.random() < 0.35:
        length, summed = rng.choice([rows, rows * size]), rng.random() < 0.6
        layout = rng.choice(["replicated", mb.layout.Replicated()])
        if not summed:
            layout = mb.layout.Replicated(sum_gradients=False)
        positions = [list(range(length))] * size
        return Keys(length, positions, summed), layout, "replicated" + " sum" * summed
    if not rows:
        name = rng.choice(["zigzag", "striped", "contiguous"])
        layout = rng.choice([name, mb.layout.make(name, cp_size=size)])
        return Keys(0, [[]] * size), layout, "no keys"
    if rows % 2:
        name = rng.choice(["striped", "contiguous"])
        return Keys(rows * size, oracle.permutation(name, size, rows * size)), name, name
    layout, positions, name = rules.layout(rng, size, rows)
    return Keys(rows * size, positions), layout, name


def mask(rng: random.Random, queries: int, keys: int, depth: int = 0):
    """(mask, bool table [queries, keys], the kinds in it)."""
    kind = rng.choice([*KINDS, *["and", "or"] * (3 if depth < 2 else 0)])
    if kind in ("and", "or"):
        (a, seen_a, kinds_a), (b, seen_b, kinds_b) = (
            mask(rng, queries, keys, depth + 1) for _ in "ab"
        )
        kinds = kinds_a | kinds_b | {kind}
        if kinds >= {"tree", "window"}:  # together they mean distances along paths
            return (a, seen_a, kinds_a) if "tree" in kinds_a else (b, seen_b, kinds_b)
        return (a & b, seen_a & seen_b, kinds) if kind == "and" else (a | b, seen_a | seen_b, kinds)
    if kind == "same length" and queries == keys:
        return rules.mask(rng, queries, depth=3)
    q, k = np.arange(queries)[:, None], np.arange(keys)[None]
    made, seen = _one(rng, kind, q, k)
    return made, np.broadcast_to(seen, (queries, keys)).copy(), {f"{kind} of two"}


def _one(rng, kind, q, k):
    queries, keys = len(q), k.shape[1]
    if kind == "causal":
        return masks.Causal(), k <= q
    if kind == "window":
        left, right = rng.randint(0, queries), rng.randint(0, keys)
        return masks.Window(left, right), (k >= q - left) & (k <= q + right)
    if kind == "dilated":
        stride = rng.randint(1, 5)
        return masks.Dilated(stride), (q - k) % stride == 0
    if kind == "prefix":
        count = rng.randint(0, max(queries, keys))
        return masks.Prefix(count), k < count + 0 * q
    if kind == "spans":
        edges = sorted(rng.sample(range(min(queries, keys) + 1), 2)) if min(queries, keys) else []
        spans = [tuple(edges)] if edges else []
        seen = np.zeros((queries, keys), dtype=bool)
        for start, stop in spans:
            seen[start:stop, start:stop] = True
        return masks.SameSpan(spans), seen
    if kind == "documents":
        return _documents(rng, queries, keys)
    if kind == "windows":
        stride, overlap = rng.randint(1, 6), rng.choice([0, 0, 1, 3])
        if queries // stride <= keys:
            length = stride + overlap
            return masks.Compressed(stride, length), k * stride + length - 1 <= q
    if kind == "windows of packs" and keys:
        return _windows_of_packs(rng, queries, keys)
    if kind == "table" and keys:
        table = np.random.default_rng(rng.randrange(1 << 30)).random((queries, keys)) < 0.4
        return Table(table), table
    return masks.Full(), True


def _bounds(rng, length, count):
    return [0, *sorted(rng.randint(0, length) for _ in range(count - 1)), length]


def _documents(rng, queries, keys):
    count = rng.randint(1, 6)
    bounds, key_bounds = _bounds(rng, queries, count), _bounds(rng, keys, count)
    padding = rng.sample(range(count), rng.choice([0, 0, 1]))
    seen = np.zeros((queries, keys), dtype=bool)
    for i in range(count):
        if i not in padding:
            seen[bounds[i] : bounds[i + 1], key_bounds[i] : key_bounds[i + 1]] = True
    return masks.Documents(bounds, padding, key_cu_seqlens=key_bounds), seen


def _windows_of_packs(rng, queries, keys):
    """Windows of documents; keys after the last complete window of a document are padding."""
    bounds = _bounds(rng, queries, rng.randint(1, 4))
    lengths = np.diff(bounds).tolist()
    for stride in range(rng.randint(1, 4), queries + 2):
        length = stride + rng.choice([0, 0, 1])
        complete = [max(0, (rows - length) // stride + 1) for rows in lengths]
        if sum(complete) <= keys:
            break
    key_bounds, spare = [0], keys - sum(complete)
    explicit = spare > 0 and rng.random() < 0.5
    for count in complete:
        more = rng.randint(0, spare) if explicit else 0
        spare -= more
        key_bounds.append(key_bounds[-1] + count + more)
    seen = np.zeros((queries, keys), dtype=bool)
    for document, start in enumerate(bounds[:-1]):
        for row in range(lengths[document]):
            for window in range(complete[document]):
                if window * stride + length - 1 <= row:
                    seen[start + row, key_bounds[document] + window] = True
    given = {"key_cu_seqlens": key_bounds} if explicit else {}
    return masks.Compressed(stride, length, cu_seqlens=bounds, **given), seen
