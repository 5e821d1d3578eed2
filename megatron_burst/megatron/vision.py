# SPDX-License-Identifier: Apache-2.0
"""Images among the tokens of a micro-batch: where they lie, and how a script puts them there.

The tokens of an image may see each other (Gemma 3 and 4), and that differs in every micro-batch. A
script says it in the `PackedSeqParams` that it gives to the model (`with_spans`), so that layers
which run again in backward, and pipeline stages with several micro-batches in flight, find the
spans of theirs. `gemma3` and `gemma4` are functions for `--burst-mask` that read them.

Shape letters: s tokens of the whole sequence, t of this context-parallel rank, h hidden size, n
image tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from ..layout import integer
from ..masks import Causal, Full, Mask, SameSpan, Window
from .data.packed import packs, params_of
from .users_mask import MaskBatch, MaskLayer

Positions = Sequence[int] | np.ndarray | torch.Tensor


def image_spans(
    tokens: torch.Tensor, image_tokens: int | Iterable[int], cu_seqlens: Positions = ()
) -> list[tuple[int, int]]:
    """The runs of image tokens in a sequence: [(first, stop)], for `with_spans`.

    tokens: integers [s] or [1, s], the whole sequence before it is cut; waits for a device.
    image_tokens: the ids, one or several. cu_seqlens: integers [n] or [1, n], where documents of a
    pack end; a run across such a boundary is two. Images of equal ids that touch are one run, as in
    Hugging Face's Gemma. Raises `ValueError` for tokens or boundaries of another shape, and ids
    that are no integers.
    """
    if tokens.dim() == 2 and tokens.shape[0] == 1:
        tokens = tokens[0]
    if tokens.dim() != 1:
        raise ValueError(
            f"tokens of shape {tuple(tokens.shape)}: spans are of one sequence, [s] or [1, s]; "
            "they need --micro-batch-size 1"
        )
    image = np.isin(tokens.detach().cpu().numpy(), _token_ids(image_tokens))
    begins, ends = image.copy(), image.copy()
    begins[1:] &= ~image[:-1]
    ends[:-1] &= ~image[1:]
    cuts = _boundaries(cu_seqlens)
    cuts = cuts[(cuts > 0) & (cuts < len(image))]
    cuts = cuts[image[cuts] & image[cuts - 1]]
    begins[cuts] = ends[cuts - 1] = True
    pairs = zip(np.flatnonzero(begins).tolist(), np.flatnonzero(ends).tolist(), strict=True)
    return [(first, last + 1) for first, last in pairs]


def with_spans(
    spans: Sequence[tuple[int, int]] | np.ndarray, seq_len: int, packed_seq_params: Any = None
) -> Any:
    """The `PackedSeqParams` of a micro-batch whose images lie at `spans`, for the model's forward.

    spans: (first, stop) of each image, positions in the whole sequence or pack, ascending; empty
    where the micro-batch has none. The same on all ranks of all pipeline stages. seq_len: tokens of
    the sequence or pack over all context-parallel ranks. packed_seq_params: of a pack with
    documents, which is returned; None makes those of one sequence, which needs --micro-batch-size
    1. Give the very object that is returned to the model, with its tensors: they stand for the
    spans. Raises `ValueError` for spans that overlap or lie outside, and for tensors that stand for
    other spans or documents already: every micro-batch needs its own.
    """
    mask = SameSpan(spans)
    mask.check(seq_len)
    params = packed_seq_params
    if params is None:
        host = torch.tensor([0, seq_len], dtype=torch.int32)
        # A copy on the CPU too: what stands for these spans stands for no others.
        ends = host.to(torch.cuda.current_device(), non_blocking=True, copy=True)
        packs().note_values(ends, host)
        params = params_of(ends, seq_len, padded=ends)
    pack = packs().of(seq_len, params.cu_seqlens_q, params.cu_seqlens_q_padded)
    packs().note(params.cu_seqlens_q, dataclasses.replace(pack, spans=mask.spans))
    return params


def place_images(
    embeddings: torch.Tensor,
    images: torch.Tensor,
    positions: Positions,
    packed_seq_params: Any = None,
    *,
    group: Any = None,
) -> torch.Tensor:
    """This rank's token embeddings with those of images in their places; differentiable.

    embeddings [t, 1, h]: of the tokens that `shard_sequence` left to this rank, so that no rank
    embeds the whole sequence; with sequence parallelism, before they are scattered. images [n, h]:
    of all images, in the order of `positions`, n integers: where they go in the whole sequence;
    integers on a device are waited for. packed_seq_params, group: as of `shard_sequence`. The rows
    of other ranks get no gradient here: sums over context-parallel ranks are whole, as Megatron
    takes them of all weights. Raises `ValueError` where shapes or positions do not fit.
    """
    from .data.slicing import held_positions

    places = _host(positions)
    rows = embeddings.shape[0]
    if embeddings.dim() != 3 or embeddings.shape[1] != 1:
        raise ValueError(
            f"embeddings of shape {tuple(embeddings.shape)}: positions are of one sequence, "
            "[t, 1, h]; they need --micro-batch-size 1"
        )
    if images.shape != (len(places), embeddings.shape[2]):
        raise ValueError(
            f"images of shape {tuple(images.shape)} for {len(places)} positions of width "
            f"{embeddings.shape[2]}: give one row for each"
        )
    held, total = held_positions(rows, packed_seq_params, group)
    if len(places) and (places.min() < 0 or places.max() >= total):
        raise ValueError(
            f"positions from {places.min()} to {places.max()}: the sequence has {total} tokens"
        )
    if len(np.unique(places)) != len(places):
        raise ValueError("positions: two images have the same place")
    row = np.full(total, -1)
    row[held] = np.arange(rows)
    mine = np.flatnonzero(row[places] >= 0)
    to, of = (torch.from_numpy(x).to(embeddings.device) for x in (row[places[mine]], mine))
    taken = images.index_select(0, of).to(embeddings.dtype)
    return embeddings.index_copy(0, to, taken[:, None])


def gemma3(layer: MaskLayer, batch: MaskBatch) -> Mask:
    """For `--burst-mask`: the mask of Gemma 3, whose images see all of themselves in every layer.

    Layers with a window (`--window-size`, `--window-attn-skip-freq`) see it or the same image, all
    others what is before them or the same image. Raises `ValueError` for a micro-batch without
    `with_spans`.
    """
    return _without_images(layer) | SameSpan(_given(batch))


def gemma4(layer: MaskLayer, batch: MaskBatch) -> Mask:
    """For `--burst-mask`: the mask of those Gemma 4 models whose images see all of themselves, in
    layers with a window only. Else as `gemma3`."""
    spans = _given(batch)
    without = _without_images(layer)
    return without if layer.window is None else without | SameSpan(spans)


def _without_images(layer: MaskLayer) -> Mask:
    """What Megatron asks for: causal or not, with the window of the layer."""
    if not layer.causal:
        return Full() if layer.window is None else Window(*layer.window)
    return Causal() if layer.window is None else Causal() & Window(layer.window[0], 0)


def _given(batch: MaskBatch) -> tuple[tuple[int, int], ...]:
    if batch.spans is None:
        raise ValueError(
            "the micro-batch does not say where its images lie: give the model the "
            "packed_seq_params of megatron_burst.megatron.vision.with_spans, with no spans where "
            "it has no image"
        )
    return batch.spans


def _token_ids(image_tokens: Any) -> list[int]:
    """The ids, of which one may stand by itself; ValueError for what are none."""
    single = not isinstance(image_tokens, Iterable) or getattr(image_tokens, "ndim", 1) == 0
    return [integer("image_tokens", one) for one in ([image_tokens] if single else image_tokens)]


def _boundaries(cu_seqlens: Any) -> np.ndarray:
    """int64 [n] of the ends of documents, which data loaders give as [1, n] too."""
    shape = np.shape(cu_seqlens)
    return _host(cu_seqlens[0] if len(shape) == 2 and shape[0] == 1 else cu_seqlens, "cu_seqlens")


def _host(positions: Positions, name: str = "positions") -> np.ndarray:
    """int64 [n] of positions that a script gives; ValueError, calling them `name`, for what are
    none."""
    if isinstance(positions, torch.Tensor):
        positions = positions.detach().cpu().numpy()
    given = np.asarray(positions)
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        raise ValueError(f"{name} must be integers [n], got {given.dtype} of {given.shape}")
    return given.astype(np.int64)
