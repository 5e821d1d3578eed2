"""Layout balanced in every algorithm: forward and backward against a dense table of documents.

With padding, with ranks whose rows see nothing at all, and with documents that were cut.
"""

import numpy as np
import oracle
import pytest
import torch

import megatron_burst as mb
from megatron_burst.schedule.algorithms import ALGORITHMS

TOLERANCE = 1e-10
# Lengths, and the documents that are padding: 48 positions, of which the second and the fourth
# pack leave ranks with nothing to see.
PACKS = {
    "one long, many short": ([23, 1, 5, 3, 7, 2, 4, 3], ()),
    "half is padding": ([9, 4, 24, 1, 10], (2,)),
    "two long": ([26, 0, 21, 1], (3,)),
    "all but one document": ([40, 8], (0,)),
}
MASKS = {
    "causal": (mb.masks.Causal(), ((None, 0),), lambda q, k: k <= q),
    "all": (mb.masks.Full(), ((None, None),), lambda q, k: k == k),
    "window": (mb.masks.Window(4, 0), ((4, 0),), lambda q, k: (k <= q) & (q - k <= 4)),
}
GRIDS = [(1, 4), (2, 2), (4, 2), (3, 1)]


def dense(lengths, padding, rule):
    number = np.repeat(np.arange(len(lengths)), lengths)
    q, k = np.arange(48)[:, None], np.arange(48)[None, :]
    real = ~np.isin(number, padding)
    return torch.from_numpy((number[:, None] == number) & real[:, None] & rule(q, k))


@pytest.mark.parametrize("side", ["kv", "query"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_packed_documents_are_exact(algorithm, side):
    for i, (pack, (lengths, padding)) in enumerate(PACKS.items()):
        nodes, per_node = GRIDS[(i + len(algorithm)) % len(GRIDS)]
        name = list(MASKS)[(i + (side == "kv")) % 3]
        mask, windows, rule = MASKS[name]
        bounds, ranks = np.cumsum([0, *lengths]), nodes * per_node
        layout = mb.layout.make(
            "balanced", cp_size=ranks, cu_seqlens=bounds, per_node=per_node, windows=windows,
            padding=padding,
        )  # fmt: skip
        errors = errors_of_a_call(
            layout, (nodes, per_node), mb.masks.Documents(bounds, padding) & mask,
            dense(lengths, padding, rule), algorithm=algorithm, side=side,
        )  # fmt: skip
        assert max(errors) < TOLERANCE, (pack, name, errors)


def errors_of_a_call(layout, grid, mask, seen, **choices):
    """The worst of out, dq, dk, dv over all ranks."""
    generator = torch.Generator().manual_seed(3)
    shapes = (48, 1, 4, 4), (48, 1, 2, 4), (48, 1, 2, 3), (48, 1, 4, 3)
    inputs = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    out, _, *grads = oracle.attention(*inputs, seen)
    *qkv, douts = (
        [mb.shard(x, layout, rank).clone() for rank in range(layout.cp_size)] for x in inputs
    )
    leaves = [[x.requires_grad_() for x in each] for each in qkv]
    groups = mb.Groups.in_process(inter=grid[0], intra=grid[1])
    outs = mb.attention(*leaves, groups=groups, layout=layout, mask=mask, **choices)
    torch.autograd.backward(outs, douts)
    got = [mb.unshard(outs, layout)]
    got += [mb.unshard([x.grad for x in each], layout) for each in leaves]
    return [oracle.worst(x, y) for x, y in zip(got, (out, *grads), strict=True)]


def test_the_packs_leave_ranks_that_see_nothing():
    """Or the tests above would not be of them."""
    blind = []
    for lengths, padding in PACKS.values():
        bounds = np.cumsum([0, *lengths])
        layout = mb.layout.make("balanced", cp_size=8, cu_seqlens=bounds, padding=padding)
        seen = dense(lengths, padding, MASKS["causal"][2]).any(dim=1).numpy()
        blind.append(sum(not seen[layout.positions(rank, 48)].any() for rank in range(8)))
    assert blind[0] == 0 < max(blind)


def test_a_rank_may_be_all_padding():
    """The last of four contiguous ranks: no row sees anything, and its gradients are zero."""
    lengths, padding = [30, 6, 12], (2,)
    layout = mb.layout.make("contiguous", cp_size=4)
    mask = mb.masks.Documents(np.cumsum([0, *lengths]), padding) & mb.masks.Causal()
    seen = dense(lengths, padding, MASKS["causal"][2])
    assert not seen[36:].any()
    for algorithm in ALGORITHMS:
        assert max(errors_of_a_call(layout, (2, 2), mask, seen, algorithm=algorithm)) < TOLERANCE


def test_a_layout_balanced_by_name_is_told_how_to_make_one():
    groups, tensors = mb.Groups.in_process(intra=2), [[torch.zeros(4, 1, 2, 8)] * 2] * 3
    words = r"layout balanced is made for every batch: .*make\('balanced', cp_size=2, cu_seqlens="
    with pytest.raises(ValueError, match=words):
        mb.attention(*tensors, groups=groups, layout="balanced")


def test_a_layout_of_another_batch_is_refused():
    groups, tensors = mb.Groups.in_process(intra=2), [[torch.zeros(4, 1, 2, 8)] * 2] * 3
    layout = mb.layout.make("balanced", cp_size=2, cu_seqlens=[0, 3, 10])
    with pytest.raises(ValueError, match="8 positions; seq_len: the documents end at 10, got 8"):
        mb.attention(*tensors, groups=groups, layout=layout)
