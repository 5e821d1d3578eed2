"""`mb.linear_kl` in one process and over ranks, against formulas in float64."""

from itertools import product

import head_oracle as oracle
import pytest
import torch
import torch.distributed as dist
from head_oracle import Options

import megatron_burst as mb

ROWS, WIDTH, TEACHER_WIDTH, VOCABULARY = 8, 6, 5, 16
TOLERANCE = 1e-10
OPTIONS = {
    "plain": (Options(), 1.0),
    "softcap": (Options(0.7, 1.5), 2.0),
    "padded": (Options(1.3, vocab_size=7), 0.5),  # the last of 4 ranks hold only padding
}
KEYS = "logit_scale", "logit_softcap", "vocab_size"


def problem(dtype=torch.float64):
    make = torch.Generator().manual_seed(3)
    shapes = (ROWS, WIDTH), (VOCABULARY, WIDTH), (ROWS, TEACHER_WIDTH), (VOCABULARY, TEACHER_WIDTH)
    return [torch.randn(shape, generator=make, dtype=torch.float64).to(dtype) for shape in shapes]


def errors(options, reverse, tile_rows, tp_group=None, sequence_parallel=False, nan_row=None):
    """Return the largest errors of KL and both gradients; the row with NaN has weight 0."""
    options, temperature = OPTIONS[options]
    hidden, weight, teacher_hidden, teacher_weight = problem()
    rank, size = (0, 1) if tp_group is None else (dist.get_rank(), dist.get_world_size())
    split = size if sequence_parallel else 1

    upstream, seen = torch.linspace(-1, 2, ROWS, dtype=torch.float64), list(range(ROWS))
    clean = hidden.clone()
    if nan_row is not None:
        hidden[nan_row], upstream[nan_row] = torch.nan, 0
        seen.remove(nan_row)

    def own(x, parts):
        return x.chunk(parts)[rank if parts > 1 else 0].clone()

    rows, shard = own(hidden, split).requires_grad_(), own(weight, size).requires_grad_()
    actual = mb.linear_kl(
        rows, shard, own(teacher_hidden, split), own(teacher_weight, size), reverse=reverse,
        temperature=temperature, tile=2 * tile_rows * len(shard) * 8, tp_group=tp_group,
        sequence_parallel=sequence_parallel, **{key: getattr(options, key) for key in KEYS},
    )  # fmt: skip
    (actual * upstream).sum().backward()
    models = [(clean, weight), (teacher_hidden, teacher_weight)]
    kl, dh, dw = oracle.kl(models, upstream, options, temperature, reverse)
    pairs = [
        (actual.detach()[seen], kl[seen]),
        (rows.grad, own(dh, split)),
        (shard.grad, own(dw, size)),
    ]
    return max((a - b).abs().max().item() for a, b in pairs)


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize("options", OPTIONS)
def test_equals_the_formula(options, reverse):
    for tile_rows in (1, 3, 100):
        assert errors(options, reverse, tile_rows) < TOLERANCE


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize("options", OPTIONS)
def test_nan_in_a_row_without_weight_stays_there(options, reverse):
    assert errors(options, reverse, 3, nan_row=4) < TOLERANCE


def faults_on_ranks():
    cases = product(OPTIONS, (False, True), (3,), (dist.group.WORLD,), (False, True), (None, 5))
    actual = {case[:2] + case[4:]: errors(*case) for case in cases}
    return {case: error for case, error in actual.items() if not error < TOLERANCE}


@pytest.mark.parametrize("size", [2, 4])
def test_a_vocabulary_over_ranks(ranks, size):
    assert ranks(size).run(faults_on_ranks) == [{}] * size


def test_the_teacher_gets_no_gradient_and_may_have_another_dtype():
    hidden, weight, teacher_hidden, teacher_weight = problem()
    teacher = [x.bfloat16().requires_grad_() for x in (teacher_hidden, teacher_weight)]
    student = [x.float().requires_grad_() for x in (hidden, weight)]
    actual = mb.linear_kl(*student, *teacher)
    actual.sum().backward()
    assert all(x.grad is None for x in teacher)
    models = [student, [x.detach() for x in teacher]]
    kl, dh, _ = oracle.kl(models, torch.ones(ROWS).double(), Options(), 1.0, False)
    assert (actual - kl).abs().max() < 1e-5
    assert (student[0].grad - dh).abs().max() < 1e-5


def test_no_more_logits_are_alive_than_a_tile_of_both(monkeypatch):
    from megatron_burst.linear_cross_entropy import tiled_loop

    products = []
    monkeypatch.setattr(
        tiled_loop, "logits_", lambda z, h, w: products.append(len(z)) or torch.mm(h, w.t(), out=z)
    )
    mb.linear_kl(*problem(), tile=2 * 2 * VOCABULARY * 8)
    assert products == [2] * 8


WRONG = {
    "temperature": (
        {"temperature": -1.0},
        "temperature must be from 1e-06 to 1000000.0, got float -1.0",
    ),
    "reverse": ({"reverse": 0}, "reverse must be True or False, got int 0"),
    "a teacher's weight": (
        {"teacher_weight": torch.zeros(9, TEACHER_WIDTH, dtype=torch.float64)},
        r"teacher_hidden and teacher_weight must have as many rows .* got \[\[8, 5\], \[9, 5\]\]",
    ),
    "no teacher, and more": (
        {"teacher_hidden": None, "hidden": torch.zeros(3), "tile": 0},
        "hidden must be .*tile must be .*teacher_hidden, teacher_weight: hidden must be a",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_refused(name):
    arguments, words = WRONG[name]
    names = "hidden", "weight", "teacher_hidden", "teacher_weight"
    with pytest.raises(ValueError, match=words):
        mb.linear_kl(**{**dict(zip(names, problem(), strict=True)), **arguments})
