# SPDX-License-Identifier: Apache-2.0
"""Images among the tokens of a micro-batch: masks that depend on their positions, and embeddings.

In Gemma 3 and 4 the tokens of an image see each other, and the positions of images differ between
micro-batches. A script passes the positions (spans) in the `PackedSeqParams` of the model's forward
(`with_spans`). Thus recomputed layers and pipeline stages read the spans of the right micro-batch,
even if several are in flight. `gemma3` and `gemma4` are mask functions for `--burst-mask` that read
the spans.

Shape letters: s tokens of the whole sequence, t tokens of this context-parallel rank, h hidden
size, n image tokens.
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
    """Return the spans of consecutive image tokens in a sequence, for `with_spans`.

    Adjacent images form one span, as in Hugging Face's Gemma. The function waits for the device of
    `tokens`.

    Args:
        tokens: integers [s] or [1, s], the whole sequence before it is cut.
        image_tokens: one or several token ids of images.
        cu_seqlens: integers [n] or [1, n], the boundaries of a pack's documents. A span across a
            boundary is split into two.

    Returns:
        (first, stop) of each span: its first position, and the position after its last.

    Raises:
        ValueError: Tokens or boundaries have another shape, or ids are not integers.
    """
    if tokens.dim() == 2 and tokens.shape[0] == 1:
        tokens = tokens[0]
    if tokens.dim() != 1:
        raise ValueError(
            f"tokens have the shape {tuple(tokens.shape)}; they must be one sequence, [s] or "
            "[1, s], which requires --micro-batch-size 1"
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
    """Return the `PackedSeqParams` of a micro-batch with images, for the model's forward.

    Pass the returned object, with its tensors, to the model: the tensor objects identify the spans.

    Args:
        spans: (first, stop) of each image, positions in the whole sequence or pack, ascending;
            empty for a micro-batch without images. The same on all ranks of all pipeline stages.
        seq_len: tokens of the sequence or pack over all context-parallel ranks.
        packed_seq_params: `PackedSeqParams` of a pack; None for one sequence, which requires
            --micro-batch-size 1.

    Returns:
        `packed_seq_params`; a new `PackedSeqParams` for one sequence.

    Raises:
        ValueError: Spans overlap or are outside the sequence, or the tensors of `packed_seq_params`
            were used with other spans: every micro-batch needs its own tensors.
    """
    mask = SameSpan(spans)
    mask.check(seq_len)
    params = packed_seq_params
    if params is None:
        host = torch.tensor([0, seq_len], dtype=torch.int32)
        # Always a copy, even on the CPU: the tensor object identifies the spans.
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
    """Put image embeddings at their positions among this rank's token embeddings.

    The function is differentiable: each rank computes the gradients of the image rows that it
    holds, and Megatron's sum of weight gradients over context-parallel ranks completes them. It
    waits for the device of `positions`.

    Args:
        embeddings: [t, 1, h], embeddings of the tokens that `shard_sequence` assigns to this rank.
            With sequence parallelism, these are the embeddings before the scatter.
        images: [n, h], embeddings of all images, in the order of `positions`.
        positions: n integers, positions of the image tokens in the whole sequence.
        packed_seq_params: same as in `shard_sequence`.
        group: same as in `shard_sequence`.

    Returns:
        [t, 1, h], `embeddings` with the images that this rank holds.

    Raises:
        ValueError: Shapes or positions do not match.
    """
    from ...megatron.data.slicing import sequence_group

    places = _host(positions)
    group = sequence_group(group, packed_seq_params)
    _, row = _homes(embeddings, places, packed_seq_params, group)
    _check_rows("images", images, len(places), embeddings)
    local_images = np.flatnonzero(row[places] >= 0)
    to, of = row[places[local_images]], torch.from_numpy(local_images).to(images.device)
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
    """Encode each image on one context-parallel rank, and put the embeddings at their positions.

    All ranks encode about the same number of tokens. A rank without images encodes the smallest
    image and drops the result, so that every rank's encoder runs and has gradients. If there is no
    image, no rank calls `encode`. The caller must then run the encoder if collectives on its
    parameters include ranks of other micro-batches.

    An all-to-all sends the rows to the ranks that hold their tokens; in backward, an all-to-all
    returns the gradients. Each rank computes the gradients of the images that it encodes, and
    Megatron's sum of weight gradients over context-parallel ranks completes them.

    Args:
        embeddings: same as in `place_images`.
        encode: called once with the indices of this rank's images, ascending; returns the
            embeddings of these images [tokens, h] in the same order.
        counts: number of tokens of each image or frame, in the order of `positions`; the same on
            all ranks.
        positions: same as in `place_images`; the same on all ranks.
        packed_seq_params: same as in `place_images`.
        group: same as in `place_images`.

    Returns:
        [t, 1, h], same as in `place_images`.

    Raises:
        ValueError: Shapes, counts or positions do not match.
    """
    from ...megatron.data.slicing import sequence_group

    places, sizes = _host(positions), _host(counts, "counts")
    if sizes.sum() != len(places) or (sizes < 1).any():
        raise ValueError(
            f"counts: {len(sizes)} images have {sizes.sum()} tokens in total, but there are "
            f"{len(places)} positions; counts must be the number of tokens, at least 1, of each "
            "image"
        )
    group = sequence_group(group, packed_seq_params)
    home, row = _homes(embeddings, places, packed_seq_params, group)
    if not len(sizes):
        return embeddings
    firsts, me = np.cumsum(sizes) - sizes, group.rank()
    shares = _shares(sizes, group.size())
    local_images = shares[me] or [int(sizes.argmin())]
    rows = encode(local_images)
    _check_rows("encode: rows", rows, int(sizes[local_images].sum()), embeddings)
    # Positions of all tokens of each rank's images, in the order of the rank's rows.
    tokens = [places[counted(firsts[share], sizes[share])] for share in shares]
    order = np.argsort(home[tokens[me]], kind="stable")
    out_of = np.bincount(home[tokens[me]], minlength=len(shares)).tolist()
    incoming = [image_tokens[home[image_tokens] == me] for image_tokens in tokens]
    sent = rows.index_select(0, torch.from_numpy(order).to(rows.device))
    moved = _ExchangeImages.apply(
        sent, out_of, [len(image_tokens) for image_tokens in incoming], group
    )
    return _placed(embeddings, moved, row[np.concatenate(incoming)])


class _ExchangeImages(torch.autograd.Function):
    """All-to-all of rows in a group; backward sends the gradients back.

    `out_of` has the number of rows to send to each rank. `into` has the number of rows to receive
    from each rank.
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
        return _ExchangeImages.apply(*gradients, *ctx.way), None, None, None


def _shares(sizes: np.ndarray, ranks: int) -> list[list[int]]:
    """Return, for each rank, the ascending indices of the images that it encodes.

    Images are assigned in order of decreasing size, each to the rank with the fewest tokens so far.
    """
    shares, load = [[] for _ in range(ranks)], [0] * ranks
    for image in np.argsort(-sizes, kind="stable").tolist():
        rank = load.index(min(load))
        shares[rank].append(image)
        load[rank] += int(sizes[image])
    return [sorted(share) for share in shares]


def _homes(
    embeddings: torch.Tensor, places: np.ndarray, packed_seq_params: Any, group: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Return the rank that holds each position of the sequence, and the row in which it holds it.

    Returns:
        Two arrays, int64 [s]: the rank that holds each position; and the row of this rank that
        holds the position, or -1 if another rank holds it.

    Raises:
        ValueError: `places` has positions outside the sequence, or a position twice.
    """
    from ...megatron.data.slicing import held_positions

    if embeddings.dim() != 3 or embeddings.shape[1] != 1:
        raise ValueError(
            f"embeddings have the shape {tuple(embeddings.shape)}; they must be of one sequence, "
            "[t, 1, h], which requires --micro-batch-size 1"
        )
    rank_positions = held_positions(embeddings.shape[0], packed_seq_params, group)
    total = rank_positions.size
    if len(places) and (places.min() < 0 or places.max() >= total):
        raise ValueError(
            f"positions are from {places.min()} to {places.max()}; they must be within the "
            f"{total} tokens of the sequence"
        )
    if len(np.unique(places)) != len(places):
        raise ValueError("positions contains a position twice; each image token needs its own")
    home, row = np.empty(total, np.int64), np.full(total, -1)
    home[rank_positions] = np.arange(len(rank_positions))[:, None]
    row[rank_positions[group.rank()]] = np.arange(rank_positions.shape[1])
    return home, row


def _check_rows(name: str, rows: torch.Tensor, count: int, embeddings: torch.Tensor) -> None:
    if rows.shape != (count, embeddings.shape[2]):
        raise ValueError(
            f"{name} have the shape {tuple(rows.shape)}; they must have the shape "
            f"{(count, embeddings.shape[2])}, with one row per position"
        )


def _placed(embeddings: torch.Tensor, rows: torch.Tensor, to: np.ndarray) -> torch.Tensor:
    index = torch.from_numpy(to).to(embeddings.device)
    return embeddings.index_copy(0, index, rows.to(embeddings.dtype)[:, None])


def gemma3(layer: MaskLayer, batch: MaskBatch) -> Mask:
    """Return the mask of Gemma 3, in which the tokens of an image see each other in every layer.

    For `--burst-mask`. In layers with a window (`--window-size`, `--window-attn-skip-freq`) an
    image token sees the window and the whole image. In other layers it sees all earlier tokens and
    the whole image.

    Args:
        layer: properties of the layer that determine the mask: causal, window.
        batch: the micro-batch, with the spans of images.

    Raises:
        ValueError: The micro-batch was not passed to `with_spans`.
    """
    return _without_images(layer) | SameSpan(_spans_of(batch))


def gemma4(layer: MaskLayer, batch: MaskBatch) -> Mask:
    """Return the mask of Gemma 4, in which the tokens of an image see each other in some layers.

    For `--burst-mask`. Layers with a window have the same mask as in `gemma3`. Layers without a
    window treat image tokens like text tokens.

    Args:
        layer: properties of the layer that determine the mask: causal, window.
        batch: the micro-batch, with the spans of images.

    Raises:
        ValueError: The micro-batch was not passed to `with_spans`.
    """
    spans = _spans_of(batch)
    without = _without_images(layer)
    return without if layer.window is None else without | SameSpan(spans)


def _without_images(layer: MaskLayer) -> Mask:
    """Return the mask of a layer without images: causal or full, with the layer's window."""
    if not layer.causal:
        return Full() if layer.window is None else Window(*layer.window)
    return Causal() if layer.window is None else Causal() & Window(layer.window[0], 0)


def _spans_of(batch: MaskBatch) -> tuple[tuple[int, int], ...]:
    if batch.spans is None:
        raise ValueError(
            "the micro-batch has no spans of images: pass the packed_seq_params of "
            "megatron_burst.plugins.vision.images.with_spans to the model, with empty spans for a "
            "micro-batch without images"
        )
    return batch.spans


def _token_ids(image_tokens: Any) -> list[int]:
    single = not isinstance(image_tokens, Iterable) or getattr(image_tokens, "ndim", 1) == 0
    return [
        integer("image_tokens", token_id)
        for token_id in ([image_tokens] if single else image_tokens)
    ]


def _boundaries(cu_seqlens: Any) -> np.ndarray:
    """Return document boundaries as int64 [n]; data loaders may pass them as [1, n]."""
    shape = np.shape(cu_seqlens)
    return _host(cu_seqlens[0] if len(shape) == 2 and shape[0] == 1 else cu_seqlens, "cu_seqlens")


def _host(positions: Positions, name: str = "positions") -> np.ndarray:
    """Return positions as a numpy array, int64 [n]; raise `ValueError` if they are not integers."""
    if isinstance(positions, torch.Tensor):
        positions = positions.detach().cpu().numpy()
    array = np.asarray(positions)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(f"{name} must be integers [n], got {array.dtype} of {array.shape}")
    return array.astype(np.int64)
