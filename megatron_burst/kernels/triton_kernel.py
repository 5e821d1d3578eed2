# SPDX-License-Identifier: Apache-2.0
"""The attention kernel "triton", for any mask: it launches our own Triton kernels.

The kernels update out and lse in float32 and add to dq, dk and dv in place. So no merge, zero-fill
or conversion is needed between two kernel calls of a ring. The inputs lse and delta cover the whole
sequence, so the same kernels are used if backward sends queries (side "query") or keys and values
(side "kv"). `triton_code` defines the kernels, `tile_grid` the visible tiles, and `blocks` the tile
sizes.

Shape letters as in `kernels.base`. Programs add to dq atomically, in any order. With
torch.use_deterministic_algorithms, a second kernel computes dq instead. Backward then has seven
matrix products per tile instead of five.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ..layout.layouts import ShardPairs
from ..masks import Mask
from .base import Rows, Scoring
from .blocks import WIDEST, BlockSizes, blocks
from .masked_pairs import ALIGNED, MaskedPairs, any_visible, copy_together
from .tile_grid import TileGrid

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HEADS = 65535  # maximum of the second dimension of a launch


Launch = tuple[torch.Tensor, ...]  # arguments of one launch: programs, others, tables, bits
Inputs = tuple[tuple[Any, ...], Any, Any]  # descriptors of q, dout, k, v; of lse; of delta


class LaunchedPairs(MaskedPairs):
    """Pairs of shards with the arguments of their launches."""

    def __init__(self, mask: Mask):
        super().__init__(mask)
        self.lists: dict[tuple, list[list[Launch]]] = {}

    def launches(self, pair: int, size: BlockSizes, by: str, device: torch.device) -> list[Launch]:
        """Return the arguments of each launch, with programs by="rows" or by="columns"."""
        launches = self.lists.setdefault((size.rows, size.columns, by, device), [])
        if pair >= len(launches):
            missing = self.tiles(size.rows, size.columns)[len(launches) :]
            launches += _on_device([_arrays(grid, by) for grid in missing], device)
        return launches[pair]


class PairWork(NamedTuple):
    """Kernel plan of one pair of shards. `number` is the index of the pair of shards in `pairs`."""

    pairs: LaunchedPairs
    number: int

    def launches(self, size: BlockSizes, by: str, device: torch.device) -> list[Launch]:
        """Return the arguments of each launch, with programs by="rows" or by="columns"."""
        return self.pairs.launches(self.number, size, by, device)


class TritonKernel:
    """Attention kernel "triton": our own Triton kernels.

    Args:
        size: Block sizes of both directions. Default: the sizes in the table of `blocks`.
    """

    name = "triton"
    softcaps = True
    maximum = True
    deterministic = True
    passed_over: tuple[str, ...] = ()

    def __init__(self, size: BlockSizes | None = None):
        self.size = size
        self._pairs: LaunchedPairs | None = None  # pairs of the latest mask

    def refusal(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str | None:
        missing = unavailable(q.device.type)
        if missing:
            return missing
        if q.dtype not in DTYPES:
            return f"supports {', '.join(map(str, DTYPES))}, got {q.dtype}"
        widths, multiple = (q.shape[-1], v.shape[-1]), ALIGNED // q.element_size()
        if max(widths) > WIDEST or any(width % multiple for width in widths):
            return f"requires widths up to {WIDEST} that are multiples of {multiple}, got {widths}"
        if q.shape[1] * q.shape[2] > HEADS:
            return f"supports batch x heads up to {HEADS}, got {q.shape[1] * q.shape[2]}"
        return None

    def works_for(self, mask: Mask, pairs: ShardPairs) -> list[PairWork | None]:
        if self._pairs is None or self._pairs.mask is not mask:
            self._pairs = LaunchedPairs(mask)
        planned = self._pairs
        return [
            PairWork(planned, planned.add(*pair)) if any_visible(mask, *pair) else None
            for pair in pairs
        ]

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        work: PairWork,
        scoring: Scoring,
        out: torch.Tensor,
        lse: torch.Tensor,
        max_logits: torch.Tensor | None = None,
    ) -> None:
        from . import triton_code

        size, (d, w) = self._size("forward", q, v), _padded(q, v)
        queries, result = _block(q, size.rows, d), _block(out, size.rows, w, output=True)
        keys, values = _block(k, size.columns, d), _block(v, size.columns, w)
        heads = q.shape[2]
        for programs, *lists in work.launches(size, "rows", q.device):
            _launch(triton_code.forward, q, len(programs), heads, size)(
                queries, keys, values, result, lse, programs, *lists,
                len(q), heads, heads // k.shape[2], *lse.stride(), scoring.scale, max_logits,
                **_constants(q, scoring, size, d, w, lists),
            )  # fmt: skip

    def backward(
        self,
        rows: Rows,
        k: torch.Tensor,
        v: torch.Tensor,
        work: PairWork,
        scoring: Scoring,
        dq: torch.Tensor | None,
        dk: torch.Tensor | None,
        dv: torch.Tensor | None,
    ) -> None:
        size = self._size("backward", k, v)
        inputs_of_pair = _inputs(rows, k, v, size)
        if dk is not None or dv is not None:
            atomic = None if torch.are_deterministic_algorithms_enabled() else dq
            self._by_keys(inputs_of_pair, size, rows.q, k, v, work, scoring, atomic, dk, dv)
            dq = dq if atomic is None else None
        if dq is not None:
            self._by_queries(inputs_of_pair, size, rows.q, k, v, work, scoring, dq)

    def _by_keys(
        self,
        inputs_of_pair: Inputs,
        size: BlockSizes,
        q,
        k,
        v,
        work: PairWork,
        scoring: Scoring,
        dq,
        dk,
        dv,
    ) -> None:
        from . import triton_code

        (inputs, lse, delta), (d, w) = inputs_of_pair, _padded(k, v)
        sums = (
            None if dk is None else _block(dk, size.columns, d, output=True),
            None if dv is None else _block(dv, size.columns, w, output=True),
        )
        if dq is not None and dq.stride(-1) != 1:
            raise ValueError(f"kernel triton: cannot write to a tensor with strides {dq.stride()}")
        heads, strides = k.shape[2], (0, 0, 0) if dq is None else dq.stride()[:3]
        for programs, *lists in work.launches(size, "columns", q.device):
            _launch(triton_code.backward_keys, q, len(programs), heads, size)(
                *inputs, dq, *sums, lse, delta, programs, *lists,
                len(q), heads, q.shape[2] // heads, *strides, q.shape[3],
                scoring.scale, **_constants(q, scoring, size, d, w, lists),
                DQ=dq is not None, DK=dk is not None, DV=dv is not None,
            )  # fmt: skip

    def _by_queries(
        self,
        inputs_of_pair: Inputs,
        size: BlockSizes,
        q,
        k,
        v,
        work: PairWork,
        scoring: Scoring,
        dq,
    ) -> None:
        from . import triton_code

        (inputs, lse, delta), (d, w) = inputs_of_pair, _padded(k, v)
        heads = q.shape[2]
        for programs, *lists in work.launches(size, "rows", q.device):
            _launch(triton_code.backward_queries, q, len(programs), heads, size)(
                *inputs, _block(dq, size.rows, d, output=True), lse, delta, programs, *lists,
                len(q), heads, heads // k.shape[2], scoring.scale,
                **_constants(q, scoring, size, d, w, lists),
            )  # fmt: skip

    def _size(self, direction: str, q: torch.Tensor, v: torch.Tensor) -> BlockSizes:
        width = max(_padded(q, v))
        return self.size or blocks(capability(q.device), direction, width, q.element_size())


def unavailable(device: str) -> str | None:
    """Return why Triton kernels do not run on this device type; None if they do."""
    try:
        from triton.runtime.interpreter import InterpretedFunction  # pyright: ignore
        from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: F401 # pyright: ignore
    except ImportError as error:
        return f"needs the package triton, with tensor descriptors (3.4 or newer): {error}"
    from . import triton_code

    interpreted = isinstance(triton_code.forward, InterpretedFunction)
    if device != "cuda" and not interpreted:
        return f"runs on cuda tensors, got {device}"
    return None


def capability(device: torch.device) -> int:
    """Return the compute capability of a GPU as an int (90 for 9.0); 0 for other devices."""
    if device.type != "cuda":
        return 0  # interpreter: smallest blocks
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def _arrays(grid: TileGrid, by: str) -> list[tuple[np.ndarray, ...]]:
    """Return the arrays of each launch of a grid: programs, other blocks, tables, bits."""
    worklists = grid.by_rows if by == "rows" else grid.by_columns
    return [(*work, grid.bits) for work in worklists if len(work.programs)]


def _on_device(
    pairs: Sequence[Sequence[tuple[np.ndarray, ...]]], device: torch.device
) -> list[list[Launch]]:
    """Copy the int32 arrays of all launches of all pairs to `device` in one transfer."""
    arrays = [x for launches in pairs for launch in launches for x in launch]
    on_device = copy_together(arrays, device)
    return [[tuple(on_device[id(x)] for x in launch) for launch in launches] for launches in pairs]


def _launch(code: Any, q: torch.Tensor, programs: int, heads: int, size: BlockSizes) -> Any:
    """Return a function that launches `code` with a grid of `programs` x (batch * `heads`)."""

    def call(*args: Any, **constants: Any) -> None:
        options = {"num_warps": size.warps, "num_stages": size.stages}
        with torch.cuda.device_of(q):
            code[programs, q.shape[1] * heads](*args, **constants, **options)

    return call


def _inputs(rows: Rows, k: torch.Tensor, v: torch.Tensor, size: BlockSizes) -> Inputs:
    """Return the descriptors for backward: the tuple (q, dout, k, v), then lse, then delta."""
    d, w = _padded(k, v)
    inputs = (
        _block(rows.q, size.rows, d),
        _block(rows.dout, size.rows, w),
        _block(k, size.columns, d),
        _block(v, size.columns, w),
    )
    return inputs, _statistics(rows.lse, size.rows), _statistics(rows.delta, size.rows)


def _statistics(x: torch.Tensor, rows: int) -> Any:
    """Return a tensor descriptor of x (lse or delta [s, b, h]); a block is `rows` rows of one head.

    The descriptor refers to a copy in which the rows of a head are contiguous. Without a
    descriptor, every thread would load all rows that it needs.
    """
    from triton.tools.tensor_descriptor import TensorDescriptor  # pyright: ignore

    (n, b, h), unit = x.shape, ALIGNED // x.element_size()
    copy = x.new_empty(b, h, n + -n % unit)
    copy[..., :n] = x.permute(1, 2, 0)
    return TensorDescriptor(copy, [b, h, n], list(copy.stride()), [1, 1, rows])


def _constants(
    q: torch.Tensor,
    scoring: Scoring,
    size: BlockSizes,
    d: int,
    w: int,
    lists: Sequence[torch.Tensor],
) -> dict[str, Any]:
    return {
        "CAP": scoring.softcap or 0.0,
        "MASKED": len(lists[1]) > 0,
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
        "M": size.rows,
        "N": size.columns,
        "D": d,
        "W": w,
    }


def _padded(q: torch.Tensor, v: torch.Tensor) -> tuple[int, int]:
    """Return the widths of blocks of keys and values: powers of two, at least 16."""
    return tuple(max(16, 1 << (x.shape[-1] - 1).bit_length()) for x in (q, v))  # pyright: ignore


def _block(x: torch.Tensor, rows: int, width: int, output: bool = False) -> Any:
    """Return a tensor descriptor of x [n, b, h, d]; a block is `rows` rows x `width` of one head.

    Elements beyond the end of x read as zero. An input with unsupported strides is copied; an
    output with unsupported strides raises ValueError.
    """
    from triton.tools.tensor_descriptor import TensorDescriptor  # pyright: ignore

    # A dimension of size 1 may have any stride.
    strides = [s if n > 1 else x.shape[-1] for n, s in zip(x.shape[:-1], x.stride(), strict=False)]
    unfit = x.stride(-1) != 1 or x.data_ptr() % ALIGNED
    if unfit or any(s == 0 or s * x.element_size() % ALIGNED for s in strides):
        if output:
            raise ValueError(f"kernel triton: cannot write to a tensor with strides {x.stride()}")
        return _block(x.clone(memory_format=torch.contiguous_format), rows, width)
    # Rows and width are last: Triton loads a block as one matrix only if all other dimensions are 1
    # and come first. Otherwise it keeps values in registers that ptxas (12.8 to 13.0) overwrites in
    # a loop.
    (n, b, h, d), (of_row, of_batch, of_head) = x.shape, strides
    return TensorDescriptor(x, [b, h, n, d], [of_batch, of_head, of_row, 1], [1, 1, rows, width])
