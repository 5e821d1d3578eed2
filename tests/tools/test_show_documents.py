"""`megatron-burst show documents`, and layout balanced in the other pictures."""

import re

import numpy as np
import pytest

from megatron_burst import masks
from megatron_burst.cli import main as cli
from megatron_burst.layout import Balanced, make
from megatron_burst.schedule.tables import Grid
from megatron_burst.tools.show import balance, language
from megatron_burst.tools.show.packs import PADDING, pack_scene

NAMES = ("zigzag of the pack", "zigzag within each document", "balanced")


def lines(capsys):
    return [line.rstrip() for line in capsys.readouterr().out.splitlines()]


# --- words ----------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["300, 20, 5", "(300,20,5)", "[300, 20, 5]"])
def test_lengths_are_numbers(text):
    assert language.lengths(text, 64) == [300, 20, 5]
    assert language.lengths("7", 64) == [7]


def test_random_lengths_fill_the_pack_and_are_those_of_their_seed():
    found = language.lengths("random(3, 10)", 512)
    assert sum(found) == 512
    assert found == language.lengths("random(seed=3, median=10.0, spread=1.5)", 512)
    assert found[:5] == [146, 19, 12, 1, 7]  # so are they everywhere
    assert found != language.lengths("random(4, 10)", 512)
    assert max(language.lengths("random(3, 10, longest=12)", 512)) == 12
    assert language.lengths("random(3, 16, 0)", 64) == [16] * 4


WRITTEN = {
    "balanced([0, 3, 8, 16])": Balanced(4, [0, 3, 8, 16], per_node=2),
    "balanced([0, 16], windows=[(3, 0), (None, 0)])": Balanced(
        4, [0, 16], per_node=2, windows=((3, 0), (None, 0))
    ),
    "balanced([0, 3, 16], padding=[0])": Balanced(4, [0, 3, 16], per_node=2, padding=[0]),
}


@pytest.mark.parametrize(("text", "made"), WRITTEN.items(), ids=list(WRITTEN))
def test_balanced_with_its_arguments(text, made):
    assert language.make_layout(text, 4, 2) == made


def test_balanced_alone_takes_what_the_mask_says():
    bounds = [0, 3, 8, 16]
    for mask, more in {
        "documents([0, 3, 8, 16]) & causal": {},
        "causal & documents([0, 3, 8, 16])": {},
        "documents([0, 3, 8, 16], [1]) & causal": {"padding": [1]},
        "documents([0, 3, 8, 16])": {"windows": ((None, None),)},
        "documents([0, 3, 8, 16]) & window(3, 1)": {"windows": ((3, 1),)},
    }.items():
        made = language.make_layout("balanced", 4, None, language.mask(mask, 16))
        assert made == Balanced(4, bounds, **more), mask
    given = language.make_layout("balanced([0, 16])", 4, None, masks.Documents(bounds))
    assert given == Balanced(4, [0, 16], windows=((None, None),))


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


# --- the pictures ---------------------------------------------------------------------------


def test_text_of_documents(capsys):
    assert cli.main(["show", "documents", "--lengths", "4,4,2,1", "--ranks", "2"]) == 0
    text = lines(capsys)
    assert text[0] == "4 documents of 1 to 4 tokens over 2 ranks, causal"
    found = "\n".join(text)
    assert re.search(r"^zigzag of the pack\n0  aaacd·  9  +█+.?\n1  abbbbc  15 +█+$", found, re.M)
    assert re.search(r"^balanced\n0  \w+·?  1\d", found, re.M)
    assert "zigzag within each document: work per rank" in found
    assert "5 tokens of padding" in found


def test_long_packs_are_drawn_to_a_scale(capsys):
    common = "show documents --ranks 2 --lengths "
    assert cli.main([*common.split(), "1000,1000,500,500"]) == 0
    text = lines(capsys)
    assert "a letter stands for 24 tokens" in text
    rows = [line.split()[1] for line in text if re.match("[01]  ", line)]
    assert len(rows) == 6
    assert {len(row) for row in rows} == {62}
    assert all(len(set(row)) <= 4 for row in rows)


def test_layout_balanced_in_every_picture(capsys):
    mask = "documents([0, 9, 16, 32]) & causal"
    for picture in ("mask", "layout", "schedule"):
        arguments = ["show", picture, "--mask", mask, "--layout", "balanced", "--ranks", "4"]
        assert cli.main(arguments) == 0
        assert "balanced" in "\n".join(lines(capsys))
