"""Random masks and layouts, each beside the same stated by hand as a table of positions.

A mask comes with a bool table [S, S] of who sees whom, a layout with the positions of each rank.
"""

import random
from itertools import pairwise

import numpy as np
import oracle
import random_trees

import megatron_burst as mb
from megatron_burst import masks

KINDS = (
    "full", "causal", "window", "dilated", "documents", "blocks", "prefix", "dense", "tree",
    "diffusion", "frames",
)  # fmt: skip
KINDS_OF_LAYOUTS = (
    "zigzag", "zigzag", "striped", "contiguous", "blocks", "documents", "balanced", "tree",
)  # fmt: skip


def mask(rng: random.Random, length: int, depth: int = 0):
    """(mask, bool table [length, length], the kinds in it)."""
    kind = rng.choice([*KINDS, *["and", "or"] * (2 if depth < 3 else 0)])
    if kind in ("and", "or"):
        (a, seen_a, kinds_a), (b, seen_b, kinds_b) = (mask(rng, length, depth + 1) for _ in "ab")
        kinds = kinds_a | kinds_b | {kind}
        if kinds >= {"tree", "window"}:  # together they mean distances along paths: see `_tree`
            return (a, seen_a, kinds_a) if "tree" in kinds_a else (b, seen_b, kinds_b)
        return (a & b, seen_a & seen_b, kinds) if kind == "and" else (a | b, seen_a | seen_b, kinds)
    q, k = np.arange(length)[:, None], np.arange(length)[None, :]
    made, seen = _one(rng, kind, length, q, k)
    return made, np.broadcast_to(seen, (length, length)).copy(), {kind}


def _one(rng, kind, length, q, k):
    if kind == "full":
        return masks.Full(), True
    if kind == "causal":
        return masks.Causal(), q >= k
    if kind == "window":
        left, right = (
            rng.choice([None, rng.randint(0, length)]),
            rng.choice([None, rng.randint(0, 5)]),
        )
        seen = (k >= q - (length if left is None else left)) & (
            k <= q + (length if right is None else right)
        )
        return masks.Window(left, right), seen
    if kind == "dilated":
        stride = rng.randint(1, 5)
        return masks.Dilated(stride), (q - k) % stride == 0
    if kind == "documents":
        bounds = [0, *sorted(rng.randint(0, length) for _ in range(rng.randint(0, 5))), length]
        number = np.array([sum(p >= bound for bound in bounds) for p in range(length)])
        padding = rng.sample(range(len(bounds) - 1), rng.choice([0, 0, 1]))
        real = ~np.isin(number - 1, padding)
        return masks.Documents(bounds, padding), (number[:, None] == number) & real[:, None]
    if kind == "tree":
        out, seen, apart = random_trees.draw(rng, length)
        window = rng.choice([None, None, rng.randint(0, length)])
        if window is None:
            return masks.Tree(out), seen
        made = (
            masks.Tree(out, window),
            masks.Tree(out) & masks.Window(window, rng.choice([0, None, 2])),
            masks.Window(window, None) & masks.Tree(out),
        )
        return rng.choice(made), seen & (apart <= window)
    if kind == "prefix":
        n = rng.randint(0, length)
        return masks.Prefix(n), k < n + 0 * q
    if kind == "diffusion" and length % 2 == 0:
        half, causal = length // 2, rng.random() < 0.5
        block = rng.randint(1, half)
        a, b = q % half // block, k % half // block
        noised = np.where(k < half, a == b, a > b)
        clean = (k >= half) & ((q >= k) if causal else (a >= b))
        return masks.BlockDiffusion(half, block, causal), np.where(q < half, noised, clean)
    if kind == "frames":
        frame = rng.choice([n for n in range(1, length + 1) if length % n == 0])
        every = rng.randint(1, 5)
        seen = (q // frame == k // frame) | (k // frame % every == 0)
        return masks.FrameTiles(length, frame, every), seen
    if kind == "blocks":
        block = rng.choice([n for n in range(1, length + 1) if length % n == 0])
        table = _table(rng, length // block)
        return masks.BlockSparse(table, block), np.kron(table, np.ones((block, block))) > 0
    table = _table(rng, length)
    return masks.Dense(table), table


def _table(rng, n):
    """Random; often with rows, columns or whole chunks that nothing is seen of."""
    table = np.array([[rng.random() < 0.5 for _ in range(n)] for _ in range(n)])
    for _ in range(rng.randint(0, 2)):
        begin, end = sorted((rng.randint(0, n), rng.randint(0, n)))
        if rng.random() < 0.5:
            table[begin:end] = False
        else:
            table[:, begin:end] = False
    return table


def layout(rng: random.Random, size: int, rows: int):
    """(layout as `prepare` takes it, [positions of each rank], its name). `rows` per rank, even."""
    length = size * rows
    kind = rng.choice(KINDS_OF_LAYOUTS)
    if kind in ("balanced", "tree"):
        return *_balanced(rng, size, length, kind == "tree"), kind
    if kind == "blocks":
        block = size * rng.choice([n for n in range(1, rows + 1) if rows % n == 0])
        made = mb.layout.make("block_striped", cp_size=size, block=block)
        return made, oracle.permutation("striped", size, length), kind
    if kind == "documents":
        cuts = sorted(rng.randint(0, rows // 2) for _ in range(rng.randint(0, 3)))
        bounds = [2 * size * cut for cut in [0, *cuts, rows // 2]]
        shards: list[list[int]] = [[] for _ in range(size)]
        for start, stop in pairwise(bounds):
            for shard, part in zip(
                shards, oracle.permutation("zigzag", size, stop - start), strict=True
            ):
                shard += [start + position for position in part]
        return mb.layout.make("zigzag", cp_size=size, cu_seqlens=bounds), shards, kind
    shards = oracle.permutation(kind, size, length)
    as_object = rng.random() < 0.2
    return mb.layout.make(kind, cp_size=size) if as_object else kind, shards, kind


def _balanced(rng, size, length, of_tree):
    """Of documents, or a tree, that need not be those of the mask; where they lie only the solver
    knows."""
    bounds = [0, *sorted(rng.randint(0, length) for _ in range(rng.randint(0, 5))), length]
    windows = rng.choice([((None, 0),), ((None, None),), ((None, 0), (3, 1))])
    padding = rng.sample(range(len(bounds) - 1), rng.choice([0, 0, 1]))
    work: dict = {"cu_seqlens": bounds, "windows": windows, "padding": padding}
    if of_tree:
        windows = rng.choice([((None, 0),), ((None, 0), (3, 0))])
        work = {"tree": masks.Tree(random_trees.draw(rng, length)[0]), "windows": windows}
    per_node = rng.choice([None, *[n for n in range(1, size + 1) if size % n == 0]])
    made = mb.layout.make("balanced", cp_size=size, per_node=per_node, **work)
    shards = [made.positions(rank, length).tolist() for rank in range(size)]
    assert sorted(position for shard in shards for position in shard) == [*range(length)]
    return made, shards
