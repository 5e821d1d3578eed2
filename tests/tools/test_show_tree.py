"""`megatron-burst show tree`: numbers against a dense matrix, words, and what is refused."""

import argparse
import re

import numpy as np
import pytest

from megatron_burst.cli import main as cli
from megatron_burst.schedule.tables import Grid
from megatron_burst.tools.show import language
from megatron_burst.tools.show import trees as show_trees

BY_HAND = "[1, 2, 3, 4, 5]\n[1, 2, 3, 6]\n\n[1, 2, 7, 8]\n[9, 9]\n"


def scene(text, nodes, per_node, layout="balanced"):
    arguments = argparse.Namespace(trajectories=text, layout=layout, kv_heads=2, width=8)
    return show_trees.tree_scene(arguments, Grid(nodes, per_node), "png")


def test_segments_lanes_and_runs_by_hand(tmp_path):
    (tmp_path / "t.jsonl").write_text(BY_HAND)
    found = scene(str(tmp_path / "t.jsonl"), 1, 2, "contiguous")
    # 1 2 | 3 | 4 5 | 6 | 7 8, and 9 9; lanes from the first leaf down, parents in the middle
    assert [each[:4] for each in found.segments] == [
        (0, 2, 0, -1), (2, 3, 2, 0), (3, 5, 3, 1), (5, 6, 3, 1), (6, 8, 2, 0), (8, 10, 0, -1),
    ]  # fmt: skip
    assert [each.lane for each in found.segments] == [1.25, 0.5, 0, 1, 2, 3]
    assert (found.lanes, found.depth, found.rows) == (4, 5, [6, 4])
    assert found.runs(found.segments[2]) == [(3, 5, 0)]
    assert found.runs(found.segments[4]) == [(2, 4, 1)]


@pytest.mark.parametrize("layout", ["balanced", "zigzag", "striped"])
@pytest.mark.parametrize("seed", range(3))
def test_numbers_are_those_of_a_dense_matrix(layout, seed):
    text = f"random({seed}, prompts=2, samples=5, turns=3, prompt=7, turn=5)"
    found = scene(text, 2, 2, layout)
    tree, holders = found.tree, found.shards.holders
    size = len(tree.tokens)
    seen = np.zeros((size, size), dtype=bool)
    for path in tree.paths:
        for i in range(len(path)):
            seen[path[i], path[: i + 1]] = True
    assert found.work == [int(seen[holders == rank].sum()) for rank in range(4)]
    for ranks in (1, 2):
        groups, rows = holders // ranks, 0
        for group in range(4 // ranks):
            rows += int(seen[groups == group][:, groups != group].any(axis=0).sum())
        assert found.received(ranks) == rows * 2 * 2 * 8 * 2
    drawn, step = found.sampled(size // 2)
    assert step in (2, 3)
    assert ((drawn >= 0) == seen[::step, ::step]).all()
    assert (drawn == np.where(drawn >= 0, holders[::step][:, None], -1)).all()
    covered = sorted(row for each in found.segments for row in range(each.begin, each.stop))
    assert covered == list(range(tree.rows))


def test_random_trajectories_are_those_of_their_seed_and_share_turns():
    found = language.trajectories("random(5, prompts=2, samples=3, turns=4)")
    assert found == language.trajectories("random(seed=5, prompts=2, samples=3, turns=4)")
    assert [each[0] for each in found] == [18638] * 3 + [14703] * 3  # so are they everywhere
    assert len({tuple(each) for each in found}) == 6


def test_text_of_a_tree(tmp_path, capsys):
    (tmp_path / "t.jsonl").write_text(BY_HAND)
    words = ["show", "tree", "--trajectories", str(tmp_path / "t.jsonl"), "--ranks", "2"]
    assert cli.main([*words, "--kv-heads", "1"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("4 trajectories as a tree, 2 ranks: balanced\n")
    assert re.search(r"^   \d\d +rows 3 to 4 *$", out, re.M)
    assert "4 trajectories of 15 tokens as 10 rows" in out
    assert "from other nodes" not in out


BAD = [
    ("tree", "--trajectories"),
    ("tree --trajectories nowhere.jsonl", "--trajectories nowhere.jsonl: "),
    ("tree --trajectories random(0,0)", "prompts must be at least 1, got 0"),
    ("tree --trajectories random(0,1,1.5)", "samples must be an integer, got 1.5"),
    ("tree --trajectories random(0,9,9,9)", "shows at most 128 segments (--png: 512), got "),
    ("tree --trajectories random --ranks 64", "--ranks: a picture as text shows at most 32"),
    ("tree --trajectories random --layout balanced([0,8])", "leave out cu_seqlens"),
    ("tree --trajectories random --layout block_striped(7)", "block_striped"),
    ("tree --trajectories random --kv-heads 0", "--kv-heads must be at least 1, got 0"),
    ("tree --trajectories random(1,1,1,1,4000000)", "trees of at most 1048576 rows are drawn"),
    ("tree --trajectories random(0,1000000000)", "at most 16777216 tokens, these have about"),
]


@pytest.mark.parametrize(("arguments", "problem"), BAD)
def test_bad_input_is_one_line_and_code_2(arguments, problem, capsys):
    try:
        code = cli.main(["show", *arguments.split()])
    except SystemExit as stop:
        code = stop.code
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert problem in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("line", "problem"),
    [("[1, 2", "line 2: "), ('{"a": 1}', "line 2: a line is a list of token ids"),
     ("[1, -2]", "--trajectories: trajectories[1]: token ids are from 0"),
     ("[1.5]", "--trajectories: trajectories[1] must hold token ids")],
)  # fmt: skip
def test_bad_lines_are_named(line, problem, tmp_path, capsys):
    (tmp_path / "t.jsonl").write_text(f"[1]\n{line}\n")
    assert cli.main(["show", "tree", "--trajectories", str(tmp_path / "t.jsonl")]) == 2
    assert problem in capsys.readouterr().err
