"""Both ways round one ring, TokenRing, and bundles cut in halves."""

from collections import Counter
from itertools import product

import numpy as np
import pytest
from tables_oracle import act_out, dense

import megatron_burst as mb
from megatron_burst.schedule.bundles import CELLS, MOST, bundled
from megatron_burst.schedule.demand import RowBytes, wanted
from megatron_burst.schedule.rings import backward, forward
from megatron_burst.schedule.tables import FAMILIES, Grid

BOTH = ("two_way", "token_ring")
SIZES = (1, 2, 3, 4, 5, 8)
ROWS = 8  # per rank
FORWARD, BACKWARD = RowBytes(kv=2, query=1, dkv=0, dquery=0, out=3), RowBytes(2, 4, 4, 2)


def documents(length):
    """Some shorter than a rank's rows, some over several ranks."""
    bounds = np.minimum([0, 2, 5, 6, 23, 30, 51, 100], length)
    return mb.masks.Documents(bounds) & mb.masks.Causal()


CASES = {
    "full": ("contiguous", lambda length: mb.masks.Full()),
    "causal zigzag": ("zigzag", lambda length: mb.masks.Causal()),
    "window contiguous": ("contiguous", lambda length: mb.masks.Window(6, 0)),
    "documents zigzag": ("zigzag", documents),
    "documents striped": ("striped", documents),
}


def case(name, size, rows=ROWS):
    """What the ranks want of each other, and what sees what."""
    layout, mask = CASES[name]
    mask = mask(size * rows)
    spans = mb.layout.make(layout, cp_size=size)
    shards = [spans.spans(rank, size * rows) for rank in range(size)]
    return wanted(mask, shards, shards), dense(mask, shards)


def passes(algorithm, grid, asked):
    """Every pass of one algorithm."""
    yield forward(algorithm, grid, wanted=asked, row_bytes=FORWARD)
    for side, gradients in product(("kv", "query"), (True, False)):
        row_bytes = BACKWARD if gradients else BACKWARD._replace(dkv=0, dquery=0)
        # Gradients of the side that stays are not asked for: they do not travel.
        row_bytes = row_bytes._replace(**{"dkv" if side == "query" else "dquery": 0})
        yield backward(algorithm, grid, side, wanted=asked, row_bytes=row_bytes)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("algorithm", BOTH)
def test_every_pair_of_rows_once_and_everything_home(algorithm, name, size):
    asked, seen = case(name, size)
    for schedule in passes(algorithm, Grid(1, size), asked):
        act_out(schedule, schedule.grid, seen)
