# SPDX-License-Identifier: Apache-2.0
"""The kernel "triton": gathers what each row has selected, within one launch each way.

For some rows at a time, so that the list of what they have in a chunk stays small, `find` makes
that list on the device and the attention kernels of `selected_code` follow it: a program for each
row and block of heads that share a selection and a key head. Nothing is read on the host. dk and dv
are added atomically, in any order, so the kernel is not deterministic.

Shape letters as in `kernels`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from ...kernels.base import Rows, Scoring
from ...kernels.triton_kernel import HEADS
from .kernels import Selected
from .pairs import SelectedPairs
from .selection import Selection

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
WIDEST = 512  # columns of keys and of values as they travel: 576 as 512 and 64
LISTED = 1 << 26  # bytes of the list of keys for the rows of a launch
LANES = 1024  # places that a program of `find` looks at together


class HeadBlocks(NamedTuple):
    """Tiles of `heads` query heads x `keys` (powers of two, at least 16); warps; stages of loads in
    flight.
    """

    heads: int
    keys: int
    warps: int
    stages: int


# (pass, columns of keys and values together up to) -> blocks of 16-bit inputs, by what the
# compiler says of sm_90 and sm_100 (`python -m benchmarks.triton_compile_selected`); no time was
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
WIDE_BLOCKS = HeadBlocks(16, 16, 4, 1)  # of inputs of 32 and 64 bits


def blocks(direction: str, columns: int, heads: int, itemsize: int) -> HeadBlocks:
    """The entry of a kernel ("forward", "backward_queries", "backward_keys") for so many columns of
    keys and values, with no more heads than there are; for inputs of `itemsize` bytes.
    """
    if itemsize > 2:
        return WIDE_BLOCKS
    limit = min(most for way, most in BLOCKS if way == direction and most >= min(columns, 1024))
    size = BLOCKS[direction, limit]
    return size._replace(heads=max(16, min(size.heads, _padded(heads))))


class SelectedTriton(Selected):
    """latent: are values the first columns of the keys, which travel without them? size: for both
    directions instead of the table's.
    """

    name = "triton"
    deterministic = False

    def __init__(self, selection: Selection, latent: bool, size: HeadBlocks | None = None):
        super().__init__(selection, latent)
        self.size = size

    @staticmethod
    def refusal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Why these tensors cannot be served, as they travel, or None."""
        missing = unavailable(q.device.type)
        if missing:
            return missing
        if torch.are_deterministic_algorithms_enabled():
            return "is not deterministic, and torch.use_deterministic_algorithms(True) was called"
        if q.dtype not in DTYPES:
            return f"takes {', '.join(map(str, DTYPES))}, got {q.dtype}"
        widths = k.shape[-1], v.shape[-1]
        if max(widths) > WIDEST or min(widths) < 1:
            return f"needs keys and values of 1 to {WIDEST} columns, got {widths}"
        if q.shape[1] * q.shape[2] > HEADS:
            return f"takes {HEADS} heads of all batch entries, got {q.shape[1] * q.shape[2]}"
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
            given = q[rows], k, v, out[rows], lse[rows]
            strides = [stride for x in given for stride in x.stride()[:3]]
            self._launch(selected_code.forward, size, q[rows], k)(
                *given, table, counts, *strides, *self._numbers(q, k), table.shape[-1],
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
        for some, table, counts in self._lists(work, len(q), len(k)):
            for name, sums in (
                ("backward_queries", (None if dq is None else dq[some],)),
                ("backward_keys", (dk, dv)),
            ):
                if all(x is None for x in sums):
                    continue
                size = self._size(name, q, k, v)
                given = q[some], dout[some], k, v, *sums
                strides = [n for x in given for n in ((0, 0, 0) if x is None else x.stride()[:3])]
                self._launch(getattr(selected_code, name), size, q[some], k)(
                    *given, lse[some], delta[some], table, counts,
                    *strides, *self._numbers(q, k), table.shape[-1],
                    **self._constants(scoring, q, k, v, size),
                )  # fmt: skip

    def _lists(
        self, work: SelectedPairs, rows: int, keys: int
    ) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
        """Some rows; int32 [r, b, H, n]: the rows of the chunk that each of their selections has
        and sees, first in it; int32 [r, b, H]: how many.
        """
        from . import selected_code

        ids, block = self.selection.ids, self.selection.block
        places = ids.shape[3] * block
        width = min(places, keys)
        step = max(1, LISTED // (4 * ids.shape[1] * ids.shape[2] * width))
        spans = work.sights.on(work.span_rows, ids.device)
        for start in range(0, rows, step):
            some = slice(start, min(start + step, rows))
            part = ids[some].contiguous()
            table, counts = part.new_empty((*part.shape[:3], width)), part.new_empty(part.shape[:3])
            if work.interval is not None:
                low, high = (work.sights.on(x, ids.device)[some] for x in work.interval)
                sight = low, high, None
            else:
                at = part.long().unsqueeze(-1) * block + torch.arange(block, device=ids.device)
                sight = None, None, work.sees(some, at.flatten(-2).clamp_(min=0)).byte()
            find: Any = selected_code.find
            with torch.cuda.device_of(ids):
                find[(counts.numel(),)](
                    part, *sight, spans, table, counts, counts[0].numel(), places, width,
                    len(spans), BLOCK=block, T=min(LANES, max(16, _padded(places))),
                )  # fmt: skip
            yield some, table, counts

    def _size(
        self, direction: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> HeadBlocks:
        columns = k.shape[-1] + v.shape[-1]
        group = q.shape[2] // self._groups(k)
        return self.size or blocks(direction, columns, group, q.element_size())

    def _groups(self, k: torch.Tensor) -> int:
        """Groups of query heads that share a selection and a key head."""
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
        """`code` for these rows of queries, on their device."""
        groups = self._groups(k)
        programs = q.shape[1] * groups * -(-q.shape[2] // groups // size.heads)
        options = {"num_warps": size.warps, "num_stages": size.stages}

        def call(*args: Any, **constants: Any) -> None:
            with torch.cuda.device_of(q):
                code[len(q), programs](*args, **constants, **options)

        return call


def unavailable(device: str) -> str | None:
    """Why these kernels do not run on a kind of device here, or None."""
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
    """x, whose last dimension lies in one piece."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _writable(*sums: torch.Tensor | None) -> None:
    for x in sums:
        if x is not None and x.stride(-1) != 1:
            raise ValueError(f"kernel triton: cannot write to a tensor with strides {x.stride()}")
