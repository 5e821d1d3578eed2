# SPDX-License-Identifier: Apache-2.0
"""Kernel "triton": gathers and processes the selected keys of each query row on the GPU.

For a tile (slice of the query rows), `find` lists the selected keys of a chunk on the device. The
number of rows of a tile bounds the size of the list. The attention kernels of `selected_code` then
process the list, with one program per query row and block of heads that share a selection and a key
head. The host does not wait for the device. Gradients of keys and values are added atomically in
any order, so the kernel is not deterministic.

Shape letters: same as in `kernels`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from ...kernels.base import Rows, Scoring
from ...kernels.triton_kernel import HEADS
from .kernels import SelectedKernel
from .pairs import SelectedPairs
from .selection import Selection

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
WIDEST = 512  # most columns of k or of v; a latent of 576 columns has 64 columns in k and 512 in v
LISTED = 1 << 26  # limit of the bytes of a tile's list of keys
LANES = 1024  # selected positions that a program of `find` processes at once


class HeadBlocks(NamedTuple):
    """Tile sizes and launch options of a kernel.

    Attributes:
        heads: Number of query heads of a tile, a power of two, at least 16.
        keys: Number of keys of a tile, a power of two, at least 16.
        warps: Number of warps of a program (`num_warps`).
        stages: Number of pipeline stages (`num_stages`).
    """

    heads: int
    keys: int
    warps: int
    stages: int


# (kernel, largest sum of the columns of k and v) -> tile sizes for 16-bit inputs. They were chosen
# by compiling for sm_90 and sm_100 (`python -m benchmarks.triton_compile_selected`). No time was
# measured on a GPU.
BLOCKS = {
    ("forward", 256): HeadBlocks(16, 64, 4, 2),
    ("forward", 512): HeadBlocks(16, 64, 4, 2),
    ("forward", 1024): HeadBlocks(32, 32, 8, 2),
    ("backward_queries", 256): HeadBlocks(16, 32, 4, 2),
    ("backward_queries", 512): HeadBlocks(16, 32, 4, 2),
    ("backward_queries", 1024): HeadBlocks(32, 16, 8, 2),
    ("backward_keys", 256): HeadBlocks(16, 64, 4, 2),
    ("backward_keys", 512): HeadBlocks(16, 32, 4, 2),
    ("backward_keys", 1024): HeadBlocks(128, 32, 8, 2),
}
WIDE_BLOCKS = HeadBlocks(16, 16, 4, 1)  # for inputs of 32 and 64 bits


def blocks(direction: str, columns: int, heads: int, itemsize: int) -> HeadBlocks:
    """Return the tile sizes and launch options of a kernel.

    A tile has query heads of one group, which share the selected keys and a key head.

    Args:
        direction: Kernel: "forward", "backward_queries" or "backward_keys".
        columns: Sum of the columns of k and v.
        heads: Number of query heads of a group. For 16-bit inputs, the heads of a tile are limited
            to this number, rounded up to a power of two, but not to less than 16.
        itemsize: Bytes of an input element.
    """
    if itemsize > 2:
        return WIDE_BLOCKS
    limit = min(n for name, n in BLOCKS if name == direction and n >= min(columns, 1024))
    size = BLOCKS[direction, limit]
    return size._replace(heads=max(16, min(size.heads, _padded(heads))))


class SelectedTriton(SelectedKernel):
    """Kernel "triton", which needs Triton and a GPU.

    Args:
        selection: Selection of this rank's queries.
        latent: Same as in `SelectedKernel`.
        size: Tile sizes and launch options for all kernels; None uses `BLOCKS`.
    """

    name = "triton"
    deterministic = False

    def __init__(self, selection: Selection, latent: bool, size: HeadBlocks | None = None):
        super().__init__(selection, latent)
        self.size = size

    @staticmethod
    def refusal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return why the kernel does not support tensors like q, k and v; None if it does."""
        missing = unavailable(q.device.type)
        if missing:
            return missing
        if torch.are_deterministic_algorithms_enabled():
            return "is not deterministic, and torch.use_deterministic_algorithms(True) was called"
        if q.dtype not in DTYPES:
            return f"supports {', '.join(map(str, DTYPES))}, got {q.dtype}"
        widths = k.shape[-1], v.shape[-1]
        if max(widths) > WIDEST or min(widths) < 1:
            return f"supports widths of (keys, values) from 1 to {WIDEST}, got {widths}"
        if q.shape[1] * q.shape[2] > HEADS:
            return f"supports batch x heads up to {HEADS}, got {q.shape[1] * q.shape[2]}"
        return None

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        work: SelectedPairs,
        scoring: Scoring,
        out: torch.Tensor,
        lse: torch.Tensor,
        max_logits: torch.Tensor | None = None,
    ) -> None:
        from . import selected_code

        (q, k, v), size = (_inner(x) for x in (q, k, v)), self._size("forward", q, k, v)
        _writable(out)
        for rows, table, counts in self._lists(work, len(q), len(k)):
            tensors = q[rows], k, v, out[rows], lse[rows]
            strides = [stride for x in tensors for stride in x.stride()[:3]]
            self._launch(selected_code.forward, size, q[rows], k)(
                *tensors, table, counts, *strides, *self._numbers(q, k), table.shape[-1],
                **self._constants(scoring, q, k, v, size),
            )  # fmt: skip

    def backward(
        self,
        rows: Rows,
        k: torch.Tensor,
        v: torch.Tensor,
        work: SelectedPairs,
        scoring: Scoring,
        dq: torch.Tensor | None,
        dk: torch.Tensor | None,
        dv: torch.Tensor | None,
    ) -> None:
        from . import selected_code

        q, dout, k, v = (_inner(x) for x in (rows.q, rows.dout, k, v))
        lse, delta = rows.lse.contiguous(), rows.delta.contiguous()
        _writable(dq, dk, dv)
        for tile, table, counts in self._lists(work, len(q), len(k)):
            for name, sums in (
                ("backward_queries", (None if dq is None else dq[tile],)),
                ("backward_keys", (dk, dv)),
            ):
                if all(x is None for x in sums):
                    continue
                size = self._size(name, q, k, v)
                tensors = q[tile], dout[tile], k, v, *sums
                strides = [n for x in tensors for n in ((0, 0, 0) if x is None else x.stride()[:3])]
                self._launch(getattr(selected_code, name), size, q[tile], k)(
                    *tensors, lse[tile], delta[tile], table, counts,
                    *strides, *self._numbers(q, k), table.shape[-1],
                    **self._constants(scoring, q, k, v, size),
                )  # fmt: skip

    def _lists(
        self, work: SelectedPairs, rows: int, keys: int
    ) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
        """Yield tiles (slices of query rows), each with its selected and visible keys.

        Yields:
            tile: Slice of the r query rows of the tile.
            table: int32 [r, b, H, n], indices of the chunk's keys that the query row selects and
                sees. Only the first `counts` of the n entries are valid.
            counts: int32 [r, b, H], number of valid entries.
        """
        from . import selected_code

        ids, block = self.selection.ids, self.selection.block
        places = ids.shape[3] * block
        width = min(places, keys)
        step = max(1, LISTED // (4 * ids.shape[1] * ids.shape[2] * width))
        spans = work.tables.on(work.span_rows, ids.device)
        for start in range(0, rows, step):
            tile = slice(start, min(start + step, rows))
            part = ids[tile].contiguous()
            table, counts = part.new_empty((*part.shape[:3], width)), part.new_empty(part.shape[:3])
            if work.interval is not None:
                low, high = (work.tables.on(x, ids.device)[tile] for x in work.interval)
                sight = low, high, None
            else:
                at = part.long().unsqueeze(-1) * block + torch.arange(block, device=ids.device)
                sight = None, None, work.sees(tile, at.flatten(-2).clamp_(min=0)).byte()
            find: Any = selected_code.find
            with torch.cuda.device_of(ids):
                find[(counts.numel(),)](
                    part, *sight, spans, table, counts, counts[0].numel(), places, width,
                    len(spans), BLOCK=block, T=min(LANES, max(16, _padded(places))),
                )  # fmt: skip
            yield tile, table, counts

    def _size(
        self, direction: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> HeadBlocks:
        columns = k.shape[-1] + v.shape[-1]
        group = q.shape[2] // self._groups(k)
        return self.size or blocks(direction, columns, group, q.element_size())

    def _groups(self, k: torch.Tensor) -> int:
        """Return the number of groups of query heads that share a selection and a key head."""
        return max(self.selection.ids.shape[2], k.shape[2])

    def _numbers(self, q: torch.Tensor, k: torch.Tensor) -> tuple[int, ...]:
        groups, selections = self._groups(k), self.selection.ids.shape[2]
        return q.shape[1], groups, q.shape[2] // groups, selections, k.shape[2]

    def _constants(
        self, scoring: Scoring, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, size: HeadBlocks
    ) -> dict[str, Any]:
        d, w = k.shape[-1], v.shape[-1]
        return {
            "SCALE": float(scoring.scale),
            "LATENT": self.latent,
            "PRECISION": "tf32" if q.dtype in DTYPES[:2] else "ieee",
            "M": size.heads,
            "N": size.keys,
            "D": d,
            "DP": max(16, _padded(d)),
            "W": w,
            "WP": max(16, _padded(w)),
        }

    def _launch(self, code: Any, size: HeadBlocks, q: torch.Tensor, k: torch.Tensor) -> Any:
        """Return a function that launches the Triton kernel `code`.

        One program computes one query row and one block of heads.
        """
        groups = self._groups(k)
        programs = q.shape[1] * groups * -(-q.shape[2] // groups // size.heads)
        options = {"num_warps": size.warps, "num_stages": size.stages}

        def call(*args: Any, **constants: Any) -> None:
            with torch.cuda.device_of(q):
                code[len(q), programs](*args, **constants, **options)

        return call


def unavailable(device: str) -> str | None:
    """Return why the kernels cannot run on a device type such as "cuda"; None if they can."""
    try:
        from triton.runtime.interpreter import InterpretedFunction  # pyright: ignore
    except ImportError as error:
        return f"needs the package triton: {error}"
    from . import selected_code

    if device != "cuda" and not isinstance(selected_code.forward, InterpretedFunction):
        return f"runs on cuda tensors, got {device}"
    return None


def _padded(width: int) -> int:
    return 1 << max(0, width - 1).bit_length()


def _inner(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _writable(*sums: torch.Tensor | None) -> None:
    for x in sums:
        if x is not None and x.stride(-1) != 1:
            raise ValueError(
                f"kernel triton: cannot write to a tensor with strides {x.stride()}; "
                "the last dimension must be contiguous"
            )
