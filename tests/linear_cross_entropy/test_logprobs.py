"""`mb.linear_logprobs` in one process and over ranks, against formulas in float64."""

import random
from itertools import product

import head_oracle as oracle
import numpy as np
import pytest
import torch
import torch.distributed as dist
from head_oracle import Options

import megatron_burst as mb

ROWS, WIDTH, VOCABULARY = 9, 6, 16
TOLERANCE = 1e-10
OPTIONS = {
    "plain": (Options(), 1.0),
    "temperature": (Options(logit_scale=1.3), 0.6),
    "softcap": (Options(logit_softcap=1.5), 2.0),
    "padded": (Options(0.7, 2.0, vocab_size=7), 0.5),
}
KEYS = "logit_scale", "logit_softcap", "vocab_size", "ignore_index"
PLACES = {
    "every row": None,
    "a tree": [0, 1, 1, 1, 2, 4, 4, 8],  # rows with several labels, and rows with none
    "mixed": [7, 0, 7, 3, 0, 0, 8, 3, 7, 1],
    "one": [5],
    "none": [],
}


POISON = "ignored nan"
OPTIONS |= {f"{name}, {POISON}": OPTIONS[name] for name in ("plain", "softcap")}


def problem(options, rows, dtype=torch.float64):
    make = torch.Generator().manual_seed(3)
    hidden = (2 * torch.randn(ROWS, WIDTH, generator=make, dtype=torch.float64)).to(dtype)
    weight = torch.randn(VOCABULARY, WIDTH, generator=make, dtype=torch.float64).to(dtype)
    count = ROWS if rows is None else len(rows)
    labels = torch.randint(0, options.vocab_size or VOCABULARY, (count,), generator=make)
    labels[3:4] = options.ignore_index
    upstream = torch.randn(2, count, generator=make, dtype=torch.float64)
    return hidden, weight, labels, upstream


def errors(options, places, tile_rows, tp_group=None, sequence_parallel=False):
    """Return the largest errors of logprobs, entropy and gradients, with and without entropy."""
    poisoned = options.endswith(POISON)
    options, temperature = OPTIONS[options]
    rows = PLACES[places]
    hidden, weight, labels, upstream = problem(options, rows)
    inputs, seen = hidden.clone(), torch.ones(len(labels), dtype=torch.bool)
    if poisoned:  # rows whose labels are ignored, or get no gradient
        upstream[:, 1:2], seen[1:2] = 0, False
        used = {row for e, row in enumerate(rows or range(ROWS)) if e not in (1, 3)}
        inputs[[row for row in range(ROWS) if row not in used]] = torch.nan
    rank, size = (0, 1) if tp_group is None else (dist.get_rank(), dist.get_world_size())
    each = np.arange(ROWS) if rows is None else np.array(rows, dtype=np.int64)
    if sequence_parallel:  # of equal slices
        hidden, labels, upstream, each = hidden[:8], labels[:8], upstream[:, :8], each[:8]
        inputs, seen = inputs[:8], seen[:8]
    worst = []
    for with_entropy in (True, False):
        own = inputs.chunk(size)[rank] if sequence_parallel else inputs
        own = own.clone().requires_grad_()
        shard = weight.chunk(size)[rank].clone().requires_grad_()
        actual = mb.linear_logprobs(
            own, shard, labels, rows=None if rows is None else each, temperature=temperature,
            entropy=with_entropy, tile=tile_rows * len(shard) * 8, tp_group=tp_group,
            sequence_parallel=sequence_parallel, **{key: getattr(options, key) for key in KEYS},
        )  # fmt: skip
        of_both = upstream * torch.tensor([[1.0], [with_entropy]])
        lp, entropy, dh, dw = oracle.logprobs(
            hidden, weight, each, labels, of_both, options, temperature
        )
        total = (actual.logprobs * upstream[0]).sum()
        if actual.entropy is not None:
            total = total + (actual.entropy * upstream[1]).sum()
            worst.append((actual.entropy.detach() - entropy)[seen])
        total.backward()
        dh = dh.chunk(size)[rank] if sequence_parallel else dh
        worst.append((actual.logprobs.detach() - lp)[seen])
        worst += [own.grad - dh, shard.grad - dw.chunk(size)[rank]]
    return max([x.abs().max().item() for x in worst if x.numel()])


@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("options", OPTIONS)
def test_equals_the_formula(options, places):
    for tile_rows in (1, 2, 100):
        assert errors(options, places, tile_rows) < TOLERANCE


def faults_on_ranks():
    actual = {}
    for options, places in product(OPTIONS, ("every row", "mixed")):
        for sequence_parallel in {places == "every row", False}:
            case = options, places, 2, dist.group.WORLD, sequence_parallel
            if not (error := errors(*case)) < TOLERANCE:
                actual[case[:3] + case[4:]] = error
    return actual


@pytest.mark.parametrize("size", [2, 4])
def test_a_vocabulary_over_ranks(ranks, size):
    assert ranks(size).run(faults_on_ranks) == [{}] * size


def top_of_ranks():
    options, temperature = OPTIONS["padded"]
    hidden, weight, labels, _ = problem(options, None)
    shard = weight.chunk(dist.get_world_size())[dist.get_rank()]
    actual = mb.linear_logprobs(
        hidden, shard, labels, temperature=temperature, top_k=5, tp_group=dist.group.WORLD,
        **{key: getattr(options, key) for key in KEYS},
    )  # fmt: skip
    return actual.top, actual.top_ids


def test_the_most_likely_tokens(ranks):
    options, temperature = OPTIONS["padded"]
    hidden, weight, _, _ = problem(options, None)
    x = 2.0 * torch.tanh(0.7 * (hidden @ weight.T)[:, :7] / 2.0) / temperature
    all_of_them = x - x.exp().sum(1).log()[:, None]
    order = all_of_them.argsort(dim=1, descending=True)[:, :5]
    for top, ids in ranks(4).run(top_of_ranks):
        assert (ids == order).all()
        torch.testing.assert_close(top, all_of_them.gather(1, order), rtol=0, atol=TOLERANCE)


def test_log_probabilities_of_a_tree_are_those_of_its_trajectories():
    rng = random.Random(2)
    prompt = [rng.randrange(VOCABULARY) for _ in range(6)]
    some = [[*prompt, *(rng.randrange(3) for _ in range(rng.randrange(7)))] for _ in range(12)]
    tree = mb.trees.pack(some)
    make = torch.Generator().manual_seed(1)
    table = torch.randn(VOCABULARY, WIDTH, generator=make, dtype=torch.float64)
    place = torch.randn(20, WIDTH, generator=make, dtype=torch.float64)
    weight = torch.randn(VOCABULARY, WIDTH, generator=make, dtype=torch.float64)
    actual = mb.linear_logprobs(
        table[tree.tokens] + place[tree.positions], weight, torch.from_numpy(tree.edges.label),
        rows=tree.edges.row,
    )  # fmt: skip
    unpacked = zip(some, tree.unpack(actual.logprobs), tree.unpack(actual.entropy), strict=True)
    for tokens, got, entropy in unpacked:
        hidden = table[tokens[:-1]] + place[: len(tokens) - 1]
        labels = torch.tensor(tokens[1:], dtype=torch.int64)
        rows = torch.arange(len(labels))
        zeros = torch.zeros(2, len(labels))
        lp, h, _, _ = oracle.logprobs(hidden, weight, rows, labels, zeros, Options(), 1.0)
        torch.testing.assert_close(got, lp, rtol=0, atol=TOLERANCE)
        torch.testing.assert_close(entropy, h, rtol=0, atol=TOLERANCE)


def test_bfloat16_is_as_near_as_torch():
    make = torch.Generator().manual_seed(0)
    hidden = torch.randn(64, 32, generator=make).bfloat16()
    weight = (torch.randn(200, 32, generator=make) / 5).bfloat16()
    labels = torch.randint(0, 200, (64,), generator=make)
    upstream = torch.randn(2, 64, generator=make, dtype=torch.float64)
    truth = oracle.logprobs(hidden, weight, torch.arange(64), labels, upstream, Options(), 1.0)

    def grads(call):
        leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
        lp, entropy = call(*leaves)
        (lp * upstream[0] + entropy * upstream[1]).sum().backward()
        actual = lp, entropy, leaves[0].grad, leaves[1].grad
        return [(x.double() - y).abs().max().item() for x, y in zip(actual, truth, strict=True)]

    def in_torch(h, w):
        x = torch.log_softmax(h @ w.T, -1)
        return x.gather(1, labels[:, None])[:, 0], -(x.exp() * x).sum(-1)

    ring = grads(lambda h, w: mb.linear_logprobs(h, w, labels, tile=20 * 200 * 4)[:2])
    reference = grads(in_torch)
    assert all(a <= b for a, b in zip(ring, reference, strict=True)), (ring, reference)


def test_no_more_logits_are_alive_than_a_tile(monkeypatch):
    """A row with several labels is computed once, and a row without labels is not computed."""
    from megatron_burst.linear_cross_entropy import tiled_loop

    products = []
    monkeypatch.setattr(
        tiled_loop, "logits_", lambda z, h, w: products.append(z.shape) or torch.mm(h, w.t(), out=z)
    )
    hidden, weight, labels, _ = problem(Options(), PLACES["mixed"])
    mb.linear_logprobs(hidden, weight, labels, rows=PLACES["mixed"], tile=2 * VOCABULARY * 8)
    assert sum(rows for rows, _ in products) == len(set(PLACES["mixed"]))
    assert max(rows for rows, _ in products) == 2


WRONG = {
    "temperature": ({"temperature": 0.0}, "temperature must be from 1e-06 to .*, got float 0.0"),
    "a temperature without end": ({"temperature": 10**400}, "temperature must be from 1e-06 to "),
    "rows of no hidden state": (
        {"hidden": torch.zeros(0, WIDTH, dtype=torch.float64), "rows": [0] * ROWS},
        r"rows must be in \[0, 0\)",
    ),
    "ragged rows": ({"rows": [[0], [1, 2]]}, r"rows must be integers \[E\] or None, got list"),
    "entropy": ({"entropy": 1}, "entropy must be True or False, got int 1"),
    "top_k": ({"top_k": 17}, "top_k must be at most the vocabulary's 16 rows, got 17"),
    "top_k of a float": ({"top_k": 2.0}, "top_k must be a positive integer or None"),
    "rows as floats": ({"rows": [0.5] * ROWS}, r"rows must be integers \[E\] or None, got float64"),
    "rows out of range": ({"rows": [ROWS] * ROWS}, r"rows must be in \[0, 9\).* got 9 to 9"),
    "fewer rows": ({"rows": [0, 1]}, r"labels must be \[2\] for hidden"),
    "all": ({"rows": [-1] * ROWS, "temperature": -1, "tile": 0}, "tile must.*rows must.*temperat"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_refused(name):
    arguments, words = WRONG[name]
    hidden, weight, labels, _ = problem(Options(), None)
    with pytest.raises(ValueError, match=words):
        mb.linear_logprobs(**{"hidden": hidden, "weight": weight, "labels": labels, **arguments})


def test_entropies_of_sure_rows_are_as_near_as_torch_in_float32():
    """A log-sum-exp minus a mean would have an error of a third, and be negative."""
    make = torch.Generator().manual_seed(0)
    hidden, weight = (
        torch.randn(300, 64, generator=make),
        torch.randn(800, 64, generator=make) * 1.5,
    )
    actual = mb.linear_logprobs(hidden, weight, torch.zeros(300, dtype=torch.int64)).entropy

    def in_torch(h, w):
        x = torch.log_softmax(h @ w.T, -1)
        return -(x.exp() * x).sum(-1)

    truth = in_torch(hidden.double(), weight.double())
    sure = truth < 1e-2
    assert actual is not None
    assert (actual >= 0).all()
    assert sure.sum() > 30
    ring, reference = (
        ((x - truth) / truth)[sure].abs().median() for x in (actual, in_torch(hidden, weight))
    )
    assert ring < 3 * reference


def test_it_is_not_differentiated_twice():
    hidden, weight, labels, _ = problem(Options(), None)
    actual = mb.linear_logprobs(hidden.requires_grad_(), weight, labels)
    with pytest.raises(RuntimeError, match="linear_logprobs cannot be differentiated twice"):
        torch.autograd.grad(actual.logprobs.sum(), hidden, create_graph=True)
