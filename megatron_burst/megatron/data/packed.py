# SPDX-License-Identifier: Apache-2.0
"""Packed batches: the documents of a `PackedSeqParams`, and the ranks that hold their tokens.

Data path, rotary embedding and attention all read the layout of a packed batch from this module, so
they use the same layout. A tensor on a device is read once, a layout is made once, and an index is
sent to a device once.

Packs are cut by these rules. With layout zigzag, if every document can be cut into 2 x CP equal
parts, each document is cut separately, as in Megatron and Transformer Engine. Layout balanced is
computed from the documents. Otherwise the layout of the run applies to the whole pack, and
documents may have any length.

A layout depends only on values that data path, rotary embedding and attention all have: the
boundaries of padded documents, and the padding at the end of the pack. The mask, which only
attention needs, also hides the padding between documents.
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

CUTS_KEPT = 4096  # exceeds packed micro-batches between their slicing and their backward


class _CutCache(dict):
    """Cache of layouts and device indices, which packs with the same `cut_key` share."""


@dataclass(frozen=True)
class Pack:
    """The documents of one packed sequence of `total` tokens over all context-parallel ranks.

    Attributes:
        total: Tokens of the pack, with padding.
        bounds: Boundaries of the documents in the pack. A document includes the padding after it,
            but the padding at the end of the pack is a separate document.
        end: The first position of the padding at the end of the pack.
        documents: Boundaries of the documents for the mask. All padding forms separate documents.
        padding: Indices of the documents in `documents` that are padding. Tokens of padding see no
            token and are seen by none.
        spans: (first, stop) of each image, from `vision.with_spans`, for a mask of the user; None
            if `with_spans` was not called.
    """

    total: int
    bounds: tuple[int, ...]
    end: int
    documents: tuple[int, ...]
    padding: tuple[int, ...] = ()
    spans: tuple[tuple[int, int], ...] | None = None

    @property
    def mask(self) -> Mask:
        """The mask in which a token sees the tokens of its document."""
        return Documents(self.documents, padding=self.padding)

    @property
    def chained(self) -> dict[str, Any]:
        """The arguments of linear attention that define the documents."""
        return {"cu_seqlens": self.bounds}

    @property
    def cut_key(self) -> tuple:
        """All values of the pack that determine its layout, given the run's `BatchCut`."""
        return self.total, self.bounds, self.end

    def layout(self, cut: BatchCut, cp_size: int) -> Layout:
        """Return the layout of the pack over `cp_size` ranks in a run with `cut`; cached."""
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
        """Return the positions of this rank's tokens in the pack and in their documents.

        Returns:
            (position in the pack, position in the document), each int64 [total / cp_size].
        """
        positions = self.layout(cut, cp_size).positions(rank, self.total)
        # Computed only for the rank's tokens: an array for all tokens would be as long as the pack.
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
        """Return the indices of a rank's tokens in the pack or in a table of angles.

        The tensor is cached on the device.

        Args:
            cut: how the run cuts batches.
            cp_size: number of ranks that hold the pack.
            rank: this rank in the group.
            device: the device of the index.
            angles: Length of the table of rotary angles to index, or None to index the tokens of
                the pack. A table as long as the pack (`total` tokens) is indexed by position in the
                pack. A table of any other length is indexed by position in the document. Indices
                beyond the table are clamped.

        Returns:
            int64 [total / cp_size].
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
        """Return `mb.layout.successors` as tensors; cached on the device.

        For each token of the rank, the tensors locate the next token of its document.

        Args:
            cut: how the run cuts batches.
            cp_size: number of ranks that hold the pack.
            rank: this rank in the group.
            device: the device of the indices.
        """
        # Packs with the same cut may differ in the padding between their documents.
        key = "successors", self.documents, cut, cp_size, rank, device
        if key not in self._made:
            index = successors(self.layout(cut, cp_size), self.documents, rank)
            self._made[key] = tuple(to_device(rows, device) for rows in index)
        return self._made[key]

    @cached_property
    def _made(self) -> _CutCache:
        return _CutCache()

    @cached_property
    def _bounds(self) -> np.ndarray:
        return np.array(self.bounds, dtype=np.int64)


class Packs:
    """Cache of the packs of batches in use. Keys are the `cu_seqlens` tensors of the batches."""

    def __init__(self) -> None:
        self._packs: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._made: WeakValueDictionary[tuple, _CutCache] = WeakValueDictionary()
        self._cut = RecentCache(CUTS_KEPT)
        self._values: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._noted: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def note(self, cu_seqlens: torch.Tensor, pack: Pack) -> None:
        """Register `pack` as the pack of this tensor object.

        This is necessary if the values of `cu_seqlens` do not define the pack completely: for a
        prefix tree, or documents with spans of images.

        Args:
            cu_seqlens: the tensor.
            pack: the pack of the tensor.

        Raises:
            ValueError: Another pack is registered for the tensor; a micro-batch with that pack may
                still be in flight.
        """
        if (noted := self._noted_of(cu_seqlens)) is not None and noted != pack:
            raise ValueError(
                "packed_seq_params: these tensors belong to the images of another micro-batch, "
                "which may still be in flight: give every micro-batch its own tensors"
            )
        self.share_cut(pack)
        self._noted[cu_seqlens] = version_of(cu_seqlens), pack

    def share_cut(self, pack: Pack) -> None:
        """Let `pack` share layouts and indices with all packs that have the same `cut_key`.

        Slicing, rotary embedding and attention make separate packs from equal document boundaries.

        Args:
            pack: the pack; changed.
        """
        vars(pack)["_made"] = self._made.setdefault(pack.cut_key, pack._made)

    def _noted_of(self, cu_seqlens: torch.Tensor) -> Any:
        """Return the pack that `note` registered for this tensor object, or None."""
        entry: Any = self._noted.get(cu_seqlens)
        version, pack = entry or (version_of(cu_seqlens), None)
        if version != version_of(cu_seqlens):
            raise ValueError(
                "packed_seq_params: lengths were changed in place after with_spans: give every "
                "micro-batch its own tensors"
            )
        return pack

    def is_tree(self, cu_seqlens: torch.Tensor) -> bool:
        """Return whether this tensor object belongs to a prefix tree."""
        pack = self._noted_of(cu_seqlens)
        return pack is not None and pack.spans is None

    def of(self, total: int, cu_seqlens: torch.Tensor, padded: torch.Tensor | None = None) -> Pack:
        """Return the pack that these tensors describe. It is cached until a tensor changes.

        Args:
            total: tokens of the pack over all ranks.
            cu_seqlens: cumulative lengths without padding.
            padded: cumulative lengths with padding, or None.

        Raises:
            ValueError: The tensors do not describe a pack of `total` tokens.
        """
        noted = self._noted_of(cu_seqlens)
        if noted is not None and noted.spans is not None and noted.total != total:
            raise ValueError(
                f"packed_seq_params: with_spans got seq_len {noted.total}, and the batch has "
                f"{total} tokens: the two must be equal"
            )
        if noted is not None:
            return noted
        state = total, cu_seqlens._version, None if padded is None else padded._version
        entries: Any = self._packs.setdefault(cu_seqlens, {})
        with_padding = padded is not None
        entry = entries.get(with_padding)
        # Weak: `padded` may be `cu_seqlens`, the key; a strong reference would keep its entry.
        if entry is None or entry[1] != state or (with_padding and entry[0]() is not padded):
            reference = TensorWeakRef(padded) if with_padding else None
            pack = pack_of(total, cu_seqlens, padded)
            self.share_cut(pack)
            entry = entries[with_padding] = reference, state, pack
        return entry[2]

    def note_values(self, sent: torch.Tensor, host: torch.Tensor) -> None:
        """Record the values of `host` for `sent`, a contiguous copy of `host` on a device."""
        self._values[sent] = sent._version, host.numpy().flatten()

    def values(self, lengths: torch.Tensor) -> np.ndarray:
        """Return the values of cumulative lengths as an array.

        Waits for the device, unless the values of the tensor or of its base were recorded.
        """
        base = lengths if lengths._base is None else lengths._base
        record: Any = self._values.get(base)
        if record and record[0] == lengths._version and base.dtype == lengths.dtype:
            host = record[1]
            strides = [step * lengths.itemsize for step in lengths.stride()]
            return as_strided(host[lengths.storage_offset() :], lengths.shape, strides)
        return lengths.detach().cpu().numpy()

    def note_cut(self, pack: Pack) -> None:
        """Record that this process cut a batch with the documents of `pack`."""
        self._cut.keep(pack.cut_key, True)

    def was_cut(self, pack: Pack) -> bool:
        """Return whether one of the last `CUTS_KEPT` recorded cuts has the documents of `pack`."""
        return pack.cut_key in self._cut


def version_of(tensor: torch.Tensor) -> int:
    """Return the version counter of a tensor; 0 for an inference tensor, which has no counter."""
    return 0 if tensor.is_inference() else tensor._version


def packs() -> Packs:
    """Return the `Packs` that data path, rotary embedding and attention share until `uninstall`."""
    state = patching.run_state()
    if state.packs is None:
        state.packs = Packs()
    return state.packs


def pack_of(total: int, cu_seqlens: torch.Tensor, padded: torch.Tensor | None = None) -> Pack:
    """Return the pack that cumulative lengths describe; wait for their device.

    Repeated entries (empty documents), tokens after the last document, and entries of -1 at the end
    are allowed.

    Args:
        total: tokens of the pack over all ranks.
        cu_seqlens: [n] or [1, n], cumulative lengths of documents without their padding.
        padded: cumulative lengths with padding, same shape as `cu_seqlens`; None without padding.

    Raises:
        ValueError: The lengths are not increasing, or contradict each other.
    """
    ends = _increasing("cu_seqlens", cu_seqlens, total)
    if padded is None:
        return _pack(total, ends, ends[:-1], np.diff(ends))
    bounds = _increasing("cu_seqlens_padded", padded, total)
    lengths, room = np.diff(ends), np.diff(bounds)
    if len(lengths) != len(room) or (lengths > room).any():
        raise ValueError(
            f"cu_seqlens_padded {bounds.tolist()} has less room than the documents of cu_seqlens "
            f"{ends.tolist()} need"
        )
    return _pack(total, bounds, bounds[:-1], lengths)


def params_of(ends: torch.Tensor, longest: int, padded: Any = None) -> Any:
    """Return the `PackedSeqParams` of self-attention over documents.

    Args:
        ends: cumulative lengths of documents.
        longest: number of tokens of the longest document.
        padded: cumulative lengths with padding, or None.
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
    """Return the pack whose documents have these starts and lengths; other tokens are padding."""
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
            f"{name} of shape {tuple(values.shape)}: packed sequences require --micro-batch-size 1"
        )
    ends = ends[: len(np.trim_zeros(ends + 1, "b"))]  # NeMo pads to its longest list with -1
    if len(ends) == 2 and ends[0] == 0 and ends[1] < -1:
        raise ValueError(
            f"{name} {ends.tolist()} is a copy of the cu_seqlens of a prefix tree, which is "
            "identified by its tensor object; pass the PackedSeqParams of TreePack.params to every "
            "layer without copying its tensors"
        )
    if len(ends) < 2 or ends[0] != 0 or (np.diff(ends) < 0).any() or ends[-1] > total:
        raise ValueError(
            f"{name} is {ends.tolist()}; it must start at 0, never decrease and end within the "
            f"{total} tokens of the pack"
        )
    return ends


def _closed(total: int, *bounds: np.ndarray) -> tuple[int, ...]:
    # numpy for speed: data loaders may pad cumulative lengths to the length of the sequence.
    return tuple(np.unique(np.concatenate([*bounds, [total]])).tolist())
