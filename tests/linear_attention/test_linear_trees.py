"""Linear attention and convolutions over prefix trees equal every trajectory computed alone.

The oracle has tokens and positions only, without rows or parents. Values and all gradients are
compared.
"""

import random
from itertools import pairwise

import numpy as np
import pytest
import random_trees
import recurrences
import torch
from pieces import Pieces
from state_chains import GRIDS, dense

import megatron_burst as mb
from megatron_burst.plugins.testing import in_process

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
    """Return branches up to `depth` turns deep, with equal trajectories and prefixes of others.

    One trajectory is alone, and one prompt is longer than the rows of a rank.
    """
    stems = [[rng.randrange(WORDS) for _ in range(rng.choice([1, 3, 40]))]]
    for _ in range(max(depth, 3)):
        stem = stems[-1] if rng.random() < 0.7 else rng.choice(stems)
        cut = len(stem) if rng.random() < 0.7 else rng.randrange(1, len(stem) + 1)
        stems.append([*stem[:cut], *(rng.randrange(WORDS) for _ in range(rng.randrange(4)))])
    return [*stems[1:], stems[-1], stems[-1][:2], [WORDS - 1] * 3]


def parameters(form):
    """Return tables of every tensor by token and position, and convolution weights."""
    make = torch.Generator().manual_seed(7)
    decay, beta = FORMS[form]
    expected = {"x": (sum(QKV),), "decay": decay, "beta": (H,) if beta else None}
    if decay == ():  # lightning: one for all tokens
        expected["decay"] = None
    shapes = {n: s for n, s in expected.items() if s is not None}
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
    """Return x [s, b, c], decay and beta of some rows."""
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
    """Compute one trajectory; rows before it and its initial state are zero."""
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
    """Return runs of rows in any order, equally many per rank; some ranks hold no whole segment."""
    cuts = [0, *sorted(rng.sample(range(1, rows), min(rows - 1, 2 * ranks))), rows]
    runs = [np.arange(a, b) for a, b in pairwise(cuts)]
    rng.shuffle(runs)
    shards = []
    for mine in np.concatenate(runs).reshape(ranks, -1):
        parts = np.split(mine, np.flatnonzero(np.diff(mine) != 1) + 1)
        shards.append([(part[0], part[-1] + 1) for part in parts])
    return Pieces(shards)


def ours(made, tree, groups, layout, rng):
    """Compute the same for a tree over ranks, in the order of its rows."""
    ranks = range(groups.size)
    tokens, positions = torch.from_numpy(tree.tokens), torch.from_numpy(tree.positions)
    x, decay, beta = inputs(made, tokens, positions)

    def shards(t):
        return t if t is None or t.dim() == 1 else [mb.shard(t, layout, r, dim=0) for r in ranks]

    where = {"groups": groups, "layout": layout, "tree": rng.choice([tree, tree.mask])}
    mixed = in_process.short_convolution(shards(x), made[1], **where)
    q, k, v = (list(each) for each in zip(*map(split, mixed), strict=True))
    arguments = {"decay": shards(decay), "beta": shards(beta)}
    kernel = rng.choice(["torch", "torch", "reference"])
    if rng.random() < 0.5:
        where = {"plan": in_process.prepare_linear(q, k, v, **arguments, **where, kernel=kernel)}
    else:
        where |= {"kernel": kernel, "algorithm": rng.choice(["auto", "all_gather"])}
    return mb.unshard(in_process.linear_attention(q, k, v, **arguments, **where), layout, dim=0)


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
    rows = ours(made, tree, in_process.groups(inter=inter, intra=intra), layout, rng)
    got = tree.unpack(rows)
    expected = [alone(made, each) for each in some]
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-10, rtol=1e-10)

    def gradients(outs):
        parts = [w * (x * x.cos()).sum() for w, x in zip(weights, outs, strict=True)]
        return torch.autograd.grad(sum(parts), made[-1])

    for one, other in zip(gradients(got), gradients(expected), strict=True):
        torch.testing.assert_close(one, other, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("kind", ["none", "scalar", "vector", "matrix"])
def test_states_of_any_tree(kind):
    """Trees with padding anywhere: the entering state of a piece follows from its ancestors.

    The pieces that hold ancestors of its first row are applied to zero, from the root on.
    """
    for seed in range(6):
        rng = random.Random(f"{kind} {seed}")
        out, seen, _ = random_trees.draw(rng, 24)
        tree, ranks = mb.masks.Tree(out), rng.choice([1, 2, 3, 4])
        layout = any_pieces(rng, ranks, 24)
        chain = mb.layout.chains(layout, 24, tree=tree)
        made = torch.Generator().manual_seed(seed)
        pieces = len(chain)
        increment = torch.randn(pieces, B, H, D, W, generator=made).double().requires_grad_()
        beyond = {"none": None, "scalar": (), "vector": (D,), "matrix": (D, D)}[kind]
        decay = None
        if beyond is not None:
            decay = torch.randn(pieces, B, H, *beyond, generator=made).double().requires_grad_()
        states = []
        for *_, position in chain.table.tolist():
            state = torch.zeros(B, H, D, W).double()
            for i, (_, _, before, _, first) in enumerate(chain.table.tolist()):
                if first + before <= position and seen[position, first]:
                    one = None if decay is None else decay[i]
                    state = dense(one, increment[i]) @ state + increment[i]
            states.append(state)
        own = [chain.of(rank) for rank in range(ranks)]
        groups = in_process.groups(intra=ranks)
        actual = in_process.state_scan(
            None if decay is None else [decay[mine] for mine in own],
            [increment[mine] for mine in own],
            groups=groups, layout=layout, seq_len=24, tree=tree,
        )  # fmt: skip
        leaves = [t for t in (decay, increment) if t is not None]
        expected = [torch.stack([states[i] for i in mine.tolist()]) for mine in own]
        of_ours, of_theirs = (recurrences.gradients(outs, leaves) for outs in (actual, expected))
        for one, other in zip([*actual, *of_ours], [*expected, *of_theirs], strict=True):
            torch.testing.assert_close(one, other, atol=1e-10, rtol=1e-10)


def test_what_travels_of_a_tree():
    """With 8 samples of one prompt, each rank that needs the maps of the prompt gets them once."""
    tree = mb.trees.pack([[*range(1, 33), 100 + i, *[0] * 7] for i in range(8)], multiple=4)
    layout, groups = mb.layout.make("contiguous", cp_size=4), in_process.groups(inter=2, intra=2)
    q, v = ([torch.randn(24, 1, 1, 4) for _ in range(4)] for _ in range(2))
    plan = in_process.prepare_linear(q, q, v, groups=groups, layout=layout, tree=tree)
    assert "algorithm all_gather (auto: the only algorithm for trees)" in plan.describe()
    with torch.no_grad():
        in_process.linear_attention(q, q, v, plan=plan)
    sent = [(rank.counters.intra, rank.counters.inter) for rank in groups.ranks]
    # The prompt has 24 rows on rank 0 and 8 on rank 1; samples lie on ranks 1, 2 and 3.
    state = 4 * 4 * 4
    assert sent == [(state, 2 * state), (0, 2 * state), (0, 0), (0, 0)]
    assert [one.traffic()[0] for one in plan.ranks] == sent
    assert plan.ranks[0].traffic()[1] == sent[0]


WRONG = {
    "ring": ({"algorithm": "ring"}, "algorithm: ring passes states along chains.*'all_gather'"),
    "scan": ({"algorithm": "scan"}, "algorithm: scan passes states along chains"),
    "two_level": ({"algorithm": "two_level"}, "algorithm: two_level passes"),
    "initial": ({"initial_state": torch.zeros(1, B, H, D, W)}, "initial_state: not supported with"),
    "final": ({"return_final_state": True}, "return_final_state: not supported with a tree"),
    "documents": ({"cu_seqlens": [0, 8]}, "tree: mutually exclusive with cu_seqlens"),
    "rows": ({"tree": mb.masks.Tree([4] * 4)}, "tree has 4 rows, but the 2 ranks hold 8 positions"),
    "no tree": ({"tree": [8] * 8}, "tree must be a result of mb.trees.pack or a masks.Tree"),
    "window": (
        {"tree": mb.masks.Tree([8] * 8) & mb.masks.Window(2, 0)}, "tree has window 2"
    ),
    "striped": ({"layout": "striped"}, "layout striped: every row's predecessor"),
}  # fmt: skip


def small():
    """Return q, k and v of two ranks, and a tree of their rows."""
    q, v = ([torch.randn(4, B, *sizes) for _ in range(2)] for sizes in ((G, D), (H, W)))
    where = {"groups": in_process.groups(intra=2)}
    where["tree"] = mb.masks.Tree([8, 8, 5, 4, 5, 8, 8, 8])
    return {"q": q, "k": q, "v": v}, where


@pytest.mark.parametrize("case", WRONG)
def test_what_a_tree_refuses(case):
    tensors, where = small()
    wrong, words = WRONG[case]
    with pytest.raises(ValueError, match=words):
        in_process.linear_attention(**tensors, **where | wrong)


@pytest.mark.parametrize("case", ["initial", "final"])
def test_what_a_plan_over_a_tree_refuses(case):
    tensors, where = small()
    wrong, words = WRONG[case]
    plan = in_process.prepare_linear(**tensors, **where)
    with pytest.raises(ValueError, match=words):
        in_process.linear_attention(**tensors, plan=plan, **wrong)
