# SPDX-License-Identifier: Apache-2.0
"""Operations of `mb` on all ranks of a grid in one process, with one tensor per rank in a list.

For tests, and to check the numerics of a large grid on one device:

    from megatron_burst.plugins.testing import in_process

    groups = in_process.groups(inter=2, intra=2)
    outs = in_process.attention(qs, ks, vs, groups=groups)  # lists with the tensor of each rank

Each rank calls the operation of `mb` in a thread of its own. One thread runs at a time
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
    """Return a grid of `inter` nodes of `intra` ranks in this process, without torch.distributed.

    Args:
        inter: Number of nodes.
        intra: Number of ranks per node.
        ulysses: Number of ranks that share heads, see `mb.Groups`.
        placement: Placement of the ranks that share heads, see `mb.Groups`.
    """
    return InProcessGroups(Topology.of_nodes(inter, intra, ulysses, placement))


class InProcessGroups:
    """All ranks of a grid in this process; `ranks` has the `Groups` of each rank."""

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
        """Bytes that the first rank sent."""
        return self.ranks[0].counters

    @property
    def cache(self) -> dict[str, Any]:
        """Cache of the first rank."""
        return self.ranks[0].cache

    def run(self, function: Callable[..., T], *of_each: Sequence[Any]) -> list[T]:
        """Call `function` on each rank. Each item of `of_each` has one value per rank."""
        arguments = zip(*of_each, strict=True)
        return self._switch.run([partial(function, *of_rank) for of_rank in arguments])


class LocalRank(Groups):
    """Groups of one rank of `InProcessGroups`."""

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
    """Plans of all ranks. Other attributes, such as `side`, are read from the plans."""

    groups: InProcessGroups
    ranks: Sequence[Any]

    def __getattr__(self, name: str) -> Any:
        if name == "ranks" or name.startswith("__"):  # read while a copy is being created
            raise AttributeError(name)
        return getattr(self.ranks[0], name)

    def matches(self, q: Sequence[object], k: Sequence[object], v: Sequence[object]) -> bool:
        """Return whether each rank's plan fits this rank's tensors (lists, one per rank)."""
        of_ranks = zip(self.ranks, q, k, v, strict=True)
        return all(plan.matches(*shard) for plan, *shard in of_ranks)

    def with_kernel(self, kernel: Any) -> Plans:
        """Return plans with another kernel, which all ranks share."""
        return replace(self, ranks=[plan.with_kernel(kernel) for plan in self.ranks])


# --- operations of `mb` -------------------------------------------------------------------------


def prepare(q: Any = None, k: Any = None, v: Any = None, *, groups: Any, **keywords: Any) -> Any:
    """Run `mb.prepare` on all ranks and return `Plans`; q, k, v: lists, one tensor per rank."""
    plans = call(mb.prepare, {"q": q, "k": k, "v": v}, groups=groups, **keywords)
    return Plans(groups, plans) if isinstance(groups, InProcessGroups) else plans


def attention(q: Any, k: Any, v: Any, **keywords: Any) -> Any:
    """Run `mb.attention` on all ranks; q, k, v and the result: lists, one tensor per rank."""
    return call(mb.attention, {"q": q, "k": k, "v": v}, **keywords)


def select(index_q: Any, index_k: Any, index_weights: Any = None, **keywords: Any) -> Any:
    """Run `mb.select` on all ranks; index tensors and the result: lists, one entry per rank."""
    lists = {"index_q": index_q, "index_k": index_k, "index_weights": index_weights}
    with torch.no_grad():
        return call(mb.select, lists, **keywords)


def sparse_attention(q: Any, k: Any, v: Any, selection: Any, **keywords: Any) -> Any:
    """Run `mb.sparse_attention` on all ranks; arguments and results: lists, one entry per rank.

    With return_lse, return the outputs and the lse of all ranks.
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
    """Run `mb.indexer_loss` on all ranks; arguments and the result: lists, one entry per rank."""
    lists = {
        "index_q": index_q, "index_k": index_k, "index_weights": index_weights, "q": q, "k": k,
        "selection": selection, "lse": lse,
    }  # fmt: skip
    return call(mb.indexer_loss, lists, **keywords)


def checkpoint(
    groups: Any, function: Callable[..., Any], *of_each: Sequence[Any], **options: Any
) -> Any:
    """Run `function` inside `mb.checkpoint` on each rank and return the results.

    Args:
        groups: Ranks that share this process.
        function: Function of one rank, see `on_ranks`.
        *of_each: Arguments as sequences with the value of each rank.
        **options: Options of `mb.checkpoint`.
    """

    def of_rank(*arguments: Any) -> Any:
        return mb.checkpoint(function, *arguments, **options)

    return on_ranks(groups, of_rank, *of_each)


def prepare_linear(
    q: Any, k: Any, v: Any, *, decay: Any = None, beta: Any = None, groups: Any, **keywords: Any
) -> Any:
    """Run `mb.prepare_linear` on all ranks and return `Plans`; tensors: lists, one per rank."""
    decay = _constant(decay, groups, None)
    lists = {"q": q, "k": k, "v": v, "decay": decay, "beta": beta}
    plans = call(mb.prepare_linear, lists, groups=groups, **keywords)
    return Plans(groups, plans) if isinstance(groups, InProcessGroups) else plans


def linear_attention(
    q: Any, k: Any, v: Any, *, decay: Any = None, beta: Any = None, initial_state: Any = None,
    **keywords: Any,
) -> Any:  # fmt: skip
    """Run `mb.linear_attention` on all ranks; tensors and results: lists, one entry per rank.

    With return_final_state, return the outputs and the final states of all ranks. decay [h] and
    initial_state may be one tensor that all ranks share.
    """
    home = keywords.get("groups"), keywords.get("plan")
    lists = {
        "q": q, "k": k, "v": v, "decay": _constant(decay, *home), "beta": beta,
        "initial_state": _shared(initial_state, *home),
    }  # fmt: skip
    return _with_final_states(call(mb.linear_attention, lists, **keywords), keywords)


def state_scan(decay: Any, increment: Any, *, initial_state: Any = None, **keywords: Any) -> Any:
    """Run `mb.state_scan` on all ranks; arguments and results are lists, one entry per rank.

    With return_final_state, return the entering and the final states of all ranks. initial_state
    may be one tensor that all ranks share.
    """
    home = keywords.get("groups"), keywords.get("plan")
    initial_state = _shared(initial_state, *home)
    lists = {"decay": decay, "increment": increment, "initial_state": initial_state}
    return _with_final_states(call(mb.state_scan, lists, **keywords), keywords)


def short_convolution(
    x: Any, weight: torch.Tensor, bias: torch.Tensor | None = None, **keywords: Any
) -> Any:
    """Run `mb.short_convolution` on all ranks; x and the result: lists, one tensor per rank."""
    return call(mb.short_convolution, {"x": x}, weight=weight, bias=bias, **keywords)


def exchange_rows(tensors: Any, route: Any, groups: Any, *options: Any) -> Any:
    """Run `comm.rows.exchange_rows` on all ranks and return the received rows of each rank.

    Args:
        tensors: List with the tensors of each rank.
        route: List with the route of each rank.
        groups: Ranks that share this process.
        *options: Further arguments, which all ranks share.
    """
    if not isinstance(groups, InProcessGroups):
        return rows.exchange_rows(tensors, route, groups, *options)
    shared = [[value] * groups.size for value in options]
    return on_ranks(groups, rows.exchange_rows, tensors, route, groups.ranks, *shared)


def _constant(decay: Any, groups: Any, plan: Any) -> Any:
    """Return a decay [h], which all ranks share, as a list."""
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
    """Run an operation of `mb` on each rank and return the results.

    With `mb.Groups`, or a plan of `mb.prepare`, the operation runs on this rank alone, and all
    arguments and the result belong to this rank.

    Args:
        operation: Function of one rank, with keywords.
        lists: Name of an argument -> list with the value of each rank, or None.
        groups: Ranks of this process; None with a plan.
        plan: `Plans` of the call; None with groups.
        **shared: Further arguments, which all ranks share.

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
    """Return `values`; raise ValueError if it is not a sequence with one value per rank."""
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
    """Return a tensor that all ranks share as a list; return other values unchanged."""
    home = groups if plan is None else getattr(plan, "groups", None)
    if isinstance(home, InProcessGroups) and isinstance(value, torch.Tensor):
        return [value] * home.size
    return value


def _with_keywords(operation: Callable[..., T], keywords: dict[str, Any]) -> T:
    return operation(**keywords)


# --- autograd -----------------------------------------------------------------------------------


def on_ranks(groups: InProcessGroups, function: Callable[..., T], *of_each: Sequence[Any]) -> Any:
    """Run `function` on each rank, in one thread per rank and one thread at a time.

    Args:
        groups: Ranks that share this process.
        function: Called once per rank. A tensor that needs a gradient must be an argument (possibly
            inside lists, tuples and dictionaries), not a variable from the function's closure.
        *of_each: Each argument as a sequence with the value of each rank. Tensors that several
            ranks share get the sum of their gradients.

    Each rank has its own autograd graph. Backward runs the graphs of all ranks one at a time too.

    Raises:
        RuntimeError: All ranks wait for messages that no rank sends, or the call is inside
            `mb.checkpoint`, whose results the ranks would share.
        ValueError: The function uses a tensor that needs a gradient and is not an argument.
    """
    if current_store() is not None:
        raise RuntimeError("ranks would share one checkpoint; call in_process.checkpoint instead")
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
    """Graph of one rank.

    Attributes:
        function: Function that computes the results of the rank.
        leaves: Index of an input -> detached alias of the input on this rank.
        tree: Tree structure of the results.
        results: Flattened results, with None in place of each output.
        outputs: Indices into `results` of the outputs, that is, of results that need gradients.
        edges: Gradient edges of the outputs; an edge does not keep the tensor.
    """

    function: Callable[[], Any]
    leaves: dict[int, torch.Tensor]
    tree: Any = None
    results: list[Any] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    edges: list[GradientEdge] = field(default_factory=list)

    def run(self) -> list[torch.Tensor]:
        """Return the outputs, without their graph."""
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
    """Raise ValueError if results depend on a leaf that is not in `leaves`."""
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
    """Return the results of the ranks, whose outputs are differentiable functions of `inputs`."""
    outputs: Any = iter(_OnRanks.apply(groups, ranks, *inputs))
    results = []
    for rank in ranks:
        values, rank.results = rank.results, []
        for i in rank.outputs:
            values[i] = next(outputs)
        results.append(tree_unflatten(values, rank.tree))
    return results


class _OnRanks(torch.autograd.Function):
    """Autograd function with the graphs of all ranks, from their inputs to their outputs."""

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
    """Return the gradients of the leaves of one rank."""
    if not edges or not leaves:
        return [None] * len(leaves)
    # In this thread, also on CUDA: on an autograd thread the ranks would deadlock.
    with torch.autograd.set_multithreading_enabled(False):
        return list(torch.autograd.grad(edges, leaves, gradients, allow_unused=True, **options))


def _sum(parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
    if len(parts) < 2:
        return parts[0] if parts else None
    return torch.stack(list(parts)).sum(0)
