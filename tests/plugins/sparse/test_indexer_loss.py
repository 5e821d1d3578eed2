"""The indexer's loss and its gradients against the formula, written by hand, in float64."""

import weakref

import pytest
import sparse_oracle
import torch
import torch.distributed as dist

import megatron_burst as mb
from megatron_burst.plugins.sparse import kernels, pairs, rules
from megatron_burst.plugins.testing import in_process

S, B, D, TOP_K = 32, 2, 4, 5
RULES = {"dsa": (rules.Dsa(), 3, 1), "qsa": (rules.Qsa(block=4), 3, 1),
         "msa": (rules.Msa(block=2), 4, 2)}  # fmt: skip
CAUSAL = torch.ones(S, S).tril().bool()
# Real ends and padded ones: padding begins within a block, and attends to nothing.
PADDED = mb.masks.Documents([0, 7, 8, 21, 24, 31, 32], padding=(1, 3, 5)) & mb.masks.Causal()
OF_POSITIONS = torch.tensor([0] * 7 + [-1] + [1] * 13 + [-2] * 3 + [2] * 7 + [-3])


def tensors(rule, heads=4):
    """Return index_q, index_k, index_weights or None, q, k and weights of the loss."""
    make = torch.Generator().manual_seed(0)
    chosen, i, n = RULES[rule]
    sizes = (i, D), (n, D), (i,), (4, D), (2, D), (chosen.selections(i, n),)
    found = [torch.randn(S, B, *size, generator=make, dtype=torch.float64) for size in sizes]
    return [x if chosen.weighted or n != 2 else None for n, x in enumerate(found)]


def by_hand(rule, given, seen=CAUSAL):
    """Return the loss [S, b, H] of every row, and gradients of the index tensors by autograd."""
    *index, q, k, outer = given
    chosen, *_ = RULES[rule]
    block = chosen.block
    index = [None if x is None else x.detach().requires_grad_() for x in index]
    scores = sparse_oracle.index_scores(rule, block, *index)
    units = sparse_oracle.chosen(scores.detach(), seen, block, TOP_K, chosen.own)
    hidden = ~sparse_oracle.table(units, seen, block, B, 4)
    _, p = sparse_oracle.attention(q, k, k, hidden, D**-0.5)
    loss = sparse_oracle.indexer_loss(scores, units, p, block)
    leaves = [x for x in index if x is not None]
    return loss.detach(), torch.autograd.grad((loss * outer).sum(), leaves)


def close(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)


def equal_to_the_formula(rule, ranks, layout, mask, algorithm="burst"):
    given, seen = tensors(rule), CAUSAL
    if mask is PADDED:
        one = OF_POSITIONS[:, None]
        seen = CAUSAL & (one == OF_POSITIONS) & (one >= 0)
    loss, grads = by_hand(rule, given, seen)
    layout = mb.layout.make(layout, cp_size=ranks)
    by = {"groups": in_process.groups(intra=ranks), "algorithm": algorithm}
    shards = [None if x is None else [mb.shard(x, layout, r).requires_grad_() for r in range(ranks)]
              for x in given]  # fmt: skip
    *index, q, k, outer = shards
    chosen = RULES[rule][0]
    found = in_process.select(*index, rule=chosen, top_k=TOP_K, layout=layout, mask=mask, **by)
    losses = in_process.indexer_loss(*index, q, k, found, rule=chosen, **by)
    close(mb.unshard(losses, layout).detach(), loss)
    torch.autograd.backward(losses, [x.detach() for x in outer])
    for own, grad in zip([x for x in index if x is not None], grads, strict=True):
        close(mb.unshard([x.grad for x in own], layout), grad)
    assert all(x.grad is None for x in [*q, *k])


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    ("ranks", "layout", "mask"),
    [(1, "zigzag", None), (2, "zigzag", None), (4, "contiguous", None), (2, "zigzag", PADDED)],
)
def test_equal_to_the_formula(rule, ranks, layout, mask):
    equal_to_the_formula(rule, ranks, layout, mask)


@pytest.mark.parametrize("most", [1, 1 << 9])
def test_equal_where_few_rows_are_computed_at_a_time(most, monkeypatch):
    monkeypatch.setattr(pairs, "TILE", most)
    monkeypatch.setitem(kernels.BYTES, "cpu", 4 * most)
    equal_to_the_formula("dsa", 2, "zigzag", None)


def test_equal_where_rows_of_keys_travel_in_another_order():
    """Only the visible rows of several documents are sent."""
    equal_to_the_formula("dsa", 4, "striped", PADDED, "ring")


def of_half_the_heads(alone, rank):
    """Return loss and gradients over half of the heads of all rows, on one of two ranks.

    Each rank holds one head. alone is the group of this rank.
    """
    *index, q, k, outer = tensors("dsa")
    index = [x.requires_grad_() for x in index]
    groups = mb.Groups.flat(alone)
    found = mb.select(*index, rule="dsa", top_k=TOP_K, groups=groups)
    half = q[:, :, 2 * rank : 2 * rank + 2], k[:, :, rank : rank + 1]
    loss = mb.indexer_loss(
        *index, *half, found, rule="dsa", groups=groups, tp_group=dist.group.WORLD
    )
    loss.backward(outer)
    return loss.detach(), [x.grad for x in index]


@pytest.fixture
def alone():
    """Return a process group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_what_the_heads_of_other_ranks_look_at_is_added(alone, monkeypatch):
    """A stand-in replaces the sum over ranks."""
    other = []
    monkeypatch.setattr(dist, "all_reduce", lambda total, group: other.append(total.clone()))
    of_half_the_heads(alone, 1)
    monkeypatch.setattr(dist, "all_reduce", lambda total, group: total.add_(other[0]))
    own, of_index = of_half_the_heads(alone, 0)
    loss, grads = by_hand("dsa", tensors("dsa"))
    close(own, loss)
    for grad, wanted in zip(of_index, grads, strict=True):
        close(grad, wanted)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_keys_that_the_mask_hides_take_no_part(ranks):
    """In a selection made by hand the last key is hidden from all rows but the last."""
    *index, q, k, outer = tensors("dsa")
    layout, groups = mb.layout.make("contiguous", cp_size=ranks), in_process.groups(intra=ranks)
    names, length = [0, 1, S - 1], torch.arange(S)
    units = [[[u for u in names if u <= t]] * B for t in length.tolist()]
    leaves = [x.requires_grad_() for x in index]
    hidden = ~sparse_oracle.table(units, CAUSAL, 1, B, 4)
    _, p = sparse_oracle.attention(q, k, k, hidden, D**-0.5)
    loss = sparse_oracle.indexer_loss(sparse_oracle.index_scores("dsa", 1, *leaves), units, p, 1)
    grads = torch.autograd.grad((loss * outer).sum(), leaves)
    *index, q, k, outer = ([mb.shard(x.detach(), layout, r) for r in range(ranks)]
                           for x in (*leaves, q, k, outer))  # fmt: skip
    ids = torch.tensor(names, dtype=torch.int32).expand(S // ranks, B, 1, 3).contiguous()
    found = [mb.Selection(ids, layout, mb.masks.Causal())] * ranks
    index = [[x.requires_grad_() for x in shard] for shard in index]
    losses = in_process.indexer_loss(*index, q, k, found, rule="dsa", groups=groups)
    close(mb.unshard(losses, layout).detach(), loss.detach())
    torch.autograd.backward(losses, outer)
    for own, grad in zip(index, grads, strict=True):
        close(mb.unshard([x.grad for x in own], layout), grad)


def test_the_graph_holds_nothing_of_attention():
    *index, q, k, _ = ([x] for x in tensors("dsa"))
    index = [[x.requires_grad_() for x in shard] for shard in index]
    groups, gone = in_process.groups(intra=1), [weakref.ref(q[0]), weakref.ref(k[0])]
    found = in_process.select(*index, rule="dsa", top_k=TOP_K, groups=groups)
    loss = in_process.indexer_loss(*index, q, k, found, rule="dsa", groups=groups)[0]
    del q, k
    assert not any(ref() is not None for ref in gone)
    loss.sum().backward()


def test_what_is_refused():
    groups = in_process.groups(intra=1)
    *index, q, k, _ = ([x] for x in tensors("dsa"))
    found = in_process.select(*index, rule="dsa", top_k=TOP_K, groups=groups)
    for words, named in {
        "requires ids with .* and blocks of 4, got": {"rule": "qsa"},
        "rule must be one of": {"rule": 3},
        "rule Nsa has no indexer loss": {"rule": "nsa"},
        "tp_group must be a process group": {"tp_group": 3},
        "lse must be .* as mb.sparse_attention": {"lse": [q[0][..., :1]]},
    }.items():
        with pytest.raises(ValueError, match=words):
            in_process.indexer_loss(
                *index, q, k, found, **{"rule": "dsa", "groups": groups} | named
            )
    with pytest.raises(ValueError, match="index_weights: rule Dsa requires a tensor"):
        in_process.indexer_loss(*index[:2], None, q, k, found, rule="dsa", groups=groups)


def on_one_of_two_ranks():
    rank = dist.get_rank()
    return of_half_the_heads([dist.new_group([r]) for r in range(2)][rank], rank)


def test_ranks_of_tensor_parallelism_sum_their_heads(ranks):
    loss, grads = by_hand("dsa", tensors("dsa"))
    for own, of_index in ranks(2).run(on_one_of_two_ranks):
        close(own, loss)
        for grad, wanted in zip(of_index, grads, strict=True):
            close(grad, wanted)
