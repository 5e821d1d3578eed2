"""Attention to keys of another sequence (`key_layout`) against the dense oracle, in float64.

Queries and keys have lengths, layouts and documents of their own. All ranks are in one process.
"""

import itertools
import random
import zlib

import nccl_rules
import numpy as np
import oracle
import pytest
import torch

import megatron_burst as mb
from megatron_burst.plugins.testing import in_process

TOLERANCE = 1e-10
RINGS = ("burst", "ring", "prefetch", "tile", "two_way", "token_ring", "all_gather", "multicast")
GRIDS = [(1, 1), (1, 2), (1, 3), (2, 2), (2, 4), (1, 8)]


def documents(rng, length, count):
    """Cumulative lengths of `count` documents, some of them empty."""
    return [0, *sorted(rng.randint(0, length) for _ in range(count - 1)), length]


def masks_of(rng, queries, keys):
    """A mask over (queries, keys), and a table of the visible pairs that is written by hand."""
    kind = rng.choice(["full", "causal", "window", "documents", "documents", "windows", "dense"])
    q, k = np.arange(queries)[:, None], np.arange(keys)[None]
    if kind == "full" or not keys:
        return mb.masks.Full(), np.ones((queries, keys), dtype=bool)
    if kind == "causal":
        return mb.masks.Causal(), k <= q
    if kind == "window":
        left, right = rng.randint(0, queries), rng.randint(0, keys)
        return mb.masks.Window(left, right), (k >= q - left) & (k <= q + right)
    if kind == "documents":
        count = rng.randint(1, 5)
        bounds, key_bounds = documents(rng, queries, count), documents(rng, keys, count)
        seen = np.zeros((queries, keys), dtype=bool)
        for rows, columns in zip(
            itertools.pairwise(bounds), itertools.pairwise(key_bounds), strict=True
        ):
            seen[slice(*rows), slice(*columns)] = True
        return mb.masks.Documents(bounds, key_cu_seqlens=key_bounds), seen
    if kind == "windows":
        stride = max(1, -(-queries // keys)) + rng.randint(0, 2)
        length = rng.choice([stride, stride, stride + 2])
        return mb.masks.Compressed(stride, length), k * stride + length - 1 <= q
    seen = np.random.default_rng(rng.randrange(1 << 30)).random((queries, keys)) < 0.4
    return rng.choice([Table, mb.masks.Dense])(seen), seen


class Table(mb.masks.Mask):
    """A mask of a user that reads a table, without `cover`."""

    def __init__(self, table):
        self.table = table

    def __repr__(self):
        return f"Table({zlib.crc32(self.table.tobytes())}, {self.table.shape})"

    def visible(self, q, k):
        return self.table[q, k]


def cut(x, positions):
    return [x[at].clone() for at in positions]


def positions_of(layout, ranks, length):
    if layout == "replicated" or isinstance(layout, mb.layout.Replicated):
        return [list(range(length)) for _ in range(ranks)]
    if not length:
        return [[] for _ in range(ranks)]
    if isinstance(layout, str):
        return oracle.permutation(layout, ranks, length)
    return [layout.positions(rank, length).tolist() for rank in range(ranks)]


def joined(parts, positions, like):
    out = torch.full_like(like, torch.nan)
    for part, at in zip(parts, positions, strict=True):
        out[at] = part.double()
    return out


def drawn_layout(rng, ranks, length, of_keys):
    names = ["contiguous", "striped"] + ["zigzag"] * (length % (2 * ranks) == 0)
    if of_keys:
        names += ["replicated", "replicated"]
    if length:
        names.append("balanced")
    name = rng.choice(names)
    if name == "balanced":
        bounds = documents(rng, length, rng.randint(1, 4))
        return mb.layout.make("balanced", cp_size=ranks, cu_seqlens=bounds)
    return name


def case(seed, grid):
    """Draw a call and compare its results with the oracle; return the plan of rank 0."""
    rng = random.Random(f"{seed} {grid}")
    inter, intra = grid
    ranks = inter * intra
    ulysses = rng.choice([1, 1, *[n for n in (2, 4) if intra % n == 0]])
    groups = in_process.groups(inter=inter, intra=intra, ulysses=ulysses)
    q_rows, k_rows = rng.choice([2, 4, 6]), rng.choice([0, 1, 2, 4, 8, 32])
    queries = q_rows * ranks
    layout = drawn_layout(rng, ranks, queries, of_keys=False)
    key_layout = drawn_layout(rng, ranks, k_rows * ranks, of_keys=True)
    keys = k_rows * (1 if key_layout == "replicated" else ranks)
    mask, seen = masks_of(rng, queries, keys)
    kv_heads = rng.choice([ulysses, 2 * ulysses])
    heads, batch = kv_heads * rng.choice([1, 3]), rng.choice([1, 2])
    d, w = rng.choice([4, 8]), rng.choice([4, 6])
    values_are_keys = seed % 3 == 2
    w = d if values_are_keys else w
    torch.manual_seed(seed)
    q, k, v = (
        torch.randn(rows, batch, n, width, dtype=torch.float64)
        for rows, n, width in ((queries, heads, d), (keys, kv_heads, d), (keys, kv_heads, w))
    )
    dout = torch.randn(queries, batch, heads, w, dtype=torch.float64)
    sink = torch.randn(heads, dtype=torch.float64) if rng.random() < 0.3 else None
    places = positions_of(layout, ranks, queries), positions_of(key_layout, ranks, keys)
    needs = rng.choice([(True, True, True)] * 3 + [(False, True, True), (True, False, False)])
    options = {
        "layout": layout, "key_layout": key_layout, "mask": mask,
        "algorithm": rng.choice([*RINGS, *["ulysses"] * (ulysses == ranks), "auto",
                                 *["hybrid"] * (ulysses > 1)]),
        "side": rng.choice(["auto", "kv", "query"]),
        "sequence_chunks": rng.choice([1, 1, 2]) if q_rows % 4 == 0 else 1,
        "kernel": rng.choice(["auto", "reference"]),
    }  # fmt: skip
    if rng.random() < 0.3 and kv_heads == 2 * ulysses:
        options["head_chunks"] = 2
    if values_are_keys:
        v, options["sequence_chunks"] = k, 1
    shards = [
        [x.requires_grad_(need) for x in cut(whole, at)]
        for whole, at, need in zip((q, k, v), (places[0], places[1], places[1]), needs, strict=True)
    ]
    if values_are_keys:
        shards[2] = None
    plans = in_process.prepare(*shards, groups=groups, sink=sink, **options)
    outs = [in_process.attention(*shards, plan=plans, sink=sink) for _ in range(2)]  # two in flight
    grads = cut(dout, places[0])
    for out in outs:
        torch.autograd.backward(out, grads)
    seen = torch.from_numpy(seen)
    wanted, _, *gradients = oracle.attention(q, k, v, dout, seen, sink=sink)
    assert oracle.worst(joined(outs[1], places[0], dout), wanted) < TOLERANCE
    if values_are_keys:
        shards, gradients = shards[:2], [gradients[0], gradients[1] + gradients[2]]
    for shard, place, gradient, whole, need in zip(
        shards, (places[0], places[1], places[1]), gradients, (q, k, v), needs, strict=False
    ):
        if not need:
            assert all(x.grad is None for x in shard)
            continue
        got = joined([x.grad for x in shard], place, whole)
        assert oracle.worst(got, 2 * gradient) < TOLERANCE
        if key_layout == "replicated" and whole is not q:
            assert all(torch.equal(x.grad, shard[0].grad) for x in shard)
    return plans


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("seed", range(12))
def test_equals_the_dense_oracle(seed, grid):
    case(seed, grid)


def joint_case(seed, grid):
    """Draw a joint call over two or three sets of keys and compare it with the oracle.

    Messages and kernels are replayed under NCCL's rules.
    """
    rng = random.Random(f"joint {seed} {grid}")
    inter, intra = grid
    ranks = inter * intra
    ulysses = rng.choice([1, 1, *[n for n in (2, 4) if intra % n == 0]])
    groups = in_process.groups(inter=inter, intra=intra, ulysses=ulysses)
    traces = nccl_rules.record(groups)
    queries = rng.choice([2, 4]) * ranks
    layout = drawn_layout(rng, ranks, queries, of_keys=False)
    kv_heads = rng.choice([1, ulysses, 2 * ulysses])
    heads = max(kv_heads, ulysses) * rng.choice([1, 2])
    batch, d, w = rng.choice([1, 2]), 4, rng.choice([4, 6])
    needs_q = rng.random() < 0.8
    torch.manual_seed(seed)
    q = torch.randn(queries, batch, heads, d, dtype=torch.float64)
    dout = torch.randn(queries, batch, heads, w, dtype=torch.float64)
    sink = torch.randn(heads, dtype=torch.float64, requires_grad=True) if seed % 2 else None
    q_places = positions_of(layout, ranks, queries)
    q_shards = [x.requires_grad_(needs_q) for x in cut(q, q_places)]
    largest, kernel = None, "auto"
    if seed % 3 == 0:
        largest = [torch.full((heads,), -torch.inf, dtype=torch.float64) for _ in range(ranks)]
        kernel = "reference"
    sets, tables, wholes, places = [], [], [], []
    for _ in range(rng.choice([2, 2, 3])):
        rows = rng.choice([0, 1, 2, 8])
        key_layout = drawn_layout(rng, ranks, rows * ranks, of_keys=ulysses == 1)
        keys = rows * (1 if key_layout == "replicated" else ranks)
        mask, seen = masks_of(rng, queries, keys)
        k, v = (torch.randn(keys, batch, kv_heads, n, dtype=torch.float64) for n in (d, w))
        place = positions_of(key_layout, ranks, keys)
        shards = [[x.requires_grad_() for x in cut(whole, place)] for whole in (k, v)]
        if d == w and rng.random() < 0.5:  # values are the keys
            v, shards[1] = k, None
        chunks = rng.choice([1, max(1, kv_heads // ulysses)])
        algorithm = rng.choice([*RINGS, "auto"])
        plans = in_process.prepare(
            q_shards, *shards, groups=groups, layout=layout, key_layout=key_layout, mask=mask,
            algorithm=algorithm, head_chunks=chunks, sink=sink, kernel=kernel,
            max_logits=largest and largest[0],
        )  # fmt: skip
        sets.append((*shards, plans))
        tables.append(seen)
        wholes.append((k, v))
        places.append(place)
    outs = in_process.joint_attention(q_shards, sets, groups=groups, sink=sink, max_logits=largest)
    torch.autograd.backward(outs, cut(dout, q_places))
    table = torch.from_numpy(np.concatenate(tables, axis=1))
    k, v = (torch.cat(parts) for parts in zip(*wholes, strict=True))
    wanted, lse, dq, dk, dv = oracle.attention(q, k, v, dout, table, sink=sink)
    assert oracle.worst(joined(outs, q_places, dout), wanted) < TOLERANCE
    if needs_q:
        assert oracle.worst(joined([x.grad for x in q_shards], q_places, q), dq) < TOLERANCE
    for communicators in nccl_rules.COMMUNICATORS.values():
        assert not nccl_rules.faults(traces, communicators(groups.topology))
    first = 0
    for (ks, vs, _), (whole_k, whole_v), place in zip(sets, wholes, places, strict=True):
        last = first + len(whole_k)
        for shards, whole, gradient in ((ks, whole_k, dk if vs else dk + dv), (vs, whole_v, dv)):
            if shards is not None:
                got = joined([x.grad for x in shards], place, whole)
                assert oracle.worst(got, gradient[first:last]) < TOLERANCE
        first = last
    if sink is not None:
        got = sink.grad
        assert oracle.worst(got, oracle.sink_gradient(sink, lse, wanted, dout)) < TOLERANCE
    if largest is None:
        return
    scores = torch.einsum("sbhd,tbhd->hbst", q, k.repeat_interleave(heads // kv_heads, 2)) / d**0.5
    scores = scores.masked_fill(~table, -torch.inf).flatten(1)
    most = scores.max(1).values if scores.shape[1] else torch.full((heads,), -torch.inf).double()
    assert torch.allclose(torch.stack(largest).max(0).values, most, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("seed", range(8))
def test_a_joint_call_is_attention_over_the_union(seed, grid):
    joint_case(seed, grid)
