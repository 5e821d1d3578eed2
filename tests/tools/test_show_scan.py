"""`megatron-burst show scan`: the chain of pieces and the hops of a scan of states."""

import pytest

from megatron_burst.cli import main as cli


def shown(capsys, words):
    assert cli.main(["show", "scan", *words.split()]) == 0
    return [line.split() for line in capsys.readouterr().out.splitlines()]


def joined(lines):
    return [" ".join(words) for words in lines]


def test_a_chain_goes_up_the_ranks_and_back(capsys):
    """Zigzag of 3 ranks: the last one holds what lies on both sides of the turn as one piece."""
    lines = shown(capsys, "--ranks 3 --algorithm ring --seq 12")
    assert ["piece", "0", "1", "2", "3", "4"] in lines
    assert ["rank", "0", "1", "2", "1", "0"] in lines
    assert ["rows", "2", "2", "4", "2", "2"] in lines
    assert ["0", "s1→1", "·", "·", "·"] in lines
    assert ["1", "·", "s2→2", "·", "s4→0"] in lines
    assert ["2", "·", "·", "s3→1", "·"] in lines
    assert "intra: 4 hops of states (4 whole)" in joined(lines)


def test_parts_follow_one_another_to_another_node(capsys):
    lines = shown(capsys, "--nodes 2 --per-node 1 --layout contiguous --blocks 2")
    assert ["0", "s1.0⇒1", "s1.1⇒1"] in lines
    assert "inter: 2 hops of states (1 whole)" in joined(lines)
    assert "2 pieces, 16 positions; 2 rounds" in joined(lines)


def test_one_piece_is_one(capsys):
    assert "1 piece, 8 positions; 0 rounds" in joined(shown(capsys, "--ranks 1"))


def test_backward_comes_from_behind_and_documents_begin_anew(capsys):
    """Documents of 4, 3 and 1 tokens; in backward the last piece of each is the first."""
    words = "--ranks 2 --seq 8 --lengths 4,3 --layout contiguous --algorithm ring"
    assert "0 hops" not in str(shown(capsys, words))
    words = "--ranks 2 --seq 8 --lengths 5,3 --layout contiguous --algorithm ring"
    lines = shown(capsys, f"{words} --backward")
    assert ["piece", "2", "1|", "0"] in lines
    assert ["rank", "0", "1|", "1"] in lines
    assert ["1", "s2→0"] in lines


def test_maps_are_named_by_their_pieces(capsys):
    lines = shown(capsys, "--ranks 3 --layout contiguous --algorithm all_gather")
    assert ["0", "s1→1", "s1→2"] in lines
    assert ["1", "m1→2"] in lines


@pytest.mark.parametrize("algorithm", ["scan", "two_level", "all_gather", "ring"])
def test_the_picture_is_a_png(tmp_path, algorithm):
    words = f"--nodes 2 --per-node 2 --algorithm {algorithm}".split()
    for layout in ("zigzag", "contiguous", "balanced"):
        file = tmp_path / f"{layout}.png"
        assert cli.main(["show", "scan", *words, "--layout", layout, "--png", str(file)]) == 0
        assert file.read_bytes()[:4] == b"\x89PNG"
