# SPDX-License-Identifier: Apache-2.0
"""Rotary embeddings of the rows of a rank, in place of Megatron's tables of the whole sequence.

Megatron computes the angles of all positions, fp32 [S, 1, 1, d], and slices the table. For 20
million tokens and width 128 a table has 10 GB. There is one table per sequence length and, with
multi-latent attention, per layer. Here a table contains only the positions of the rank, and all
layers with the same angles share it.

The rows of a packed batch are known only in the function that applies the angles. Until then a
*blank* replaces the table: a tensor of NaN with the table's shape and a storage of one element.

A blank is identified by the address of its storage, because the tensor is the only object that
Megatron passes from the rotary embedding to the function that applies the angles: this function
gets no `PackedSeqParams`, and a model may have several rotary embeddings. Views, `detach` and
recomputation keep the address, but not attributes or the subclass of the tensor. A number stored in
the tensor would have to be read from the GPU in every layer. `RotaryTables` keeps the storage until
`uninstall`, so no other tensor can have the same address. A copy of a blank raises `ValueError`,
and code that uses a blank as a table gets NaN, not wrong angles.

Shape letters: S tokens of the whole sequence, d rotary width.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.models.common.embeddings.rotary_pos_embedding import (
    MultimodalRotaryEmbedding,
    RotaryEmbedding,
)
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding

from ...comm.recent import RecentCache
from ...layout import DocumentZigzag
from ...layout import make as make_layout
from ...layout.sharding import to_device
from .. import patching
from ..patching import Wrap, bound_to, given_to, log, signature_of
from .angles import EXACT, TurnRates, angles_at
from .cut import ONE_RANK, cut_of_run, unpacked
from .packed import packs


def rope_patches(layout: str) -> list[Wrap]:
    """Return the wrappers of Megatron's rotary embeddings in a run with layout `layout`."""
    table = ["max_seq_len", "offset", "packed_seq", "cp_group"]
    return [
        Wrap(RotaryEmbedding, "forward", table, partial(_forward, layout)),
        Wrap(YarnRotaryEmbedding, "forward", table, partial(_scaled_forward, layout)),
        Wrap(YarnRotaryEmbedding, "_set_cos_sin_cache", ["seq_len"], _without_rows),
        Wrap(YarnRotaryEmbedding, "get_cached_cos_sin",
             ["seq_len", "offset", "dtype", "packed_seq"], partial(_cos_sin, layout)),
        Wrap(MultimodalRotaryEmbedding, "forward", ["position_ids", "cp_group"],
             partial(_of_own_positions, layout)),
    ]  # fmt: skip


def _forward(
    layout: str,
    _: Callable,
    self: Any,
    max_seq_len: int,
    offset: int = 0,
    packed_seq: bool = False,
    cp_group: Any = None,
) -> torch.Tensor:
    table_rows = _rows_of_group(layout, self.cp_group if cp_group is None else cp_group)
    if packed_seq and table_rows.size > 1:
        return tables().blank(self, max_seq_len)
    return tables().rows(self, max_seq_len, offset, table_rows)


def _scaled_forward(layout: str, original: Callable, self: Any, *args: Any, **named: Any) -> Any:
    return _forward(layout, original, self, *args, **named), tables().rates(self).scale


def _without_rows(_: Callable, self: Any, *args: Any, **named: Any) -> None:
    """Create Yarn's cos/sin cache with 0 rows, because no layer reads the cache."""
    self.max_seq_len_cached = self.offset_cached = 0
    self.dtype_cached, self.packed_seq_cached = None, False
    for name in ("cos_cached", "sin_cached"):
        self.register_buffer(name, torch.empty(0), persistent=False)


def _cos_sin(
    layout: str, original: Callable, *args: Any, **named: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines of the rank's rows.

    For packed batches, return all positions of a document: the fused kernels select rows
    themselves.
    """
    bound = bound_to(original, args, named)
    bound.apply_defaults()
    self, length, offset, dtype, packed = bound.args
    table_rows = ALL if packed else _rows_of_group(layout, self.cp_group)
    return tables().cos_sin(self, length, offset, table_rows, dtype)


def _of_own_positions(layout: str, original: Callable, *args: Any, **named: Any) -> torch.Tensor:
    """Return the M-RoPE angles of this rank's rows of `position_ids` [3, batch, S]."""
    bound = bound_to(original, args, named)
    arguments = bound.arguments
    group = arguments.get("cp_group")
    table_rows = _rows_of_group(layout, arguments["self"].cp_group if group is None else group)
    if table_rows.size == 1:
        return original(*args, **named)
    ids = arguments["position_ids"]
    local_index = to_device(table_rows.positions(ids.shape[-1]), ids.device)
    arguments["position_ids"] = ids.index_select(-1, local_index)
    arguments["cp_group"] = ONE_RANK
    angles = original(*bound.args, **bound.kwargs)
    patching.run_state().mrope_angles = weakref.ref(angles)
    return angles


def mrope_of_packs() -> ValueError:
    """Return the error for a packed batch of a model with M-RoPE."""
    return ValueError(
        "packed_seq_params with --position-embedding-type mrope: Megatron selects angles of packed "
        "documents by the index in the pack, not by position_ids, so images would lose their axes; "
        "call the model without packed_seq_params, with one sequence in each row of the batch"
    )


def packed_rope(
    layout: str, rotate: Callable, original: Callable, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """Replace `rope_utils._apply_rotary_pos_emb_thd`, for documents of any length.

    If each document is cut separately, as in Megatron, call `original`.

    Args:
        layout: the layout of the run.
        rotate: `rope_utils._apply_rotary_pos_emb_bshd`.
        original: the replaced function.
        args: positional arguments of `original`.
        kwargs: keyword arguments of `original`.
    """
    arguments = given_to(original, args, kwargs)
    t, cu_seqlens, freqs, group = (
        arguments.pop(name, None) for name in ("t", "cu_seqlens", "freqs", "cp_group")
    )
    reference = patching.run_state().mrope_angles
    axes = None if reference is None else reference()
    if axes is not None and axes.data_ptr() == freqs.data_ptr():
        raise mrope_of_packs()
    # Newer versions also have the parameter max_seqlen, which `rotate` does not.
    named = {k: x for k, x in arguments.items() if k in signature_of(rotate).parameters}
    if group is not None and is_blank(freqs):
        angles = tables().of_pack(freqs, t.shape[0], cu_seqlens, _rows_of_group(layout, group))
        return rotate(t.unsqueeze(1), angles, **named).squeeze(1)
    if group is None or group.size() == 1:
        if not packs().is_tree(cu_seqlens):
            return original(*args, **kwargs)
        group = ONE_RANK
    pack, cut = packs().of(t.shape[0] * group.size(), cu_seqlens), cut_of_run(layout)
    if isinstance(pack.layout(cut, group.size()), DocumentZigzag):
        return original(*args, **kwargs)
    index = pack.index(cut, group.size(), group.rank(), freqs.device, freqs.shape[0])
    return rotate(t.unsqueeze(1), freqs[index], **named).squeeze(1)


def fused_packed_rope(layout: str, original: Callable, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Replace `rope_utils.fused_apply_rotary_pos_emb_thd` if the table is a placeholder (blank).

    The original selects rows from tables of whole documents. Here the fused kernel for batches that
    are not packed gets the angles of this rank's rows.

    Args:
        layout: the layout of the run.
        original: the replaced function.
        args: positional arguments of `original`.
        kwargs: keyword arguments of `original`.
    """
    bound = bound_to(original, args, kwargs)
    bound.apply_defaults()
    arguments = bound.arguments
    t, freqs = arguments["t"], arguments["freqs"]
    if not is_blank(freqs):
        return original(*args, **kwargs)
    table_rows = TableRows(layout, arguments["cp_size"], arguments["cp_rank"])
    angles = tables().of_pack(freqs, t.shape[0], arguments["cu_seqlens"], table_rows)
    named = {"interleaved": True} if arguments.get("interleaved") else {}
    turned = rope_utils.fused_apply_rotary_pos_emb(t.unsqueeze(1), angles, **named)
    return turned.squeeze(1)


def _rows_of_group(layout: str, group: Any) -> TableRows:
    return (
        ALL if group is None or group.size() == 1 else TableRows(layout, group.size(), group.rank())
    )


# Two lengths (training and evaluation, or micro-batches of a forward and a backward), each with two
# tables (layers with a window and layers without).
TABLES_KEPT = 4


@dataclass(frozen=True)
class TableRows:
    """The rows of a rotary table that rank `rank` of `size` ranks holds in layout `layout`."""

    layout: str
    size: int
    rank: int

    def positions(self, length: int) -> np.ndarray:
        """Return the rank's positions, int64 [length / size], in a sequence without packing."""
        if self.size == 1:
            return np.arange(length)
        check_length(length, self.layout, self.size)
        return make_layout(self.layout, cp_size=self.size).positions(self.rank, length)


ALL = TableRows("contiguous", 1, 0)


class RotaryTables:
    """Cache of the `TABLES_KEPT` last used rotary tables, and of placeholders (blanks)."""

    def __init__(self) -> None:
        self._rates: WeakKeyDictionary[Any, tuple[tuple, TurnRates]] = WeakKeyDictionary()
        self._blanks: dict[tuple, tuple[torch.Tensor, TurnRates]] = {}
        self._pairs: dict[tuple, torch.Tensor] = {}
        self._made = RecentCache(TABLES_KEPT)
        self._logged = False

    def rates(self, rope: Any) -> TurnRates:
        """Return the angular frequencies of one of Megatron's rotary modules."""
        return self._keyed_rates(rope)[1]

    def rows(
        self, rope: Any, length: int, offset: int = 0, table_rows: TableRows = ALL
    ) -> torch.Tensor:
        """Return angles, fp32 [rows, 1, 1, d].

        Args:
            rope: Megatron's rotary module.
            length: tokens of the sequence.
            offset: the position of the first token.
            table_rows: the rows of the table.
        """
        key, rates = self._keyed_rates(rope)

        def make() -> torch.Tensor:
            at = to_device(table_rows.positions(length) + offset, rates.per_position.device)
            return self._angles(at, rates, offset + length)

        return self._once((key, length, offset, table_rows), make)

    def cos_sin(
        self, rope: Any, length: int, offset: int, table_rows: TableRows, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scaled cosines and sines of the angles of `table_rows`, for fused MLA kernels.

        Args:
            rope: Megatron's rotary module.
            length: tokens of the sequence.
            offset: the position of the first token.
            table_rows: the rows of the table.
            dtype: dtype of the result.
        """
        key, rates = self._keyed_rates(rope)

        def make() -> tuple[torch.Tensor, torch.Tensor]:
            angles = self.rows(rope, length, offset, table_rows)
            cos, sin = angles.cos() * rates.scale, angles.sin() * rates.scale
            return cos.to(dtype).contiguous(), sin.to(dtype).contiguous()

        return self._once((key, length, offset, table_rows, dtype), make)

    def blank(self, rope: Any, length: int) -> torch.Tensor:
        """Return a placeholder (blank) for a table of angles: NaN, fp32 [length, 1, 1, d]."""
        key, rates = self._keyed_rates(rope)
        if key not in self._blanks:
            nan = torch.full((1,), torch.nan, device=rates.per_position.device)
            self._blanks[key] = nan, rates
        return self._blanks[key][0].expand(length, 1, 1, rates.width)

    def pair(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        """Return the stack of two placeholders (blanks) without a copy: fp32 [2, length, 1, 1, d].

        Both entries of the result are blanks again. `torch.stack` would copy the blanks, and a copy
        has another address.
        """
        rates = [self._of_blank(blank) for blank in (first, second)]
        name = "pair", *(key for key, _ in rates)
        if name not in self._pairs:
            self._pairs[name] = torch.full((2,), torch.nan, device=first.device)
            for place, (row, (_, turns)) in enumerate(zip(self._pairs[name], rates, strict=True)):
                self._blanks[(*name, place)] = row, turns
        return self._pairs[name].view(2, 1, 1, 1, 1).expand(2, *first.shape)

    def of_pack(
        self, blank: torch.Tensor, tokens: int, cu_seqlens: torch.Tensor, table_rows: TableRows
    ) -> torch.Tensor:
        """Return angles, fp32 [tokens, 1, 1, d], of this rank's tokens of a packed batch.

        Args:
            blank: result of `blank`, or a view of the result. If it has one row per token of the
                pack, angles belong to positions in the pack, otherwise to positions in documents.
            tokens: number of tokens that this rank holds.
            cu_seqlens: cumulative lengths of the documents.
            table_rows: the rows of the table.
        """
        (key, rates), length = self._of_blank(blank), blank.shape[0]
        pack, cut = packs().of(tokens * table_rows.size, cu_seqlens), cut_of_run(table_rows.layout)
        place = cut, table_rows.size, table_rows.rank, rates.per_position.device, length

        def make() -> torch.Tensor:
            return self._angles(pack.index(*place), rates, length)

        return self._once((key, pack.cut_key, *place), make)

    def _of_blank(self, blank: torch.Tensor) -> tuple[tuple, TurnRates]:
        address = blank.data_ptr()
        for key, (nan, rates) in self._blanks.items():
            if nan.data_ptr() == address:
                return key, rates
        raise ValueError(
            "rotary_pos_emb of a packed batch was copied before it reached the attention layer; "
            "pass the tensor that the rotary embedding returned"
        )

    def _keyed_rates(self, rope: Any) -> tuple[tuple, TurnRates]:
        if rope not in self._rates:
            rates = _rates(rope)
            self._rates[rope] = rates.key(), rates
        return self._rates[rope]

    def _angles(self, at: torch.Tensor, rates: TurnRates, reach: int) -> torch.Tensor:
        if reach > EXACT and not self._logged:
            self._logged = True
            log(
                f"rotary angles of positions from {EXACT:,} on are computed in fp64; Megatron's "
                f"fp32 angles are off by up to {rates.worst_of_fp32(reach - 1):.2g} rad at "
                f"position {reach - 1:,}"
            )
        return angles_at(at, rates, reach)

    def _once(self, key: tuple, make: Callable[[], Any]) -> Any:
        def table() -> Any:
            made = make()
            for tensor in made if isinstance(made, tuple) else (made,):
                tensor._do_not_offload = True  # shared by layers, so it stays on the device
            return made

        return self._made.of(key, table)


def _rates(rope: Any) -> TurnRates:
    if isinstance(rope, YarnRotaryEmbedding):
        # Megatron's own table of two positions: the second row contains the frequencies.
        table: Any = rope.get_emb(2)
        angles, scale = table
        return TurnRates(angles[1, 0, 0, : angles.shape[-1] // 2].clone(), scale=scale)
    if rope.inv_freq.device.type == "cpu":
        rope.inv_freq = rope.inv_freq.to(device=torch.cuda.current_device())  # as in Megatron
    factor = rope.seq_len_interpolation_factor
    return TurnRates(
        rope.inv_freq,
        interpolation=None if factor is None else 1 / factor,
        interleaved=rope.rotary_interleaved,
    )


def tables() -> RotaryTables:
    """Return the rotary tables of the run, which are kept until `uninstall`."""
    state = patching.run_state()
    if state.rotary_tables is None:
        state.rotary_tables = RotaryTables()
    return state.rotary_tables


def is_blank(freqs: torch.Tensor) -> bool:
    """Return whether a tensor is a placeholder (blank), not a table of angles."""
    return freqs.dim() == 4 and freqs.shape[-1] > 1 and freqs.stride(-1) == 0


def check_length(length: int, layout: str, size: int) -> None:
    """Raise an error unless a sequence without packing can be cut into 2 x `size` equal parts.

    Args:
        length: tokens of the sequence.
        layout: the layout of the run.
        size: number of ranks.

    Raises:
        ValueError: The layout is balanced, which requires packed batches, or `length` is not
            divisible by 2 x `size`.
    """
    if layout == "balanced":
        raise unpacked()
    if length % (2 * size):
        raise patching.user_error(
            f"--seq-length {length} is not divisible by 2 x --context-parallel-size "
            f"({2 * size}); pad the sequences to a multiple, or change one of the two flags"
        )
