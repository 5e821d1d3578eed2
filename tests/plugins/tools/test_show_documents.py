"""`megatron-burst show documents`: numbers by hand and against dense masks, and the words."""

import numpy as np
import pytest

from megatron_burst import masks
from megatron_burst.layout import Balanced, make
from megatron_burst.plugins.tools.show import balance, words
from megatron_burst.plugins.tools.show.packs import PADDING, pack_scene
from megatron_burst.schedule.tables import Grid

NAMES = ("zigzag of the pack", "zigzag within each document", "balanced")


# --- the numbers ----------------------------------------------------------------------------


def scene(lengths, seq_len, grid, mask=masks.Causal()):  # noqa: B008
    return pack_scene(lengths, seq_len, grid, mask, "causal")


@pytest.mark.parametrize("mask", [masks.Causal(), masks.Full(), masks.Window(5, 2)], ids=repr)
def test_work_is_that_of_the_dense_mask(mask):
    lengths, grid = [13, 1, 24, 6], Grid(1, 4)
    found = scene(lengths, 48, grid, mask)
    bounds = np.cumsum([0, *lengths, 4])
    inside = masks.Documents(bounds, padding=[4]) & mask
    assert [held.name for held in found.held] == list(NAMES)
    zigzag, within, balanced = found.held
    assert zigzag.work == balance.work(make("zigzag", cp_size=4), inside, 48)
    window = (mask.left, mask.right) if isinstance(mask, masks.Window) else (None, None)
    made = Balanced(4, bounds, windows=(window,), padding=[4])
    assert balanced.work == list(made.pairs) == balance.work(made, inside, 48)
    assert balanced.imbalance == made.balance
    assert sum(within.work) == sum(zigzag.work) == sum(balanced.work)
    assert [held.padding for held in found.held] == [4, 3 + 7 + 0 + 2, 4]


def test_every_token_is_drawn_once():
    lengths = [13, 1, 24, 6]
    for held in scene(lengths, 48, Grid(1, 4)).held:
        drawn = [run for rank in range(4) for run in held.runs(rank)]
        count = [sum(b - a for a, b, of in drawn if of == i) for i in range(4)]
        assert count == lengths
        assert sum(b - a for a, b, of in drawn if of == PADDING) == held.padding


def test_rows_from_other_nodes_by_hand():
    """Two nodes of one rank, one document of 16: zigzag sees 12 of it on the first node, all that
    the other has, and 4 on the other; a window of 1 sees one row at each end."""
    held = scene([16], 16, Grid(2, 1)).held
    assert [each.between for each in held] == [(8 + 4) / 16] * 3
    narrow = scene([16], 16, Grid(2, 1), masks.Window(1, 0)).held[0]
    assert narrow.between == (1 + 1) / 16
    apart = scene([8, 8], 16, Grid(2, 1)).held
    assert [each.between for each in apart] == [8 / 16, (4 + 2 + 4 + 2) / 16, 0]


# --- the words ------------------------------------------------------------------------------


def test_the_words_of_documents():
    found = scene([4, 4, 2, 1], 12, Grid(1, 2))
    assert words.title(found) == "4 documents of 1 to 4 tokens over 2 ranks, causal"
    whole, within, _ = words.caption(found)
    assert whole == "zigzag of the pack: work per rank 9 to 15 pairs, imbalance 1.25, " + (
        "1 token of padding"
    )
    assert within.startswith("zigzag within each document: work per rank")
    assert within.endswith("5 tokens of padding")
    assert found.held[0].runs(0) == [
        (0, 3, 0), (3, 4, 2), (4, 5, 3), (5, 6, PADDING),
    ]  # fmt: skip
