"""Attention over trees equals attention over every trajectory alone: outputs and all gradients."""

import random

import pytest
import torch

import megatron_burst as mb
from megatron_burst.plugins.testing import in_process
from megatron_burst.schedule.algorithms import ALGORITHMS

TOLERANCE = 1e-10
GRIDS = [(1, 1), (1, 2), (1, 3), (2, 2), (2, 4)]
HEADS, KV_HEADS, WIDTH, WORDS = 4, 2, 6, 5


def trajectories(rng, depth):
    """Return branches of `depth` levels, with equal ones, prefixes of others, and one alone."""
    actual = [[rng.randrange(WORDS) for _ in range(rng.randrange(1, 12))]]
    for _ in range(depth):
        stem = rng.choice(actual)
        turn = [rng.randrange(WORDS) for _ in range(rng.randrange(9))]
        actual.append([*stem[: rng.randrange(len(stem) + 1)], *turn])
    return [*actual, actual[0], [WORDS - 1] * 3]


def parameters():
    generator = torch.Generator().manual_seed(7)
    shapes = [(WORDS, HEADS, WIDTH), (WORDS, KV_HEADS, WIDTH), (WORDS, KV_HEADS, WIDTH)]
    shapes += [(200, *shape[1:]) for shape in shapes]  # by position
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in shapes
    ]


def looked_up(leaves, tokens, positions):
    tables, places = leaves[:3], leaves[3:]
    return [x[tokens] + y[positions] for x, y in zip(tables, places, strict=True)]


def alone(qkv, window):
    """Compute causal attention of one trajectory for q [s, h, d], k and v [s, kv, d]."""
    q, k, v = qkv
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / WIDTH**0.5
    apart = torch.arange(len(q))[:, None] - torch.arange(len(q))[None]
    hidden = (apart < 0) | (apart > (len(q) if window is None else window))
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


def loss_of(outs, weights):
    """Return the weighted sum of the losses of all trajectories."""
    return torch.stack([w * (x * x.cos()).sum() for w, x in zip(weights, outs, strict=True)]).sum()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("case", range(5))
def test_a_tree_equals_its_trajectories(algorithm, case):
    rng = random.Random(f"{algorithm} {case}")
    some = trajectories(rng, rng.choice([1, 4, 16]))
    weights = [rng.random() for _ in some]
    inter, intra = GRIDS[case]
    ranks = inter * intra
    tree = mb.trees.pack(some, multiple=2 * ranks)
    window = rng.choice([None, None, 3])
    mask = tree.mask if window is None else tree.mask & mb.masks.Window(window, 0)
    name = rng.choice(["zigzag", "striped", "balanced", "balanced"])
    own = tree if name == "balanced" else None
    layout = mb.layout.make(name, cp_size=ranks, tree=own)

    ring = parameters()
    qkv = [x[:, None] for x in looked_up(ring, tree.tokens, tree.positions)]
    outs = in_process.attention(
        *([mb.shard(x, layout, rank) for rank in range(ranks)] for x in qkv),
        groups=in_process.groups(inter=inter, intra=intra),
        layout=layout, mask=mask, algorithm=algorithm, side=rng.choice(["kv", "query"]),
    )  # fmt: skip
    got = tree.unpack(mb.unshard(outs, layout)[:, 0])
    loss_of(got, weights).backward()

    reference = parameters()
    expected = [alone(looked_up(reference, each, range(len(each))), window) for each in some]
    loss_of(expected, weights).backward()
    for x, y in zip(got, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=TOLERANCE)
    for x, y in zip(ring, reference, strict=True):
        torch.testing.assert_close(x.grad, y.grad, rtol=0, atol=TOLERANCE)


def test_only_ancestors_travel_and_a_prompt_crosses_to_a_node_once():
    """Rows that multicast sends between 2 nodes of 4 ranks for 64 samples of one prompt."""
    prompt = list(range(1, 513))
    tree = mb.trees.pack([[*prompt, 1000 + i, *[0] * 63] for i in range(64)], multiple=8)
    layout = mb.layout.make("balanced", cp_size=8, per_node=4, tree=tree)
    groups = in_process.groups(inter=2, intra=4)
    x = [torch.randn(len(tree.tokens) // 8, 1, 1, 4) for _ in range(8)]
    with torch.no_grad():
        in_process.attention(
            x, x, x, groups=groups, layout=layout, mask=tree.mask, algorithm="multicast"
        )
    crossed = sum(rank.counters.inter for rank in groups.ranks)
    owners = {p: rank // 4 for rank in range(8) for p in layout.positions(rank, len(tree.tokens))}
    needed = {
        (k, node)
        for k in owners
        for node in (0, 1)
        if owners[k] != node and any(owners[q] == node for q in range(k, tree.out[k]))
    }
    assert sum(k < len(prompt) for k, _ in needed) == len(prompt)
    assert crossed == len(needed) * 2 * 4 * 4  # keys and values, width 4, float32


def test_ranks_with_other_trees_are_refused():
    groups = in_process.groups(intra=2)
    x = [torch.randn(4, 1, 1, 4) for _ in range(2)]
    for out in ([4] * 4, [9] * 8):
        with pytest.raises(ValueError, match=r"the tree has 4 rows|row 0 ends at 9"):
            in_process.attention(x, x, x, groups=groups, mask=mb.masks.Tree(out))
