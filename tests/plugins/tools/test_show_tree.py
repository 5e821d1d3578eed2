"""`megatron-burst show tree`: numbers against a dense matrix, texts, and invalid input."""

import argparse

import numpy as np
import pytest

from megatron_burst.cli import main as cli
from megatron_burst.plugins.tools.show import trees as show_trees
from megatron_burst.plugins.tools.show import words
from megatron_burst.schedule.tables import Grid

BY_HAND = "[1, 2, 3, 4, 5]\n[1, 2, 3, 6]\n\n[1, 2, 7, 8]\n[9, 9]\n"


def scene(path, nodes, per_node, layout="balanced", kv_heads=2):
    arguments = argparse.Namespace(
        trajectories=path, layout=layout, block=None, kv_heads=kv_heads, width=8
    )
    return show_trees.tree_scene(arguments, Grid(nodes, per_node))


def written(trajectories, folder):
    """Write a file of these trajectories."""
    (folder / "t.jsonl").write_text("".join(f"{each}\n" for each in trajectories))
    return folder / "t.jsonl"


def at_random(seed, prompts, samples, turns, most):
    """Return trajectories of several prompts that share a random number of turns with the first."""
    random = np.random.default_rng(seed)

    def tokens():
        return random.integers(0, 1 << 16, random.integers(1, most)).tolist()

    found = []
    for _ in range(prompts):
        prompt, first = tokens(), [tokens() for _ in range(turns)]
        for _ in range(samples):
            shared = first[: random.integers(turns + 1)]
            found.append(sum([*shared, *(tokens() for _ in range(turns - len(shared)))], prompt))
    return found


def test_segments_lanes_and_runs_by_hand(tmp_path):
    (tmp_path / "t.jsonl").write_text(BY_HAND)
    found = scene(tmp_path / "t.jsonl", 1, 2, "contiguous")
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
def test_numbers_are_those_of_a_dense_matrix(layout, seed, tmp_path):
    found = scene(written(at_random(seed, 2, 5, 3, 12), tmp_path), 2, 2, layout)
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


def test_the_words_of_a_tree(tmp_path):
    (tmp_path / "t.jsonl").write_text(BY_HAND)
    found = scene(tmp_path / "t.jsonl", 1, 2, kv_heads=1)
    assert words.title(found) == "4 trajectories as a tree, 2 ranks: balanced"
    caption = words.caption(found)
    assert caption[0].startswith("4 trajectories with 15 tokens in total become 10 rows")
    assert not any("from other nodes" in line for line in caption)


MANY = [[i, j, k] for i in range(9) for j in range(9) for k in range(9)]
BAD = [
    ("tree", "--trajectories"),
    ("tree --trajectories nowhere.jsonl", "--trajectories nowhere.jsonl: "),
    ("tree --trajectories {many}", "a picture shows at most 512 segments, got 819; use fewer"),
    ("tree --trajectories {few} --ranks 64", "--ranks: a picture shows at most 32"),
    ("tree --trajectories {few} --layout block_striped --block 7", "got block=7; use 8"),
    ("tree --trajectories {few} --layout block_striped", "requires --block N"),
    ("tree --trajectories {few} --kv-heads 0", "--kv-heads must be at least 1, got 0"),
    ("tree --trajectories {long}", "a picture shows at most 1048576 rows, got 10"),
]


@pytest.mark.parametrize(("arguments", "problem"), BAD)
def test_bad_input_is_one_line_and_code_2(arguments, problem, capsys, tmp_path):
    files = {"few": [[1, 2]], "many": MANY, "long": [[0] * ((1 << 20) + 1)]}
    paths = {}
    for name, trajectories in files.items():
        if f"{{{name}}}" in arguments:
            paths[name] = written(trajectories, tmp_path)
    try:
        code = cli.main(["show", *arguments.format(**paths).split(), "--out", "x.png"])
    except SystemExit as stop:
        code = stop.code
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert problem in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("line", "problem"),
    [("[1, 2", "line 2: "), ('{"a": 1}', "line 2: a line must be a list of token ids"),
     ("[1, -2]", "t.jsonl: trajectories[1]: token ids are from 0"),
     ("[1.5]", "t.jsonl: trajectories[1] must hold token ids")],
)  # fmt: skip
def test_bad_lines_are_named(line, problem, tmp_path, capsys):
    (tmp_path / "t.jsonl").write_text(f"[1]\n{line}\n")
    command = ["show", "tree", "--trajectories", str(tmp_path / "t.jsonl"), "--out", "x.png"]
    assert cli.main(command) == 2
    assert problem in capsys.readouterr().err
