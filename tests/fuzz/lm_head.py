"""Random calls of `linear_cross_entropy`, in one process and on gloo ranks, by seed.

`python -m tests.fuzz lm_head --seed 1 --seconds 600`. A case is its number: everything about it is
drawn from that, on every rank alike. The truth is `head_oracle`'s: dense, in float64, written by
hand. float64 must agree to 1e-10; lower precision is bounded by the error of torch's own operators
in the same dtype, and by rounding.

Shape letters: n tokens, d width, v vocabulary rows of all ranks.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import head_oracle as oracle
import torch
import torch.distributed as dist
from workers import WorkerError, Workers

import megatron_burst as mb

from .head_cases import Case, Problem, draw, laid_out, sums_dtype
from .tally import Tally, attempt

EXACT = 1e-10


class Kept:
    """A sink that keeps what it gets."""

    def __init__(self, weight: torch.Tensor, dtype: torch.dtype):
        self.tensor, self.done_calls = torch.zeros(weight.shape, dtype=dtype), 0

    def target(self) -> torch.Tensor:
        return self.tensor

    def done(self) -> None:
        self.done_calls += 1


# --- one case on one rank --------------------------------------------------------------------


@dataclass
class Found:
    """Results of this rank; gradients where they were asked for."""

    loss: torch.Tensor
    argmax: torch.Tensor | None
    dh: torch.Tensor | None = None
    dw: torch.Tensor | None = None
    warned: bool = False


def _call(case: Case, problem: Problem, rank: int) -> Found:
    """The operation, as this case has it."""
    hidden = problem.poisoned(case.poison)
    hidden = hidden.chunk(case.world)[rank] if case.sequence_parallel else hidden
    weight = problem.weight[rank * case.rows : (rank + 1) * case.rows]
    hidden = laid_out(hidden, case.hidden_strides).requires_grad_("hidden" not in case.frozen)
    weight = laid_out(weight, case.weight_strides).requires_grad_("weight" not in case.frozen)
    sink = None if case.sink is None else Kept(weight, case.sink)
    result = mb.linear_cross_entropy(
        hidden, weight, laid_out(problem.labels.to(case.label_dtype), case.hidden_strides),
        loss_mask=problem.mask, tp_group=dist.group.WORLD if case.world > 1 else None,
        sequence_parallel=case.sequence_parallel, tile=case.tile, mode=case.mode,
        return_argmax=case.argmax, sink=sink, **vars(case.options),
    )  # fmt: skip
    loss, argmax = result if isinstance(result, tuple) else (result, None)
    found = Found(loss.detach(), argmax)
    if not loss.requires_grad:
        return found
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if case.twice and hidden.requires_grad:  # to no effect on the weight
            torch.autograd.grad(loss, hidden, problem.upstream, retain_graph=True)
        loss.backward(problem.upstream)
    if sink is not None:
        assert weight.grad is None
        assert sink.done_calls == weight.requires_grad
    found.dh = hidden.grad
    found.dw = sink.tensor if sink is not None and weight.requires_grad else weight.grad
    found.warned = any("not a multiple of loss_mask" in str(w.message) for w in caught)
    return found


def _eager(case: Case, problem: Problem) -> tuple[torch.Tensor, ...]:
    """Loss [n], dhidden, dweight by torch's operators in the dtype of the case."""
    options = case.options
    hidden = problem.hidden.reshape(-1, case.width).clone().requires_grad_()
    weight = problem.weight.clone().requires_grad_()
    labels = problem.labels.reshape(-1)
    x = (hidden @ weight.T).to(sums_dtype(case.dtype)) * options.logit_scale
    if options.logit_softcap is not None:
        x = options.logit_softcap * torch.tanh(x / options.logit_softcap)
    x = x[:, : options.vocab_size or len(weight)]
    lse, e = x.logsumexp(1), options.label_smoothing
    inside = (labels >= 0) & (labels < x.shape[1])
    hit = x.gather(1, labels.where(inside, 0)[:, None])[:, 0] * inside
    loss = lse - (1 - e) * hit - e * x.mean(1) + options.z_loss * lse**2
    loss = loss.where(labels != options.ignore_index, 0)
    return loss.detach(), *torch.autograd.grad(loss, [hidden, weight], problem.upstream.reshape(-1))


def check(number: int, rank: int = 0) -> list[str]:
    """What is wrong with a case on this rank."""
    return attempt(lambda: list(_faults(draw(number), rank)))


def _faults(case: Case, rank: int) -> Iterator[str]:
    problem = Problem.of(case)
    found = _call(case, problem, rank)
    hidden, labels = problem.hidden.reshape(-1, case.width), problem.labels.reshape(-1)
    upstream = problem.upstream.reshape(-1)
    loss, _, lse, logits, _ = oracle.loss(hidden, problem.weight, labels, case.options)
    if case.poison is not None:
        mine = found.loss.reshape(-1)
        if not mine.isfinite().all():
            yield f"loss of rows that do not count: {mine[problem.unused].tolist()}"
        loss[problem.unused] = mine[problem.unused].double()  # a softcap makes it finite, else 0
    truth = loss, *oracle.gradients(hidden, problem.weight, labels, upstream, case.options)
    if found.loss.shape != problem.labels.shape or found.loss.dtype != sums_dtype(case.dtype):
        yield f"loss is {list(found.loss.shape)} of {found.loss.dtype}"
    bounds = _bounds(case, problem, truth, lse, logits)
    share = slice(rank * case.rows, (rank + 1) * case.rows)
    dh = truth[1].reshape(problem.hidden.shape)
    dh = dh.chunk(case.world)[rank] if case.sequence_parallel else dh
    pairs = {
        "loss": (found.loss.reshape(-1), truth[0]),
        "dhidden": (found.dh, dh),
        "dweight": (found.dw, truth[2][share]),
    }
    for (name, (mine, right)), bound in zip(pairs.items(), bounds, strict=True):
        if mine is None:
            if name[1:] not in case.frozen and len(case.frozen) < 2:
                yield f"{name} is missing"
        elif not (error := _worst(mine.double() - right)) <= bound:
            yield f"{name} is off by {error:.3g}, allowed {bound:.3g}"
    if case.poison is not None and found.argmax is not None:  # no row is the most likely one
        unused, real = problem.unused, logits[:, : case.options.vocab_size or logits.shape[1]]
        found.argmax.view(-1)[unused] = real.argmax(1)[unused]
    yield from _wrong_winners(case, found.argmax, logits)
    if found.warned != _dear(case, problem, labels) and len(case.frozen) < 2:
        yield f"warned: {found.warned}"


def _bounds(
    case: Case,
    problem: Problem,
    truth: tuple[torch.Tensor, ...],
    lse: torch.Tensor,
    logits: torch.Tensor,
) -> list[float]:
    """Of the absolute errors of loss, dhidden, dweight."""
    if case.dtype is torch.float64:
        return [EXACT * (1 + _worst(x)) for x in truth]
    stock = [_worst(a.double() - b) for a, b in zip(_eager(case, problem), truth, strict=True)]
    each = problem.upstream.abs().double().reshape(-1) * abs(case.options.logit_scale)
    each = each * (1 + 2 * case.options.z_loss * lse.abs())
    # How large the terms are of which a result is the sum: so much does their rounding matter.
    terms = (
        1 + _worst(logits) + case.options.z_loss * _worst(lse) ** 2,
        _worst(each) * _worst(problem.weight.double()) * case.world,
        each.sum().item() * _worst(problem.hidden.double()),
    )
    eps = [torch.finfo(d).eps for d in (sums_dtype(case.dtype), case.dtype, case.dtype)]
    return [2 * s + 4 * e * t for s, e, t in zip(stock, eps, terms, strict=True)]


def _wrong_winners(case: Case, argmax: torch.Tensor | None, logits: torch.Tensor) -> Iterator[str]:
    if (argmax is None) == case.argmax:
        yield f"argmax: {argmax}"
    if argmax is None:
        return
    real = logits[:, : case.options.vocab_size or logits.shape[1]]
    near = 16 * torch.finfo(sums_dtype(case.dtype)).eps * (1 + _worst(logits))
    picked = argmax.reshape(-1)
    if not ((picked >= 0) & (picked < real.shape[1])).all():
        yield f"argmax outside the vocabulary: {picked.tolist()}"
    elif not (real.gather(1, picked[:, None])[:, 0] >= real.amax(1) - near).all():
        yield f"argmax {picked.tolist()}, the largest are {real.argmax(1).tolist()}"


def _dear(case: Case, problem: Problem, labels: torch.Tensor) -> bool:
    """Must the logits be computed a second time? If what arrives is no multiple of the weights."""
    if case.mode != "single_pass" or not len(labels):
        return False
    arrived = problem.upstream.reshape(-1) * (labels != case.options.ignore_index)
    at = problem.weights.abs().argmax()
    factor = arrived[at] / problem.weights[at] if problem.weights[at] else 0
    return _worst(arrived - factor * problem.weights) > 1e-4 * _worst(arrived)


def _worst(x: torch.Tensor) -> float:
    return x.abs().max().item() if x.numel() else 0.0


# --- many cases ------------------------------------------------------------------------------


def on_rank(number: int) -> list[str]:
    return check(number, dist.get_rank())


def search(cases: Iterable[int], pools: Callable[[int], Workers]) -> Tally:
    """Try these cases, on `pools(n)` where they need n ranks, until too many have failed."""
    tally = Tally("lm_head")
    for number in cases:
        case = draw(number)
        if case.world == 1:
            found = check(number)
        else:
            try:
                answers = pools(case.world).run(on_rank, number)
            except WorkerError as error:
                answers = [[str(error)]]
            found = [f"rank {i}: {fault}" for i, some in enumerate(answers) for fault in some]
        tally.add(case.kinds, found, case, number)
        if tally.full:
            break
    return tally
