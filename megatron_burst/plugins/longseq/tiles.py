# SPDX-License-Identifier: Apache-2.0
"""Row-wise functions that run in tiles of rows, so that one tile at a time is in memory.

Each tile has a fate between forward and backward: "recompute" (keep only its inputs and run it
again), "keep" (keep its graph) or "move" (keep its graph, with the saved tensors in host memory).
Sources: ALST (TiledMLP), MEMO (a fate per tile of tokens).

Autograd must see one gradient per parameter in each backward, for any number of tiles, because
Megatron's data-parallel hook counts gradients to start its reduction. `torch.autograd.grad` runs no
such hook. So `torch.autograd.grad` computes the gradients of a tile, and `ParameterSums` adds them.
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
    """Sums of the gradients of parameters: fp32 for bf16 and fp16, otherwise the parameter's dtype.

    A layer with Megatron's fused weight gradient adds to ``parameter.main_grad`` itself, sets
    ``parameter.grad_added_to_main_grad`` and returns a tensor of arbitrary content to autograd.
    Such tensors are never summed. One of them is returned, for the hooks that wait for a gradient.

    Args:
        parameters: Parameters, in the order of their gradients.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]):
        self.parameters = tuple(parameters)
        self._sums: list[Gradient] = [None] * len(self.parameters)
        self._owned = [False] * len(self.parameters)  # true if no other code reads the sum

    def add(self, grads: Sequence[Gradient]) -> None:
        """Add the gradients of one tile to the sums.

        Args:
            grads: One gradient per parameter; None if the tile does not use the parameter.
        """
        for index, (parameter, grad) in enumerate(zip(self.parameters, grads, strict=True)):
            total = self._sums[index]
            if grad is None:
                continue
            if total is None or getattr(parameter, "grad_added_to_main_grad", False):
                self._sums[index] = grad
            elif self._owned[index]:
                total.add_(grad)
            else:  # other code may read the tensor of the first gradient
                self._sums[index] = torch.add(total.to(_accumulated(total.dtype)), grad)
                self._owned[index] = True

    def backward(
        self,
        outputs: Sequence[torch.Tensor] | Sequence[torch.autograd.graph.GradientEdge],
        inputs: Sequence[torch.Tensor] | Sequence[torch.autograd.graph.GradientEdge],
        grad_outputs: Sequence[torch.Tensor],
    ) -> tuple[Gradient, ...]:
        """Differentiate one tile: add the parameter gradients and return the input gradients.

        The graph of the tile is freed.

        Args:
            outputs: Outputs of the tile, or their gradient edges.
            inputs: Inputs of the tile, or their gradient edges.
            grad_outputs: One gradient per output.

        Returns:
            One gradient per input; None if the outputs do not depend on the input.
        """
        targets = [*inputs, *self.parameters]
        grads = torch.autograd.grad(outputs, targets, grad_outputs, allow_unused=True)
        self.add(grads[len(inputs) :])
        return grads[: len(inputs)]

    def result(self) -> tuple[Gradient, ...]:
        """Return one gradient per parameter, rounded once to the parameter's dtype."""
        return tuple(
            None if total is None else total.to(parameter.dtype)
            for parameter, total in zip(self.parameters, self._sums, strict=True)
        )


def _accumulated(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


Fate = Literal["keep", "move", "recompute"]


def slices_of(rows: int, tiles: int | Sequence[slice]) -> tuple[slice, ...]:
    """Return the tiles of `rows` rows as consecutive slices.

    Args:
        rows: Number of rows.
        tiles: Number of tiles, or consecutive slices from 0 to `rows`, which are only checked.
    """
    if isinstance(tiles, (list, tuple)):
        slices = tuple(tiles)
        if not (slices and _are_consecutive(slices, rows)):
            raise ValueError(
                f"tiled: tiles must be consecutive slices from 0 to {rows}, got {slices}"
            )
        return slices
    if type(tiles) is not int or tiles < 1:
        raise ValueError(f"tiled: tiles must be an integer >= 1, got {tiles!r}")
    length, longer = divmod(rows, tiles)
    lengths = [length + 1] * longer + [length] * (tiles - longer)
    return tuple(slice(a, b) for a, b in pairwise(accumulate(lengths, initial=0)))


def _are_consecutive(tiles: Sequence[object], rows: int) -> bool:
    """Return whether `tiles` are consecutive slices from 0 to `rows`; slices may be empty."""
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
    """Check the arguments of `tiled`, and raise a ValueError that names the first invalid one."""
    if not callable(fn):
        raise ValueError(f"tiled: fn must be a function or a module, got {fn!r}")
    for index, argument in enumerate(others):
        if isinstance(argument, torch.Tensor) and (argument.ndim == 0 or len(argument) != rows):
            raise ValueError(
                f"tiled: others[{index}] has shape {list(argument.shape)} but is cut into tiles "
                f"like x, which has {rows} rows; bind tensors that fn needs whole to fn, and list "
                "them in parameters="
            )
    if len(fates) != len(slices) or not all(fate in get_args(Fate) for fate in fates):
        raise ValueError(
            f"tiled: fates must have {len(slices)} entries of {', '.join(get_args(Fate))}, "
            f"got {fates!r}"
        )
    if "move" in fates and host is None:
        raise ValueError('tiled: fates contains "move", which requires host=mb.HostMemory()')
    if host is not None and not hasattr(host, "saved"):
        raise ValueError(f"tiled: host must be an mb.HostMemory, got {host!r}")
    if any(getattr(p, "_backward_hooks", None) for p in parameters):
        raise ValueError(
            "tiled: a parameter has a hook of Tensor.register_hook, which would receive the "
            "gradient of every tile; use register_post_accumulate_grad_hook, which receives the sum"
        )


def check_leaves(
    y: GradientEdge | None, anchor: torch.Tensor, parameters: Sequence[torch.Tensor]
) -> None:
    """Raise ValueError if a tile computes gradients for a tensor that the caller did not pass.

    Args:
        y: Edge of the tile's output; None if it needs no gradient.
        anchor: Leaf tensor at which the graph of the tile's inputs ends.
        parameters: Tensors whose gradients `tiled` returns.
    """
    expected = {id(t) for t in (anchor, *parameters)}
    seen = {p.grad_fn for p in parameters}  # autograd itself handles the history of a parameter
    seen.add(None)
    pending = [y.node if y is not None else None]
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)  # set for the node of a leaf
        if isinstance(variable, torch.Tensor) and id(variable) not in expected:
            raise ValueError(
                f"tiled: fn computes gradients for a tensor of shape {list(variable.shape)} that "
                "is neither an argument of fn nor in parameters=; add it to parameters="
            )
        pending += [parent for parent, _ in node.next_functions] if node is not None else []


__all__ = ["Fate", "ParameterSums", "tiled"]


class TileHost(Protocol):
    """Host memory for tiles with the fate "move", such as `mb.HostMemory`."""

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

    A second backward over a retained graph is correct if all tiles are recomputed. It raises
    RuntimeError if the first backward freed the graph of a tile. Second-order gradients are not
    supported. Sources: ALST (arXiv 2506.13996, TiledMLP), MEMO (arXiv 2407.12117).

    Args:
        fn: `fn(x_tile, *other_tiles) -> y_tile`. Each output row must depend only on the same row
            of the inputs. `fn` must be deterministic if tiles are recomputed.
        x: Tensor [rows, ...].
        others: Tensors [rows, ...], which are cut like `x`, or other objects, which are passed
            unchanged.
        parameters: All further tensors for which `fn` computes gradients. Default: the parameters
            of `fn`, if it is a module. Their gradients are summed over tiles in fp32 (fp64 for
            fp64) and reach autograd once.
        tiles: Number of tiles, whose lengths differ by at most one row, or consecutive slices. With
            fewer rows than tiles, some tiles are empty. `fn` is called for empty tiles too,
            because it may contain collectives that all ranks must call equally often.
        fates: "recompute", "keep" or "move" per tile. Default: all "recompute".
        host: Host memory (`mb.HostMemory`) for saved tensors of tiles with the fate "move".

    Returns:
        Tensor [rows, ...], the concatenated outputs of the tiles.

    Raises:
        ValueError: An argument is invalid; the message names it.
    """
    if parameters is None:
        if not isinstance(fn, torch.nn.Module):
            raise ValueError(
                "tiled: fn is not a module, so parameters= is required: list all tensors that fn "
                "computes gradients for and that are not its arguments; () if there are none"
            )
        parameters = tuple(fn.parameters())
    if not _are_tensors(parameters):
        raise ValueError(
            "tiled: parameters must be a list or tuple of tensors, or None if fn is a module, got "
            f"{type(parameters).__name__}; use () if there are none"
        )
    if not isinstance(x, torch.Tensor) or x.ndim == 0:
        raise ValueError(f"tiled: x must be a tensor [rows, ...], got {type(x).__name__}")
    slices = slices_of(x.shape[0], tiles)
    if fates is not None and not isinstance(fates, (list, tuple)):
        raise ValueError(
            f"tiled: fates must be a list with one of {', '.join(get_args(Fate))} per tile, got "
            f"{fates!r}"
        )
    tile_fates = tuple(fates) if fates is not None else ("recompute",) * len(slices)
    used = tuple(p for p in dict.fromkeys(parameters) if p.requires_grad)
    check_call(fn, x.shape[0], others, used, slices, tile_fates, host)
    if not torch.is_grad_enabled():
        tile_fates = ("recompute",) * len(slices)  # there is no backward
    tensors = [t for t in (x, *others) if isinstance(t, torch.Tensor)]
    call = _TiledCall(fn, (x, *others), used, slices, tile_fates, host)
    return _Tiled.apply(call, len(tensors), *tensors, *used)  # pyright: ignore[reportReturnType]


def _are_tensors(parameters: object) -> bool:
    return isinstance(parameters, (list, tuple)) and all(
        isinstance(parameter, torch.Tensor) for parameter in parameters
    )


class _TiledCall:
    """Arguments and settings of a call of `tiled`, except its tensors [rows, ...]."""

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
        # Autograd keeps the tensors; this object keeps only their places among the arguments.
        self.constants = [None if isinstance(a, torch.Tensor) else a for a in arguments]
        self.places = [i for i, a in enumerate(arguments) if isinstance(a, torch.Tensor)]
        self.parameters = parameters
        self.slices = slices
        self.fates = fates
        self.host = host
        self.grad_enabled = torch.is_grad_enabled()
        self.autocast = _Autocast.now(arguments[0].device.type)

    def run(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Call `fn` for one tile; `tensors` are the tile's rows of all tensor arguments."""
        arguments = list(self.constants)
        for place, tensor in zip(self.places, tensors, strict=True):
            arguments[place] = tensor
        with self.autocast.entered():
            y = self.fn(*arguments)
        rows = tensors[0].shape[0]
        if not isinstance(y, torch.Tensor) or y.ndim == 0 or y.shape[0] != rows:
            actual = list(y.shape) if isinstance(y, torch.Tensor) else type(y).__name__
            raise ValueError(
                f"tiled: fn must return a tensor of {rows} rows for a tile, got {actual}"
            )
        return y

    def graph(
        self, tensors: Sequence[torch.Tensor], needed: Sequence[bool]
    ) -> tuple[torch.Tensor, TileGraph]:
        """Call `fn` for one tile with autograd; return the output and the ends of its graph.

        Args:
            tensors: The tile's rows of all tensor arguments.
            needed: For each tensor, whether it needs a gradient.
        """
        anchor = tensors[0].new_zeros((), dtype=torch.float32, requires_grad=True)
        with torch.enable_grad():
            entered = [
                _Entry.apply(anchor, t) if need else t.detach()
                for t, need in zip(tensors, needed, strict=True)
            ]
            y = self.run(entered)
        inputs = [get_gradient_edge(t) for t, need in zip(entered, needed, strict=True) if need]
        return y, TileGraph(get_gradient_edge(y) if y.requires_grad else None, inputs, anchor)


class TileGraph(NamedTuple):
    """Ends of a tile's autograd graph: the gradient edges of the tile's output and inputs.

    Attributes:
        y: Edge of the output; None if the output needs no gradient.
        inputs: Edges of the inputs. The inputs are not leaves, because the node of a leaf would
            keep memory that was moved.
        anchor: Leaf at which the edges of the inputs end.
    """

    y: GradientEdge | None
    inputs: list[GradientEdge]
    anchor: torch.Tensor


class _Entry(torch.autograd.Function):
    """Autograd function of the first node in a tile's graph; it holds no memory of the tile."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, tile: torch.Tensor) -> torch.Tensor:
        return tile.view_as(tile)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[None, None]:
        return None, None


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _TiledCall, count: int, *tensors: torch.Tensor) -> torch.Tensor:
        inputs = tensors[:count]
        recomputed = [s for s, f in zip(call.slices, call.fates, strict=True) if f == "recompute"]
        # Save only rows that are recomputed, so that the inputs of moved tiles can be freed.
        ctx.saved = slice(recomputed[0].start, recomputed[-1].stop) if recomputed else slice(0, 0)
        # A view without rows would hold the memory of all rows.
        ctx.save_for_backward(*(t[ctx.saved] if recomputed else t.new_empty(0) for t in inputs))
        ctx.call, ctx.graphs = call, {}
        ctx.like = [(t.shape, t.dtype, t.device) for t in inputs]
        needed = [t.requires_grad for t in inputs]
        learns = any(needed) or bool(call.parameters)
        recomputes = bool(recomputed) and call.grad_enabled and learns
        rng_states = _rng_states(inputs[0].device) if recomputes else []
        y = None
        for index, (rows, fate) in enumerate(zip(call.slices, call.fates, strict=True)):
            tile = [t[rows] for t in inputs]
            if index == 0 and call.grad_enabled and not learns:
                # No argument needs a gradient, so `fn` must not compute any.
                part, graph = call.graph(tile, needed)
                check_leaves(graph.y, graph.anchor, ())
            elif fate == "recompute" or not learns:
                part = call.run(tile)
            else:
                with call.host.saved(1.0) if fate == "move" and call.host else nullcontext():
                    part, graph = call.graph(tile, needed)
                if not ctx.graphs:
                    check_leaves(graph.y, graph.anchor, call.parameters)
                ctx.graphs[index] = graph
                del graph
            if y is None:
                y = part.new_empty((inputs[0].shape[0], *part.shape[1:]))
            if (part.shape[1:], part.dtype) != (y.shape[1:], y.dtype):
                raise ValueError(
                    "tiled: fn must return the same row shape and dtype for all tiles, got "
                    f"{list(y.shape[1:])} {y.dtype} and {list(part.shape[1:])} {part.dtype}"
                )
            y[rows] = part.detach()
            del part, tile
        assert y is not None  # there is at least one tile
        if recomputes and not all(map(torch.equal, rng_states, _rng_states(y.device))):
            raise ValueError(
                "tiled: fn drew random numbers (for example for dropout) and would draw "
                'different numbers when a tile is recomputed; give all tiles the fate "keep" or '
                '"move", or draw the numbers outside fn'
            )
        return y

    @staticmethod
    @first_order_only("mb.tiled")
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        call, saved = ctx.call, ctx.saved_tensors
        needed = ctx.needs_input_grad[2 : 2 + len(saved)]
        grads = [
            torch.empty(shape, dtype=dtype, device=device) if need else None
            for (shape, dtype, device), need in zip(ctx.like, needed, strict=True)
        ]
        sums = ParameterSums(call.parameters)
        # Reverse order: the last tile's saved tensors were moved last and are fetched first.
        for index in reversed(range(len(call.slices))):
            rows = call.slices[index]
            graph = ctx.graphs.pop(index, None)
            if graph is None:
                _, graph = call.graph(_rows_of(saved, rows, ctx.saved), needed)
                if index == len(call.slices) - 1:
                    check_leaves(graph.y, graph.anchor, call.parameters)
            part = [None] * len(graph.inputs)
            if graph.y is not None:
                part = sums.backward([graph.y], graph.inputs, [dy[rows]])
            del graph
            for total, grad in zip([g for g in grads if g is not None], part, strict=True):
                total[rows] = 0 if grad is None else grad
        return None, None, *grads, *sums.result()


def _rng_states(device: torch.device) -> list[torch.Tensor]:
    """Return the states of the random generators that `fn` may use, as host tensors."""
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states


def _rows_of(
    saved: Sequence[torch.Tensor], rows: slice, saved_rows: slice
) -> Sequence[torch.Tensor]:
    """Return some rows of tensors of which only the rows `saved_rows` were saved.

    Args:
        saved: Saved tensors.
        rows: Rows to return, numbered over all tiles.
        saved_rows: Rows that the saved tensors contain, numbered over all tiles.
    """
    if not saved_rows.start <= rows.start <= rows.stop <= saved_rows.stop:
        raise RuntimeError(
            "mb.tiled: backward ran a second time, and the first backward freed the graph of a "
            'tile with the fate "keep" or "move"; give all tiles the fate "recompute"'
        )
    return [t[rows.start - saved_rows.start : rows.stop - saved_rows.start] for t in saved]


@dataclass(frozen=True)
class _Autocast:
    """Autocast state in which `tiled` was called.

    The recomputation of a tile restores it, because backward runs outside the caller's autocast.
    """

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
        # No cache: it could return a weight that was cast without a graph.
        return torch.autocast(self.device, self.dtype, cache_enabled=False)
