"""One kernel call for all chunks of keys that are present together.

The tests check the number of calls, results against dense float64 matrices, memory and the cost
model.
"""

import pytest
import sparse_oracle
import torch

import megatron_burst as mb
from megatron_burst.autotune.candidates import FixedSettings, Workload, on_grid
from megatron_burst.plugins.sparse import indexer, kernels, registry
from megatron_burst.plugins.testing import in_process
from megatron_burst.schedule.cost import Sizes
from megatron_burst.schedule.dry_run import dry_run
from megatron_burst.schedule.topology import Topology

S, B, D, W, HEADS, TOP_K = 48, 2, 7, 5, 4, 5
BOUNDS = [0, 5, 7, 31, 48]  # uneven documents
DOCUMENTS = mb.masks.Documents(BOUNDS) & mb.masks.Causal()
LATENT, GROUPED = "latent", "grouped"


def layout_of(name, ranks):
    extra = {"cu_seqlens": BOUNDS} if name == "balanced" else {}
    return mb.layout.make(name, cp_size=ranks, **extra)


def tensors():
    """Return index_q, index_k, weights, q, k, v (None for a latent) and an output gradient."""
    make = torch.Generator().manual_seed(0)
    sizes = (3, D), (1, D), (3,), (HEADS, D), (2, D), (2, W), (HEADS, W)
    return [torch.randn(S, B, *size, generator=make, dtype=torch.float64) for size in sizes]


def shown(mask):
    """Return a bool [S, S] by the definition of each mask."""
    t = torch.arange(S)
    document = torch.searchsorted(torch.tensor(BOUNDS), t, right=True)
    alike = document[:, None] == document if mask is DOCUMENTS else t[:, None] >= -1
    return (t[:, None] >= t) & alike


def by_hand(mask, keys, sink):
    """Return units, out, gradients of q, k, v and sink, and the indexer's loss and gradients."""
    *index, q, k, v, dout = (t.clone().requires_grad_() for t in tensors())
    if keys == LATENT:
        k = k[:, :, :1].detach().requires_grad_()
    seen = shown(mask)
    scores = sparse_oracle.index_scores("dsa", 1, *index)
    units = sparse_oracle.chosen(scores.detach(), seen, 1, TOP_K, False)
    hidden = ~sparse_oracle.table(units, seen, 1, B, HEADS)
    values = k[..., :W] if keys == LATENT else v
    out, p = sparse_oracle.attention(q, k, values, hidden, D**-0.5, sink)
    leaves = [q, k, sink] if keys == LATENT else [q, k, sink, v]
    grads = torch.autograd.grad(out, leaves, dout.detach())
    _, p = sparse_oracle.attention(q.detach(), k.detach(), k.detach(), hidden, D**-0.5)
    loss = sparse_oracle.indexer_loss(scores, units, p, 1)
    return units, out, grads, loss, torch.autograd.grad(loss.sum(), index)


def layer(groups, layout, mask, keys, sink, **by):
    """Compute the same over the ranks of `groups`."""
    cut = [[mb.shard(t, layout, r).requires_grad_() for r in range(groups.size)]
           for t in tensors()]  # fmt: skip
    *index, q, k, v, dout = cut
    latent = keys == LATENT
    if latent:
        k, v = [x[:, :, :1].detach().requires_grad_() for x in k], None
    by = {"groups": groups, "algorithm": by.pop("algorithm")} | by
    found = in_process.select(*index, rule="dsa", top_k=TOP_K, layout=layout, mask=mask,
                      groups=groups, algorithm=by["algorithm"])  # fmt: skip
    outs = in_process.sparse_attention(
        q, k, v, found, sink=sink, value_width=W if latent else None, **by
    )
    leaves = [x for t in (q, k, *([] if latent else [v])) for x in t]
    leaves += [] if sink is None else [sink]
    grads = torch.autograd.grad(outs, leaves,
                                [x.detach() for x in dout])  # fmt: skip
    if sink is None:
        return None
    by.pop("kernel")
    losses = in_process.indexer_loss(*index, q, k, found, rule="dsa", **by)
    extra = torch.autograd.grad([x.sum() for x in losses], [x for t in index for x in t])

    def whole(flat):
        size = groups.size
        return [mb.unshard(flat[n : n + size], layout) for n in range(0, len(flat), size)]

    (ids,), (out,), (loss,) = (whole(x) for x in ([each.ids for each in found], outs, losses))
    *of_keys, of_sink = *whole(grads[:-1]), grads[-1]
    return ids, out, [*of_keys[:2], of_sink, *of_keys[2:]], loss, whole(extra)


def close(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)


CASES = [
    ((1, 1), "multicast", "zigzag", DOCUMENTS, LATENT),
    ((1, 2), "all_gather", "striped", None, GROUPED),
    ((1, 3), "multicast", "contiguous", None, LATENT),
    ((2, 2), "multicast", "balanced", DOCUMENTS, LATENT),
    ((2, 2), "all_gather", "zigzag", DOCUMENTS, GROUPED),
    ((2, 2), "multicast", "contiguous", None, GROUPED),
    ((2, 2), "prefetch", "zigzag", DOCUMENTS, GROUPED),
    ((2, 4), "multicast", "striped", DOCUMENTS, LATENT),
]  # fmt: skip


@pytest.mark.parametrize(("grid", "algorithm", "name", "mask", "keys"), CASES)
def test_equal_to_dense_matrices(grid, algorithm, name, mask, keys):
    groups = in_process.groups(inter=grid[0], intra=grid[1])
    layout = layout_of(name, groups.size)
    sink = torch.linspace(-1, 1, HEADS, dtype=torch.float64).requires_grad_()
    units, out, grads, loss, extra = by_hand(mask, keys, sink)
    for kernel in ("aten", "reference")[: 1 + (algorithm == "prefetch")]:
        found = layer(groups, layout, mask, keys, sink, kernel=kernel, algorithm=algorithm)
        rows = [[u for u in row if u >= 0] for row in found[0].flatten(0, 2).tolist()]
        assert rows == [row for t in units for row in t]
        close(found[1], out.detach())
        for own, wanted in zip(found[2], grads, strict=True):
            close(own, wanted)
        close(found[3].detach(), loss.detach())
        for own, wanted in zip(found[4], extra, strict=True):
            close(own, wanted)


@pytest.mark.parametrize("algorithm", ["multicast", "all_gather"])
def test_ids_in_float32_do_not_depend_on_what_is_joined(algorithm):
    index = [t.float() for t in tensors()[:3]]
    index[0] = index[0].round()  # with equal scores
    ids = []
    for inter, intra in ((1, 1), (1, 2), (2, 2), (2, 4)):
        groups = in_process.groups(inter=inter, intra=intra)
        layout = layout_of("zigzag", groups.size)
        cut = [[mb.shard(t, layout, r) for r in range(groups.size)] for t in index]
        found = in_process.select(
            *cut, rule="dsa", top_k=TOP_K, groups=groups, layout=layout, algorithm=algorithm
        )
        ids.append(mb.unshard([each.ids for each in found], layout))
    assert all(torch.equal(ids[0], other) for other in ids[1:])


# --- how many calls, and how often queries are read ----------------------------------------------


@pytest.fixture
def calls(monkeypatch):
    """Return pass, query rows and key rows of each call of kernel "counting" and indexer."""
    found = []

    class Counting(kernels.SelectedAten):
        def forward(self, q, k, *remaining):
            found.append(("forward", len(q), len(k)))
            super().forward(q, k, *remaining)

        def backward(self, rows, k, *remaining):
            found.append(("backward", len(rows.q), len(k)))
            super().backward(rows, k, *remaining)

    def pair(self, call, queries, keys, sums, pair=indexer.UnitSelector.pair):
        found.append(("selection", len(self.q), len(keys[0])))
        pair(self, call, queries, keys, sums)

    monkeypatch.setitem(registry.KERNELS, "counting", Counting)
    monkeypatch.setattr(indexer.UnitSelector, "pair", pair)
    return found


@pytest.mark.parametrize(
    ("algorithm", "grid", "each"),
    [
        ("multicast", (2, 2), 2),  # one call for each node
        ("multicast", (2, 4), 2),
        ("multicast", (1, 4), 1),
        ("all_gather", (2, 2), 1),  # one for all
        ("burst", (2, 2), 4),  # one for each chunk
    ],
)
def test_calls_of_a_kernel_and_reads_of_queries(calls, algorithm, grid, each):
    """Every rank makes one call per group of chunks.

    Each call has all rows of queries, and all calls together have all keys once.
    """
    groups = in_process.groups(inter=grid[0], intra=grid[1])
    size, rows = groups.size, S // groups.size
    layer(groups, layout_of("zigzag", size), None, LATENT, None, kernel="counting",
          algorithm=algorithm)  # fmt: skip
    for name in ("selection", "forward", "backward"):
        here = [(q, k) for which, q, k in calls if which == name]
        assert len(here) == size * each
        assert {q for q, _ in here} == {rows}  # nothing but whole reads of a rank's queries
        # zigzag: half of a chunk is of no use to those before its owner, and does not travel
        assert any(S // each - rows < k <= S // each or each == size for _, k in here)
        assert sum(k for _, k in here) <= size * S


def test_a_recompute_joins_the_rows_that_are_left(calls):
    groups = in_process.groups(inter=2, intra=2)
    layout = layout_of("striped", 4)
    *index, q, k, v, _ = ([mb.shard(t, layout, r).requires_grad_() for r in range(4)]
                          for t in tensors())  # fmt: skip
    plan = in_process.prepare(
        q, k, v, groups=groups, layout=layout, algorithm="multicast", store=0.5
    )
    leaves = [x for t in (*index, q, k, v) for x in t]

    def run(plan, *arguments):
        *index, q, k, v = arguments
        found = mb.select(*index, rule="dsa", top_k=TOP_K, plan=plan, label=0)
        return mb.sparse_attention(q, k, v, found, plan=plan, label=0, kernel="counting")

    def grads(outs):
        return torch.autograd.grad(sum(x.square().sum() for x in outs), leaves[12:])

    arguments = plan.ranks, *index, q, k, v
    wanted = grads(in_process.on_ranks(groups, run, *arguments))
    calls.clear()
    found = grads(in_process.checkpoint(groups, run, *arguments, keep=0.5))
    for own, other in zip(found, wanted, strict=True):
        close(own, other)
    forward = [rows for name, rows, _ in calls if name == "forward"]
    assert len(forward) == 2 * 4 * 2  # forward and recompute, of 4 ranks, a call for each node
    assert sorted(forward)[:8] == [S // 4 // 2] * 8  # half of the rows were kept


# --- memory, and what the model says --------------------------------------------------------------


def test_a_rank_holds_the_keys_of_two_nodes():
    """Chunks of other ranks on 4 nodes of 4, in addition to the copies that a call joins."""
    groups, layout = in_process.groups(inter=4, intra=4), layout_of("striped", 16)
    index = [[mb.shard(torch.zeros(16 * 8, 1, *size), layout, r) for r in range(16)]
             for size in ((3, D), (1, D), (3,))]  # fmt: skip
    in_process.select(
        *index, rule="dsa", top_k=2, groups=groups, layout=layout, algorithm="multicast"
    )
    (made,) = groups.ranks[0].cache["works"].values()
    forward, backward = made.schedules[0]
    assert forward.visibility.joined
    for schedule in (forward, backward):
        held_bytes = [dry_run(schedule, rank) for rank in range(16)]
        assert max(each.most["kv"] for each in held_bytes) <= 2 * 4 + 1
        moments = [moment for each in held_bytes for moment in each.moments]
        rows = [n for moment in moments for n in moment.get("kv joined", ())]
        assert {-(-n // 8) for n in rows} == {4}  # chunks of 8 rows


def seconds(algorithm, grid=(4, 2), memory=1e6, compute=1e12, rates=None):
    """Return the predicted seconds of forward and backward."""
    size = grid[0] * grid[1]
    sizes = Sizes(16, B, HEADS, 1, D - W, W, 2, 4, 4, (True, True, True))
    workload = Workload(sizes, mb.masks.Full(), layout_of("striped", size), attended=TOP_K,
                        latent=True)  # fmt: skip
    rates = rates or mb.Rates(1e9, 1e9, compute=compute, memory=memory)
    (found,) = on_grid(workload, Topology(size, grid[1]), rates, FixedSettings(algorithm, "kv", 1))
    return found.forward.compute, found.backward.compute


@pytest.mark.parametrize(("algorithm", "each"), [("burst", 8), ("multicast", 4), ("all_gather", 1)])
def test_the_model_counts_what_each_call_reads(algorithm, each):
    """Reads and writes of q (bf16), out (fp32), dout and dq, or the FLOPs of the call."""
    rows = 16 * B * HEADS
    there, back = rows * (2 * D + 8 * W) / 1e6, rows * (2 * D + 2 * W + 8 * D) / 1e6
    assert seconds(algorithm) == pytest.approx((each * there, each * back))
    flops = 2.0 * rows * TOP_K * (D + W)
    free = seconds(algorithm, memory=float("inf"), compute=1e6)
    assert free == pytest.approx((flops / 1e6, 2.5 * flops / 1e6))


def test_auto_takes_fewer_calls_where_reading_takes_long():
    def taken(memory):
        groups, layout = in_process.groups(inter=2, intra=2), layout_of("striped", 4)
        *index, q, k, _, _ = ([mb.shard(t, layout, r) for r in range(4)] for t in tensors())
        rates = mb.Rates(1e9, 1e8, compute=1e9, memory=memory)
        plan = in_process.prepare(
            q, k, k, groups=groups, layout=layout, algorithm="auto", rates=rates, side="kv"
        )
        found = in_process.select(*index, rule="dsa", top_k=TOP_K, plan=plan, label=0)
        in_process.sparse_attention(q, k, k, found, plan=plan, label=0)
        return [each.algorithm for each in groups.ranks[0].cache["sparse"].values()][-1]

    assert taken(1e6) == "all_gather"
    assert taken(float("inf")) != "all_gather"
