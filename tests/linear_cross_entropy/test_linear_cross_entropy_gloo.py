"""LM head and loss over tensor-parallel gloo ranks: exchanges, equal bits, equal errors.

`test_fuzz_lm_head.py` checks the results.
"""

import warnings
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import megatron_burst as mb
from megatron_burst.linear_cross_entropy import split

TOKENS, WIDTH, VOCABULARY = 12, 8, 20


def problem(dtype=torch.float64):
    """Return hidden, weight and labels of all ranks, with labels at every shard's borders."""
    make = torch.Generator().manual_seed(5)
    hidden = torch.randn(TOKENS, WIDTH, generator=make, dtype=torch.float64).to(dtype)
    weight = torch.randn(VOCABULARY, WIDTH, generator=make, dtype=torch.float64).to(dtype)
    borders = [0, 4, 5, 9, 10, 14, 15, VOCABULARY - 1]  # of 2 and of 4 shards
    labels = torch.tensor([*borders, 1, 7, 2, 3])
    labels[10] = -100
    return hidden, weight, labels


def share(x, parts=None):
    """Return this rank's slice of dimension 0 as a leaf."""
    size, rank = dist.get_world_size(), dist.get_rank()
    return x.chunk(parts or size)[rank].clone()


def same_bits():
    hidden, weight, labels = problem(torch.float32)
    loss = mb.linear_cross_entropy(hidden, share(weight), labels, tp_group=dist.group.WORLD)
    return loss.tolist()


def test_the_loss_has_the_same_bits_on_every_rank(ranks):
    first, *others = ranks(4).run(same_bits)
    assert others == [first] * 3


def argmax_of_equal_logits():
    ones = torch.ones(3, WIDTH)
    _, actual = mb.linear_cross_entropy(
        ones, ones, torch.zeros(3, dtype=torch.int64), tp_group=dist.group.WORLD, return_argmax=True
    )
    return actual.tolist()


def test_of_equal_logits_on_two_ranks_the_lowest_row_wins(ranks):
    assert ranks(2).run(argmax_of_equal_logits) == [[0, 0, 0]] * 2


def exchanges(sequence_parallel, mode, rows):
    """Return the collectives of forward and backward on this rank."""
    hidden, weight, labels = problem()
    own = (share(hidden) if sequence_parallel else hidden).requires_grad_()
    weight = share(weight).requires_grad_()
    calls = []
    start = split._start

    def count(kind, *tensors, **choices):
        calls.append(kind)
        return start(kind, *tensors, **choices)

    with mock.patch.object(split, "_start", count):
        loss = mb.linear_cross_entropy(
            own, weight, labels, tp_group=dist.group.WORLD, mode=mode,
            sequence_parallel=sequence_parallel, tile=rows * len(weight) * 8,
        )  # fmt: skip
        forward = sorted(calls)
        calls.clear()
        loss.sum().backward()
    return forward, sorted(calls)


@pytest.mark.parametrize("mode", ["single_pass", "recompute"])
def test_one_small_exchange_per_tile_and_what_the_products_need(ranks, mode):
    tiles = 3
    gather, scatter, reduce = "all_gather", "reduce_scatter", "all_reduce"
    single = mode == "single_pass"
    forward, backward = ranks(2).run(exchanges, False, mode, 4)[0]
    header_and_stats = [gather] * (1 + tiles)
    sums, flag = [reduce] * tiles, [reduce]
    assert forward == sorted(header_and_stats + sums * single)
    assert backward == (flag if single else sums)
    forward, backward = ranks(2).run(exchanges, True, mode, 4)[0]
    assert forward == sorted(header_and_stats + [gather] * tiles + [scatter] * tiles * single)
    assert backward == (flag if single else sorted([gather] * tiles + [scatter] * tiles))


def different_upstream():
    """Only rank 0 gets a gradient that is no multiple of the mask."""
    hidden, weight, labels = problem()
    hidden, weight = share(hidden).requires_grad_(), share(weight).requires_grad_()
    loss = mb.linear_cross_entropy(
        hidden, weight, labels, tp_group=dist.group.WORLD, sequence_parallel=True
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        (loss * (torch.arange(TOKENS) - 4.0 if dist.get_rank() == 0 else 1)).sum().backward()
    return len(caught)


def test_ranks_recompute_together_or_not_at_all(ranks):
    assert ranks(4).run(different_upstream) == [1] * 4


class Odd:
    def __repr__(self):
        raise AttributeError("odd")


def wrong_call(what):
    hidden, weight, labels = problem()
    odd = dist.get_rank() == 1
    choices = {}
    if what == "tokens":
        hidden, labels = (x[: 6 if odd else 12] for x in (hidden, labels))
    elif what == "tile":
        choices["tile"] = 100 if odd else 200
    elif what == "gradients":
        hidden.requires_grad_(odd)
    elif what == "label":
        labels[3] = 20 if odd else 1
    elif what == "shape":
        labels = labels[:5] if odd else labels
    elif what == "kind":
        labels, choices = (None, {"tile": "1GB"}) if odd else (labels, {})
    elif what == "hidden":
        hidden = None if odd else hidden
    elif what == "foreign":
        choices["tile"] = Odd() if odd else None
    elif what == "labels":
        labels[2:4] = torch.tensor([5, 7] if odd else [7, 5])
    elif what == "weights":
        choices["loss_mask"] = torch.ones(TOKENS).index_fill(0, torch.tensor([3]), 0.5 + odd)
    elif what == "mask":
        choices["loss_mask"] = torch.ones(TOKENS) if odd else None
    try:
        mb.linear_cross_entropy(hidden, share(weight), labels, tp_group=dist.group.WORLD, **choices)
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize(
    ("what", "message"),
    {
        "tokens": "ranks disagree: rank 0 has hidden ((12, 8)",
        "tile": "tile=200",
        "gradients": "gradients of (hidden, weight) (False, False)",
        "label": "rank 1: labels must be in [0, 20)",
        "shape": "rank 1: labels must be [12]",
        "kind": "rank 1: labels must be a torch.Tensor of integers, got None; tile must be",
        "hidden": "rank 1: hidden must be a torch.Tensor [..., d], got None",
        "foreign": "rank 1: AttributeError in the arguments: odd",
        "labels": "ranks disagree: rank 0 has checksum of labels ",
        "weights": "ranks disagree: rank 0 has loss_mask 'given, checksum ",
        "mask": "ranks disagree: rank 0 has loss_mask 'none', rank 1 has loss_mask 'given",
    }.items(),
)
def test_a_wrong_call_raises_the_same_error_on_all_ranks(ranks, what, message):
    first, second = ranks(2).run(wrong_call, what)
    assert message in first
    assert first == second
