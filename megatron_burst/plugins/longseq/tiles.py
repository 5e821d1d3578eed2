# SPDX-License-Identifier: Apache-2.0
"""A function of rows, run in tiles of rows, so that its working set is that of one tile.

Each tile has a fate between forward and backward: "recompute" (only its inputs are kept, and it
runs again), "keep" (its graph is kept) or "move" (its graph is kept, and what it saved waits in
host memory). Source: ALST (TiledMLP), MEMO (fates by tile of tokens).

A parameter must reach autograd once per backward, whatever the number of tiles: Megatron's
data-parallel hook counts arrivals to start its reduction. Tiles are therefore differentiated by
`torch.autograd.grad`, which runs no such hook, and their gradients added here (`ParameterSums`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Literal, NamedTuple, Protocol, get_args

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ...kernels.autograd import first_order_only

Gradient = torch.Tensor | None


class ParameterSums:
    """Sums of the gradients of some parameters: fp32 for bf16 and fp16, else in their own dtype.

    A layer with Megatron's fused weight gradient adds to ``parameter.main_grad`` itself, says so
    by ``parameter.grad_added_to_main_grad`` and hands autograd a tensor of arbitrary content. That
    tensor is never summed: one of them is handed on, for the hooks that wait for it.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]):
        self.parameters = tuple(parameters)
        self._sums: list[Gradient] = [None] * len(self.parameters)
        self._ours = [False] * len(self.parameters)  # nobody else holds this sum

    def add(self, grads: Sequence[Gradient]) -> None:
        """Add the gradients of one piece, one per parameter, None where it has no part in it."""
        for index, (parameter, grad) in enumerate(zip(self.parameters, grads, strict=True)):
            total = self._sums[index]
            if grad is None:
                continue
            if total is None or getattr(parameter, "grad_added_to_main_grad", False):
                self._sums[index] = grad
            elif self._ours[index]:
                total.add_(grad)
            else:  # the first gradient may be a tensor that others read
                self._sums[index] = torch.add(total.to(_accumulated(total.dtype)), grad)
                self._ours[index] = True

    def backward(
        self,
        outputs: Sequence[torch.Tensor] | Sequence[torch.autograd.graph.GradientEdge],
        inputs: Sequence[torch.Tensor] | Sequence[torch.autograd.graph.GradientEdge],
        grad_outputs: Sequence[torch.Tensor],
    ) -> tuple[Gradient, ...]:
        """Differentiate one piece: adds the parameters' gradients, returns those of `inputs`.

        The graph of the piece is used up. Both may be `torch.autograd.graph.GradientEdge`s.
        """
        wanted = [*inputs, *self.parameters]
        grads = torch.autograd.grad(outputs, wanted, grad_outputs, allow_unused=True)
        self.add(grads[len(inputs) :])
        return grads[: len(inputs)]

    def result(self) -> tuple[Gradient, ...]:
        """What autograd is handed, one per parameter, rounded once to the parameter's dtype."""
        return tuple(
            None if total is None else total.to(parameter.dtype)
            for parameter, total in zip(self.parameters, self._sums, strict=True)
        )


def _accumulated(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


Fate = Literal["keep", "move", "recompute"]


def slices_of(rows: int, tiles: int | Sequence[slice]) -> tuple[slice, ...]:
    """The tiles of a call, as slices that follow each other from 0 to `rows`."""
    if isinstance(tiles, (list, tuple)):
        found = tuple(tiles)
        if not (found and _follow(found, rows)):
            raise ValueError(
                f"tiled: tiles must be slices that follow each other from 0 to {rows}, got {found}"
            )
        return found
    if type(tiles) is not int or tiles < 1:
        raise ValueError(f"tiled: tiles must be an integer from 1 on, got {tiles!r}")
    length, longer = divmod(rows, tiles)
    lengths = [length + 1] * longer + [length] * (tiles - longer)
    return tuple(slice(a, b) for a, b in pairwise(accumulate(lengths, initial=0)))


def _follow(tiles: Sequence[object], rows: int) -> bool:
    """Are these slices that follow each other from 0 to `rows`, some perhaps empty?"""
    end = 0
    for tile in tiles:
        if not isinstance(tile, slice) or tile.step not in (None, 1) or tile.start != end:
            return False
        if type(tile.stop) is not int or tile.stop < end:
            return False
        end = tile.stop
    return end == rows


def check_call(
    fn: object,
    rows: int,
    others: Sequence[Any],
    parameters: Sequence[torch.Tensor],
    slices: Sequence[slice],
    fates: Sequence[Fate],
    host: object,
) -> None:
    """Raise ValueError naming the invalid argument."""
    if not callable(fn):
        raise ValueError(f"tiled: fn must be a function or a module, got {fn!r}")
    for index, other in enumerate(others):
        if isinstance(other, torch.Tensor) and (other.ndim == 0 or other.shape[0] != rows):
            raise ValueError(
                f"tiled: others[{index}] has shape {list(other.shape)}, and is cut into tiles like "
                f"x, of {rows} rows; what fn needs whole belongs to fn, and to parameters="
            )
    if len(fates) != len(slices) or not all(fate in get_args(Fate) for fate in fates):
        raise ValueError(
            f"tiled: fates must be {len(slices)} of {', '.join(get_args(Fate))}, got {fates!r}"
        )
    if "move" in fates and host is None:
        raise ValueError('tiled: fates has "move", which needs host=')
    if host is not None and not hasattr(host, "saved"):
        raise ValueError(f"tiled: host must be an mb.HostMemory, got {host!r}")
    if any(getattr(p, "_backward_hooks", None) for p in parameters):
        raise ValueError(
            "tiled: a parameter has a hook of Tensor.register_hook, which would see the gradient "
            "of every tile; use register_post_accumulate_grad_hook, which sees their sum"
        )


def check_leaves(
    y: GradientEdge | None, anchor: torch.Tensor, parameters: Sequence[torch.Tensor]
) -> None:
    """Raise ValueError if a graph ends in a tensor whose gradient nobody would collect."""
    known = {id(t) for t in (anchor, *parameters)}
    seen = {p.grad_fn for p in parameters}  # what made a parameter is autograd's own affair
    seen.add(None)
    left = [y.node if y is not None else None]
    while left:
        node = left.pop()
        if node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)  # of the nodes that stand for leaves
        if isinstance(variable, torch.Tensor) and id(variable) not in known:
            raise ValueError(
                f"tiled: fn computes gradients for a tensor of shape {list(variable.shape)} that "
                "is neither among its arguments nor in parameters="
            )
        left += [each for each, _ in node.next_functions] if node is not None else []


__all__ = ["Fate", "ParameterSums", "tiled"]


class TileHost(Protocol):
    """What "move" needs of host memory: a context in which saved tensors wait there."""

    def saved(self, fraction: float) -> AbstractContextManager[object]: ...


def tiled(
    fn: Callable[..., torch.Tensor],
    x: torch.Tensor,
    *others: Any,
    parameters: Sequence[torch.Tensor] | None = None,
    tiles: int | Sequence[slice] = 8,
    fates: Sequence[Fate] | None = None,
    host: TileHost | None = None,
) -> torch.Tensor:
    """Run `fn(x, *others)` in tiles of dim 0, with the output and gradients of one call.

    fn: `fn(x_tile, *other_tiles) -> y_tile`, each row of which depends on the same row of the
    inputs only. It must be deterministic: one that draws random numbers is refused where tiles
    are recomputed.
    x [rows, ...]; others: tensors [rows, ...], cut like `x`, or anything else, handed on as it is.
    parameters: all further tensors that `fn` computes gradients for; default: those of `fn`, if it
    is a module. Their gradients are summed over tiles in fp32 (fp64 for fp64), and reach autograd
    once. tiles: how many, of equal length up to one row, or their slices in order. Where there are
    fewer rows some tiles are empty, and `fn` is called for these too: it may contain collective
    communication, of which all ranks must have equally many. fates: one per tile; default: all
    "recompute". host: where "move" puts what a tile saves (`mb.HostMemory`).

    A second backward over a retained graph is right where all tiles are recomputed, and refused
    where the first one used up the graph of a tile. There are no gradients of gradients. Raises
    ValueError naming the invalid argument.
    """
    if parameters is None:
        if not isinstance(fn, torch.nn.Module):
            raise ValueError(
                "tiled: parameters= is needed where fn is not a module: all tensors that it "
                "computes gradients for and that are not among its arguments; () for none"
            )
        parameters = tuple(fn.parameters())
    if not _are_tensors(parameters):
        raise ValueError(
            "tiled: parameters must be a list or tuple of tensors, () for none, or None where fn "
            f"is a module, got {type(parameters).__name__}"
        )
    if not isinstance(x, torch.Tensor) or x.ndim == 0:
        raise ValueError(f"tiled: x must be a tensor [rows, ...], got {type(x).__name__}")
    slices = slices_of(x.shape[0], tiles)
    if fates is not None and not isinstance(fates, (list, tuple)):
        raise ValueError(f"tiled: fates must be a list with one for each tile, got {fates!r}")
    each = tuple(fates) if fates is not None else ("recompute",) * len(slices)
    used = tuple(p for p in dict.fromkeys(parameters) if p.requires_grad)
    check_call(fn, x.shape[0], others, used, slices, each, host)
    if not torch.is_grad_enabled():
        each = ("recompute",) * len(slices)  # no backward will come
    tensors = [t for t in (x, *others) if isinstance(t, torch.Tensor)]
    job = _Job(fn, (x, *others), used, slices, each, host)
    return _Tiled.apply(job, len(tensors), *tensors, *used)  # pyright: ignore[reportReturnType]


def _are_tensors(parameters: object) -> bool:
    return isinstance(parameters, (list, tuple)) and all(
        isinstance(each, torch.Tensor) for each in parameters
    )


class _Job:
    """What all tiles of a call share."""

    def __init__(
        self,
        fn: Callable[..., torch.Tensor],
        arguments: tuple[Any, ...],
        parameters: tuple[torch.Tensor, ...],
        slices: tuple[slice, ...],
        fates: tuple[Fate, ...],
        host: TileHost | None,
    ):
        self.fn = fn
        # Tensors are autograd's to keep: their places among the arguments are remembered.
        self.others = [None if isinstance(a, torch.Tensor) else a for a in arguments]
        self.places = [i for i, a in enumerate(arguments) if isinstance(a, torch.Tensor)]
        self.parameters = parameters
        self.slices = slices
        self.fates = fates
        self.host = host
        self.watched = torch.is_grad_enabled()
        self.autocast = _Autocast.now(arguments[0].device.type)

    def run(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """`fn` of one tile, given its rows of all tensors."""
        arguments = list(self.others)
        for place, tensor in zip(self.places, tensors, strict=True):
            arguments[place] = tensor
        with self.autocast.entered():
            y = self.fn(*arguments)
        rows = tensors[0].shape[0]
        if not isinstance(y, torch.Tensor) or y.ndim == 0 or y.shape[0] != rows:
            found = list(y.shape) if isinstance(y, torch.Tensor) else type(y).__name__
            raise ValueError(
                f"tiled: fn must return a tensor of {rows} rows for a tile, got {found}"
            )
        return y

    def graph(
        self, tensors: Sequence[torch.Tensor], needed: Sequence[bool]
    ) -> tuple[torch.Tensor, Graph]:
        """`fn` of one tile with its graph."""
        anchor = tensors[0].new_zeros((), dtype=torch.float32, requires_grad=True)
        with torch.enable_grad():
            entered = [
                _Entry.apply(anchor, t) if need else t.detach()
                for t, need in zip(tensors, needed, strict=True)
            ]
            y = self.run(entered)
        inputs = [get_gradient_edge(t) for t, need in zip(entered, needed, strict=True) if need]
        return y, Graph(get_gradient_edge(y) if y.requires_grad else None, inputs, anchor)


class Graph(NamedTuple):
    """The graph of a tile: where gradients enter for its output (None where it has no gradient),
    where they leave for its inputs, and the leaf in which those end.

    The inputs are no leaves themselves: a leaf's node would keep the memory that was moved.
    """

    y: GradientEdge | None
    inputs: list[GradientEdge]
    anchor: torch.Tensor


class _Entry(torch.autograd.Function):
    """Where the graph of a tile begins: holds no memory of the tile."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, tile: torch.Tensor) -> torch.Tensor:
        return tile.view_as(tile)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[None, None]:
        return None, None


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, job: _Job, count: int, *tensors: torch.Tensor) -> torch.Tensor:
        inputs = tensors[:count]
        again = [s for s, fate in zip(job.slices, job.fates, strict=True) if fate == "recompute"]
        # Of moved tiles nothing stays: only rows that are computed again are saved as they are.
        ctx.saved = slice(again[0].start, again[-1].stop) if again else slice(0, 0)
        # A view of no rows would hold the memory of all.
        ctx.save_for_backward(*(t[ctx.saved] if again else t.new_empty(0) for t in inputs))
        ctx.job, ctx.kept = job, {}
        ctx.like = [(t.shape, t.dtype, t.device) for t in inputs]
        needed = [t.requires_grad for t in inputs]
        learns = any(needed) or bool(job.parameters)
        runs_again = bool(again) and job.watched and learns
        drawn = _random_numbers(inputs[0].device) if runs_again else []
        y = None
        for index, (rows, fate) in enumerate(zip(job.slices, job.fates, strict=True)):
            tile = [t[rows] for t in inputs]
            if index == 0 and job.watched and not learns:
                # Nothing that was named wants a gradient: then nothing else may.
                part, graph = job.graph(tile, needed)
                check_leaves(graph.y, graph.anchor, ())
            elif fate == "recompute" or not learns:
                part = job.run(tile)
            else:
                with job.host.saved(1.0) if fate == "move" and job.host else nullcontext():
                    part, graph = job.graph(tile, needed)
                if not ctx.kept:
                    check_leaves(graph.y, graph.anchor, job.parameters)
                ctx.kept[index] = graph
                del graph
            if y is None:
                y = part.new_empty((inputs[0].shape[0], *part.shape[1:]))
            if (part.shape[1:], part.dtype) != (y.shape[1:], y.dtype):
                raise ValueError(
                    "tiled: fn must return rows of one shape and dtype, got "
                    f"{list(y.shape[1:])} {y.dtype} and {list(part.shape[1:])} {part.dtype}"
                )
            y[rows] = part.detach()
            del part, tile
        assert y is not None  # there is at least one tile
        if runs_again and not all(map(torch.equal, drawn, _random_numbers(y.device))):
            raise ValueError(
                "tiled: fn drew random numbers (dropout, say), and would draw others when a tile "
                'is computed again; give all tiles the fate "keep" or "move", or draw them outside'
            )
        return y

    @staticmethod
    @first_order_only("mb.tiled")
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        job, saved = ctx.job, ctx.saved_tensors
        needed = ctx.needs_input_grad[2 : 2 + len(saved)]
        grads = [
            torch.empty(shape, dtype=dtype, device=device) if need else None
            for (shape, dtype, device), need in zip(ctx.like, needed, strict=True)
        ]
        sums = ParameterSums(job.parameters)
        # Last tile first: its saved tensors were moved last, and come back first.
        for index in reversed(range(len(job.slices))):
            rows = job.slices[index]
            graph = ctx.kept.pop(index, None)
            if graph is None:
                _, graph = job.graph(_rows_of(saved, rows, ctx.saved), needed)
                if index == len(job.slices) - 1:
                    check_leaves(graph.y, graph.anchor, job.parameters)
            part = [None] * len(graph.inputs)
            if graph.y is not None:
                part = sums.backward([graph.y], graph.inputs, [dy[rows]])
            del graph
            for whole, grad in zip([g for g in grads if g is not None], part, strict=True):
                whole[rows] = 0 if grad is None else grad
        return None, None, *grads, *sums.result()


def _random_numbers(device: torch.device) -> list[torch.Tensor]:
    """The states of the generators that `fn` may draw from; kept on the host, also CUDA's."""
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states


def _rows_of(saved: Sequence[torch.Tensor], rows: slice, there: slice) -> Sequence[torch.Tensor]:
    """The rows of a tile, of tensors of which the rows `there` were saved."""
    if not there.start <= rows.start <= rows.stop <= there.stop:
        raise RuntimeError(
            "mb.tiled: backward a second time needs a tile whose graph was kept or moved, and was "
            'used up by the first time: give it the fate "recompute"'
        )
    return [t[rows.start - there.start : rows.stop - there.start] for t in saved]


@dataclass(frozen=True)
class _Autocast:
    """The autocast state of a call, for its recompute: backward runs outside of it."""

    device: str
    enabled: bool
    dtype: torch.dtype | None

    @classmethod
    def now(cls, device: str) -> _Autocast:
        enabled = torch.is_autocast_enabled(device)
        return cls(device, enabled, torch.get_autocast_dtype(device) if enabled else None)

    def entered(self) -> AbstractContextManager[object]:
        if not self.enabled:
            return nullcontext()
        # Without the cache: a weight that was cast without a graph would be reused with one.
        return torch.autocast(self.device, self.dtype, cache_enabled=False)
