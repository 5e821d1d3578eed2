"""Which chunks move on from where they are: the part of a ring schedule that the mask decides.

On a ring every chunk visits the ranks in a fixed order, so the mask decides only how far it has to
go. Steps are counted as LoongTrain's double ring has them: an outer step per node, an inner step
per rank of the node. On one ring over all ranks there is a single outer step.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .tables import Grid, Side


class Moves(NamedTuple):
    """Does the chunk of an owner move on after a step? bool [owner, outer, inner] within nodes,
    [owner, outer] between nodes.

    Where chunks go straight from their owner to each user (and gradients straight back) `inter`
    and `inter_gradient` are None, and `inner` counts how many ranks further on the user is.
    """

    intra: np.ndarray
    inter: np.ndarray | None
    intra_gradient: np.ndarray
    inter_gradient: np.ndarray | None


def locations(rings: Grid) -> np.ndarray:
    """int [owner, outer, inner]: the rank that has the owner's chunk at that step."""
    nodes, width = rings
    owner, outer, inner = np.ogrid[: rings.size, :nodes, :width]
    return (owner // width + outer) % nodes * width + (owner % width + inner) % width


def moves(
    rings: Grid, side: Side, visible: np.ndarray, *, kept: int, gradients: bool, direct: bool
) -> Moves:
    """The moves of one pass; arguments as in `rings.Schedule`.

    rings: the grid on which chunks move. direct: they go straight from owner to user.
    """
    nodes, width = rings
    here, owner = locations(rings), np.arange(rings.size)[:, None, None]
    used = visible[(here, owner) if side == "kv" else (owner, here)]
    # A kept chunk is still computed with, so its gradient travels, but it need not be sent.
    fetched = used.copy()
    fetched.reshape(-1, nodes * width)[:, nodes * width - kept :] = False
    if direct:
        away = np.arange(rings.size) > 0  # a rank sends itself nothing
        return Moves(fetched & away, None, used & away & gradients, None)

    # An activation moves while a rank further along has a use for it ...
    later = _from_the_end(fetched, 2)
    later_nodes = _from_the_end(np.logical_or.reduce(fetched, 2), 1)
    # ... and a gradient from the first rank that added to it. Inner step 0 adds to the sum that
    # this rank gathers for its node (at outer step 0: for itself), so it sends nothing within the
    # node; the node's sum then crosses to the next node.
    so_far = np.logical_or.accumulate(used[:, :, 1:], 2) & gradients
    so_far_nodes = np.logical_or.accumulate(np.logical_or.reduce(used, 2)[:, 1:], 1) & gradients
    return Moves(
        intra=_padded(later[:, :, 1:], 2, 0),
        inter=_padded(later_nodes[:, 1:], 1, 0),
        intra_gradient=_padded(so_far, 2, 1),
        inter_gradient=_padded(so_far_nodes, 1, 1),
    )


def _from_the_end(used: np.ndarray, axis: int) -> np.ndarray:
    """Is anything used at this index of `axis` or at a later one?"""
    return np.flip(np.logical_or.accumulate(np.flip(used, axis), axis), axis)


def _padded(moves: np.ndarray, axis: int, side: int) -> np.ndarray:
    """`moves` with one more False along `axis`, at its end (side 0) or its beginning (side 1)."""
    width = [(0, 0)] * moves.ndim
    width[axis] = (side, 1 - side)
    return np.pad(moves, width)
