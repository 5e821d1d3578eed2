# SPDX-License-Identifier: Apache-2.0
"""`mb.compress`: compressed keys, each a weighted mean of the rows of a window, across ranks.

Each window of rows has one compressed key. Each rank sends its rows of a window to the rank that
holds the key. Nothing is sent if the layouts put every window and its key on the same rank.

Shape letters: s local rows, t local keys, m rows of a window, b batch, c columns.
"""

from __future__ import annotations

from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import torch

from ...comm.groups import check_label
from ...comm.rows import GRID, DeviceRoute, exchange_rows, longest, route_on_device
from ...kernels.autograd import outside_graphs, refuse_transforms
from ...kernels.online_softmax import accumulation_dtype
from ...layout import Layout
from ...layout.routes import RowMoves
from ...layout.sharding import to_device
from ...masks.compressed import Compressed
from ...planning.plan import Plan
from .window_layout import owners

ROUTES_KEPT = 64  # per rank: kinds of layers times micro-batches in flight


@outside_graphs
def compress(
    values: torch.Tensor,
    gates: torch.Tensor,
    bias: torch.Tensor,
    *,
    plan: Plan,
    overlap: bool = False,
    label: object = None,
) -> torch.Tensor:
    """Compute compressed keys: for every window, a weighted mean of its rows.

    Key w of a document is the sum over the rows j of window w of softmax_j(gates_j + bias_(j mod
    m)) * values_j, separately for every column, computed in float32 (float64 for float64 tensors).
    Here m is the stride of the mask, and j counts rows from the start of the document. With
    `overlap`, the tensors have two series of columns, and the softmax of key w covers 2 m rows: the
    rows of window w - 1 with the first series, and the rows of window w with the second series. The
    first window of a document has only its own rows. Sources: the compressors of DeepSeek-V4's
    heavily compressed attention (without overlap) and compressed sparse attention (with overlap).

    Forward and backward are collective calls. The caller normalizes and rotates the keys.

    Args:
        values: Rows of this rank [s, b, c], or [s, b, 2 c] with `overlap`.
        gates: Logits of the weights, with the shape, dtype and device of `values`.
        bias: Logits [m, c], or [m, 2 c] with `overlap`. Row j is added to the gates of row j of
            every window. The gradient of `bias` is the sum over the keys of this rank.
        plan: Plan of `mb.prepare` for attention to the compressed keys, with mask
            `mb.masks.Compressed(m, ...)` and option `key_layout`. The plan determines the windows,
            the layouts and the documents.
        overlap: True if `values`, `gates` and `bias` have two series of columns.
        label: Same as in `mb.attention`.

    Returns:
        Compressed keys of this rank [t, b, c] in the dtype of `values`. Padding keys are zeros.

    Raises:
        ValueError: An argument is not supported.
        RuntimeError: A rank died or is out of step. The message names the exchange.
    """
    refuse_transforms("mb.compress")
    check_label(label)
    mask = _check(values, gates, bias, plan, overlap)
    width = values.shape[2] // (1 + overlap)
    series = [slice(width, 2 * width), slice(0, width)] if overlap else [slice(None)]
    rows, logits, dtype = [], [], accumulation_dtype(values.dtype)
    plan.groups.connect([GRID], values.device)
    for back, columns in enumerate(series):  # the own window, and the window before
        window = _window(plan, mask, back, values.device)
        tensors = [values[..., columns].contiguous(), gates[..., columns].contiguous()]
        plan.groups.expect(longest(len(values), tensors))
        identity = crc32(f"compress {plan.identity} {back}".encode())
        own, weights = exchange_rows(tensors, window.route, plan.groups, identity, label)
        rows.append(own.unflatten(0, (-1, mask.stride)).to(dtype))
        weights = weights.unflatten(0, (-1, mask.stride)).to(dtype)
        weights = weights + bias[:, None, columns].to(dtype)
        logits.append(weights.masked_fill(~window.complete[:, None, None, None], float("-inf")))
    padding = ~_window(plan, mask, 0, values.device).complete[:, None, None, None]
    weights = torch.cat(logits, dim=1).masked_fill(padding, 0.0)
    weights = torch.softmax(weights, dim=1).masked_fill(padding, 0.0)
    return (weights * torch.cat(rows, dim=1)).sum(dim=1).to(values.dtype)


def _check(values: Any, gates: Any, bias: Any, plan: Any, overlap: object) -> Compressed:
    """Check the arguments of `compress`, and return the mask of the plan."""
    if not isinstance(plan, Plan):
        raise ValueError(f"plan must be made by mb.prepare, got {plan!r:.100}")
    mask, key_layout = plan.mask, plan.options.key_layout
    if type(mask) is not Compressed or mask.length != mask.stride:
        raise ValueError(
            "plan: mb.compress needs a plan with mask mb.masks.Compressed(m) of windows without "
            f"gaps or overlaps, got {mask!r:.200}"
        )
    if not isinstance(key_layout, Layout):
        raise ValueError(
            f"plan: mb.compress needs keys that are split over ranks, got key_layout={key_layout!r}"
        )
    if not isinstance(overlap, bool):
        raise ValueError(f"overlap must be True or False, got {overlap!r}")
    for name, tensor in (("values", values), ("gates", gates)):
        rows, batch = plan.signature[0][0][:2]
        if not isinstance(tensor, torch.Tensor) or tensor.dim() != 3:
            got = tuple(tensor.shape) if isinstance(tensor, torch.Tensor) else repr(tensor)
            raise ValueError(f"{name} must be a tensor [s, b, columns], got {got!s:.100}")
        if tuple(tensor.shape[:2]) != (rows, batch) or str(tensor.device) != str(plan.device):
            raise ValueError(
                f"{name} must have the {rows} rows, batch {batch} and device {plan.device} of the "
                f"plan, got {tuple(tensor.shape)} on {tensor.device}"
            )
        if not tensor.is_floating_point() or not tensor.shape[2] or tensor.shape[2] % (1 + overlap):
            raise ValueError(
                f"{name} must be floating-point with a positive{' even' * overlap} number of "
                f"columns, got {tensor.dtype} {tuple(tensor.shape)}"
            )
    if gates.shape != values.shape or gates.dtype != values.dtype:
        raise ValueError(
            f"gates must have the shape and dtype of values, {tuple(values.shape)} {values.dtype}, "
            f"got {tuple(gates.shape)} {gates.dtype}"
        )
    expected = (mask.stride, values.shape[2])
    tensor = isinstance(bias, torch.Tensor)
    if not tensor or tuple(bias.shape) != expected or bias.device != values.device:
        got = f"{tuple(bias.shape)} on {bias.device}" if tensor else repr(bias)
        raise ValueError(f"bias must be {expected} on {values.device}, got {got:.100}")
    return mask


class _WindowRows(NamedTuple):
    """Route that brings each compressed key the rows of its window, or of the window before.

    Attributes:
        route: Route that sends the m rows of the window to the rank of the key, in the order of
            keys.
        complete: Bool [t], True for keys that have this window.
    """

    route: DeviceRoute
    complete: torch.Tensor


def _window(plan: Plan, mask: Compressed, back: int, device: torch.device) -> _WindowRows:
    """Return the route of each key's window, or of the window before if `back` is 1.

    The result is cached per plan.
    """
    cache = plan.groups.recent("windows", ROUTES_KEPT)
    key = plan.identity, back
    window = cache.find(key)
    if window is None:
        window = cache.keep(key, _made_window(plan, mask, back, device))
    return window


def window_moves(
    mask: Compressed, layout: Layout, key_layout: Layout, seq_len: int, key_len: int, back: int
) -> RowMoves:
    """Return the transfers, on all ranks, that bring each key's rows to the rank of the key.

    Args:
        mask: Mask with the window of rows of each key; windows have no gaps or overlaps.
        layout: Layout of the rows.
        key_layout: Layout of the keys.
        seq_len: Number of positions of the rows.
        key_len: Number of positions of the keys.
        back: 0 for the window of each key, 1 for the previous window.
    """
    m = mask.stride
    source, row = owners(layout, seq_len)
    destination, place = owners(key_layout, key_len)
    first = mask.first_rows(np.arange(key_len), seq_len, back)
    keys = np.flatnonzero(first >= 0)
    positions = (first[keys, None] + np.arange(m)).reshape(-1)
    keys = np.repeat(keys, m)
    landing = place[keys] * m + np.tile(np.arange(m), len(keys) // m)
    return RowMoves(source[positions], row[positions], destination[keys], landing)


def _made_window(plan: Plan, mask: Compressed, back: int, device: torch.device) -> _WindowRows:
    key_layout, ranks, me = plan.options.key_layout, plan.groups.size, plan.groups.rank
    assert isinstance(key_layout, Layout)
    seq_len, key_len = plan.signature[0][0][0] * ranks, plan.signature[1][0][0] * ranks
    moves = window_moves(mask, plan.layout, key_layout, seq_len, key_len, back)
    # Each rank computes the route of its own messages only.
    own_moves = (moves.source == me) | (moves.destination == me)
    moves = RowMoves(*(column[own_moves] for column in moves))
    own = key_layout.positions(me, key_len) if key_len else np.empty(0, dtype=np.int64)
    first = mask.first_rows(own, seq_len, back)
    return _WindowRows(
        route_on_device(moves.route(me, ranks, len(own) * mask.stride), device),
        to_device(first >= 0, device),
    )
