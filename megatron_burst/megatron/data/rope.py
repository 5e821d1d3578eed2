# SPDX-License-Identifier: Apache-2.0
"""Rotary embeddings of the rows of a rank, in place of Megatron's tables of the whole sequence.

Megatron computes angles of all positions, fp32 [S, 1, 1, d], and cuts them: 10 GB for 20 million
tokens of width 128, once per length and, with multi-latent attention, per layer. Here a table is
made of the positions that the rank holds, and shared by all layers whose angles are the same.

The rows of a packed batch are known only where the angles are applied. Until then Megatron passes a
*blank*: NaN, of the shape of Megatron's table and with a storage of one number.

A blank is recognized by the address of its storage, because the tensor is the only thing that
Megatron passes from the rotary embedding to the function that applies it: this function gets no
`PackedSeqParams`, and a model may have several rotary embeddings. Views, `detach` and recomputation
keep the address. An attribute or a subclass of the tensor would not survive them, and a number
stored in the tensor would have to be read from the GPU in every layer. `RotaryTables` keeps the
storage until `uninstall`, so no other tensor can have the address. A copy raises `ValueError`, and
code that uses a blank as a table gets NaN, not wrong angles.

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
    """What makes rotary tables in a run of that layout."""
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
    held = _held(layout, self.cp_group if cp_group is None else cp_group)
    if packed_seq and held.size > 1:
        return tables().blank(self, max_seq_len)
    return tables().rows(self, max_seq_len, offset, held)


def _scaled_forward(layout: str, original: Callable, self: Any, *args: Any, **named: Any) -> Any:
    return _forward(layout, original, self, *args, **named), tables().rates(self).scale


def _without_rows(_: Callable, self: Any, *args: Any, **named: Any) -> None:
    """Yarn's cache without rows: its constructor fills one that no layer asks for."""
    self.max_seq_len_cached = self.offset_cached = 0
    self.dtype_cached, self.packed_seq_cached = None, False
    for name in ("cos_cached", "sin_cached"):
        self.register_buffer(name, torch.empty(0), persistent=False)


def _cos_sin(
    layout: str, original: Callable, *args: Any, **named: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of the rank's rows. For packed batches of all positions of a document: the
    fused kernels that take them choose rows themselves.
    """
    bound = bound_to(original, args, named)
    bound.apply_defaults()
    self, length, offset, dtype, packed = bound.args
    held = ALL if packed else _held(layout, self.cp_group)
    return tables().cos_sin(self, length, offset, held, dtype)


def _of_own_positions(layout: str, original: Callable, *args: Any, **named: Any) -> torch.Tensor:
    """Angles of several axes: `position_ids` [3, batch, S] are cut, instead of their angles."""
    bound = bound_to(original, args, named)
    given = bound.arguments
    group = given.get("cp_group")
    held = _held(layout, given["self"].cp_group if group is None else group)
    if held.size == 1:
        return original(*args, **named)
    ids = given["position_ids"]
    mine = to_device(held.positions(ids.shape[-1]), ids.device)
    given["position_ids"] = ids.index_select(-1, mine)
    given["cp_group"] = ONE_RANK
    angles = original(*bound.args, **bound.kwargs)
    patching.notes()[_AXES] = weakref.ref(angles)
    return angles


def mrope_of_packs() -> ValueError:
    """The error for a packed batch of a model whose positions have several axes."""
    return ValueError(
        "packed_seq_params with --position-embedding-type mrope: Megatron takes angles of packed "
        "documents by their places, not by position_ids, so images would lose their axes; call the "
        "model without packed_seq_params, one sequence per batch row"
    )


def packed_rope(
    layout: str, rotate: Callable, original: Callable, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """`rope_utils._apply_rotary_pos_emb_thd`, for documents of any length.

    rotate: `rope_utils._apply_rotary_pos_emb_bshd`. The original runs if each document is laid
    out by itself, as Megatron does it.
    """
    given = given_to(original, args, kwargs)
    t, cu_seqlens, freqs, group = (
        given.pop(name, None) for name in ("t", "cu_seqlens", "freqs", "cp_group")
    )
    axes = patching.notes().get(_AXES, lambda: None)()
    if axes is not None and axes.data_ptr() == freqs.data_ptr():
        raise mrope_of_packs()
    # Newer versions also take max_seqlen, which only their own slicing needs.
    named = {k: x for k, x in given.items() if k in signature_of(rotate).parameters}
    if group is not None and is_blank(freqs):
        angles = tables().of_pack(freqs, t.shape[0], cu_seqlens, _held(layout, group))
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
    """`rope_utils.fused_apply_rotary_pos_emb_thd`, which chooses rows of tables of whole documents:
    the fused kernel of batches that are not packed takes those of the rank.
    """
    bound = bound_to(original, args, kwargs)
    bound.apply_defaults()
    given = bound.arguments
    t, freqs = given["t"], given["freqs"]
    if not is_blank(freqs):
        return original(*args, **kwargs)
    held = HeldRows(layout, given["cp_size"], given["cp_rank"])
    angles = tables().of_pack(freqs, t.shape[0], given["cu_seqlens"], held)
    named = {"interleaved": True} if given.get("interleaved") else {}
    turned = rope_utils.fused_apply_rotary_pos_emb(t.unsqueeze(1), angles, **named)
    return turned.squeeze(1)


def _held(layout: str, group: Any) -> HeldRows:
    return (
        ALL if group is None or group.size() == 1 else HeldRows(layout, group.size(), group.rank())
    )


_NOTE = "rotary tables"
_AXES = "the last angles of several axes"
# Training and evaluation, or the micro-batches of a forward and of a backward, each with the tables
# of layers with a window and of those without.
TABLES_KEPT = 4


@dataclass(frozen=True)
class HeldRows:
    """Which rows of a sequence a table is of: those of `rank` of `size` ranks in a layout."""

    layout: str
    size: int
    rank: int

    def positions(self, length: int) -> np.ndarray:
        """int64 [length / size], for a sequence that is not packed."""
        if self.size == 1:
            return np.arange(length)
        check_length(length, self.layout, self.size)
        return make_layout(self.layout, cp_size=self.size).positions(self.rank, length)


ALL = HeldRows("contiguous", 1, 0)


class RotaryTables:
    """The rotary tables of a run: the last `TABLES_KEPT`, and the blanks of packed batches."""

    def __init__(self) -> None:
        self._rates: WeakKeyDictionary[Any, tuple[tuple, TurnRates]] = WeakKeyDictionary()
        self._blanks: dict[tuple, tuple[torch.Tensor, TurnRates]] = {}
        self._pairs: dict[tuple, torch.Tensor] = {}
        self._made = RecentCache(TABLES_KEPT)
        self._said = False

    def rates(self, rope: Any) -> TurnRates:
        """How fast the angles of one of Megatron's modules turn."""
        return self._known(rope)[1]

    def rows(self, rope: Any, length: int, offset: int = 0, held: HeldRows = ALL) -> torch.Tensor:
        """fp32 [rows, 1, 1, d]: angles of the rows `held` of `length` positions, which start at
        `offset`.
        """
        key, rates = self._known(rope)

        def make() -> torch.Tensor:
            at = to_device(held.positions(length) + offset, rates.per_position.device)
            return self._angles(at, rates, offset + length)

        return self._once((key, length, offset, held), make)

    def cos_sin(
        self, rope: Any, length: int, offset: int, held: HeldRows, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Scaled cosines and sines of `rows`, as fused kernels of latent attention take them."""
        key, rates = self._known(rope)

        def make() -> tuple[torch.Tensor, torch.Tensor]:
            angles = self.rows(rope, length, offset, held)
            cos, sin = angles.cos() * rates.scale, angles.sin() * rates.scale
            return cos.to(dtype).contiguous(), sin.to(dtype).contiguous()

        return self._once((key, length, offset, held, dtype), make)

    def blank(self, rope: Any, length: int) -> torch.Tensor:
        """fp32 [length, 1, 1, d] of NaN, in place of a table whose rows are not known yet."""
        key, rates = self._known(rope)
        if key not in self._blanks:
            nan = torch.full((1,), torch.nan, device=rates.per_position.device)
            self._blanks[key] = nan, rates
        return self._blanks[key][0].expand(length, 1, 1, rates.width)

    def pair(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        """fp32 [2, length, 1, 1, d] of NaN, whose two rows stand for the same tables as two blanks
        of one shape, as their stack would if it were no copy.
        """
        rates = [self._of_blank(blank) for blank in (first, second)]
        name = "pair", *(key for key, _ in rates)
        if name not in self._pairs:
            self._pairs[name] = torch.full((2,), torch.nan, device=first.device)
            for place, (row, (_, turns)) in enumerate(zip(self._pairs[name], rates, strict=True)):
                self._blanks[(*name, place)] = row, turns
        return self._pairs[name].view(2, 1, 1, 1, 1).expand(2, *first.shape)

    def of_pack(
        self, blank: torch.Tensor, tokens: int, cu_seqlens: torch.Tensor, held: HeldRows
    ) -> torch.Tensor:
        """fp32 [tokens, 1, 1, d]: angles of the `tokens` of a packed batch that this rank holds.

        blank: from `blank`, or a view of it. As long as the pack it stands for positions in the
        pack, otherwise for positions in documents.
        """
        (key, rates), length = self._of_blank(blank), blank.shape[0]
        pack, cut = packs().of(tokens * held.size, cu_seqlens), cut_of_run(held.layout)
        place = cut, held.size, held.rank, rates.per_position.device, length

        def make() -> torch.Tensor:
            return self._angles(pack.index(*place), rates, length)

        return self._once((key, pack.cut_key, *place), make)

    def _of_blank(self, blank: torch.Tensor) -> tuple[tuple, TurnRates]:
        known = self._blanks.items()
        found = [(k, r) for k, (nan, r) in known if nan.data_ptr() == blank.data_ptr()]
        if not found:
            raise ValueError(
                "rotary_pos_emb of a packed batch was copied on its way to the attention layer; "
                "hand on what the rotary embedding returned"
            )
        return found[0]

    def _known(self, rope: Any) -> tuple[tuple, TurnRates]:
        if rope not in self._rates:
            rates = _rates(rope)
            self._rates[rope] = rates.key(), rates
        return self._rates[rope]

    def _angles(self, at: torch.Tensor, rates: TurnRates, reach: int) -> torch.Tensor:
        if reach > EXACT and not self._said:
            self._said = True
            log(
                f"rotary angles of positions from {EXACT:,} on are computed in fp64; Megatron's "
                f"fp32 angles are off by up to {rates.worst_of_fp32(reach - 1):.2g} rad at "
                f"position {reach - 1:,}"
            )
        return angles_at(at, rates, reach)

    def _once(self, key: tuple, make: Callable[[], Any]) -> Any:
        def table() -> Any:
            made = make()
            for each in made if isinstance(made, tuple) else (made,):
                each._do_not_offload = True  # it stays here as long as it is known
            return made

        return self._made.of(key, table)


def _rates(rope: Any) -> TurnRates:
    if isinstance(rope, YarnRotaryEmbedding):
        # Megatron's own table of two positions: the second has the frequencies.
        found: Any = rope.get_emb(2)
        angles, scale = found
        return TurnRates(angles[1, 0, 0, : angles.shape[-1] // 2].clone(), scale=scale)
    if rope.inv_freq.device.type == "cpu":
        rope.inv_freq = rope.inv_freq.to(device=torch.cuda.current_device())  # as Megatron does it
    factor = rope.seq_len_interpolation_factor
    return TurnRates(
        rope.inv_freq,
        interpolation=None if factor is None else 1 / factor,
        interleaved=rope.rotary_interleaved,
    )


def tables() -> RotaryTables:
    """The rotary tables of the run, until `uninstall`."""
    return patching.notes().setdefault(_NOTE, RotaryTables())


def is_blank(freqs: torch.Tensor) -> bool:
    """Whether this is a blank and not a table of angles."""
    return freqs.dim() == 4 and freqs.shape[-1] > 1 and freqs.stride(-1) == 0


def check_length(length: int, layout: str, size: int) -> None:
    """Raise `ValueError` unless ranks can hold equal parts of a sequence that is not packed."""
    if layout == "balanced":
        raise unpacked()
    if length % (2 * size):
        raise patching.user_error(
            f"--seq-length {length} is not divisible by 2 x --context-parallel-size "
            f"({2 * size}); pad the sequences or change one of the two"
        )
