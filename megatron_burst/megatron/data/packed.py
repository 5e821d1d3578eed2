# SPDX-License-Identifier: Apache-2.0
"""Packed batches: which documents a `PackedSeqParams` holds, and where their tokens are.

Data path, rotary embedding and attention all ask this module for the layout of a packed batch, so
that they cannot disagree; what a tensor on a device says is read once, a layout is made once, and
what goes to a device is sent once. The rule: under layout zigzag, if every document can be cut into
2 x CP equal pieces, each document is laid out by itself, as Megatron and Transformer Engine do it.
Layout balanced is made of the documents. Otherwise the layout of the run applies to the whole pack,
whose documents may have any length.

A layout goes only by what data path, rotary embedding and attention all know: where documents
start, with the padding behind each, and what pads the end of the pack. The mask, which attention
alone needs, also hides the padding between documents.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided
from torch.utils.weak import TensorWeakRef, WeakIdKeyDictionary

from ...comm.recent import RecentCache
from ...layout import Layout, successors
from ...layout import make as make_layout
from ...layout.sharding import to_device
from ...masks import Documents, Mask
from .. import patching
from .cut import BatchCut

CUTS_KEPT = 4096  # more than packed micro-batches between their slicing and their backward


class _Cuts(dict):
    """What was made for packs that are cut alike: layouts, and numbers of tokens on devices."""


@dataclass(frozen=True)
class Pack:
    """The documents of one packed sequence of `total` tokens over all context-parallel ranks.

    bounds: boundaries of the documents in the pack, each with the padding behind it; what pads the
    end of the pack is one more. end: where that begins.
    documents: boundaries for the mask, for which padding is a document of its own. padding: which
    of these documents are padding: they see nothing, and nothing sees them. spans: of images, if a
    script told them (`vision.with_spans`), for a mask of the user's.
    """

    total: int
    bounds: tuple[int, ...]
    end: int
    documents: tuple[int, ...]
    padding: tuple[int, ...] = ()
    spans: tuple[tuple[int, int], ...] | None = None

    @property
    def mask(self) -> Mask:
        """A token sees its own document."""
        return Documents(self.documents, padding=self.padding)

    @property
    def chained(self) -> dict[str, Any]:
        """What linear attention takes to know which tokens follow which."""
        return {"cu_seqlens": self.bounds}

    @property
    def cut_key(self) -> tuple:
        """All that the layout of the pack depends on, besides the run's `BatchCut`."""
        return self.total, self.bounds, self.end

    def layout(self, cut: BatchCut, cp_size: int) -> Layout:
        """Which positions of the pack each rank holds, in a run that cuts by `cut`; made once."""
        if (cut, cp_size) not in self._made:
            self._made[cut, cp_size] = self._layout(cut, cp_size)
        return self._made[cut, cp_size]

    def _layout(self, cut: BatchCut, cp_size: int) -> Layout:
        if cp_size == 1:  # hybrid context parallelism: documents of any length
            return make_layout("contiguous", cp_size=1)
        if cut.name == "balanced":
            return self._balanced(cut, cp_size)
        if cut.name == "zigzag" and not (np.diff(self.bounds) % (2 * cp_size)).any():
            return make_layout(cut.name, cp_size=cp_size, cu_seqlens=self.bounds)
        if self.total % (2 * cp_size):
            raise ValueError(
                f"packed sequence of {self.total} tokens: not divisible by 2 x "
                f"--context-parallel-size ({2 * cp_size}); pad the end of the pack"
            )
        return make_layout(cut.name, cp_size=cp_size)

    def _balanced(self, cut: BatchCut, cp_size: int) -> Layout:
        if self.total % (cp_size * cut.multiple):
            tensor = f" x --tensor-model-parallel-size ({cut.multiple})" if cut.multiple > 1 else ""
            raise ValueError(
                f"packed sequence of {self.total} tokens: not divisible by "
                f"--context-parallel-size ({cp_size}){tensor}; pad the end of the pack"
            )
        return make_layout(
            cut.name,
            cp_size=cp_size,
            cu_seqlens=self.bounds,
            per_node=None if cut.per_node is None else math.gcd(cut.per_node, cp_size),
            windows=cut.windows,
            padding=[len(self.bounds) - 2] if self.end < self.total else [],
            row_cost=cut.row_cost,
        )

    def places(self, cut: BatchCut, cp_size: int, rank: int) -> tuple[np.ndarray, np.ndarray]:
        """int64 [total / cp_size] each: positions in the pack, and in their documents."""
        positions = self.layout(cut, cp_size).positions(rank, self.total)
        # Of the rank's tokens alone: numbers of all tokens would be as long as the pack.
        document = np.searchsorted(self._bounds, positions, side="right") - 1
        return positions, positions - self._bounds[document]

    def index(
        self,
        cut: BatchCut,
        cp_size: int,
        rank: int,
        device: torch.device,
        angles: int | None = None,
    ) -> torch.Tensor:
        """int64 [total / cp_size] on `device`, sent there once: which tokens the rank holds.

        With angles: which of so many rotary angles they take. As many as the pack has tokens are
        for positions in the pack, fewer for positions in documents; what pads the end takes the
        last.
        """
        key = cut, cp_size, rank, device, angles
        if key not in self._made:
            rows, in_document = self.places(cut, cp_size, rank)
            if angles is not None:
                rows = np.minimum(rows if angles == self.total else in_document, angles - 1)
            self._made[key] = to_device(rows, device)
        return self._made[key]

    def successors(
        self, cut: BatchCut, cp_size: int, rank: int, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `mb.layout.successors`, on `device`, sent there once: where the rank's tokens find
        the next ones of their documents.
        """
        # Packs that are cut alike may differ in the padding between their documents.
        key = "successors", self.documents, cut, cp_size, rank, device
        if key not in self._made:
            index = successors(self.layout(cut, cp_size), self.documents, rank)
            self._made[key] = tuple(to_device(rows, device) for rows in index)
        return self._made[key]

    @cached_property
    def _made(self) -> _Cuts:
        return _Cuts()

    @cached_property
    def _bounds(self) -> np.ndarray:
        return np.array(self.bounds, dtype=np.int64)


class Packs:
    """The packs of the batches in use, by the tensors that describe them."""

    def __init__(self) -> None:
        self._known: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._made: WeakValueDictionary[tuple, _Cuts] = WeakValueDictionary()
        self._cut = RecentCache(CUTS_KEPT)
        self._values: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._noted: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def note(self, cu_seqlens: torch.Tensor, pack: Pack) -> None:
        """Remember that this very tensor stands for `pack`, which says what its values do not: a
        prefix tree, or where images lie. ValueError if it stands for another: a micro-batch of that
        one may still be in flight.
        """
        if (known := self._noted_of(cu_seqlens)) is not None and known != pack:
            raise ValueError(
                "packed_seq_params: these tensors stand for the images of another micro-batch, "
                "which may still be in flight: give every micro-batch tensors of its own"
            )
        vars(pack)["_made"] = self._made.setdefault(pack.cut_key, pack._made)
        self._noted[cu_seqlens] = version_of(cu_seqlens), pack

    def _noted_of(self, cu_seqlens: torch.Tensor) -> Any:
        """The pack that was noted for this very tensor, None if none was."""
        found: Any = self._noted.get(cu_seqlens)
        version, pack = found or (version_of(cu_seqlens), None)
        if version != version_of(cu_seqlens):
            raise ValueError(
                "packed_seq_params: lengths were changed in place after with_spans: give every "
                "micro-batch tensors of its own"
            )
        return pack

    def is_tree(self, cu_seqlens: torch.Tensor) -> bool:
        """Whether this very tensor stands for a prefix tree."""
        pack = self._noted_of(cu_seqlens)
        return pack is not None and pack.spans is None

    def of(self, total: int, cu_seqlens: torch.Tensor, padded: torch.Tensor | None = None) -> Pack:
        """As `pack_of`, which is asked once for tensors that nobody has changed since."""
        noted = self._noted_of(cu_seqlens)
        if noted is not None and noted.spans is not None and noted.total != total:
            raise ValueError(
                f"packed_seq_params: with_spans was told a seq_len of {noted.total}, and the "
                f"batch has {total} tokens"
            )
        if noted is not None:
            return noted
        state = total, cu_seqlens._version, None if padded is None else padded._version
        entries: Any = self._known.setdefault(cu_seqlens, {})
        with_padding = padded is not None
        known = entries.get(with_padding)
        # Held weakly: it may be `cu_seqlens` itself, whose entry would then never end.
        if known is None or known[1] != state or (with_padding and known[0]() is not padded):
            held = TensorWeakRef(padded) if with_padding else None
            pack = pack_of(total, cu_seqlens, padded)
            # Tensors of slicing, rotary embedding and attention differ, and say the same.
            vars(pack)["_made"] = self._made.setdefault(pack.cut_key, pack._made)
            known = entries[with_padding] = held, state, pack
        return known[2]

    def note_values(self, sent: torch.Tensor, host: torch.Tensor) -> None:
        """Remember that `sent`, contiguous on a device, says what `host` says now."""
        self._values[sent] = sent._version, host.numpy().flatten()

    def values(self, lengths: torch.Tensor) -> np.ndarray:
        """What cumulative lengths say; waits for a device, unless they are a view of noted ones."""
        base = lengths if lengths._base is None else lengths._base
        known: Any = self._values.get(base)
        if known and known[0] == lengths._version and base.dtype == lengths.dtype:
            host = known[1]
            strides = [step * lengths.itemsize for step in lengths.stride()]
            return as_strided(host[lengths.storage_offset() :], lengths.shape, strides)
        return lengths.detach().cpu().numpy()

    def note_cut(self, pack: Pack) -> None:
        """Remember that this process cut a batch of such documents."""
        self._cut.keep(pack.cut_key, True)

    def was_cut(self, pack: Pack) -> bool:
        """Whether one of the last `CUTS_KEPT` batches that this process cut had such documents."""
        return pack.cut_key in self._cut


def version_of(tensor: torch.Tensor) -> int:
    """Return how often a tensor was written; 0 for an inference tensor, which has no counter."""
    return 0 if tensor.is_inference() else tensor._version


def packs() -> Packs:
    """The packs that data path, rotary embedding and attention share until `uninstall`."""
    return patching.notes().setdefault("packs", Packs())


def pack_of(total: int, cu_seqlens: torch.Tensor, padded: torch.Tensor | None = None) -> Pack:
    """The pack that cumulative lengths describe; waits for the device that holds them.

    cu_seqlens [n] or [1, n]: cumulative lengths of documents without their padding; padded: the
    same with it. Repeated entries (empty documents), tokens after the last document and entries
    of -1 at the end are allowed.
    """
    ends = _increasing("cu_seqlens", cu_seqlens, total)
    if padded is None:
        return _pack(total, ends, ends[:-1], np.diff(ends))
    bounds = _increasing("cu_seqlens_padded", padded, total)
    lengths, room = np.diff(ends), np.diff(bounds)
    if len(lengths) != len(room) or (lengths > room).any():
        raise ValueError(
            f"cu_seqlens_padded {bounds.tolist()} leaves no room for cu_seqlens {ends.tolist()}"
        )
    return _pack(total, bounds, bounds[:-1], lengths)


def params_of(ends: torch.Tensor, longest: int, padded: Any = None) -> Any:
    """The `PackedSeqParams` of queries and keys whose documents end alike, the longest of so many
    tokens. padded: where their padding ends, a tensor as `ends`, if that is said too.
    """
    from megatron.core.packed_seq_params import PackedSeqParams

    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def _pack(total: int, bounds: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> Pack:
    """The pack whose documents have these starts and lengths; the rest is padding."""
    documents = _closed(total, bounds, starts + lengths)
    real = np.isin(documents[:-1], starts[lengths > 0])
    padding = tuple(np.flatnonzero(~real).tolist())
    return Pack(total, _closed(total, bounds), int(bounds[-1]), documents, padding)


def _increasing(name: str, values: torch.Tensor, total: int) -> np.ndarray:
    ends = packs().values(values).astype(np.int64)
    if ends.ndim == 2 and len(ends) == 1:
        ends = ends[0]
    if ends.ndim != 1:
        raise patching.user_error(
            f"{name} of shape {tuple(values.shape)}: packed sequences need --micro-batch-size 1"
        )
    ends = ends[: len(np.trim_zeros(ends + 1, "b"))]  # NeMo pads to its longest with -1
    if len(ends) == 2 and ends[0] == 0 and ends[1] < -1:
        raise ValueError(
            f"{name} {ends.tolist()} is a copy of the cu_seqlens of a prefix tree, which is found "
            "by the tensor itself; pass the PackedSeqParams of TreePack.params to every layer "
            "without copying its tensors"
        )
    if len(ends) < 2 or ends[0] != 0 or (np.diff(ends) < 0).any() or ends[-1] > total:
        raise ValueError(
            f"{name} must start at 0, never decrease and end by the {total} tokens of the pack, "
            f"got {ends.tolist()}"
        )
    return ends


def _closed(total: int, *bounds: np.ndarray) -> tuple[int, ...]:
    # As arrays: data loaders fill cumulative lengths up to the length of the sequence.
    return tuple(np.unique(np.concatenate([*bounds, [total]])).tolist())
