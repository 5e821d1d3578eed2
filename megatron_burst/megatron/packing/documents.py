# SPDX-License-Identifier: Apache-2.0
"""Exchange of documents between data-parallel ranks, and micro-batches of these documents.

A document is a dict of tensors of equal length, one per entry of the batch (tokens, labels, loss
mask, position ids). Rows are moved and never changed, so every loss stays the same. Rows after the
last row with a loss are omitted: they are the padding of a data loader, and with causal attention
no earlier row depends on them.

Ranks first exchange the lengths in one small all-gather. Every rank then computes the same packing.
The documents are exchanged in one all-to-all of bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from ..data.packed import pack_of

Document = dict[str, torch.Tensor]
_NAMES = ("tokens", "labels", "loss_mask", "position_ids")


def documents_of(batch: dict[str, Any]) -> list[Document]:
    """Return the documents of a batch, in order, without documents that have no loss.

    Args:
        batch: tensors [1, tokens] by name; `cu_seqlens` (and `cu_seqlens_padded`) [1, n] are the
            boundaries of the documents.

    Raises:
        ValueError: The batch is not one pack [1, tokens] with boundaries of documents, or it has
            entries that cannot be moved.
    """
    if batch.get("attention_mask") is not None:
        raise ValueError(
            "--burst-pack does not support the attention_mask of these batches; pass "
            "--no-create-attention-mask-in-dataloader"
        )
    missing = [name for name in (*_NAMES[:3], "cu_seqlens") if batch.get(name) is None]
    if missing:
        raise ValueError(
            f"--burst-pack: batches of the data loader have no {', '.join(missing)}; use --sft or "
            "--dataloader-inter-document-masking, which add cu_seqlens, the ends of documents"
        )
    sequences = {name: batch[name] for name in _NAMES if batch.get(name) is not None}
    shapes = {name: tuple(value.shape) for name, value in sequences.items()}
    total = sequences["tokens"].shape[-1]
    unknown = [
        name
        for name, value in batch.items()
        if name not in _NAMES and getattr(value, "shape", None) == (1, total)
    ]
    if unknown and not set(unknown) <= {"cu_seqlens", "cu_seqlens_padded"}:
        raise ValueError(
            f"--burst-pack supports the entries {', '.join(_NAMES)}, and batches also have "
            f"{unknown}: remove these entries"
        )
    if set(shapes.values()) != {(1, total)}:
        raise ValueError(
            "--burst-pack requires --micro-batch-size 1 and entries of one length, got shapes "
            f"{shapes}"
        )
    bounds = pack_of(total, batch["cu_seqlens"], batch.get("cu_seqlens_padded")).documents
    counts = (sequences["loss_mask"][0] != 0).cpu()
    documents = []
    for start, end in pairwise(bounds):
        rows = counts[start:end].nonzero()
        if len(rows):
            end = start + int(rows[-1]) + 1
            documents.append({name: value[0, start:end] for name, value in sequences.items()})
    return documents


def names_of(batch: dict[str, Any]) -> Document:
    """Return a document without tokens: a CPU tensor [0] for each entry of a batch, by name."""
    return {name: batch[name][0, :0].cpu() for name in _NAMES if batch.get(name) is not None}


def micro_batch(documents: Sequence[Document], like: Document, total: int) -> dict[str, Any]:
    """Concatenate documents to a batch in the format of the data loader, padded to `total` tokens.

    Padding has no loss. Padding is part of `cu_seqlens`, because Megatron's rotary embeddings
    require `cu_seqlens` to end with the pack. Padding consists of short documents, over which
    attention is fast.

    Args:
        documents: the documents.
        like: result of `names_of`, with the names and dtypes of the entries.
        total: tokens of the micro-batch.
    """
    batch: dict[str, Any] = {}
    for name, example in like.items():
        parts = [document[name] for document in documents]
        used = sum(len(part) for part in parts)
        batch[name] = torch.cat([*parts, example.new_zeros(total - used)])[None]
    lengths = [len(document["tokens"]) for document in documents]
    tail = total - sum(lengths)
    lengths += [min(_PADDING, tail - start) for start in range(0, tail, _PADDING)]
    batch["cu_seqlens"] = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)[None]
    batch["max_seqlen"] = torch.tensor([max(lengths)], dtype=torch.int32)
    return batch


_PADDING = 512  # maximum number of tokens of a document of padding


_FIRST = 1024  # numbers per rank in the first exchange; a second exchange sends further numbers


def gather(numbers: Sequence[int] | None, group: Any) -> list[list[int]]:
    """All-gather a list of numbers of any length per rank, and return the lists in rank order.

    Args:
        numbers: the numbers of this rank; None if its data are unusable.
        group: the process group.

    Raises:
        ValueError: A rank passed None; raised on every rank.
    """
    if group.size() == 1:
        return [_usable(numbers, 0)]
    own = [-1] if numbers is None else [len(numbers), *numbers]
    heads = _all_gather(own[:_FIRST], _FIRST, group)
    for rank, head in enumerate(heads):
        _usable(None if head[0] < 0 else head, rank)
    longest = 1 + max(head[0] for head in heads)
    tails = _all_gather(own[_FIRST:], longest - _FIRST, group) if longest > _FIRST else None
    return [
        (head + (tails[rank] if tails else []))[1 : 1 + head[0]] for rank, head in enumerate(heads)
    ]


def _usable(numbers: Sequence[int] | None, rank: int) -> list[int]:
    if numbers is None:
        raise ValueError(
            f"--burst-pack: data-parallel rank {rank} cannot use its batches; see the error of "
            "that rank"
        )
    return list(numbers)


def _all_gather(numbers: Sequence[int], size: int, group: Any) -> list[list[int]]:
    own = torch.zeros(size, dtype=torch.int64)
    own[: len(numbers)] = torch.tensor(list(numbers), dtype=torch.int64)
    own = own.to(device_of(group))
    gathered = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(gathered, own, group=group)
    return [numbers_of_rank.tolist() for numbers_of_rank in gathered]


def route(
    own: Sequence[Document],
    homes: Sequence[Sequence[int]],
    lengths: Sequence[Sequence[int]],
    like: Document,
    group: Any,
) -> dict[int, Document]:
    """Send documents to the ranks that train on them, and return the documents for this rank.

    Documents are numbered from 0 over all ranks: first the documents that rank 0 read, then those
    that rank 1 read, and so on.

    Args:
        own: documents that this rank read.
        homes: for each rank, the numbers of the documents that it trains on.
        lengths: for each rank, the lengths in tokens of the documents that it read.
        like: result of `names_of`, which defines the entries of a document.
        group: the process group.

    Returns:
        Documents that this rank trains on, by number.
    """
    firsts = [sum(map(len, lengths[:rank])) for rank in range(len(lengths))]
    me = group.rank()
    read = [range(first, first + len(sizes)) for first, sizes in zip(firsts, lengths, strict=True)]
    size_of = dict(enumerate(size for sizes in lengths for size in sizes))
    width = sum(value.element_size() for value in like.values())
    to_send = [sorted(n for n in home if n in read[me]) for home in homes]
    to_receive = [sorted(n for n in homes[me] if n in ns) for ns in read]
    leaving = [_bytes(own[n - firsts[me]], like) for numbers in to_send for n in numbers]
    sent = torch.cat(leaving) if leaving else torch.empty(0, dtype=torch.uint8)
    out_of, into = (
        [width * sum(size_of[n] for n in numbers) for numbers in numbers_by_rank]
        for numbers_by_rank in (to_send, to_receive)
    )
    received = _all_to_all(sent, out_of, into, group)
    documents, at = {}, 0
    for number in (n for numbers in to_receive for n in numbers):
        end = at + width * size_of[number]
        documents[number] = _document(received[at:end], like, size_of[number])
        at = end
    return documents


def _all_to_all(sent: torch.Tensor, out_of: list[int], into: list[int], group: Any) -> torch.Tensor:
    if group.size() == 1:
        return sent
    sent = sent.to(device_of(group))
    received = sent.new_empty(sum(into))
    dist.all_to_all_single(received, sent, into, out_of, group=group)
    return received.cpu()


def _bytes(document: Document, like: Document) -> torch.Tensor:
    parts = [document[name].cpu().contiguous().view(torch.uint8) for name in like]
    return torch.cat(parts)


def _document(data: torch.Tensor, like: Document, length: int) -> Document:
    document, at = {}, 0
    for name, example in like.items():
        end = at + length * example.element_size()
        # A copy: a view needs an address that is a multiple of its element's size.
        document[name] = data[at:end].clone().view(example.dtype)
        at = end
    return document


def device_of(group: Any) -> torch.device:
    """Return the device on which tensors must be for collectives of the group."""
    if "nccl" in dist.get_backend(group):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
