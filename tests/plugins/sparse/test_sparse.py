"""Selections and attention over them, against dense matrices written by hand, in float64."""

from dataclasses import dataclass

import pytest
import sparse_oracle
import torch

import megatron_burst as mb
from megatron_burst.execution import ring
from megatron_burst.plugins.sparse import kernels, pairs, rules
from megatron_burst.plugins.testing import in_process

B, D, W = 2, 4, 3
BOUNDS = [0, 13, 20, 48]
EVEN = [0, 16, 24, 48]  # documents that begin at blocks
RULES = {
    "dsa": (rules.Dsa(), 3, 1),  # rule, index heads, index key heads
    "qsa": (rules.Qsa(block=4), 3, 1),
    "moba": (rules.Moba(block=4), 4, 2),
    "msa": (rules.Msa(block=2), 4, 2),
}
MASKS = {
    "causal": mb.masks.Causal(),
    "full": mb.masks.Full(),
    "window": mb.masks.Window(6, 0),
    "documents": mb.masks.Documents(BOUNDS) & mb.masks.Causal(),
    "even": mb.masks.Documents(EVEN) & mb.masks.Causal(),
}


def seen(mask, length):
    """Return a bool [S, S] by the definition of each mask."""
    t = torch.arange(length)
    gap, bounds = t[:, None] - t, torch.tensor(EVEN if mask == "even" else BOUNDS)
    document = torch.searchsorted(bounds, t, right=True)
    return {
        "causal": gap >= 0,
        "full": gap > -length,
        "window": (gap >= 0) & (gap <= 6),
    }.get(mask, (gap >= 0) & (document[:, None] == document))


def layout_of(name, ranks):
    if name == "balanced":
        return mb.layout.make(name, cp_size=ranks, cu_seqlens=BOUNDS)
    return mb.layout.make(name, cp_size=ranks)


def index_tensors(rule, length, seed=0, equal=False, dtype=torch.float64):
    """Return index_q, index_k and weights or None; with `equal` most scores are equal integers."""
    make = torch.Generator().manual_seed(seed)
    chosen, heads, key_heads = RULES[rule]
    sizes = [(heads, D), (key_heads, D), (heads,)]
    found = [torch.randn(length, B, *size, generator=make, dtype=dtype) for size in sizes]
    if equal:
        found = [x.round().clamp(-1, 1) for x in found]
    return found if chosen.weighted else [*found[:2], None]


def shards(x, layout):
    if x is None:
        return None
    return [mb.shard(x, layout, rank).detach() for rank in range(layout.cp_size)]


def select(index, layout, **named):
    groups = named.pop("groups", None) or in_process.groups(intra=layout.cp_size)
    arguments = [shards(x, layout) for x in index]
    return in_process.select(*arguments, groups=groups, layout=layout, **named)


def ids_of(selections, layout):
    return mb.unshard([each.ids for each in selections], layout)


def listed(ids):
    """Return the units of each row in the format of `sparse_oracle.chosen`."""
    return [[[u for u in row if u >= 0] for row in t.flatten(0, 1).tolist()] for t in ids]


@dataclass(frozen=True)
class Case:
    rule: str
    ranks: int
    layout: str = "zigzag"
    mask: str = "causal"
    algorithm: str = "burst"
    top_k: int = 5
    equal: bool = False


CASES = [
    *(Case("dsa", ranks, name, algorithm=algorithm, equal=ranks == 3)
      for ranks, algorithm in ((1, "burst"), (2, "all_gather"), (3, "ring"), (4, "multicast"),
                               (8, "burst"))
      for name in ("zigzag", "contiguous", "striped")),
    *(Case("dsa", ranks, "balanced", "documents", algorithm)
      for ranks, algorithm in ((2, "burst"), (3, "all_gather"), (4, "prefetch"))),
    *(Case("dsa", ranks, "zigzag", "window", top_k=top_k)
      for ranks in (2, 4) for top_k in (2, 100)),
    Case("dsa", 3, "contiguous", "full", "double_ring", equal=True),
    *(Case(rule, ranks, name, mask, algorithm, top_k=3, equal=equal)
      for rule in ("qsa", "moba", "msa")
      for ranks, name, mask, algorithm, equal in (
          (1, "zigzag", "causal", "burst", False), (2, "zigzag", "even", "all_gather", True),
          (3, "zigzag", "causal", "burst", True), (4, "contiguous", "even", "ring", False))),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, vars(case).values())))
def test_equal_to_dense_matrices(case):
    """Units, outputs and gradients of both kernels equal dense matrices, with shared heads."""
    length, layout = 48, layout_of(case.layout, case.ranks)
    rule, *_ = RULES[case.rule]
    groups = in_process.groups(intra=case.ranks)
    index = index_tensors(case.rule, length, equal=case.equal)
    named = {"mask": MASKS[case.mask], "algorithm": case.algorithm, "groups": groups}
    found = select(index, layout, rule=rule, top_k=case.top_k, **named)
    shown = seen(case.mask, length)
    scores = sparse_oracle.index_scores(case.rule, rule.block, *index)
    wanted = sparse_oracle.chosen(scores, shown, rule.block, case.top_k, rule.own)
    ids = ids_of(found, layout)
    assert listed(ids) == wanted
    assert all(ids.flatten(0, 2)[n].tolist()[len(row):] == [-1] * (case.top_k - len(row))
               for n, row in enumerate(row for t in wanted for row in t))  # fmt: skip
    assert torch.equal(found[0].counts, (found[0].ids >= 0).sum(-1).int())

    make = torch.Generator().manual_seed(1)
    sizes = [(4, D), (2, D), (2, W), (4, W)]
    q, k, v, dout = (
        torch.randn(length, B, *size, generator=make, dtype=torch.float64) for size in sizes
    )
    sink = torch.randn(4, generator=make, dtype=torch.float64).requires_grad_()
    leaves = [x.requires_grad_() for x in (q, k, v)] + [sink]
    hidden = ~sparse_oracle.table(wanted, shown, rule.block, B, 4)
    out, _ = sparse_oracle.attention(q, k, v, hidden, D**-0.5, sink)
    grads = torch.autograd.grad(out, leaves, dout)
    for kernel in ("reference", "aten"):
        mine = [[x.requires_grad_() for x in shards(t, layout)] for t in (q, k, v)]
        again = sink.detach().clone().requires_grad_()
        outs = in_process.sparse_attention(
            *mine, found, sink=again, kernel=kernel, groups=groups, algorithm=case.algorithm
        )
        close(mb.unshard(outs, layout), out)
        torch.autograd.backward(outs, shards(dout, layout))
        for t, grad in zip(mine, grads, strict=False):
            close(mb.unshard([x.grad for x in t], layout), grad)
        close(again.grad, grads[3])


@pytest.mark.parametrize(("most", "rule"), [(1, "dsa"), (1 << 12, "qsa")])
def test_equal_where_few_rows_are_computed_at_a_time(most, rule, monkeypatch):
    """Tiles of one row, and tiles that do not divide the rows."""
    monkeypatch.setattr(pairs, "TILE", most)
    monkeypatch.setitem(kernels.BYTES, "cpu", 4 * most)
    test_equal_to_dense_matrices(Case(rule, 2, top_k=3))


def close(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("algorithm", ["multicast", "prefetch"])
def test_what_crosses_between_nodes_is_whole_blocks(algorithm):
    """With documents that begin at blocks only visible rows are sent, as whole blocks."""
    length, layout = 48, layout_of("contiguous", 4)
    groups, mask = in_process.groups(inter=2, intra=2), mb.masks.Documents([0, 12, 28, 48])
    index, rule = index_tensors("qsa", length), rules.Qsa(block=4)
    named = {"rule": rule, "top_k": 2, "mask": mask & mb.masks.Causal()}
    found = select(index, layout, groups=groups, algorithm=algorithm, **named)
    t = torch.arange(length)
    document = torch.searchsorted(torch.tensor([0, 12, 28, 48]), t, right=True)
    shown = (t[:, None] >= t) & (document[:, None] == document)
    scores = sparse_oracle.index_scores("qsa", 4, *index)
    assert listed(ids_of(found, layout)) == sparse_oracle.chosen(scores, shown, 4, 2, True)


@pytest.mark.parametrize("mask", ["causal", "full", "even"])
@pytest.mark.parametrize("means", [1, 2, 4])
def test_blocks_by_compressed_attention(mask, means):
    """Rule nsa: softmax over visible means, and the first, own and previous block always."""
    length, rule = 48, rules.Nsa(block=4, means=means)
    make = torch.Generator().manual_seed(0)
    q, k = (torch.randn(length, B, n, D, generator=make, dtype=torch.float64) for n in (4, 2))
    shown, ids = seen(mask, length), []
    scores = sparse_oracle.compressed_scores(q, k, 4, means, shown)
    wanted = sparse_oracle.chosen(scores, shown, 4, 5, True, True, 1)
    for ranks, algorithm in ((1, "burst"), (2, "ring"), (3, "all_gather")):
        layout = layout_of("zigzag" if ranks < 3 else "contiguous", ranks)
        named = {"top_k": 5, "mask": MASKS[mask], "algorithm": algorithm}
        ids.append(ids_of(select([q, k, None], layout, rule=rule, **named), layout))
        assert listed(ids[-1]) == wanted
    x = [t.float() for t in (q, k)]
    layouts = [layout_of("contiguous", ranks) for ranks in (1, 2, 4)]
    named = {"rule": rule, "top_k": 4, "mask": MASKS[mask]}
    ids = [ids_of(select([*x, None], layout, **named), layout) for layout in layouts]
    assert all(torch.equal(ids[0], other) for other in ids[1:])


@pytest.mark.parametrize(
    ("rule", "row"), [("qsa", 2 / 4), ("moba", 2 / 4), ("msa", 1), ("nsa", 2 / 4)]
)
def test_means_travel_instead_of_keys(rule, row):
    """An index key number has 2 bytes and a mean 4, and there is one mean per block of 4."""
    length, layout, groups = 64, layout_of("contiguous", 2), in_process.groups(intra=2)
    made = {"nsa": rules.Nsa(block=4, means=1)}.get(rule) or RULES.get(rule, (None,))[0]
    index = index_tensors("msa" if rule == "nsa" else rule, length, dtype=torch.bfloat16)
    select(index, layout, rule=made, top_k=3, groups=groups)
    walks = 2 if rule == "nsa" else 1
    assert groups.counters.intra == walks * row * length // 2 * B * index[1].shape[2] * D * 2


@pytest.mark.parametrize("ranks", [1, 2])
def test_infinite_scores_displace_nothing(ranks):
    """The own block and, with enough room, other visible blocks stay selected."""
    inf, layout = float("inf"), layout_of("contiguous", ranks)
    for keys in ([inf, inf, 1, 1, 2, 2, 0, 0], [inf - inf, 1, 1, 1, 2, 2, 0, 0],
                 [1, 1, -inf, 0, 2, 2, 0, 0]):  # fmt: skip
        index = [torch.ones(8, 1, 1, 1), torch.tensor(keys)[:, None, None, None], None]
        last = [
            ids_of(select(index, layout, rule=rules.Moba(block=2), top_k=n), layout)[-1].flatten()
            for n in (1, 4)
        ]
        assert [each.tolist() for each in last] == [[3], [0, 1, 2, 3]]


def test_what_is_not_a_number_ranks_last():
    keys = torch.tensor([float("nan"), 0, 1, 1, -2, -2, 0, 0])[:, None, None, None]
    index = [torch.ones(8, 1, 1, 1), keys, None]
    ids = ids_of(select(index, layout_of("contiguous", 2), rule=rules.Moba(block=2), top_k=3),
                 layout_of("contiguous", 2))  # fmt: skip
    assert ids[-1].flatten().tolist() == [1, 2, 3]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_one_latent_for_all_heads(ranks):
    """Values are the first columns of the keys, are sent once, and add to the gradient of keys."""
    length, width, layout = 32, 5, layout_of("contiguous", ranks)
    groups = in_process.groups(intra=ranks)
    found = select(index_tensors("dsa", length), layout, rule="dsa", top_k=6, groups=groups)
    make = torch.Generator().manual_seed(1)
    sizes = [(4, 7), (1, 7), (4, width)]
    q, k, dout = (
        torch.randn(length, B, *size, generator=make, dtype=torch.float64).requires_grad_()
        for size in sizes
    )
    shown = seen("causal", length)
    hidden = ~sparse_oracle.table(listed(ids_of(found, layout)), shown, 1, B, 4)
    out, _ = sparse_oracle.attention(q, k, k[..., :width], hidden, 0.3)
    grads = torch.autograd.grad(out, (q, k), dout.detach())
    for kernel in ("reference", "aten"):
        mine = [[x.requires_grad_() for x in shards(t, layout)] for t in (q, k)]
        before = groups.counters.intra
        outs = in_process.sparse_attention(
            *mine, None, found, value_width=width, scale=0.3, kernel=kernel, groups=groups
        )
        # the first rank sends its own rows, once
        assert groups.counters.intra - before == (ranks > 1) * (length // ranks) * B * 7 * 8
        close(mb.unshard(outs, layout), out)
        torch.autograd.backward(outs, shards(dout, layout))
        for t, grad in zip(mine, grads, strict=True):
            close(mb.unshard([x.grad for x in t], layout), grad)


@pytest.mark.parametrize("rule", RULES)
def test_the_selection_is_the_same_on_any_number_of_ranks(rule):
    """In float32 the ids are equal at 1, 2, 4 and 8 ranks."""
    index = index_tensors(rule, 256, dtype=torch.float32)
    ids = []
    for ranks in (1, 2, 4, 8):
        layout = layout_of("zigzag", ranks)
        ids.append(ids_of(select(index, layout, rule=RULES[rule][0], top_k=7), layout))
    assert all(torch.equal(ids[0], other) for other in ids[1:])


@pytest.mark.parametrize("layout", ["zigzag", "striped"])
def test_equal_keys_are_told_apart_by_position_alone(layout):
    """Among equal keys the lower positions are selected, even if chunks have odd lengths.

    In float32, with heads of the usual width and repeated keys, ids are equal at 1, 2 and 8 ranks.
    """
    make, length = torch.Generator().manual_seed(0), 16 * 7
    which = torch.randint(0, 20, (length,), generator=make)
    k = torch.randn(20, 128, generator=make)[which][:, None, None]
    q, weights = (torch.randn(length, 1, 32, *size, generator=make) for size in ((128,), ()))
    ids = []
    for ranks in (1, 2, 8):
        place = layout_of(layout, ranks)
        ids.append(ids_of(select([q, k, weights], place, rule="dsa", top_k=9), place))
    assert all(torch.equal(ids[0], other) for other in ids[1:])
    for t, row in enumerate(ids[0][:, 0, 0].tolist()):
        taken, cut = {*row}, [u for u in row if any(which[s] == which[u] for s in range(t + 1)
                                                     if s not in row)]  # fmt: skip
        assert len({int(which[u]) for u in cut}) <= 1  # one kind of key is taken in part
        assert all(s in taken for u in cut for s in range(u) if which[s] == which[u])


def test_a_rule_of_your_own():
    """A user's rule that selects the earliest keys."""

    class First:
        block, own, weighted = 1, False, False

        def selections(self, heads, key_heads):
            return 1

        def scores(self, q, k, weights):
            return torch.zeros(*q.shape[:2], 1, len(k), dtype=q.dtype)

    layout = layout_of("zigzag", 2)
    index = [*index_tensors("dsa", 32)[:2], None]
    ids = ids_of(select(index, layout, rule=First(), top_k=3), layout)
    assert ids[:, 0, 0].tolist() == [[0, -1, -1], [0, 1, -1], *[[0, 1, 2]] * 30]


def test_layers_take_the_plan_of_attention():
    """Without a collective the results equal those of the keywords."""
    length, layout = 32, layout_of("zigzag", 2)
    groups = in_process.groups(intra=2)
    q, k, v = (
        shards(torch.randn(length, B, heads, D, dtype=torch.float64), layout) for heads in (4, 2, 2)
    )
    plan = in_process.prepare(q, k, v, groups=groups, layout=layout)
    index = index_tensors("dsa", length)
    wanted = select(index, layout, rule="dsa", top_k=4, groups=groups)
    out = in_process.sparse_attention(q, k, v, wanted, groups=groups)
    gather, groups.ranks[0].__class__.gather = groups.ranks[0].__class__.gather, None
    try:
        for layer in range(2):
            arguments = [shards(x, layout) for x in index]
            found = in_process.select(*arguments, rule="dsa", top_k=4, plan=plan, label=layer)
            outs = in_process.sparse_attention(q, k, v, found, plan=plan, label=layer)
            assert all(map(torch.equal, outs, out))
    finally:
        groups.ranks[0].__class__.gather = gather
    assert all(torch.equal(a.ids, b.ids) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("keep", [0.5, 1.0])
def test_a_checkpoint_keeps_what_it_promises(keep, monkeypatch):
    """The store keeps selection, loss and the rows of attention; other rows are recomputed.

    Gradients have the same bits as without a checkpoint.
    """
    groups, length, layout = in_process.groups(intra=2), 32, layout_of("zigzag", 2)
    index = [shards(x, layout) for x in index_tensors("dsa", length)]
    q, k = (shards(torch.randn(length, B, n, 7, dtype=torch.float64), layout) for n in (4, 1))
    leaves = [x.requires_grad_() for shard in (*index, q, k) for x in shard]
    plan = in_process.prepare(q, k, k, groups=groups, layout=layout, store=keep)
    walks = []
    monkeypatch.setattr(ring, "run", lambda rings, run=ring.run: (
        walks.append(rings[0].rank_pass.name), run(rings)))  # fmt: skip

    def layer(plan, *arguments):
        *index, q, k = arguments
        found = mb.select(*index, rule="dsa", top_k=4, plan=plan, label=0)
        out, lse = mb.sparse_attention(
            q, k, None, found, value_width=5, plan=plan, label=0, return_lse=True
        )
        return out, mb.indexer_loss(*index, q, k, found, rule="dsa", plan=plan, label=0, lse=lse)

    arguments = plan.ranks, *index, q, k
    wanted = [x for each in in_process.on_ranks(groups, layer, *arguments) for x in each]
    alone = torch.autograd.grad(sum(x.square().sum() for x in wanted), leaves)
    before, walks[:] = len(walks), []
    found = [
        x for each in in_process.checkpoint(groups, layer, *arguments, keep=keep) for x in each
    ]
    assert all(map(torch.equal, found, wanted))
    forward = len(walks)
    again = torch.autograd.grad(sum(x.square().sum() for x in found), leaves)
    assert all(map(torch.equal, alone, again))
    # of two ranks: selection, attention, probabilities, scores; backward of two
    assert (before, forward) == (12, 8)
    assert len(walks) - forward == 6  # the rest of attention, and backward


def test_a_checkpoint_gives_no_layer_what_another_selected():
    index, order = index_tensors("dsa", 16), []
    leaf = torch.ones(16, requires_grad=True)
    plan = mb.prepare(index[0], index[1], index[1], groups=mb.Groups.single(), store=1.0)

    def layers(x):
        order.append(not order)
        for label in (0, 1) if order[-1] else (1, 0):
            mb.select(*index, rule="dsa", top_k=4, plan=plan, label=label)
        return x.square()

    with pytest.raises(ValueError, match="differs from the first run"):
        mb.checkpoint(layers, leaf, keep=1.0).sum().backward()


def test_what_the_store_has_must_be_planned():
    index = index_tensors("dsa", 16)
    q = index[0].requires_grad_()
    plan = mb.prepare(q, q, q, groups=mb.Groups.single())
    with pytest.raises(ValueError, match=r"use mb.prepare\(..., store=0.5\)"):
        mb.checkpoint(lambda _: mb.select(*index, rule="dsa", top_k=4, plan=plan), q, keep=0.5)


def test_lse_is_that_of_all_rows():
    length, layout, groups = 32, layout_of("zigzag", 2), in_process.groups(intra=2)
    found = select(index_tensors("dsa", length), layout, rule="dsa", top_k=6, groups=groups)
    q, k = (torch.randn(length, B, n, D, dtype=torch.float64) for n in (4, 2))
    sink = torch.randn(4, dtype=torch.float64)
    shown = sparse_oracle.table(listed(ids_of(found, layout)), seen("causal", length), 1, B, 4)
    scores = torch.einsum("sbhd,tbhd->sbht", q, k.repeat_interleave(2, 2)) * D**-0.5
    wanted = scores.masked_fill(~shown, float("-inf")).logsumexp(-1)
    mine = [shards(x, layout) for x in (q, k, k)]
    for one, right in ((None, wanted), (sink, torch.logaddexp(wanted, sink))):
        _, lse = in_process.sparse_attention(*mine, found, sink=one, groups=groups, return_lse=True)
        close(mb.unshard(lse, layout), right)
        assert not lse[0].requires_grad
