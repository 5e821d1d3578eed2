"""`megatron-burst show scan`: the chain of pieces and the hops of a scan of states."""

import argparse

import pytest

from megatron_burst.cli import main as cli
from megatron_burst.plugins.tools import show
from megatron_burst.plugins.tools.show import words


def scene(line):
    """Return the scene of `megatron-burst show scan` with these arguments."""
    parser = argparse.ArgumentParser()
    show.add_arguments(parser)
    return show.scene_of(parser.parse_args(["scan", *line.split(), "--out", "x.png"]))


def chain(found):
    """Return the pieces in the order of positions, their ranks and their rows."""
    pieces = found.pieces
    return (
        pieces,
        [int(found.chains.rank[i]) for i in pieces],
        [int(found.chains.table[i, 2]) for i in pieces],
    )


def hops(found):
    """Return (round, sender, content, receiver) of every hop."""
    of = found.hops
    return {
        (int(of.round[i]), int(of.source[i]), found.name(i), int(of.destination[i]))
        for i in range(len(of))
    }


def test_a_chain_goes_up_the_ranks_and_back():
    """Zigzag of 3 ranks: the last rank holds both sides of the turn as one piece."""
    found = scene("--ranks 3 --algorithm ring --seq 12")
    assert chain(found) == ([0, 1, 2, 3, 4], [0, 1, 2, 1, 0], [2, 2, 4, 2, 2])
    assert hops(found) == {(0, 0, "s1", 1), (1, 1, "s2", 2), (2, 2, "s3", 1), (3, 1, "s4", 0)}
    assert "intra: 4 hops of states (4 whole)" in words.caption(found)


def test_parts_follow_one_another_to_another_node():
    found = scene("--nodes 2 --per-node 1 --layout contiguous --blocks 2")
    assert hops(found) == {(0, 0, "s1.0", 1), (1, 0, "s1.1", 1)}
    assert found.between.all()
    assert words.caption(found) == [
        "2 pieces, 16 positions; 2 rounds", "inter: 2 hops of states (1 whole)",
    ]  # fmt: skip


def test_one_piece_is_one():
    assert words.caption(scene("--ranks 1")) == ["1 piece, 8 positions; 0 rounds"]


def test_backward_comes_from_behind_and_documents_begin_anew():
    """Documents of 5 and 3 tokens, of which the first is on both ranks.

    In backward the last piece of each document is the first. Documents of 4, 3 and 1 tokens need no
    hop.
    """
    assert not hops(scene("--ranks 2 --seq 8 --lengths 4,3 --layout contiguous --algorithm ring"))
    line = "--ranks 2 --seq 8 --lengths 5,3 --layout contiguous --algorithm ring"
    found = scene(f"{line} --backward")
    assert chain(found)[:2] == ([2, 1, 0], [0, 1, 1])
    assert hops(found) == {(0, 1, "s2", 0)}


def test_maps_are_named_by_their_pieces():
    found = hops(scene("--ranks 3 --layout contiguous --algorithm all_gather"))
    assert {each[1:] for each in found} == {(0, "s1", 1), (0, "s1", 2), (1, "m1", 2)}


@pytest.mark.parametrize("algorithm", ["scan", "two_level", "all_gather", "ring"])
def test_the_picture_is_a_png(tmp_path, algorithm):
    line = f"--nodes 2 --per-node 2 --algorithm {algorithm}".split()
    for layout in ("zigzag", "contiguous", "balanced"):
        file = tmp_path / f"{layout}.png"
        assert cli.main(["show", "scan", *line, "--layout", layout, "--out", str(file)]) == 0
        assert file.read_bytes()[:4] == b"\x89PNG"
