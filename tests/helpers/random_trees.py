"""Random trees as `masks.Tree` takes them, and who sees whom in them, by walking paths."""

import numpy as np


def draw(rng, length):
    """Trees in depth-first order, with padding anywhere: the row after each row's subtree, a bool
    table [length, length] of each row and its ancestors, and how many steps lie between them."""
    out, paths = list(range(length)), []
    path: list[int] = []  # of the row before
    branch = rng.choice([0.05, 0.3, 0.7])
    for row in range(length):
        if rng.random() < branch:
            path = path[: rng.randint(0, len(path))]
        padding = rng.random() < 0.05
        paths.append([] if padding else [*path, row])
        path = path if padding else [*path, row]
        for ancestor in paths[row]:
            out[ancestor] = row + 1
    seen, apart = np.zeros((length, length), dtype=bool), np.zeros((length, length), dtype=int)
    for row, ancestors in enumerate(paths):
        seen[row, ancestors] = True
        apart[row, ancestors] = range(len(ancestors))[::-1]
    return out, seen, apart
