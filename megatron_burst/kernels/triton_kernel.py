"""The project's own attention for GPUs: any mask, lse and delta from outside, sums in place.

It carries (out, lse) from pair to pair in float32 and adds dq, dk and dv where they are, so
between two pairs of a ring there is nothing to merge, to zero or to convert; side "query" and
side "kv" run the same kernels. This module decides how a pair becomes launches; `triton_code` says
what a launch does, `tile_grid` which tiles it visits, and `blocks` how large they are.

Shape letters as in `kernels`. dq is added atomically, in any order, unless
torch.use_deterministic_algorithms asks for one: then a second kernel makes it, at a third more
work (seven products for five).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..layout import Span
from ..masks import Mask
from .base import Rows, Scoring
from .blocks import WIDEST, Blocks, blocks
from .tile_grid import TileGrid, tile_grid

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
COARSE = 128  # tiles by which a pair is first looked at
HEADS = 65535  # the second dimension of a launch
ALIGNED = 16  # bytes: what a descriptor wants of every stride


class PairWork:
    """One pair of shards; its grids are made when first asked for, its lists once per device."""

    def __init__(self, mask: Mask, q_spans: Sequence[Span], k_spans: Sequence[Span]):
        self.problem = mask, q_spans, k_spans
        self.grids: dict[tuple[int, int], TileGrid] = {}
        self.lists: dict[tuple, list[tuple[torch.Tensor, ...]]] = {}

    def grid(self, rows: int, columns: int) -> TileGrid:
        """The pair's tiles of `rows` x `columns`."""
        if (rows, columns) not in self.grids:
            self.grids[rows, columns] = tile_grid(*self.problem, rows, columns)
        return self.grids[rows, columns]

    def launches(
        self, size: Blocks, by: str, device: torch.device
    ) -> list[tuple[torch.Tensor, ...]]:
        """(programs, others, tables, bits) of each launch, by "rows" or "columns"."""
        key = size.rows, size.columns, by, device
        if key not in self.lists:
            found = self.grid(size.rows, size.columns)
            full, partial = found.by_rows if by == "rows" else found.by_columns
            bits = torch.tensor(found.bits, device=device)
            self.lists[key] = [
                (*(torch.tensor(x, device=device) for x in work), bits)
                for work in (full, partial)
                if len(work.programs)
            ]
        return self.lists[key]


class TritonKernel:
    """size: blocks for both directions instead of the table's."""

    name = "triton"
    softcaps = True
    deterministic = True

    def __init__(self, size: Blocks | None = None):
        self.size = size

    def refusal(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str | None:
        missing = unavailable(q.device.type)
        if missing:
            return missing
        if q.dtype not in DTYPES:
            return f"takes {', '.join(map(str, DTYPES))}, got {q.dtype}"
        widths, multiple = (q.shape[-1], v.shape[-1]), ALIGNED // q.element_size()
        if max(widths) > WIDEST or any(width % multiple for width in widths):
            return f"needs widths up to {WIDEST} that {multiple} divides, got {widths}"
        if q.shape[1] * q.shape[2] > HEADS:
            return f"takes {HEADS} heads of all batch entries, got {q.shape[1] * q.shape[2]}"
        return None

    def work_for(
        self, mask: Mask, q_spans: Sequence[Span], k_spans: Sequence[Span]
    ) -> PairWork | None:
        pair = PairWork(mask, q_spans, k_spans)
        return pair if pair.grid(COARSE, COARSE) else None

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        work: PairWork,
        scoring: Scoring,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        from . import triton_code

        size, (d, w) = self._size("forward", q, v), _padded(q, v)
        queries, result = _block(q, size.rows, d), _block(out, size.rows, w, output=True)
        keys, values = _block(k, size.columns, d), _block(v, size.columns, w)
        heads = q.shape[2]
        for programs, *lists in work.launches(size, "rows", q.device):
            _launch(triton_code.forward, q, len(programs), heads, size)(
                queries, keys, values, result, lse, programs, *lists,
                len(q), heads, heads // k.shape[2], *lse.stride(), scoring.scale,
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
        if dk is not None or dv is not None:
            atomic = None if torch.are_deterministic_algorithms_enabled() else dq
            self._by_keys(rows, k, v, work, scoring, atomic, dk, dv)
            dq = dq if atomic is None else None
        if dq is not None:
            self._by_queries(rows, k, v, work, scoring, dq)

    def _by_keys(self, rows: Rows, k, v, work: PairWork, scoring: Scoring, dq, dk, dv) -> None:
        from . import triton_code

        q, size, (d, w) = rows.q, self._size("backward", k, v), _padded(k, v)
        inputs, lse, delta = _inputs(rows, k, v, size)
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
                len(q), heads, q.shape[2] // heads, *lse.stride()[:2], *strides, q.shape[3],
                scoring.scale, **_constants(q, scoring, size, d, w, lists),
                DQ=dq is not None, DK=dk is not None, DV=dv is not None,
            )  # fmt: skip

    def _by_queries(self, rows: Rows, k, v, work: PairWork, scoring: Scoring, dq) -> None:
        from . import triton_code

        q, size, (d, w) = rows.q, self._size("backward", k, v), _padded(k, v)
        inputs, lse, delta = _inputs(rows, k, v, size)
        heads = q.shape[2]
        for programs, *lists in work.launches(size, "rows", q.device):
            _launch(triton_code.backward_queries, q, len(programs), heads, size)(
                *inputs, _block(dq, size.rows, d, output=True), lse, delta, programs, *lists,
                len(q), heads, heads // k.shape[2], *lse.stride()[:2], scoring.scale,
                **_constants(q, scoring, size, d, w, lists),
            )  # fmt: skip

    def _size(self, direction: str, q: torch.Tensor, v: torch.Tensor) -> Blocks:
        width = max(_padded(q, v))
        return self.size or blocks(capability(q.device), direction, width, q.element_size())


def unavailable(device: str) -> str | None:
    """Why there are no Triton kernels for a kind of device here, or None."""
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
    """Of a device, as `blocks` counts: 9.0 is 90."""
    if device.type != "cuda":
        return 0  # the interpreter: the smallest blocks
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def _launch(code: Any, q: torch.Tensor, programs: int, heads: int, size: Blocks) -> Any:
    """`code` for so many programs, heads of every batch entry, on the device of q."""

    def call(*args: Any, **constants: Any) -> None:
        options = {"num_warps": size.warps, "num_stages": size.stages}
        with torch.cuda.device_of(q):
            code[programs, q.shape[1] * heads](*args, **constants, **options)

    return call


def _inputs(
    rows: Rows, k: torch.Tensor, v: torch.Tensor, size: Blocks
) -> tuple[tuple[Any, ...], torch.Tensor, torch.Tensor]:
    """Of either backward: descriptors of q, dout, k, v; lse and delta, contiguous."""
    d, w = _padded(k, v)
    inputs = (
        _block(rows.q, size.rows, d), _block(rows.dout, size.rows, w),
        _block(k, size.columns, d), _block(v, size.columns, w),
    )  # fmt: skip
    return inputs, rows.lse.contiguous(), rows.delta.contiguous()


def _constants(
    q: torch.Tensor, scoring: Scoring, size: Blocks, d: int, w: int, lists: Sequence[torch.Tensor]
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
    """Widths of blocks: powers of two, at least what a product needs; the rest reads as zero."""
    return tuple(max(16, 1 << (x.shape[-1] - 1).bit_length()) for x in (q, v))  # pyright: ignore


def _block(x: torch.Tensor, rows: int, width: int, output: bool = False) -> Any:
    """A descriptor of x [n, b, h, d] for `rows` rows of one head, zeros beyond its end."""
    from triton.tools.tensor_descriptor import TensorDescriptor  # pyright: ignore

    # a dimension of one may have any stride
    strides = [s if n > 1 else x.shape[-1] for n, s in zip(x.shape[:-1], x.stride(), strict=False)]
    unfit = x.stride(-1) != 1 or x.data_ptr() % ALIGNED
    if unfit or any(s == 0 or s * x.element_size() % ALIGNED for s in strides):
        if output:
            raise ValueError(f"kernel triton: cannot write to a tensor with strides {x.stride()}")
        return _block(x.clone(memory_format=torch.contiguous_format), rows, width)
    return TensorDescriptor(x, list(x.shape), [*strides, 1], [rows, 1, 1, width])
