"""Memory of sparse operations: chunks of keys, and no tensor of queries times keys."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import megatron_burst as mb
from megatron_burst.plugins.sparse import kernels, pairs
from megatron_burst.plugins.testing import in_process
from megatron_burst.schedule.dry_run import dry_run

S, RANKS, TOP_K, WIDTH, VALUES = 256, 4, 8, 12, 8


class Largest(TorchDispatchMode):
    """Size of the largest storage of a result, in fp32 numbers."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        actual = func(*args, **(kwargs or {}))
        for each in actual if isinstance(actual, (tuple, list)) else (actual,):
            if isinstance(each, torch.Tensor):
                each = each.untyped_storage().nbytes() // 4
                self.most = max(self.most, each)
        return actual


@pytest.mark.parametrize("algorithm", ["burst", "all_gather"])
def test_no_tensor_has_scores_of_all_rows_and_keys(monkeypatch, algorithm):
    monkeypatch.setattr(pairs, "TILE", 1 << 11)  # elements
    monkeypatch.setattr(kernels, "_bytes", lambda device: 1 << 13)
    groups, layout = in_process.groups(intra=RANKS), mb.layout.make("zigzag", cp_size=RANKS)
    sizes = (2, WIDTH), (1, WIDTH), (2,), (2, WIDTH), (1, WIDTH)
    cut = [
        [mb.shard(torch.randn(S, 1, *size), layout, r).requires_grad_() for r in range(RANKS)]
        for size in sizes
    ]
    *index, q, k = cut
    with Largest() as seen:
        named = {"groups": groups, "algorithm": algorithm}
        chosen = in_process.select(*index, rule="dsa", top_k=TOP_K, **named)
        outs = in_process.sparse_attention(q, k, None, chosen, value_width=VALUES, **named)
        loss = in_process.indexer_loss(*index, q, k, chosen, rule="dsa", **named)
        torch.autograd.backward([x.sum() for x in (*outs, *loss)])
    rows = S // RANKS
    each = 1 if algorithm == "burst" else 2  # chunks: all keys are scored at once, a few rows each
    assert rows * 2 * WIDTH <= seen.most < each * rows * rows < rows * S


@pytest.mark.parametrize(("algorithm", "keys"), [("ring", 2), ("burst", 2), ("all_gather", 3)])
def test_a_ring_holds_two_chunks_of_keys_beyond_the_own(algorithm, keys):
    """In forward and backward of a plan; gradients have their own buffers."""
    groups, layout = in_process.groups(intra=RANKS), mb.layout.make("zigzag", cp_size=RANKS)
    q = [torch.zeros(S // RANKS, 1, 2, WIDTH, requires_grad=True) for _ in range(RANKS)]
    plan = in_process.prepare(q, q, q, groups=groups, layout=layout, algorithm=algorithm, side="kv")
    for schedule in plan.ranks[0].schedules:
        held_bytes = [dry_run(schedule, rank).most["kv"] for rank in range(RANKS)]
        assert max(held_bytes) == keys
