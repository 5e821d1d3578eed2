"""Selections among compressed keys, which are a sequence of their own, in float64.

The compressed branch of DeepSeek-V4: an indexer selects compressed keys, and one softmax covers a
window of the sequence, the selected compressed keys and a sink. Oracles are dense and handwritten.
"""

import math

import numpy as np
import oracle
import pytest
import sparse_oracle
import torch

import megatron_burst as mb
from megatron_burst.plugins.sparse.attention import selected_plan
from megatron_burst.plugins.testing import in_process

RATIO, TOP_K, WINDOW, B, HEADS, D, W = 4, 3, 5, 2, 4, 6, 3
BOUNDS = [0, 13, 13, 40, 48]
KEYS = [0, 3, 3, 10, 12]  # one per complete window, and two that are padding


def keys_seen(packed, length):
    """bool [S, S / RATIO]: which compressed keys each query sees."""
    seen = torch.zeros(length, length // RATIO, dtype=torch.bool)
    bounds, keys = (BOUNDS, KEYS) if packed else ([0, length], [0, length // RATIO])
    for low, high, first, last in zip(bounds, bounds[1:], keys, keys[1:], strict=False):
        for t in range(low, high):
            for w in range(last - first):
                seen[t, first + w] = (w + 1) * RATIO <= t - low + 1
    return seen


def window_seen(packed, length):
    t = torch.arange(length)
    gap = t[:, None] - t
    seen = (gap >= 0) & (gap < WINDOW)
    if packed:
        document = torch.searchsorted(torch.tensor(BOUNDS), t, right=True)
        seen &= document[:, None] == document
    return seen


def masks(packed):
    if not packed:
        return mb.masks.Window(WINDOW - 1, 0), mb.masks.Compressed(RATIO)
    documents = mb.masks.Documents(BOUNDS)
    compressed = mb.masks.Compressed(RATIO, cu_seqlens=BOUNDS, key_cu_seqlens=KEYS)
    return documents & mb.masks.Window(WINDOW - 1, 0), compressed


def selected_by_hand(scores, seen):
    """The ids of the best TOP_K visible keys of each query, ascending: [S, b] lists."""
    found = []
    for t in range(len(scores)):
        visible = [w for w in range(scores.shape[2]) if seen[t, w]]
        found.append([
            sorted(sorted(visible, key=lambda w, b=b, t=t: (-scores[t, b, w].item(), w))[:TOP_K])
            for b in range(scores.shape[1])
        ])  # fmt: skip
    return found


def split(x, layout, ranks):
    return [mb.shard(x.detach(), layout, rank).requires_grad_(x.requires_grad)
            for rank in range(ranks)]  # fmt: skip


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("ranks", "layout", "key_layout"),
    [
        (1, "zigzag", "contiguous"), (2, "zigzag", "zigzag"), (2, "contiguous", "striped"),
        (3, "striped", "contiguous"), (4, "balanced", "contiguous"),
    ],
)  # fmt: skip
def test_one_softmax_over_window_selected_keys_and_sink(ranks, layout, key_layout, packed):
    length = 48
    torch.manual_seed(ranks)
    double = {"dtype": torch.float64, "requires_grad": True}
    q, k, v, c, u = (
        torch.randn(rows, B, n, width, **double)
        for rows, n, width in (
            (length, HEADS, D), (length, 1, D), (length, 1, W), (length // RATIO, 1, D),
            (length // RATIO, 1, W),
        )
    )  # fmt: skip
    index_q, index_k = torch.randn(length, B, 2, 4).double(), torch.randn(12, B, 1, 4).double()
    weights, sink = torch.rand(length, B, 2).double(), torch.randn(HEADS, **double)
    dout = torch.randn(length, B, HEADS, W).double()
    seen, near = keys_seen(packed, length), window_seen(packed, length)

    # By hand: scores, selection, and one softmax over the union.
    dots = torch.einsum("sbhd,wbd->sbhw", index_q, index_k[:, :, 0])
    scores = (weights.unsqueeze(-1) * torch.relu(dots)).sum(2)
    chosen = selected_by_hand(scores, seen)
    table = torch.zeros(length, B, length + length // RATIO, dtype=torch.bool)
    table[:, :, :length] = near[:, None]
    for t in range(length):
        for b in range(B):
            table[t, b, [length + w for w in chosen[t][b]]] = True
    keys, values = torch.cat([k, c]), torch.cat([v, u])
    hidden = ~table[:, :, None].expand(-1, -1, HEADS, -1)
    wanted, _ = sparse_oracle.attention(q, keys, values, hidden, 1 / math.sqrt(D), sink)
    expected = torch.autograd.grad(wanted, (q, k, v, c, u, sink), dout)

    groups = in_process.groups(intra=ranks)
    if layout == "balanced":
        layout = mb.layout.make(layout, cp_size=ranks, cu_seqlens=BOUNDS)
    else:
        layout = mb.layout.make(layout, cp_size=ranks)
    key_layout = mb.layout.make(key_layout, cp_size=ranks)
    qs, ks, vs = (split(x, layout, ranks) for x in (q, k, v))
    cs, us = (split(x, key_layout, ranks) for x in (c, u))
    own = sink.detach().clone().requires_grad_()
    window_mask, compressed_mask = masks(packed)
    window = in_process.prepare(qs, ks, vs, groups=groups, layout=layout, mask=window_mask)
    windows = in_process.prepare(
        qs, cs, us, groups=groups, layout=layout, key_layout=key_layout, mask=compressed_mask
    )
    selection = in_process.select(
        *(split(x, place, ranks) for x, place in ((index_q, layout), (index_k, key_layout))),
        split(weights, layout, ranks), rule="dsa", top_k=TOP_K, plan=windows,
    )  # fmt: skip
    for rank in range(ranks):
        for row, t in enumerate(layout.positions(rank, length)):
            for b in range(B):
                ids = [i for i in selection[rank].ids[row, b, 0].tolist() if i >= 0]
                assert ids == chosen[t][b]

    def joint(q, k, v, c, u, sink, window, windows, selection):
        made = selected_plan(q, c, u, selection, plan=windows, sink=sink)
        return mb.joint_attention(q, [(k, v, window), (c, u, made)], sink=sink)

    outs = in_process.on_ranks(
        groups, joint, qs, ks, vs, cs, us, [own] * ranks, window.ranks, windows.ranks, selection
    )
    torch.autograd.backward(outs, split(dout, layout, ranks))
    got = mb.unshard([x.detach() for x in outs], layout)
    assert oracle.worst(got, wanted.detach()) < 1e-10
    for shards, place, gradient in zip(
        (qs, ks, vs, cs, us), (layout,) * 3 + (key_layout,) * 2, expected, strict=False
    ):
        assert oracle.worst(mb.unshard([x.grad for x in shards], place), gradient) < 1e-10
    assert oracle.worst(own.grad, expected[-1]) < 1e-10


def test_sparse_attention_and_indexer_loss_over_other_keys():
    """The selected keys alone, with the plan and with the selection's own layouts."""
    length, ranks = 32, 2
    torch.manual_seed(0)
    groups = in_process.groups(intra=ranks)
    layout, key_layout = (mb.layout.make(n, cp_size=ranks) for n in ("zigzag", "contiguous"))
    q = torch.randn(length, B, HEADS, D, dtype=torch.float64)
    c, u = (torch.randn(length // RATIO, B, 1, n, dtype=torch.float64) for n in (D, W))
    index_q, index_k = torch.randn(length, B, 2, 4).double(), torch.randn(8, B, 1, 4).double()
    weights = torch.rand(length, B, 2).double()
    seen = keys_seen(False, length)
    scores = sparse_oracle.index_scores("dsa", 1, index_q, index_k, weights)
    chosen = [[row[b] for b in range(B)] for row in selected_by_hand(scores[:, :, 0], seen)]
    kept = torch.zeros(length, B, HEADS, length // RATIO, dtype=torch.bool)
    for t, row in enumerate(chosen):
        for b, ids in enumerate(row):
            kept[t, b, :, ids] = True
    wanted, p = sparse_oracle.attention(q, c, u, ~kept, 1 / math.sqrt(D))
    loss = sparse_oracle.indexer_loss(scores, chosen, p, 1)

    qs, cs, us = (split(x, at, ranks) for x, at in ((q, layout), (c, key_layout), (u, key_layout)))
    index = split(index_q, layout, ranks), split(index_k, key_layout, ranks)
    plan = in_process.prepare(
        qs, cs, us, groups=groups, layout=layout, key_layout=key_layout,
        mask=mb.masks.Compressed(RATIO),
    )  # fmt: skip
    weights = split(weights, layout, ranks)
    selection = in_process.select(*index, weights, rule="dsa", top_k=TOP_K, plan=plan)
    for keywords in ({"plan": plan}, {"groups": groups}):
        outs = in_process.sparse_attention(qs, cs, us, selection, **keywords)
        assert oracle.worst(mb.unshard(outs, layout), wanted) < 1e-10
    got = in_process.indexer_loss(*index, weights, qs, cs, selection, rule="dsa", plan=plan)
    assert oracle.worst(mb.unshard(got, layout), loss) < 1e-10


@pytest.mark.parametrize(("rule", "error"), [("qsa", "rule: blocks of 4 keys need keys of the")])
def test_rules_with_blocks_are_refused(rule, error):
    groups = mb.Groups.single()
    q, k = torch.randn(8, 1, 2, 4), torch.randn(2, 1, 1, 4)
    plan = mb.prepare(q, k, k, groups=groups, key_layout="contiguous", mask=mb.masks.Compressed(4))
    with pytest.raises(ValueError, match=error):
        mb.select(q, k, torch.randn(8, 1, 2), rule=rule, top_k=1, plan=plan)
    replicated = mb.prepare(
        q, k, k, groups=groups, key_layout="replicated", mask=mb.masks.Compressed(4)
    )
    with pytest.raises(ValueError, match="needs keys that are split over ranks"):
        mb.select(q, k, torch.randn(8, 1, 2), rule="dsa", top_k=1, plan=replicated)


def test_intervals_of_queries_are_those_of_visible():
    q, k = np.arange(48), np.arange(12)
    for packed in (False, True):
        mask = masks(packed)[1]
        low, high = mask.keys_of_queries(q)
        seen = (k >= low[:, None]) & (k < high[:, None])
        assert (seen == keys_seen(packed, 48).numpy()).all()
    documents = mb.masks.Documents(BOUNDS, padding=[3], key_cu_seqlens=KEYS)
    low, high = documents.keys_of_queries(q)
    seen = (k >= low[:, None]) & (k < high[:, None])
    assert (seen == documents.visible(q[:, None], k[None])).all()
