"""Rotary tables of the rows of a rank, in place of Megatron's tables of the whole sequence.

Megatron computes angles of all positions, fp32 [S, 1, 1, d], and cuts them: 10 GB for 20 million
tokens of width 128, once per length and, with multi-latent attention, per layer. Here a table is
made of the positions that the rank holds, and shared by all layers whose angles are the same.

The rows of a packed batch are known only where the angles are applied. Up to there a *blank*
travels: NaN, of the shape that Megatron's table would have and with a storage of one number. Code
that takes a blank for a table gets NaN, and not wrong angles.

Shape letters: S tokens of the whole sequence, d rotary width.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding

import megatron_burst as mb
from megatron_burst.layout.sharding import to_device
from megatron_burst.megatron.checks import translation
from megatron_burst.megatron.data.angles import EXACT, Rates, angles_at
from megatron_burst.megatron.data.cut import cut_of_run, unpacked
from megatron_burst.megatron.data.packed import packs
from megatron_burst.megatron.log import log
from megatron_burst.megatron.patching import registry

_NOTE = "rotary tables"
TABLES_KEPT = 2  # training and evaluation, or the micro-batches of a forward and of a backward


@dataclass(frozen=True)
class Held:
    """Which rows of a sequence a table is of: those of ``rank`` of ``size`` ranks in a layout."""

    layout: str
    size: int
    rank: int

    def positions(self, length: int) -> np.ndarray:
        """int64 [length / size], for a sequence that is not packed."""
        if self.size == 1:
            return np.arange(length)
        check_length(length, self.layout, self.size)
        return mb.layout.make(self.layout, cp_size=self.size).positions(self.rank, length)


ALL = Held("contiguous", 1, 0)


class Tables:
    """The rotary tables of a run: the last `TABLES_KEPT`, and the blanks of packed batches."""

    def __init__(self) -> None:
        self._rates: WeakKeyDictionary[Any, tuple[tuple, Rates]] = WeakKeyDictionary()
        self._blanks: dict[tuple, tuple[torch.Tensor, Rates]] = {}
        self._made: OrderedDict[tuple, Any] = OrderedDict()
        self._said = False

    def rates(self, rope: Any) -> Rates:
        """How fast the angles of one of Megatron's modules turn."""
        return self._known(rope)[1]

    def rows(self, rope: Any, length: int, offset: int = 0, held: Held = ALL) -> torch.Tensor:
        """fp32 [rows, 1, 1, d]: angles of the rows ``held`` of ``length`` positions, which start at
        ``offset``."""
        key, rates = self._known(rope)

        def make() -> torch.Tensor:
            at = to_device(held.positions(length) + offset, rates.per_position.device)
            return self._angles(at, rates, offset + length)

        return self._once((key, length, offset, held), make)

    def cos_sin(
        self, rope: Any, length: int, offset: int, held: Held, dtype: torch.dtype
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

    def of_pack(
        self, blank: torch.Tensor, tokens: int, cu_seqlens: torch.Tensor, held: Held
    ) -> torch.Tensor:
        """fp32 [tokens, 1, 1, d]: angles of the ``tokens`` of a packed batch that this rank holds.

        blank: from `blank`, or a view of it. As long as the pack it stands for positions in the
        pack, otherwise for positions in documents.
        """
        known = self._blanks.items()
        found = [(k, r) for k, (nan, r) in known if nan.data_ptr() == blank.data_ptr()]
        if not found:
            raise ValueError(
                "rotary_pos_emb of a packed batch was copied on its way to the attention layer; "
                "hand on what the rotary embedding returned"
            )
        (key, rates), length = found[0], blank.shape[0]
        pack, cut = packs().of(tokens * held.size, cu_seqlens), cut_of_run(held.layout)
        place = cut, held.size, held.rank, rates.per_position.device, length

        def make() -> torch.Tensor:
            return self._angles(pack.index(*place), rates, length)

        return self._once((key, pack.cut_key, *place), make)

    def _known(self, rope: Any) -> tuple[tuple, Rates]:
        if rope not in self._rates:
            rates = _rates(rope)
            self._rates[rope] = rates.key(), rates
        return self._rates[rope]

    def _angles(self, at: torch.Tensor, rates: Rates, reach: int) -> torch.Tensor:
        if reach > EXACT and not self._said:
            self._said = True
            log(
                f"rotary angles of positions from {EXACT:,} on are computed in fp64; Megatron's "
                f"fp32 angles are off by up to {rates.worst_of_fp32(reach - 1):.2g} rad at "
                f"position {reach - 1:,}"
            )
        return angles_at(at, rates, reach)

    def _once(self, key: tuple, make: Callable[[], Any]) -> Any:
        if key not in self._made:
            made = make()
            for table in made if isinstance(made, tuple) else (made,):
                table._do_not_offload = True  # it stays here as long as it is known
            while len(self._made) >= TABLES_KEPT:
                self._made.popitem(last=False)
            self._made[key] = made
        self._made.move_to_end(key)
        return self._made[key]


def _rates(rope: Any) -> Rates:
    if isinstance(rope, YarnRotaryEmbedding):
        # Megatron's own table of two positions: the second has the frequencies.
        found: Any = rope.get_emb(2)
        angles, scale = found
        return Rates(angles[1, 0, 0, : angles.shape[-1] // 2].clone(), scale=scale)
    if rope.inv_freq.device.type == "cpu":
        rope.inv_freq = rope.inv_freq.to(device=torch.cuda.current_device())  # as Megatron does it
    factor = rope.seq_len_interpolation_factor
    return Rates(
        rope.inv_freq,
        interpolation=None if factor is None else 1 / factor,
        interleaved=rope.rotary_interleaved,
    )


def tables() -> Tables:
    """The rotary tables of the run, until `uninstall`."""
    patches = registry.installed("burst")
    return patches.notes.setdefault(_NOTE, Tables()) if patches else Tables()


def is_blank(freqs: torch.Tensor) -> bool:
    """Whether this is a blank and not a table of angles."""
    return freqs.dim() == 4 and freqs.shape[-1] > 1 and freqs.stride(-1) == 0


def check_length(length: int, layout: str, size: int) -> None:
    """Raise ``ValueError`` unless ranks can hold equal parts of a sequence that is not packed."""
    if layout == "balanced":
        raise unpacked()
    if length % (2 * size):
        raise translation.user_error(
            f"--seq-length {length} is not divisible by 2 x --context-parallel-size "
            f"({2 * size}); pad the sequences or change one of the two"
        )
