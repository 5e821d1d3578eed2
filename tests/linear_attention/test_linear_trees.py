"""Linear attention and short convolutions over prefix trees equal every trajectory computed alone.

The oracle knows tokens and positions, and neither rows nor parents: values and all gradients.
"""

import random

import numpy as np
import pytest
import random_trees
import recurrences
import torch
from pieces import Pieces
from state_chains import GRIDS

import megatron_burst as mb

WORDS, LONGEST, WIDTH = 5, 400, 4
B, G, H, D, W = 1, 1, 2, 3, 4
QKV = [G * D, G * D, H * W]
FORMS = {  # name -> shape of the decay behind [s, b], is there a beta?
    "linear": (None, False),
    "scalar_decay": ((H,), False),
    "lightning": ((), False),
    "vector_decay": ((H, D), False),
    "delta_rule": (None, True),
    "gated_delta_rule": ((H,), True),
    "kda": ((H, D), True),
}


def trajectories(rng, depth):
    """Branches up to `depth` turns deep, with equal ones, prefixes of others, one alone, and a
    prompt longer than what a rank holds."""
    stems = [[rng.randrange(WORDS) for _ in range(rng.choice([1, 3, 40]))]]
    for _ in range(max(depth, 3)):
        stem = stems[-1] if rng.random() < 0.7 else rng.choice(stems)
        cut = len(stem) if rng.random() < 0.7 else rng.randrange(1, len(stem) + 1)
        stems.append([*stem[:cut], *(rng.randrange(WORDS) for _ in range(rng.randrange(4)))])
    return [*stems[1:], stems[-1], stems[-1][:2], [WORDS - 1] * 3]


def parameters(form):
    """Tables of every tensor by token and by position, of the decay, and the taps of a
    convolution over q, k and v."""
    make = torch.Generator().manual_seed(7)
    decay, beta = FORMS[form]
    wanted = {"x": (sum(QKV),), "decay": decay, "beta": (H,) if beta else None}
    if decay == ():  # lightning: one for all tokens
        wanted["decay"] = None
    shapes = {n: s for n, s in wanted.items() if s is not None}
    tables = {
        (name, size): torch.randn(size, B, *shape, generator=make, dtype=torch.float64)
        for name, shape in shapes.items()
        for size in (WORDS, LONGEST)
    }
    taps = torch.randn(sum(QKV), WIDTH, generator=make, dtype=torch.float64) / 2
    constant = torch.rand(H, generator=make, dtype=torch.float64) if decay == () else None
    leaves = [t for t in (*tables.values(), taps, constant) if t is not None]
    for leaf in leaves:
        leaf.requires_grad_()
    return tables, taps, constant, leaves


def inputs(made, tokens, positions):
    """x [s, b, c], decay and beta of some rows."""
    tables, _, constant, _ = made

    def looked_up(name):
        if (name, WORDS) not in tables:
            return None
        return tables[name, WORDS][tokens] + tables[name, LONGEST][positions]

    decay, beta = looked_up("decay"), looked_up("beta")
    decay = -constant if constant is not None else decay if decay is None else -decay.abs() / 4
    return looked_up("x"), decay, beta if beta is None else beta.sigmoid()


def split(x):
    q, k, v = x.split(QKV, -1)
    return q.unflatten(-1, (G, D)), k.unflatten(-1, (G, D)) / 2, v.unflatten(-1, (H, W))


def alone(made, tokens):
    """One trajectory: rows before it are zero, and so is the state."""
    tokens, taps = torch.tensor(tokens), made[1]
    x, decay, beta = inputs(made, tokens, torch.arange(len(tokens)))
    rows = []
    for t in range(len(x)):
        back = range(min(WIDTH, t + 1))
        rows.append(torch.stack([x[t - i] * taps[:, WIDTH - 1 - i] for i in back]).sum(0))
    q, k, v = split(torch.stack(rows))
    if decay is not None and decay.dim() == 1:
        decay = decay.expand(*v.shape[:3])
    state = torch.zeros(B, H, D, W, dtype=torch.float64)
    return recurrences.tokens(recurrences.Case(q, k, v, decay, beta), state, D**-0.5)[0]


def any_pieces(rng, ranks, rows):
    """Runs of rows in any order, equally many on each rank: some ranks miss whole segments."""
    cuts = [0, *sorted(rng.sample(range(1, rows), min(rows - 1, 2 * ranks))), rows]
    runs = [np.arange(a, b) for a, b in zip(cuts, cuts[1:], strict=False)]
    rng.shuffle(runs)
    shards = []
    for mine in np.concatenate(runs).reshape(ranks, -1):
        parts = np.split(mine, np.flatnonzero(np.diff(mine) != 1) + 1)
        shards.append([(part[0], part[-1] + 1) for part in parts])
    return Pieces(shards)


def ours(made, tree, groups, layout, rng):
    """The same of a tree over ranks, in the order of its rows."""
    ranks = range(groups.size)
    tokens, positions = torch.from_numpy(tree.tokens), torch.from_numpy(tree.positions)
    x, decay, beta = inputs(made, tokens, positions)

    def shards(t):
        return t if t is None or t.dim() == 1 else [mb.shard(t, layout, r, dim=0) for r in ranks]

    where = {"groups": groups, "layout": layout, "tree": rng.choice([tree, tree.mask])}
    mixed = mb.short_convolution(shards(x), made[1], **where)
    q, k, v = (list(each) for each in zip(*map(split, mixed), strict=True))
    given = {"decay": shards(decay), "beta": shards(beta)}
    kernel = rng.choice(["torch", "torch", "reference"])
    if rng.random() < 0.5:
        where = {"plan": mb.prepare_linear(q, k, v, **given, **where, kernel=kernel)}
    else:
        where |= {"kernel": kernel, "algorithm": rng.choice(["auto", "all_gather"])}
    return mb.unshard(mb.linear_attention(q, k, v, **given, **where), layout, dim=0)


@pytest.mark.parametrize("world", GRIDS)
@pytest.mark.parametrize("form", FORMS)
def test_a_tree_equals_its_trajectories(form, world):
    rng = random.Random(f"{form} {world}")
    some = trajectories(rng, rng.choice([1, 5, 16]))
    weights = [rng.random() for _ in some]
    tree = mb.trees.pack(some, multiple=2 * world)
    name = rng.choice(["balanced", "balanced", "zigzag", "contiguous", "pieces"])
    if name == "pieces":
        layout = any_pieces(rng, world, len(tree.tokens))
    else:
        own = tree if name == "balanced" else None
        layout = mb.layout.make(name, cp_size=world, tree=own)
    inter, intra = GRIDS[world]

    made = parameters(form)
    rows = ours(made, tree, mb.Groups.in_process(inter=inter, intra=intra), layout, rng)
    got = tree.unpack(rows)
    wanted = [alone(made, each) for each in some]
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=1e-10, rtol=1e-10)

    def gradients(outs):
        parts = [w * (x * x.cos()).sum() for w, x in zip(weights, outs, strict=True)]
        return torch.autograd.grad(sum(parts), made[-1])

    for one, other in zip(gradients(got), gradients(wanted), strict=True):
        torch.testing.assert_close(one, other, atol=1e-10, rtol=1e-10)
