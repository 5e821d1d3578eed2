"""Flash attention operators behind one protocol: torch's own for CPUs and CUDA, cuDNN, and the
compiled one of `csrc/` for narrow heads on a CPU.

Decides which widths, dtypes and devices each serves, and spells the arguments of a tile as each
operator expects them. Windows are aligned to the last row and column, as in FlashAttention.

FlashAttention takes many sequences of different lengths in one call, given by where each begins.
Documents that a rank holds whole are tiles that lie end to end, and become one such call instead
of one for every document; `joined` decides which tiles do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch

from ..layout.sharding import to_device
from ..masks.base import Band
from ..masks.tiling import Tile
from . import native

# What tiles of one call are: triangles, or bands down the diagonal; or wholly visible
DIAGONAL, SQUARE = "diagonal", "square"
FEWEST = 3  # of one call: zigzag's own pair, which every layer of other masks has, stays as it is


class Lengths:
    """Rows and columns of each of many sequences, brought to each device once."""

    def __init__(self, tiles: Sequence[Tile]):
        sizes = np.array([tile.shape for tile in tiles], dtype=np.int32)
        self.longest = tuple(sizes.max(axis=0).tolist())
        zero = np.zeros((1, 2), dtype=np.int32)
        self._ends = np.concatenate([zero, np.cumsum(sizes, axis=0, dtype=np.int32)])
        self._there: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}

    def on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Cumulative rows and columns, int32 [sequences + 1]."""
        if device not in self._there:
            rows, columns = to_device(np.ascontiguousarray(self._ends.T), device)
            self._there[device] = rows, columns
        return self._there[device]


class Joined(NamedTuple):
    """Tiles of one kind, each beginning in the row and in the column where the one before ends.

    whole: what they lie in. Every tile is a lower triangle if `whole` is called one, and has the
    band of `whole` if that has one, with the right edge on its diagonal.
    """

    tiles: tuple[Tile, ...]
    whole: Tile
    lengths: Lengths


def joined(tiles: Sequence[Tile]) -> list[Tile | Joined]:
    """The tiles in their order, of which those end to end are joined."""
    # One row and one column are a triangle as well as a square: as what there is besides.
    one = DIAGONAL if any(tile.triangle or tile.band for tile in tiles) else SQUARE
    kinds = [_kind(tile, one) for tile in tiles]
    waiting = {(kind, *_start(tiles[n])): n for n, kind in enumerate(kinds) if kind}
    found: dict[int, Tile | Joined] = {n: tiles[n] for n, kind in enumerate(kinds) if not kind}
    for corner in sorted(waiting):
        if corner not in waiting:  # it came behind another
            continue
        kind, chain = corner[0], [waiting.pop(corner)]
        limits = _limits((None, 0), tiles[chain[0]])
        while (n := waiting.get((kind, *_stop(tiles[chain[-1]])))) is not None:
            limits = limits and _limits(limits, tiles[n])
            if limits is None:
                break
            chain.append(waiting.pop((kind, *_start(tiles[n]))))
        if len(chain) < FEWEST:
            found |= {n: tiles[n] for n in chain}
        else:
            found[chain[0]] = _join([tiles[n] for n in chain])
    return [found[n] for n in sorted(found)]


def _kind(tile: Tile, one: str) -> str | None:
    """What tiles of one call have in common; None: this one is computed alone. one: the kind of a
    tile of one row and one column."""
    (rows, columns), band = tile.shape, tile.band
    steps = {tile.rows.step or 1, tile.columns.step or 1}
    if tile.table is not None or steps != {1}:
        return None
    if band is None:
        return one if rows == columns == 1 else DIAGONAL if tile.triangle else SQUARE
    return DIAGONAL if rows == columns and band.right == 0 else None


def _start(tile: Tile) -> tuple[int, int]:
    return tile.rows.start, tile.columns.start


def _stop(tile: Tile) -> tuple[int, int]:
    return tile.rows.stop, tile.columns.stop


def _limits(limits: tuple[Band | None, int], tile: Tile) -> tuple[Band | None, int] | None:
    """The band of some tiles and the rows of the longest without one, with one tile more; None if
    that cannot be one call. A triangle is a band that is as wide as it has rows."""
    band, longest = limits
    if tile.band is None:
        longest = max(longest, tile.shape[0])
    elif band in (None, tile.band):
        band = tile.band
    else:
        return None
    return None if band and longest > band.left + 1 else (band, longest)


def _join(chain: Sequence[Tile]) -> Joined:
    first, last = chain[0], chain[-1]
    band = next((tile.band for tile in chain if tile.band is not None), None)
    rows = slice(first.rows.start, last.rows.stop, 1)
    columns = slice(first.columns.start, last.columns.stop, 1)
    causal = band is None and any(tile.triangle for tile in chain)
    whole = Tile(rows, columns, triangle=causal, band=band)
    return Joined(tuple(chain), whole, Lengths(chain))


aten = torch.ops.aten

Window = tuple[int, int]


class Operator(Protocol):
    """One stock operator pair on [b, h, s, d]; lse is [b, h, s]; widths of q, k, v are equal.

    Row m of s sees column n of t if causal (s = t): n <= m; with a bias: where it is not -inf; with
    a window (left, right): m + t - s - left <= n <= m + t - s + right; else always.
    """

    device: str
    dtypes: tuple[torch.dtype, ...]
    multiple: int  # widths must be a multiple of this
    limits: tuple[int | None, int | None]  # of `masks.tiling.Cutter`; tables come as a bias
    windows: bool  # takes a window
    deterministic: bool  # if torch.use_deterministic_algorithms asks for it
    takes_delta: bool  # backward gets delta [b, h, s] where others get out
    joins: bool  # takes many sequences of different lengths in one call: `JoiningOperator`

    def unfit(self, device: torch.device, width: int) -> str | None:
        """Why a device of the right type cannot serve this width, or None."""
        ...

    def forward(
        self, q, k, v, causal: bool, bias: torch.Tensor | None, window: Window | None, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    def backward(
        self, dout, q, k, v, out, lse, causal: bool, bias: torch.Tensor | None,
        window: Window | None, scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...  # fmt: skip


class JoiningOperator(Operator, Protocol):
    """An operator that also takes many sequences end to end, of one batch entry: b = 1. `causal`
    and `window` count within each; the other arguments are as above."""

    def forward_joined(
        self, q, k, v, causal: bool, window: Window | None, scale: float, lengths: Lengths
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    def backward_joined(
        self, dout, q, k, v, out, lse, causal: bool, window: Window | None, scale: float,
        lengths: Lengths,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...  # fmt: skip


class CpuFlash:
    """torch's flash attention for CPUs."""

    device = "cpu"
    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    multiple = 1
    limits: tuple[int | None, int | None] = (192, 256)  # it skips little of a triangle: cut it
    windows = False
    deterministic = True
    takes_delta = False
    joins = False

    def unfit(self, device: torch.device, width: int) -> str | None:
        return None

    def forward(self, q, k, v, causal, bias, window, scale):
        return aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, attn_mask=bias, scale=scale
        )

    def backward(self, dout, q, k, v, out, lse, causal, bias, window, scale):
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout, q, k, v, out, lse, 0.0, causal, attn_mask=bias, scale=scale
        )


class CpuNarrow:
    """The compiled attention of narrow heads (`csrc/narrow.h`), where it was built.

    As fast as the processor adds and multiplies: 3 to 5 times torch's at width 8, 1.5 to 1.8 times
    at 16 (benchmarks/csrc.py). At 24 and 32 torch's is as fast, so those are not served. All
    it returns is float32.
    """

    device = "cpu"
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    multiple = 1
    limits: tuple[int | None, int | None] = (None, None)
    windows = True
    deterministic = True
    takes_delta = True
    joins = False

    def unfit(self, device: torch.device, width: int) -> str | None:
        if width > native.NARROW:
            return f"takes widths up to {native.NARROW}, got {width}"
        if native.serves(device.type):
            return None
        return f"needs the compiled library of csrc/, and there is no {native.FILE}: `make csrc`"

    def forward(self, q, k, v, causal, bias, window, scale):
        return native.narrow_forward(q, k, v, _from_first(q, k, causal, window), scale)

    def backward(self, dout, q, k, v, out, lse, causal, bias, window, scale):
        band = _from_first(q, k, causal, window)
        return native.narrow_backward(dout, q, k, v, lse, out, band, scale)  # out: delta


class CudaFlash:
    """FlashAttention 2, as torch contains it."""

    device = "cuda"
    dtypes = (torch.bfloat16, torch.float16)
    multiple = 8
    limits: tuple[int | None, int | None] = (None, None)
    windows = True
    deterministic = True
    takes_delta = False
    joins = True

    def unfit(self, device: torch.device, width: int) -> str | None:
        return f"takes widths up to 256, got {width}" if width > 256 else None

    def forward(self, q, k, v, causal, bias, window, scale):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        lengths = None, None, q.shape[1], k.shape[1]
        out, lse, *_ = aten._flash_attention_forward(
            q, k, v, *lengths, 0.0, causal, False, scale=scale, **_sides(window)
        )
        return out.transpose(1, 2), lse

    def backward(self, dout, q, k, v, out, lse, causal, bias, window, scale):
        dout, q, k, v, out = (x.transpose(1, 2) for x in (dout, q, k, v, out))
        lengths = None, None, q.shape[1], k.shape[1]
        grads = aten._flash_attention_backward(
            dout, q, k, v, out, lse.contiguous(), *lengths, 0.0, causal, *_no_dropout(q.device),
            scale=scale, **_sides(window),
        )  # fmt: skip
        dq, dk, dv = (grad.transpose(1, 2) for grad in grads)
        return dq, dk, dv

    def forward_joined(self, q, k, v, causal, window, scale, lengths):
        q, k, v = (_rows_first(x) for x in (q, k, v))
        given = *lengths.on(q.device), *lengths.longest
        out, lse, *_ = aten._flash_attention_forward(
            q, k, v, *given, 0.0, causal, False, scale=scale, **_sides(window)
        )
        return out.transpose(0, 1).unsqueeze(0), lse.reshape(1, q.shape[1], len(q))  # torch: [h, s]

    def backward_joined(self, dout, q, k, v, out, lse, causal, window, scale, lengths):
        dout, q, k, v, out = (_rows_first(x) for x in (dout, q, k, v, out))
        given, lse = (*lengths.on(q.device), *lengths.longest), lse.squeeze(0).contiguous()
        grads = aten._flash_attention_backward(
            dout, q, k, v, out, lse, *given, 0.0, causal, *_no_dropout(q.device),
            scale=scale, **_sides(window),
        )  # fmt: skip
        dq, dk, dv = (grad.transpose(0, 1).unsqueeze(0) for grad in grads)
        return dq, dk, dv


class CudaCudnn:
    """cuDNN's attention, as torch contains it."""

    device = "cuda"
    dtypes = (torch.bfloat16, torch.float16)
    multiple = 8
    limits: tuple[int | None, int | None] = (None, None)
    windows = False
    deterministic = False  # its backward adds to dq in any order
    takes_delta = False
    joins = False

    def unfit(self, device: torch.device, width: int) -> str | None:
        """As torch has it for its own use of cuDNN: 256 only on Hopper, from cuDNN 9.10 on."""
        if width <= 128:
            return None
        version = torch.backends.cudnn.version() or 0
        if width <= 256 and version >= 91000 and torch.cuda.get_device_capability(device) == (9, 0):
            return None
        return f"takes widths up to 128, and 256 on Hopper with cuDNN 9.10, got {width}"

    def forward(self, q, k, v, causal, bias, window, scale):
        result = aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, causal, scale=scale
        )
        return result[0], result[1].reshape(q.shape[:3])

    def backward(self, dout, q, k, v, out, lse, causal, bias, window, scale):
        # Some releases of torch find a graph that they have built by q, k and v alone, and build it
        # for the strides that out and dout have the first time: so these follow from those of q.
        dout, out = (_laid_out_like(x, q) for x in (dout, out))
        seed = torch.empty((), dtype=torch.int64, device=q.device)  # no dropout: never read
        sizes = (None, None, q.shape[2], k.shape[2])
        return aten._scaled_dot_product_cudnn_attention_backward(
            dout, q, k, v, out, lse.contiguous().unsqueeze(-1), seed, seed, None, *sizes,
            0.0, causal, scale=scale,
        )  # fmt: skip


def prefers_cudnn(device: torch.device) -> bool:
    """Is cuDNN the faster of torch's operators here? torch's own rule for its own choice: Hopper
    and Blackwell, and a cuDNN later than 9.15.0, which cured lengths that 128 does not divide."""
    capability = torch.cuda.get_device_capability(device)
    version = torch.backends.cudnn.version() or 0
    return capability in ((9, 0), (10, 0), (10, 3)) and version > 91500


def _from_first(q: torch.Tensor, k: torch.Tensor, causal: bool, window: Window | None) -> Window:
    """(left, right) counted from the first row and column: row m sees m - left to m + right."""
    s, t = q.shape[2], k.shape[2]
    if window is None:
        return s, 0 if causal else t
    return window[0] - (t - s), window[1] + (t - s)


def _laid_out_like(x: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """x, copied where its strides are not those of torch.empty_like(q); both of one shape."""
    place = torch.empty_like(q)
    return x if x.stride() == place.stride() else place.copy_(x)


def _rows_first(x: torch.Tensor) -> torch.Tensor:
    """[1, h, s, d] -> [s, h, d], a view."""
    return x.squeeze(0).transpose(0, 1)


def _no_dropout(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Seed and offset, which are never read."""
    seed = torch.empty(2, dtype=torch.uint64, device=device)
    return seed, torch.empty((), dtype=torch.uint64, device=device)


def _sides(window: Window | None) -> dict[str, int]:
    if window is None:
        return {}
    return {"window_size_left": window[0], "window_size_right": window[1]}
