# SPDX-License-Identifier: Apache-2.0
"""Operations on all ranks of a grid in one process: a list of tensors in place of one tensor.

For tests, and to check the numerics of a large grid on one device:

    from megatron_burst.plugins.testing import ranks

    groups = ranks.in_process(inter=2, intra=2)
    outs = ranks.attention(qs, ks, vs, groups=groups)  # lists with the tensor of each rank

Each rank calls the operation of `mb` in its own thread. The ranks take turns (`on_ranks`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_flatten, tree_unflatten

from ...attention import attention as attention_of_rank
from ...comm.groups import Groups, InProcessGroups, PlansOfRanks
from ...planning.prepare import prepare as prepare_on_rank

T = TypeVar("T")


def in_process(
    *, inter: int = 1, intra: int, ulysses: int = 1, placement: str = "head_first"
) -> InProcessGroups:
    """Return a grid of `inter` nodes of `intra` ranks in this process, without torch.distributed.

    Args:
        inter: Number of nodes.
        intra: Number of ranks per node.
        ulysses: Number of ranks that share heads, as of `mb.Groups`.
        placement: Which ranks share heads, as of `mb.Groups`.
    """
    return Groups.in_process(inter=inter, intra=intra, ulysses=ulysses, placement=placement)


# --- named operations ---------------------------------------------------------------------------


def prepare(
    q: Any = None, k: Any = None, v: Any = None, *, groups: InProcessGroups, **keywords: Any
) -> PlansOfRanks:
    """Return the plans of all ranks, as `mb.prepare`; q, k, v: lists with a tensor per rank."""
    return _plans(prepare_on_rank, groups, {"q": q, "k": k, "v": v}, keywords)


def attention(q: Any, k: Any, v: Any, **keywords: Any) -> list[Any]:
    """Return the outputs of all ranks, as `mb.attention`; q, k, v: lists with a tensor per rank."""
    return _call(attention_of_rank, {"q": q, "k": k, "v": v}, keywords)


def _call(operation: Callable[..., Any], lists: dict[str, Any], keywords: dict[str, Any]) -> Any:
    """Return the result of an operation on each rank. keywords: arguments that ranks share, and
    `groups` or `plan` of all ranks."""
    groups, plan = keywords.pop("groups", None), keywords.pop("plan", None)
    home = groups if plan is None else plan.groups
    homes = [{"groups": rank} for rank in home.ranks]
    if plan is not None:
        given = {} if groups is None else {"groups": groups}
        homes = [{"plan": each, **given} for each in plan.ranks]
    return _on_each(operation, home, lists, homes, keywords)


def _plans(
    operation: Callable[..., Any],
    groups: InProcessGroups,
    lists: dict[str, Any],
    keywords: dict[str, Any],
) -> PlansOfRanks:
    homes = [{"groups": rank} for rank in groups.ranks]
    with torch.no_grad():
        return PlansOfRanks(groups, _on_each(operation, groups, lists, homes, keywords))


def _on_each(
    operation: Callable[..., Any],
    groups: InProcessGroups,
    lists: dict[str, Any],
    homes: Sequence[dict[str, Any]],
    keywords: dict[str, Any],
) -> list[Any]:
    for name, each in lists.items():
        if isinstance(each, (list, tuple)) and len(each) != groups.size:
            raise ValueError(
                f"{name}: groups hold {groups.size} ranks in this process; give a list with a "
                f"tensor of each, got {len(each)} in a list"
            )
    arguments = [
        {
            name: each[rank] if isinstance(each, (list, tuple)) else each
            for name, each in lists.items()
        }
        | home
        | keywords
        for rank, home in enumerate(homes)
    ]
    return on_ranks(groups, partial(_with_keywords, operation), arguments)


def _with_keywords(operation: Callable[..., T], keywords: dict[str, Any]) -> T:
    return operation(**keywords)


# --- autograd -----------------------------------------------------------------------------------


def on_ranks(groups: InProcessGroups, function: Callable[..., T], *of_each: Sequence[Any]) -> Any:
    """Return the result of `function` on each rank; the ranks run in turns, each in a thread.

    Args:
        groups: Ranks that share this process.
        function: Called once per rank. A tensor that needs a gradient must be an argument (or in
            lists, tuples and dictionaries of an argument), not a variable of the function.
        *of_each: Each argument as a sequence with the value of each rank. Tensors that several
            ranks share get the sum of their gradients.

    Each rank has a graph of its own. The backward of the results runs the graphs of all ranks in
    turns too.

    Raises:
        RuntimeError: All ranks wait for messages that no rank sends.
    """
    if not torch.is_grad_enabled():
        return groups.run(function, *of_each)
    flat = [tree_flatten(arguments) for arguments in zip(*of_each, strict=True)]
    inputs = {id(x): x for values, _ in flat for x in values if _needs_grad(x)}
    if not inputs:
        return groups.run(function, *of_each)
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
    """The graph of one rank.

    function: computes the results of the rank. leaves: number of an input -> the copy of this rank.
    results: values in the tree of the results, None for an output, a tensor with a gradient. edges:
    of the outputs; an edge does not keep the tensor.
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
        del self.function
        outputs = [self.results[i].detach() for i in self.outputs]
        for i in self.outputs:
            self.results[i] = None
        return outputs


def _differentiable(
    groups: InProcessGroups, ranks: Sequence[_Rank], inputs: Sequence[torch.Tensor]
) -> list[Any]:
    """Return the results of the ranks, whose outputs follow from `inputs`."""
    outputs: Any = iter(_OnRanks.apply(groups, ranks, *inputs))
    found = []
    for rank in ranks:
        values, rank.results = rank.results, []
        for i in rank.outputs:
            values[i] = next(outputs)
        found.append(tree_unflatten(values, rank.tree))
    return found


class _OnRanks(torch.autograd.Function):
    """The graphs of all ranks as one node, from the inputs to the outputs of all ranks."""

    @staticmethod
    def forward(
        ctx: Any, groups: InProcessGroups, ranks: Sequence[_Rank], *inputs: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        with torch.enable_grad():
            found = groups.run(_Rank.run, ranks)
        ctx.groups, ctx.ranks, ctx.inputs = groups, ranks, inputs
        return tuple(output for outputs in found for output in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        again, count = torch.is_grad_enabled(), len(ctx.inputs)
        keep = torch._C._autograd._get_current_graph_task_keep_graph()
        rest, calls = iter(enumerate(gradients, count)), []
        for rank in ctx.ranks:
            # With create_graph the gradients of the outputs are inputs too.
            upper = {
                number: gradient.detach().requires_grad_(again)
                for _, (number, gradient) in zip(rank.edges, rest, strict=False)
            }
            function = partial(
                _gradients, rank.edges, list(rank.leaves.values()), list(upper.values()),
                retain_graph=keep, create_graph=again,
            )  # fmt: skip
            calls.append(_Rank(function, rank.leaves | upper))
        if again:
            found = _differentiable(ctx.groups, calls, [*ctx.inputs, *gradients])
        else:
            found = ctx.groups.run(lambda call: call.function(), calls)
        parts: list[list[torch.Tensor]] = [[] for _ in range(count)]
        for rank, of_leaves in zip(ctx.ranks, found, strict=True):
            for number, gradient in zip(rank.leaves, of_leaves, strict=True):
                if gradient is not None:
                    parts[number].append(gradient)
        return None, None, *(_sum(each) for each in parts)


def _gradients(
    edges: Sequence[GradientEdge],
    leaves: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    **options: bool,
) -> list[torch.Tensor | None]:
    """Return the gradients of the leaves of one rank."""
    if not edges or not leaves:
        return [None] * len(leaves)
    # In this thread, also on CUDA: a thread of autograd would wait for itself.
    with torch.autograd.set_multithreading_enabled(False):
        return list(torch.autograd.grad(edges, leaves, gradients, allow_unused=True, **options))


def _sum(parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
    if len(parts) < 2:
        return parts[0] if parts else None
    return torch.stack(list(parts)).sum(0)
