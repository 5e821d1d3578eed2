"""The fused LM head over tensor-parallel gloo ranks, against formulas written out by hand.

Every rank builds the whole problem and compares its share of the results with the oracle's.
"""

import warnings
from itertools import product
from unittest import mock

import head_oracle as oracle
import pytest
import torch
import torch.distributed as dist
from head_oracle import Options

import megatron_burst as mb
from megatron_burst.linear_cross_entropy import split

TOKENS, WIDTH, VOCABULARY = 12, 8, 20
TOLERANCE = 1e-10
OPTIONS = {
    "plain": Options(),
    "all": Options(0.7, 2.0, 0.1, 0.2, 17),
    "empty-shard": Options(0.7, None, 0.1, 0.2, 9),  # the last shards hold only padding
}
MASKS = {
    "none": None,
    "ragged": torch.arange(TOKENS) % 3 != 0,
    "zeros-in-one-slice": torch.arange(TOKENS) >= TOKENS // 4,
    "zeros": torch.zeros(TOKENS),
}
UPSTREAM = {"mask": torch.full((TOKENS,), 0.3), "any": torch.arange(TOKENS) - 4.0}


def problem(options, dtype=torch.float64):
    """hidden, weight and labels of all ranks; labels on every shard's borders."""
    make = torch.Generator().manual_seed(5)
    hidden = torch.randn(TOKENS, WIDTH, generator=make, dtype=torch.float64).to(dtype)
    weight = torch.randn(VOCABULARY, WIDTH, generator=make, dtype=torch.float64).to(dtype)
    count = options.vocab_size or VOCABULARY
    borders = [0, 4, 5, 9, 10, 14, 15, VOCABULARY - 1]  # of 2 and of 4 shards
    labels = torch.tensor([min(b, count - 1) for b in borders] + [1, 7, 2, 3])
    labels[10] = options.ignore_index
    return hidden, weight, labels


def share(x, parts=None):
    """This rank's slice of dimension 0, a leaf."""
    size, rank = dist.get_world_size(), dist.get_rank()
    return x.chunk(parts or size)[rank].clone()


def faults(options, mask, upstream, sequence_parallel, mode, rows, dtype=torch.float64):
    """Largest errors of loss, dhidden and dweight on this rank, and whether it warned."""
    options, mask = OPTIONS[options], MASKS[mask]
    hidden, weight, labels = problem(options, dtype)
    mine = (share(hidden) if sequence_parallel else hidden.clone()).requires_grad_()
    rows_of_weight = share(weight).requires_grad_()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loss, best = mb.linear_cross_entropy(
            mine, rows_of_weight, labels, loss_mask=mask, tp_group=dist.group.WORLD,
            sequence_parallel=sequence_parallel, tile=rows * len(rows_of_weight) * dtype.itemsize,
            mode=mode, return_argmax=True, **vars(options),
        )  # fmt: skip
        arriving = UPSTREAM[upstream].double()
        if upstream == "mask" and mask is not None:
            arriving = arriving * mask.double()
        (loss * arriving).sum().backward()
    dh, dw = oracle.gradients(hidden, weight, labels, arriving, options)
    pairs = [
        (loss, oracle.loss(hidden, weight, labels, options)[0]),
        (best, oracle.best(hidden, weight, labels, options)),
        (mine.grad, share(dh) if sequence_parallel else dh),
        (rows_of_weight.grad, share(dw)),
    ]
    errors = [(a.detach().double() - b).abs().max().item() for a, b in pairs]
    return max(errors), [str(w.message)[:300] for w in caught]


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["replicated", "sequence"])
@pytest.mark.parametrize("mode", ["single_pass", "recompute"])
def test_equals_the_formula(ranks, world, sequence_parallel, mode):
    workers = ranks(world)
    one_tile = [("all", "ragged", upstream, 100) for upstream in UPSTREAM]
    for options, mask, upstream, rows in [*product(OPTIONS, MASKS, UPSTREAM, (5,)), *one_tile]:
        case = (options, mask, upstream, sequence_parallel, mode, rows)
        for error, warned in workers.run(faults, *case):
            assert error < TOLERANCE, case
            assert len(warned) == (upstream == "any" and mode == "single_pass"), (case, warned)


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["replicated", "sequence"])
def test_bf16_over_ranks(ranks, sequence_parallel):
    """The ranks' sums travel as bf16; on values of about 1 that is an error of about 2^-8."""
    case = ("plain", "none", "mask", sequence_parallel, "single_pass", 5, torch.bfloat16)
    assert max(error for error, _ in ranks(2).run(faults, *case)) < 2**-6


def same_bits():
    hidden, weight, labels = problem(Options(), torch.float32)
    loss = mb.linear_cross_entropy(hidden, share(weight), labels, tp_group=dist.group.WORLD)
    return loss.tolist()


def test_the_loss_has_the_same_bits_on_every_rank(ranks):
    first, *others = ranks(4).run(same_bits)
    assert others == [first] * 3


def argmax_of_equal_logits():
    ones = torch.ones(3, WIDTH)
    _, found = mb.linear_cross_entropy(
        ones, ones, torch.zeros(3, dtype=torch.int64), tp_group=dist.group.WORLD, return_argmax=True
    )
    return found.tolist()


def test_of_equal_logits_on_two_ranks_the_lowest_row_wins(ranks):
    assert ranks(2).run(argmax_of_equal_logits) == [[0, 0, 0]] * 2


def exchanges(sequence_parallel, mode, rows):
    """Collectives of forward and of backward, on this rank."""
    hidden, weight, labels = problem(Options())
    mine = (share(hidden) if sequence_parallel else hidden).requires_grad_()
    weight = share(weight).requires_grad_()
    calls = []
    start = split._start

    def count(kind, *tensors, **choices):
        calls.append(kind)
        return start(kind, *tensors, **choices)

    with mock.patch.object(split, "_start", count):
        loss = mb.linear_cross_entropy(
            mine, weight, labels, tp_group=dist.group.WORLD, mode=mode,
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
    """Rank 0 gets a gradient that is no multiple of the mask, the others one that is."""
    hidden, weight, labels = problem(Options())
    hidden, weight = share(hidden).requires_grad_(), share(weight).requires_grad_()
    loss = mb.linear_cross_entropy(
        hidden, weight, labels, tp_group=dist.group.WORLD, sequence_parallel=True
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        (loss * (UPSTREAM["any"] if dist.get_rank() == 0 else 1)).sum().backward()
    return len(caught)


def test_ranks_recompute_together_or_not_at_all(ranks):
    assert ranks(4).run(different_upstream) == [1] * 4


class Odd:
    def __repr__(self):
        raise AttributeError("odd")


def wrong_call(what):
    hidden, weight, labels = problem(Options())
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
