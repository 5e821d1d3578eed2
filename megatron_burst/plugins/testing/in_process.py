# SPDX-License-Identifier: Apache-2.0
"""Operations of `megatron_burst` (`mb`) on all ranks of a grid in one process.

Arguments and results are lists with one tensor per rank.

For tests, and to check the numerics of a large grid on one device:

    from megatron_burst.plugins.testing import in_process

    groups = in_process.groups(inter=2, intra=2)
    outs = in_process.attention(qs, ks, vs, groups=groups)  # lists with the tensor of each rank

Each rank calls the operation of `mb` in a thread of its own. Only one thread runs at a time
(`on_ranks`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch._C._autograd import (  # pyright: ignore[reportMissingModuleSource]
    _get_current_graph_task_keep_graph as _keeps_graph,  # pyright: ignore
)
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_flatten, tree_unflatten

import megatron_burst as mb

from ...autotune.rates import Rates
from ...comm import rows
from ...comm.groups import CallCounter, Groups
from ...comm.transport import Channel, Counters
from ...recompute.checkpoint import current_store
from ...schedule.topology import Topology
from .local import LocalEndpoint, RankSwitch

T = TypeVar("T")


def groups(
    *, inter: int = 1, intra: int, ulysses: int = 1, placement: str = "head_first"
) -> InProcessGroups:
    """Return a grid of `inter` nodes with `intra` ranks each, all in this process.

    torch.distributed is not used.

    Args:
        inter: Number of nodes.
        intra: Number of ranks per node.
        ulysses: Number of ranks among which heads are divided, see `mb.Groups`.
        placement: "head_first" or "context_first", see `mb.Groups`.
    """
    return InProcessGroups(Topology.of_nodes(inter, intra, ulysses, placement))


class InProcessGroups:
    """Grid whose ranks are all in this process; `ranks` has the `Groups` of each rank."""

    backend = "in_process"

    def __init__(self, topology: Topology):
        self.topology, self._switch = topology, RankSwitch()
        self.ranks = tuple(LocalRank(topology, rank, self._switch) for rank in range(topology.size))

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.topology.size

    @property
    def counters(self) -> Counters:
        """Counters of the bytes that rank 0 has sent."""
        return self.ranks[0].counters

    @property
    def cache(self) -> dict[str, Any]:
        """Cache of rank 0's `Groups`."""
        return self.ranks[0].cache

    def run(self, function: Callable[..., T], *of_each: Sequence[Any]) -> list[T]:
        """Call `function` on each rank and return the results by rank.

        Args:
            function: Function of one rank.
            *of_each: Arguments of the function, each as a sequence with one value per rank.
        """
        arguments = zip(self.ranks, *of_each, strict=True)
        return self._switch.run([partial(function, *of_rank) for _, *of_rank in arguments])


class LocalRank(Groups):
    """`Groups` of one rank of `InProcessGroups`."""

    def __init__(self, topology: Topology, rank: int, switch: RankSwitch):
        self.topology, self.rank, self._switch = topology, rank, switch
        self.backend, self.devices, self.calls = "in_process", (), CallCounter()
        # Messages within a process take no time.
        self.cache: dict[str, Any] = {"rates": Rates(math.inf, math.inf)}
        counters = Counters()
        self._place(lambda members: LocalEndpoint(members.index(rank), members, switch, counters))

    def gather(self, header: torch.Tensor) -> list[torch.Tensor]:
        return self._switch.all_gather(self.rank, self.size, header)

    def connect(self, channels: Iterable[Channel], device: torch.device) -> None:
        pass  # mailboxes are created at their first use

    def expect(self, message: int) -> None:
        pass  # no message is received into a buffer

    @contextmanager
    def running(self, device: str = "cpu") -> Iterator[None]:
        with torch.autocast(device, enabled=False):
            yield  # the messages of a failed call are dropped, so the next call may run

    def check(self) -> None:
        pass


@dataclass(frozen=True)
class Plans:
    """Plans of all ranks. Other attributes, such as `side`, are read from the plan of rank 0."""

    groups: InProcessGroups
    ranks: Sequence[Any]

    def __getattr__(self, name: str) -> Any:
        if name == "ranks" or name.startswith("__"):  # read while a copy is being created
            raise AttributeError(name)
        return getattr(self.ranks[0], name)

    def matches(self, q: Sequence[object], k: Sequence[object], v: Sequence[object]) -> bool:
        """Return True if each rank's plan fits its tensors; q, k, v are lists by rank."""
        of_ranks = zip(self.ranks, q, k, v, strict=True)
        return all(plan.matches(*shard) for plan, *shard in of_ranks)

    def with_kernel(self, kernel: Any) -> Plans:
        """Return a copy of the plans with another kernel, the same on all ranks."""
        return replace(self, ranks=[plan.with_kernel(kernel) for plan in self.ranks])


# --- operations of `mb` -------------------------------------------------------------------------


def prepare(q: Any = None, k: Any = None, v: Any = None, *, groups: Any, **keywords: Any) -> Any:
    """Run `mb.prepare` on all ranks and return `Plans`; q, k, v are lists, one tensor per rank."""
    plans = call(mb.prepare, {"q": q, "k": k, "v": v}, groups=groups, **keywords)
    return Plans(groups, plans) if isinstance(groups, InProcessGroups) else plans


def attention(q: Any, k: Any, v: Any, **keywords: Any) -> Any:
    """Run `mb.attention` on all ranks; q, k, v and the result are lists, one tensor per rank."""
    return call(mb.attention, {"q": q, "k": k, "v": v}, **keywords)


def joint_attention(
    q: Any, key_sets: Sequence[Any], *, groups: Any, max_logits: Any = None, **shared: Any
) -> Any:
    """Run `mb.joint_attention` on all ranks.

    With return_lse, return the pair (list of outputs, list of lse).

    Args:
        q: Queries, a list with the tensor of each rank.
        key_sets: Tuples (k, v, plans): two lists with the tensor of each rank, and `Plans`; v is
            None if values are the keys.
        groups: Grid from `in_process.groups`.
        max_logits: List with the buffer of each rank, or None.
        **shared: Further arguments, the same on all ranks.
    """
    sets_of = [
        [(k[rank], v and v[rank], plans.ranks[rank]) for k, v, plans in key_sets]
        for rank in range(groups.size)
    ]
    arguments = [
        {"q": q[rank], "key_sets": sets_of[rank], "max_logits": largest, **shared}
        for rank, largest in enumerate(_of_all("max_logits", max_logits, groups.size))
    ]
    results = on_ranks(groups, partial(_with_keywords, mb.joint_attention), arguments)
    return tuple(map(list, zip(*results, strict=True))) if shared.get("return_lse") else results


def compress(values: Any, gates: Any, bias: torch.Tensor, **keywords: Any) -> Any:
    """Run `mb.compress` on all ranks; values, gates and the result are lists by rank.

    All ranks share the bias.
    """
    return call(mb.compress, {"values": values, "gates": gates}, bias=bias, **keywords)


def select(index_q: Any, index_k: Any, index_weights: Any = None, **keywords: Any) -> Any:
    """Run `mb.select` on all ranks; index tensors and the result are lists, one entry per rank."""
    lists = {"index_q": index_q, "index_k": index_k, "index_weights": index_weights}
    with torch.no_grad():
        return call(mb.select, lists, **keywords)


def sparse_attention(q: Any, k: Any, v: Any, selection: Any, **keywords: Any) -> Any:
    """Run `mb.sparse_attention` on all ranks; q, k, v, selection and the result are lists by rank.

    With return_lse, return the pair (list of outputs, list of lse).
    """
    lists = {"q": q, "k": k, "v": v, "selection": selection}
    results = call(mb.sparse_attention, lists, **keywords)
    if keywords.get("return_lse") and isinstance(results, list):
        return tuple(map(list, zip(*results, strict=True)))
    return results


def indexer_loss(
    index_q: Any, index_k: Any, index_weights: Any, q: Any, k: Any, selection: Any, *,
    lse: Any = None, **keywords: Any,
) -> Any:  # fmt: skip
    """Run `mb.indexer_loss` on all ranks; tensors, selection and the result are lists by rank."""
    lists = {
        "index_q": index_q, "index_k": index_k, "index_weights": index_weights, "q": q, "k": k,
        "selection": selection, "lse": lse,
    }  # fmt: skip
    return call(mb.indexer_loss, lists, **keywords)


def checkpoint(
    groups: Any, function: Callable[..., Any], *of_each: Sequence[Any], **options: Any
) -> Any:
    """Run `mb.checkpoint(function, ...)` on each rank and return the results by rank.

    Args:
        groups: Grid from `in_process.groups`.
        function: Function of one rank, see `on_ranks`.
        *of_each: Arguments of the function, each as a sequence with one value per rank.
        **options: Options of `mb.checkpoint`, the same on all ranks.
    """

    def of_rank(*arguments: Any) -> Any:
        return mb.checkpoint(function, *arguments, **options)

    return on_ranks(groups, of_rank, *of_each)


def prepare_linear(
    q: Any, k: Any, v: Any, *, decay: Any = None, beta: Any = None, reverse_decay: Any = None,
    reverse_beta: Any = None, groups: Any, **keywords: Any,
) -> Any:  # fmt: skip
    """Run `mb.prepare_linear` on all ranks and return `Plans`; tensors are lists, one per rank."""
    lists = {
        "q": q, "k": k, "v": v, "decay": _constant(decay, groups, None), "beta": beta,
        "reverse_decay": _constant(reverse_decay, groups, None), "reverse_beta": reverse_beta,
    }  # fmt: skip
    plans = call(mb.prepare_linear, lists, groups=groups, **keywords)
    return Plans(groups, plans) if isinstance(groups, InProcessGroups) else plans


def linear_attention(
    q: Any, k: Any, v: Any, *, decay: Any = None, beta: Any = None, reverse_decay: Any = None,
    reverse_beta: Any = None, initial_state: Any = None, **keywords: Any,
) -> Any:  # fmt: skip
    """Run `mb.linear_attention` on all ranks; tensors and the result are lists, one per rank.

    With return_final_state, return the pair (list of outputs, list of final states). Decays of
    shape [heads], and initial_state, may also be one tensor that all ranks share.
    """
    home = keywords.get("groups"), keywords.get("plan")
    lists = {
        "q": q, "k": k, "v": v, "decay": _constant(decay, *home), "beta": beta,
        "reverse_decay": _constant(reverse_decay, *home), "reverse_beta": reverse_beta,
        "initial_state": _shared(initial_state, *home),
    }  # fmt: skip
    return _with_final_states(call(mb.linear_attention, lists, **keywords), keywords)


def state_scan(decay: Any, increment: Any, *, initial_state: Any = None, **keywords: Any) -> Any:
    """Run `mb.state_scan` on all ranks; tensors and the result are lists, one entry per rank.

    With return_final_state, return the pair (list of entering states, list of final states).
    initial_state may also be one tensor that all ranks share.
    """
    home = keywords.get("groups"), keywords.get("plan")
    initial_state = _shared(initial_state, *home)
    lists = {"decay": decay, "increment": increment, "initial_state": initial_state}
    return _with_final_states(call(mb.state_scan, lists, **keywords), keywords)


def short_convolution(
    x: Any, weight: torch.Tensor, bias: torch.Tensor | None = None, **keywords: Any
) -> Any:
    """Run `mb.short_convolution` on all ranks; x and the result are lists, one tensor per rank.

    All ranks share weight and bias.
    """
    return call(mb.short_convolution, {"x": x}, weight=weight, bias=bias, **keywords)


def exchange_rows(tensors: Any, route: Any, groups: Any, *options: Any) -> Any:
    """Run `comm.rows.exchange_rows` on all ranks and return the received rows of each rank.

    Args:
        tensors: List with the tensors of each rank.
        route: List with the route of each rank.
        groups: Grid from `in_process.groups`.
        *options: Further arguments, the same on all ranks.
    """
    if not isinstance(groups, InProcessGroups):
        return rows.exchange_rows(tensors, route, groups, *options)
    shared = [[value] * groups.size for value in options]
    return on_ranks(groups, rows.exchange_rows, tensors, route, groups.ranks, *shared)


def _constant(decay: Any, groups: Any, plan: Any) -> Any:
    """Return a list with `decay` for each rank if `decay` is one tensor [heads], else `decay`."""
    constant = isinstance(decay, torch.Tensor) and decay.dim() == 1
    return _shared(decay, groups, plan) if constant else decay


def _with_final_states(results: Any, keywords: Mapping[str, Any]) -> Any:
    if keywords.get("return_final_state") and isinstance(results, list):
        return tuple(map(list, zip(*results, strict=True)))
    return results


def call(
    operation: Callable[..., Any],
    lists: Mapping[str, Any],
    *,
    groups: Any = None,
    plan: Any = None,
    **shared: Any,
) -> Any:
    """Run an operation of `mb` on each rank and return the results by rank.

    If `groups` is an `mb.Groups`, or `plan` a plan of `mb.prepare`, the operation runs only on this
    rank. All arguments and the result then belong to this rank.

    Args:
        operation: Function of one rank, called with keyword arguments.
        lists: Arguments by name, each as a list with one value per rank; or None.
        groups: Grid from `in_process.groups`; None with a plan.
        plan: `Plans` of the call; None with groups.
        **shared: Further arguments, the same on all ranks.

    Raises:
        ValueError: A value is not a list, or its length differs from the number of ranks.
    """
    home = groups if plan is None else getattr(plan, "groups", None)
    if not isinstance(home, InProcessGroups):
        alone = {"groups": groups, "plan": plan}
        own = {name: value for name, value in alone.items() if value is not None}
        return operation(**lists, **own, **shared)
    arguments = []
    for rank in range(home.size):
        own = dict(shared)
        if groups is not None:
            own["groups"] = groups.ranks[rank]
        if plan is not None:
            own["plan"] = plan.ranks[rank]
        for name, values in lists.items():
            own[name] = _of_all(name, values, home.size)[rank]
        arguments.append(own)
    return on_ranks(home, partial(_with_keywords, operation), arguments)


def _of_all(name: str, values: Any, size: int) -> Sequence[Any]:
    """Return `values`, or a list of None per rank if `values` is None.

    Raises ValueError if `values` is not a list with one value per rank.
    """
    if values is None:
        return [None] * size
    listed = isinstance(values, (list, tuple))
    if listed and len(values) == size:
        return values
    text = f"tensor {[*values.shape]}" if isinstance(values, torch.Tensor) else repr(values)
    got = f"{len(values)} in a list" if listed else f"{text:.60}"
    raise ValueError(
        f"{name}: groups hold {size} ranks in this process; pass a list with one value per rank, "
        f"got {got}"
    )


def _shared(value: Any, groups: Any, plan: Any) -> Any:
    """Return a list with `value` for each rank if `value` is a tensor; otherwise `value`."""
    home = groups if plan is None else getattr(plan, "groups", None)
    if isinstance(home, InProcessGroups) and isinstance(value, torch.Tensor):
        return [value] * home.size
    return value


def _with_keywords(operation: Callable[..., T], keywords: dict[str, Any]) -> T:
    return operation(**keywords)


# --- autograd -----------------------------------------------------------------------------------


def on_ranks(groups: InProcessGroups, function: Callable[..., T], *of_each: Sequence[Any]) -> Any:
    """Run `function` on each rank and return the results by rank.

    The results are differentiable. Each rank has a thread and an autograd graph of its own. In
    forward and backward, only one thread runs at a time.

    Args:
        groups: Grid from `in_process.groups`.
        function: Called once per rank. A tensor that needs a gradient must be an argument (possibly
            inside lists, tuples and dictionaries), not a variable from the function's closure.
        *of_each: Arguments of the function, each as a sequence with one value per rank. The
            gradient of a tensor that several ranks share is the sum of their gradients.

    Raises:
        RuntimeError: All ranks wait for messages that no rank sends, or the call is inside
            `mb.checkpoint`, which would mix the attention outputs of all ranks.
        ValueError: The function uses a tensor that needs a gradient and is not an argument.
    """
    if current_store() is not None:
        raise RuntimeError(
            "mb.checkpoint around an in_process operation would mix the attention outputs of all "
            "ranks; call in_process.checkpoint, which runs mb.checkpoint on each rank"
        )
    if not torch.is_grad_enabled():
        return groups.run(function, *of_each)
    flat = [tree_flatten(arguments) for arguments in zip(*of_each, strict=True)]
    inputs = {id(x): x for values, _ in flat for x in values if _needs_grad(x)}
    if not inputs:
        results = groups.run(function, *of_each)
        edges = [get_gradient_edge(x) for x in tree_flatten(results)[0] if _needs_grad(x)]
        _check_leaves(edges, ())
        return results
    numbers, ranks = {key: number for number, key in enumerate(inputs)}, []
    for values, tree in flat:
        # Detached, so that the graph of the rank ends here.
        leaves = {numbers[id(x)]: x.detach().requires_grad_() for x in values if _needs_grad(x)}
        values = [leaves[numbers[id(x)]] if _needs_grad(x) else x for x in values]
        ranks.append(_Rank(partial(function, *tree_unflatten(values, tree)), leaves))
    return _differentiable(groups, ranks, list(inputs.values()))


def _needs_grad(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


@dataclass
class _Rank:
    """Function, results and autograd graph of one rank.

    An output is a result that needs a gradient.

    Attributes:
        function: Function that computes the results of the rank.
        leaves: Detached copy of each input that needs a gradient, by index of the input. The copy
            shares the input's memory.
        tree: Nesting of the results in lists, tuples and dictionaries.
        results: Flattened results, with None in place of each output.
        outputs: Indices of the outputs in `results`.
        edges: Gradient edge of each output; an edge does not keep the tensor in memory.
    """

    function: Callable[[], Any]
    leaves: dict[int, torch.Tensor]
    tree: Any = None
    results: list[Any] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    edges: list[GradientEdge] = field(default_factory=list)

    def run(self) -> list[torch.Tensor]:
        """Call the function, store its results, and return the outputs, detached."""
        self.results, self.tree = tree_flatten(self.function())
        self.outputs = [i for i, value in enumerate(self.results) if _needs_grad(value)]
        self.edges = [get_gradient_edge(self.results[i]) for i in self.outputs]
        _check_leaves(self.edges, self.leaves.values())
        del self.function
        outputs = [self.results[i].detach() for i in self.outputs]
        for i in self.outputs:
            self.results[i] = None
        return outputs


def _check_leaves(edges: Iterable[GradientEdge], leaves: Iterable[torch.Tensor]) -> None:
    """Raise ValueError if the graph of the results has a leaf tensor that is not in `leaves`."""
    expected = {id(leaf) for leaf in leaves}
    nodes, seen = [edge.node for edge in edges], set()
    while nodes:
        node: Any = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)  # set for the node of a leaf
        if variable is not None and id(variable) not in expected:
            raise ValueError(
                f"the function of a rank uses a tensor {list(variable.shape)} that needs a "
                "gradient and is not an argument; pass it as an argument"
            )
        nodes += [following for following, _ in node.next_functions]


def _differentiable(
    groups: InProcessGroups, ranks: Sequence[_Rank], inputs: Sequence[torch.Tensor]
) -> list[Any]:
    """Run the ranks and return their results; the outputs are differentiable in `inputs`."""
    outputs: Any = iter(_OnRanks.apply(groups, ranks, *inputs))
    results = []
    for rank in ranks:
        values, rank.results = rank.results, []
        for i in rank.outputs:
            values[i] = next(outputs)
        results.append(tree_unflatten(values, rank.tree))
    return results


class _OnRanks(torch.autograd.Function):
    """Autograd function that runs the graphs of all ranks, from inputs to outputs."""

    @staticmethod
    def forward(
        ctx: Any, groups: InProcessGroups, ranks: Sequence[_Rank], *inputs: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        with torch.enable_grad():
            of_ranks = groups.run(_Rank.run, ranks)
        ctx.groups, ctx.ranks, ctx.inputs = groups, ranks, inputs
        return tuple(output for outputs in of_ranks for output in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        higher_order, count = torch.is_grad_enabled(), len(ctx.inputs)
        keep = _keeps_graph()
        numbered, calls = iter(enumerate(gradients, count)), []
        for rank in ctx.ranks:
            # With create_graph the gradients of the outputs are inputs too.
            upper = {
                number: gradient.detach().requires_grad_(higher_order)
                for _, (number, gradient) in zip(rank.edges, numbered, strict=False)
            }
            function = partial(
                _gradients, rank.edges, list(rank.leaves.values()), list(upper.values()),
                retain_graph=keep, create_graph=higher_order,
            )  # fmt: skip
            calls.append(_Rank(function, rank.leaves | upper))
        if higher_order:
            of_ranks = _differentiable(ctx.groups, calls, [*ctx.inputs, *gradients])
        else:
            of_ranks = ctx.groups.run(lambda call: call.function(), calls)
        parts: list[list[torch.Tensor]] = [[] for _ in range(count)]
        for rank, of_leaves in zip(ctx.ranks, of_ranks, strict=True):
            for number, gradient in zip(rank.leaves, of_leaves, strict=True):
                if gradient is not None:
                    parts[number].append(gradient)
        return None, None, *(_sum(of_input) for of_input in parts)


def _gradients(
    edges: Sequence[GradientEdge],
    leaves: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    **options: bool,
) -> list[torch.Tensor | None]:
    """Return the gradient of each leaf of one rank; None for a leaf without a gradient.

    Args:
        edges: Gradient edges of the outputs.
        leaves: Detached inputs of the rank.
        gradients: Gradients of the outputs.
        **options: Options of `torch.autograd.grad`.
    """
    if not edges or not leaves:
        return [None] * len(leaves)
    # In this thread, also on CUDA: on an autograd thread the ranks would deadlock.
    with torch.autograd.set_multithreading_enabled(False):
        return list(torch.autograd.grad(edges, leaves, gradients, allow_unused=True, **options))


def _sum(parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
    if len(parts) < 2:
        return parts[0] if parts else None
    return torch.stack(list(parts)).sum(0)
