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
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ...layout import integer
from ...layout.layouts import counted
from ...masks import Causal, Full, Mask, SameSpan, Window
from ...megatron.data.packed import packs, params_of
from ...megatron.users_mask import MaskBatch, MaskLayer

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
    from ...megatron.data.slicing import sequence_group

    places = _host(positions)
    group = sequence_group(group, packed_seq_params)
    _, row = _homes(embeddings, places, packed_seq_params, group)
    _check_rows("images", images, len(places), embeddings)
    mine = np.flatnonzero(row[places] >= 0)
    to, of = row[places[mine]], torch.from_numpy(mine).to(images.device)
    return _placed(embeddings, images.index_select(0, of), to)


def encode_shared(
    embeddings: torch.Tensor,
    encode: Callable[[list[int]], torch.Tensor],
    counts: Positions,
    positions: Positions,
    packed_seq_params: Any = None,
    *,
    group: Any = None,
) -> torch.Tensor:
    """As `place_images`, with each context-parallel rank encoding a share of the images.

    embeddings, positions, packed_seq_params, group: as of `place_images`. counts: how many tokens
    each image or frame has, in the order of `positions`; both are the same on all ranks. encode:
    is called once with the numbers of this rank's images, ascending, and returns their rows
    [tokens, h] in that order. Shares have about equally many tokens; a rank without one encodes the
    smallest image and drops its rows, so that every rank's encoder runs and has gradients. Without
    any image no rank calls `encode`, so encoders whose parameters are gathered or reduced with
    ranks of other micro-batches must be run by the caller.

    The rows travel to the ranks that hold their tokens by one all-to-all of the group, their
    gradients come back by another. So a rank has the gradients of its own images only: sums over
    context-parallel ranks are whole, as Megatron takes them of all weights. Raises `ValueError`
    where shapes, counts or positions do not fit.
    """
    from ...megatron.data.slicing import sequence_group

    places, sizes = _host(positions), _host(counts, "counts")
    if sizes.sum() != len(places) or (sizes < 1).any():
        raise ValueError(
            f"counts: {len(sizes)} images have {sizes.sum()} tokens, and there are {len(places)} "
            "positions; give the number of tokens, at least 1, of each image"
        )
    group = sequence_group(group, packed_seq_params)
    home, row = _homes(embeddings, places, packed_seq_params, group)
    if not len(sizes):
        return embeddings
    firsts, me = np.cumsum(sizes) - sizes, group.rank()
    shares = _shares(sizes, group.size())
    mine = shares[me] or [int(sizes.argmin())]
    rows = encode(mine)
    _check_rows("encode: rows", rows, int(sizes[mine].sum()), embeddings)
    # Of each rank's images the places of all tokens, in the order of its rows.
    tokens = [places[counted(firsts[share], sizes[share])] for share in shares]
    order = np.argsort(home[tokens[me]], kind="stable")
    out_of = np.bincount(home[tokens[me]], minlength=len(shares)).tolist()
    coming = [each[home[each] == me] for each in tokens]
    sent = rows.index_select(0, torch.from_numpy(order).to(rows.device))
    moved = _AllToAll.apply(sent, out_of, [len(each) for each in coming], group)
    return _placed(embeddings, moved, row[np.concatenate(coming)])


class _AllToAll(torch.autograd.Function):
    """Rows to the ranks of a group, and their gradients back; `out_of` and `into`: how many go to
    and come from each.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, out_of: list[int], into: list[int], group: Any
    ) -> torch.Tensor:
        ctx.way = into, out_of, group
        if group.size() == 1:
            return rows.clone()
        moved = rows.new_empty(sum(into), *rows.shape[1:])
        dist.all_to_all_single(moved, rows.contiguous(), into, out_of, group=group)
        return moved

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _AllToAll.apply(*gradients, *ctx.way), None, None, None


def _shares(sizes: np.ndarray, ranks: int) -> list[list[int]]:
    """The images of each rank, ascending; the largest first goes to the rank with fewest tokens."""
    shares, load = [[] for _ in range(ranks)], [0] * ranks
    for image in np.argsort(-sizes, kind="stable").tolist():
        rank = load.index(min(load))
        shares[rank].append(image)
        load[rank] += int(sizes[image])
    return [sorted(each) for each in shares]


def _homes(
    embeddings: torch.Tensor, places: np.ndarray, packed_seq_params: Any, group: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Which rank holds each position of the sequence, and in which of its rows this rank does, -1
    where it does not: int64 [s] each; ValueError for places that do not fit.
    """
    from ...megatron.data.slicing import held_positions

    if embeddings.dim() != 3 or embeddings.shape[1] != 1:
        raise ValueError(
            f"embeddings of shape {tuple(embeddings.shape)}: positions are of one sequence, "
            "[t, 1, h]; they need --micro-batch-size 1"
        )
    held = held_positions(embeddings.shape[0], packed_seq_params, group)
    total = held.size
    if len(places) and (places.min() < 0 or places.max() >= total):
        raise ValueError(
            f"positions from {places.min()} to {places.max()}: the sequence has {total} tokens"
        )
    if len(np.unique(places)) != len(places):
        raise ValueError("positions: two images have the same place")
    home, row = np.empty(total, np.int64), np.full(total, -1)
    home[held] = np.arange(len(held))[:, None]
    row[held[group.rank()]] = np.arange(held.shape[1])
    return home, row


def _check_rows(what: str, rows: torch.Tensor, count: int, embeddings: torch.Tensor) -> None:
    if rows.shape != (count, embeddings.shape[2]):
        raise ValueError(
            f"{what} of shape {tuple(rows.shape)} for {count} positions of width "
            f"{embeddings.shape[2]}: give one row for each"
        )


def _placed(embeddings: torch.Tensor, rows: torch.Tensor, to: np.ndarray) -> torch.Tensor:
    index = torch.from_numpy(to).to(embeddings.device)
    return embeddings.index_copy(0, index, rows.to(embeddings.dtype)[:, None])


def gemma3(layer: MaskLayer, batch: MaskBatch) -> Mask:
    """For `--burst-mask`: the mask of Gemma 3, whose images see all of themselves in every layer.

    Layers with a window (`--window-size`, `--window-attn-skip-freq`) see it or the same image, all
    others what is before them or the same image. Raises `ValueError` for a micro-batch without
    `with_spans`.
    """
    return _without_images(layer) | SameSpan(_given(batch))


def gemma4(layer: MaskLayer, batch: MaskBatch) -> Mask:
    """For `--burst-mask`: the mask of those Gemma 4 models whose images see all of themselves, in
    layers with a window only. Else as `gemma3`.
    """
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
            "packed_seq_params of megatron_burst.plugins.vision.images.with_spans, with no spans "
            "where it has no image"
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
    none.
    """
    if isinstance(positions, torch.Tensor):
        positions = positions.detach().cpu().numpy()
    given = np.asarray(positions)
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        raise ValueError(f"{name} must be integers [n], got {given.dtype} of {given.shape}")
    return given.astype(np.int64)
