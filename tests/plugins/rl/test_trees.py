"""`mb.trees`: packed trees against sets of prefixes, and refused arguments."""

import random

import numpy as np
import pytest
import torch

import megatron_burst as mb


def drawn(seed):
    """Draw trajectories over few tokens: most share prefixes, some are empty, some equal."""
    rng = random.Random(seed)
    words = rng.choice([1, 2, 4])
    longest = rng.choice([3, 9, 24])
    actual = [
        [rng.randrange(words) for _ in range(rng.randrange(longest))]
        for _ in range(rng.randrange(1, 9))
    ]
    return [*actual, [0]], [rng.random() for _ in [*actual, 0]]


@pytest.mark.parametrize("seed", range(60))
def test_a_packed_tree_has_every_prefix_once(seed):
    trajectories, weights = drawn(seed)
    tree = mb.trees.pack(trajectories, weights=weights, multiple=4)
    prefixes = {tuple(each[: i + 1]): [] for each in trajectories for i in range(len(each))}
    for number, each in enumerate(trajectories):
        for i in range(len(each)):
            prefixes[tuple(each[: i + 1])].append(number)
    assert tree.rows == len(prefixes)
    assert len(tree.tokens) % 4 == 0
    assert tree.rows <= len(tree.tokens) < tree.rows + 4

    of_row = {}  # row -> its prefix, by following parents
    for row in range(tree.rows):
        parent = int(tree.parents[row])
        of_row[row] = (*of_row.get(parent, ()), int(tree.tokens[row]))
        assert tree.positions[row] == len(of_row[row]) - 1
        assert tree.multiplicity[row] == len(prefixes[of_row[row]])
    assert sorted(of_row.values()) == sorted(prefixes)
    below = [
        [i for i in of_row if of_row[i][: len(of_row[row])] == of_row[row]]
        for row in range(tree.rows)
    ]
    assert all(rows == [*range(row, tree.out[row])] for row, rows in enumerate(below))
    assert [each.tolist() for each in tree.unpack(tree.tokens)] == trajectories

    edges = tree.edges
    assert [of_row[i] for i in edges.target] == [
        of_row[i] for i in range(tree.rows) if tree.positions[i]
    ]
    for row, label, target, weight, first, stop in zip(*edges, strict=True):
        assert of_row[target] == (*of_row[row], label)
        through = prefixes[of_row[target]]
        assert sorted(tree.order[first:stop]) == through
        assert weight == pytest.approx(sum(weights[number] for number in through))
    assert [each.tolist() for each in tree.unpack(edges.label)] == [x[1:] for x in trajectories]


def test_weights_may_differ_between_tokens_that_trajectories_share():
    tree = mb.trees.pack([[5, 6, 7], [5, 6, 8]], weights=[[9, 1, 2], [9, 10, 20]])
    assert tree.edges.label.tolist() == [6, 7, 8]
    assert tree.edges.weight.tolist() == [11, 2, 20]


def test_the_earlier_trajectory_comes_first():
    tree = mb.trees.pack([[9, 3], [1, 2], [9, 1]])
    assert tree.tokens.tolist() == [9, 3, 1, 1, 2]
    assert tree.parents.tolist() == [-1, 0, 0, -1, 3]


def test_segments_that_are_known():
    tree = mb.trees.from_segments([[5, 6], [7], [], [8, 9], [4]], [-1, 0, 1, 2, 0], ends=[3, 4, 2])
    assert tree.tokens.tolist() == [5, 6, 7, 8, 9, 4]
    assert [each.tolist() for each in tree.unpack(tree.tokens)] == [
        [5, 6, 7, 8, 9],
        [5, 6, 4],
        [5, 6, 7],
    ]
    assert tree.edges.weight.tolist() == [3, 2, 1, 1, 1]
    assert tree.edges.row.tolist() == [0, 1, 2, 3, 1]
    by_leaves = mb.trees.from_segments([[5, 6], [7], [5, 1]], [-1, 0, 0])
    assert [each.tolist() for each in by_leaves.unpack(by_leaves.tokens)] == [
        [5, 6, 7],
        [5, 6, 5, 1],
    ]


def test_gradients_of_what_is_shared_add_up():
    tree = mb.trees.pack([[1, 2, 3], [1, 2], [1, 2, 4]])
    values = torch.zeros(len(tree.edges.row), dtype=torch.float64, requires_grad=True)
    parts = [(i + 1) * each.sum() for i, each in enumerate(tree.unpack(values))]
    torch.stack(parts).sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [6, 1, 3]


@pytest.mark.parametrize("cp_size", [1, 2, 3, 8])
def test_every_edge_lies_on_the_rank_of_its_row(cp_size):
    trajectories, _ = drawn(5)
    tree = mb.trees.pack(trajectories, multiple=cp_size)
    layout = mb.layout.make("balanced", cp_size=cp_size, tree=tree)
    actual = []
    for rank in range(cp_size):
        edges, rows = tree.edges_on(layout, rank)
        assert (layout.positions(rank, len(tree.tokens))[rows] == tree.edges.row[edges]).all()
        actual += edges.tolist()
    assert sorted(actual) == [*range(len(tree.edges.row))]


@pytest.mark.parametrize(
    "windows", [((None, 0),), ((3, 0),), ((None, 0), (2, 0))], ids=["causal", "window", "both"]
)
def test_balanced_counts_the_pairs_of_trees(windows):
    rng = random.Random(0)
    prompt = [rng.randrange(99) for _ in range(600)]
    answers = [
        [*prompt[: rng.choice([200, 600])], *range(i, i + rng.randrange(400))] for i in range(9)
    ]
    tree = mb.trees.pack([*answers, [7, *prompt]], multiple=16)
    layout = mb.layout.make("balanced", cp_size=16, per_node=4, tree=tree, windows=windows)
    seen = [
        sum(min(p, p if left is None else left) + 1 for left, _ in windows) * (tree.out[row] > row)
        for row, p in enumerate(tree.positions)
    ]
    by_hand = [int(sum(seen[p] for p in layout.positions(r, len(seen)))) for r in range(16)]
    assert isinstance(layout, mb.layout.Balanced)
    assert layout.pairs == tuple(by_hand)
    assert max(by_hand) * 16 / sum(by_hand) < 1.05


WRONG = {
    "no token": (lambda: mb.trees.pack([[], []]), "no token"),
    "a negative token": (lambda: mb.trees.pack([[1], [2, -100]]), r"trajectories\[1\]: .* -100"),
    "floats": (lambda: mb.trees.pack([[1.5]]), r"trajectories\[0\] must hold token ids"),
    "weights": (
        lambda: mb.trees.pack([[1], [2]], weights=[1.0]),
        "weights has 1 entries for 2 trajectories",
    ),
    "weights of tokens": (
        lambda: mb.trees.pack([[1, 2]], weights=[[1.0]]),
        r"weights\[0\] must be a finite",
    ),
    "multiple": (
        lambda: mb.trees.pack([[1]], multiple=0),
        "multiple must be from 1 to 2147483647, got 0",
    ),
    "a cycle": (
        lambda: mb.trees.from_segments([[1], [2]], [1, 0]),
        r"parents\[0\] must be -1 or a",
    ),
    "itself": (lambda: mb.trees.from_segments([[1]], [0]), r"parents\[0\] must be -1 or a"),
    "parents": (
        lambda: mb.trees.from_segments([[1]], [-1, 0]),
        "parents has 2 entries for 1 segments",
    ),
    "ends": (
        lambda: mb.trees.from_segments([[1]], [-1], ends=[1]),
        r"ends\[0\] must be the index of one of 1",
    ),
    "values": (
        lambda: mb.trees.pack([[1, 2]]).unpack(np.zeros(5)),
        r"one value per edge \(1\) or per row \(2\)",
    ),
    "a tree that is none": (lambda: mb.layout.make("balanced", cp_size=2, tree=3), "tree must be"),
    "tree and documents": (
        lambda: mb.layout.make("balanced", cp_size=1, tree=mb.trees.pack([[1]]), cu_seqlens=[0, 1]),
        "tree: mutually exclusive",
    ),
    "rows": (
        lambda: mb.layout.make("balanced", cp_size=2, tree=mb.trees.pack([[1]])),
        r"tree: layout .* multiple of 2 tokens, got 1; mb.trees.pack\(..., multiple=2\) pads it",
    ),
    "no trajectories": (lambda: mb.trees.pack(3), "trajectories must be a sequence, got int 3"),
    "tokens of 64 bits": (
        lambda: mb.trees.pack([np.array([2**63], dtype=np.uint64)]),
        "token ids are from 0 to",
    ),
    "a weight that is none": (
        lambda: mb.trees.pack([[1, 2]], weights=[None]),
        r"weights\[0\] must be a finite number",
    ),
    "a weight that is not finite": (
        lambda: mb.trees.pack([[1, 2]], weights=[[1.0, np.nan]]),
        r"weights\[0\] must be a finite",
    ),
    "a complex weight": (lambda: mb.trees.pack([[1]], weights=[1j]), r"weights\[0\] must be"),
    "weights that are none": (lambda: mb.trees.pack([[1]], weights=5), "weights must be a seq"),
    "ends that are none": (
        lambda: mb.trees.from_segments([[1]], [-1], ends=5),
        "ends must be a sequence, got int 5",
    ),
    "values of a list": (
        lambda: mb.trees.pack([[1, 2]]).unpack([1.0]),
        "per row .*, got list",
    ),
    "bounds of 64 bits": (
        lambda: mb.masks.Tree(np.array([2**63, 2], dtype=np.uint64)),
        "row 0 ends at 9223372036",
    ),
    "windows": (
        lambda: mb.layout.make(
            "balanced", cp_size=1, tree=mb.trees.pack([[1]]), windows=[(None, None)]
        ),
        "a row of a tree does not see later rows",
    ),
    "bounds out of range": (
        lambda: mb.masks.Tree([2, 4, 3]),
        "row 1 ends at 4, but the tree has 3 rows",
    ),
    "bounds that cross": (
        lambda: mb.masks.Tree([3, 4, 3, 4]),
        "row 1 ends at 4, but the subtree of its anc",
    ),
    "bounds as floats": (
        lambda: mb.masks.Tree(np.array([1.0])),
        "out must hold one integer per row",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_tree_is_refused(name):
    call, words = WRONG[name]
    with pytest.raises(ValueError, match=words):
        call()
