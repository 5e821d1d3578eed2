"""Tiles: every shape acted out row by row, the bytes between nodes by hand, what a tile holds."""

from itertools import product
from time import process_time

import numpy as np
import pytest
import tables_oracle

from megatron_burst import layout, masks
from megatron_burst.schedule import demand as demands
from megatron_burst.schedule.algorithms import burst, tile, tile_shape
from megatron_burst.schedule.demand import Demand, RowBytes, everything
from megatron_burst.schedule.program import program
from megatron_burst.schedule.rings import Schedule
from megatron_burst.schedule.tables import Grid

GRIDS = [Grid(*g) for g in ((1, 4), (2, 2), (2, 4), (4, 2), (3, 3), (1, 6), (1, 3), (7, 1), (1, 1))]
FORWARD, BACKWARD = RowBytes(2, 1, 0, 0, 2), RowBytes(2, 2, 4, 2, 0)
NEITHER = RowBytes(2, 2, 4, 0, 0)  # the queries need no gradient
ROWS = 4  # of a rank, where the layout makes them equal


def cases(size):
    """name -> (mask, shards) on so many ranks."""
    length, random = ROWS * size, np.random.default_rng(size)
    zigzag, contiguous = ([layout.make(name, cp_size=size).spans(rank, length)
                           for rank in range(size)] for name in ("zigzag", "contiguous"))  # fmt: skip
    some = [shard if rank % 3 else () for rank, shard in enumerate(contiguous)]
    cuts = np.unique([0, *random.integers(1, length, size // 2), length])
    packed = masks.Documents(cuts) & masks.Causal()
    return {
        "full": (masks.Full(), contiguous),
        "causal, zigzag": (masks.Causal(), zigzag),
        "window": (masks.Window(5, 0), contiguous),
        "documents, zigzag": (packed, zigzag),
        "documents": (packed, contiguous),
        "some ranks have nothing": (masks.Causal(), some),
        "nothing is seen": (masks.Dense(np.zeros((length, length), dtype=bool)), contiguous),
        "anything": (masks.Dense(random.random((length, length)) < 0.1), zigzag),
    }


def acted_out(grid, shape, mask, shards, row_bytes, programs=True):
    wanted = demands.wanted(mask, shards, shards)
    demand = Demand(grid, "kv", wanted, row_bytes)
    made = tile.tables(demand, shape=shape)
    ranks = [program(made, grid, rank) for rank in range(grid.size)] if programs else None
    seen = tables_oracle.dense(mask, shards)
    return tables_oracle.act_out(made, grid, seen, row_bytes=row_bytes, programs=ranks)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_every_shape_by_the_rules(grid):
    for shape, (mask, shards) in product(tile_shape.shapes(grid), cases(grid.size).values()):
        for row_bytes in (FORWARD, BACKWARD, NEITHER):
            acted_out(grid, shape, mask, shards, row_bytes)


@pytest.mark.slow
def test_every_shape_of_four_by_four_by_the_rules():
    grid = Grid(4, 4)
    for shape, (mask, shards) in product(tile_shape.shapes(grid), cases(grid.size).values()):
        for row_bytes in (FORWARD, BACKWARD):
            acted_out(grid, shape, mask, shards, row_bytes, programs=False)
