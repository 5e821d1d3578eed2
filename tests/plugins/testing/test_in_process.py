"""Ranks in one process: their order, their modes, their errors and their gradients."""

import os
import signal

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import megatron_burst as mb
from megatron_burst.plugins.testing import in_process

SIZE = 3


class Calls(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.__name__)
        return function(*args, **(kwargs or {}))


def in_turns(groups, rank, order):
    """Append this rank's number three times, and wait for all ranks in between."""
    for _ in range(3):
        order.append(rank)
        groups.ranks[rank].gather(torch.zeros(1))


def test_ranks_take_turns_in_their_order():
    groups, order = in_process.groups(intra=SIZE), []
    groups.run(lambda rank: in_turns(groups, rank, order), range(SIZE))
    # The last rank of a gather continues at once.
    assert order == [0, 1, 2, 2, 0, 1, 1, 2, 0]


def test_an_error_of_one_rank_ends_the_others():
    groups, ended = in_process.groups(intra=SIZE), []

    def run(rank):
        try:
            if rank == 1:
                raise ValueError("of rank 1")
            groups.ranks[rank].gather(torch.zeros(1))
        finally:
            ended.append(rank)

    with pytest.raises(ValueError, match="of rank 1"):
        groups.run(run, range(SIZE))
    assert sorted(ended) == [0, 1]  # rank 2 has not begun
    results = groups.run(lambda rank: groups.ranks[rank].gather(torch.tensor(rank)), range(SIZE))
    assert [[x.item() for x in each] for each in results] == [[0, 1, 2]] * SIZE


def test_a_deadlock_is_an_error():
    groups = in_process.groups(intra=SIZE)
    with pytest.raises(RuntimeError, match="deadlock: some ranks did not call gather 1"):
        groups.run(lambda rank: rank and groups.ranks[rank].gather(torch.zeros(1)), range(SIZE))


def test_ranks_have_the_modes_of_the_caller():
    groups = in_process.groups(intra=SIZE)

    def modes(_):
        return torch.is_grad_enabled(), torch.ones(2, 2).mm(torch.ones(2, 2)).dtype

    assert groups.run(modes, range(SIZE)) == [(True, torch.float32)] * SIZE
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert groups.run(modes, range(SIZE)) == [(False, torch.bfloat16)] * SIZE
    with Calls() as calls:
        groups.run(modes, range(SIZE))
    assert calls.names.count("mm.default") == SIZE
    with torch.inference_mode():
        (found, *_) = groups.run(lambda _: torch.ones(1).is_inference(), range(SIZE))
    assert found


def total(group, x, weight, other=None):
    """Return [x weight, sum over ranks of the value of x], and an object that is not a tensor."""
    values = group.gather(x.detach().clone())
    return {"out": x * weight + (0 if other is None else other), "sum": sum(values)}, group.rank


def test_gradients_of_all_ranks_and_of_what_they_share():
    groups = in_process.groups(intra=SIZE)
    xs = [torch.full((2,), 1.0 + rank, requires_grad=True) for rank in range(SIZE)]
    weight = torch.tensor([2.0, 3.0], requires_grad=True)
    found = in_process.on_ranks(groups, total, groups.ranks, xs, [weight] * SIZE)
    assert [number for _, number in found] == [0, 1, 2]
    assert all(each["sum"].tolist() == [6.0, 6.0] for each, _ in found)
    assert not any(each["sum"].requires_grad for each, _ in found)
    outs = [each["out"] for each, _ in found]
    assert outs[2].tolist() == [6.0, 9.0]
    grads = torch.autograd.grad(outs[::2], [*xs, weight], [torch.ones(2), torch.full((2,), 10.0)])
    expected = [[2.0, 3.0], [0.0, 0.0], [20.0, 30.0], [31.0, 31.0]]  # 1 + 10 * 3
    assert [grad.tolist() for grad in grads] == expected
    with pytest.raises(RuntimeError, match="a second time"):
        torch.autograd.grad(outs[::2], [*xs, weight], [torch.ones(2), torch.full((2,), 10.0)])


def test_nothing_is_kept_without_gradients():
    groups = in_process.groups(intra=SIZE)
    xs = [torch.ones(2, requires_grad=True)] * SIZE
    with torch.no_grad():
        found = in_process.on_ranks(groups, total, groups.ranks, xs, xs)
    assert not any(each["out"].requires_grad for each, _ in found)


def test_second_and_third_derivatives():
    groups = in_process.groups(intra=2)
    xs = [torch.tensor([2.0], requires_grad=True), torch.tensor([3.0], requires_grad=True)]
    outs = in_process.on_ranks(groups, lambda x, y: x**3 * y, xs, xs[::-1])
    loss, derivatives = sum(outs).sum(), []  # x^3 y + x y^3, at (2, 3)
    for _ in range(3):
        (loss,) = torch.autograd.grad(loss, xs[:1], create_graph=True)
        derivatives.append(loss.item())
    assert derivatives == [63.0, 36.0, 18.0]  # 3 x^2 y + y^3, 6 x y, 6 y


def test_a_checkpoint_in_each_rank_runs_again_in_its_thread():
    groups, runs = in_process.groups(intra=2), []

    def squared(group, x):
        group.gather(torch.zeros(1))
        runs.append(group.rank)
        return x.sin().square()

    xs = [torch.ones(2, requires_grad=True) for _ in range(2)]
    outs = in_process.on_ranks(
        groups, lambda group, x: mb.checkpoint(squared, group, x, keep=0.0), groups.ranks, xs
    )
    assert sorted(runs) == [0, 1]
    torch.autograd.backward([out.sum() for out in outs])
    assert sorted(runs) == [0, 0, 1, 1]
    expected = 2 * torch.ones(2).sin() * torch.ones(2).cos()
    assert all(torch.allclose(x.grad, expected) for x in xs)


def test_ranks_inside_one_checkpoint_are_refused():
    groups = in_process.groups(intra=2)
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"in_process\.checkpoint"):
        mb.checkpoint(lambda x: in_process.on_ranks(groups, torch.sin, [x, x])[0], x, keep=0.5)


@pytest.mark.parametrize("argument_needs_it", [True, False])
def test_a_tensor_that_is_no_argument_and_needs_a_gradient_is_refused(argument_needs_it):
    weight = torch.ones(2, requires_grad=True)
    tensors = [torch.ones(2, requires_grad=argument_needs_it) for _ in range(2)]
    with pytest.raises(
        ValueError, match=r"tensor \[2\] that needs a gradient and is not an argument"
    ):
        in_process.on_ranks(in_process.groups(intra=2), lambda x: x * weight, tensors)


def test_a_process_that_forks_has_its_own_threads():
    groups = in_process.groups(intra=2)
    assert groups.run(lambda x: x + 1, [1, 2]) == [2, 3]
    child = os.fork()
    if not child:
        signal.alarm(20)  # a call without threads would wait for ever
        os._exit(groups.run(lambda x: x + 1, [3, 4]) != [4, 5])
    assert os.waitpid(child, 0)[1] == 0


def test_a_function_without_arguments_runs_once_per_rank():
    calls = []
    assert in_process.groups(intra=2).run(lambda: calls.append(0)) == [None] * 2
    assert len(calls) == 2
