# SPDX-License-Identifier: Apache-2.0
"""Documents out of a data loader's batches, between data-parallel ranks, and into micro-batches.

A document is a dict of equally long tensors, one per sequence of the batch (tokens, labels, loss
mask, position ids): rows are moved and never changed, so every loss stays what it was. What follows
the last row with a loss is left out: attention is causal, so nothing depends on it. That is what a
data loader pads with.

Ranks first exchange the lengths in one small all-gather; every rank then packs for itself and gets
the same. The documents travel in one all-to-all, of bytes.
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
    """The documents of a batch, in order, without those that have no loss.

    batch: tensors [1, tokens] of which `cu_seqlens` (and `cu_seqlens_padded`) [1, n] say where
    documents end. Raises ValueError for a batch of another form.
    """
    if batch.get("attention_mask") is not None:
        raise ValueError(
            "--burst-pack: batches have an attention_mask, which documents replace: pass "
            "--no-create-attention-mask-in-dataloader"
        )
    missing = [name for name in (*_NAMES[:3], "cu_seqlens") if batch.get(name) is None]
    if missing:
        raise ValueError(
            f"--burst-pack: batches of the data loader have no {', '.join(missing)}; cu_seqlens "
            "says where documents end, and comes with --sft or --dataloader-inter-document-masking"
        )
    sequences = {name: batch[name] for name in _NAMES if batch.get(name) is not None}
    shapes = {name: tuple(value.shape) for name, value in sequences.items()}
    total = sequences["tokens"].shape[-1]
    others = [
        name
        for name, value in batch.items()
        if name not in _NAMES and getattr(value, "shape", None) == (1, total)
    ]
    if others and not set(others) <= {"cu_seqlens", "cu_seqlens_padded"}:
        raise ValueError(f"--burst-pack moves {', '.join(_NAMES)}, and batches have {others}, too")
    if set(shapes.values()) != {(1, total)}:
        raise ValueError(f"--burst-pack needs --micro-batch-size 1 and one length, got {shapes}")
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
    """The sequences of a batch, without tokens: their names and dtypes."""
    return {name: batch[name][0, :0].cpu() for name in _NAMES if batch.get(name) is not None}


def micro_batch(documents: Sequence[Document], like: Document, total: int) -> dict[str, Any]:
    """Documents behind each other, padded to `total` tokens: a batch as data loaders make them.

    like: names and dtypes, for a micro-batch without documents. Padding has no loss, and is
    documents of its own, because rotary embeddings of Megatron want `cu_seqlens` to end with
    the pack: short ones, in which attention takes no time.
    """
    batch: dict[str, Any] = {}
    for name, one in like.items():
        parts = [document[name] for document in documents]
        used = sum(len(part) for part in parts)
        batch[name] = torch.cat([*parts, one.new_zeros(total - used)])[None]
    lengths = [len(document["tokens"]) for document in documents]
    tail = total - sum(lengths)
    lengths += [min(_PADDING, tail - start) for start in range(0, tail, _PADDING)]
    batch["cu_seqlens"] = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)[None]
    batch["max_seqlen"] = torch.tensor([max(lengths)], dtype=torch.int32)
    return batch


_PADDING = 512  # tokens of a document of padding, at most


_FIRST = 1024  # numbers of a rank in the first exchange; there is a second one only for more


def gather(numbers: Sequence[int] | None, group: Any) -> list[list[int]]:
    """The `numbers` of every rank of the group, in the order of ranks.

    None stands for a rank whose data are unusable; then every rank raises ValueError.
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
            f"--burst-pack: data-parallel rank {rank} cannot use its batches, and says why"
        )
    return list(numbers)


def _all_gather(numbers: Sequence[int], size: int, group: Any) -> list[list[int]]:
    own = torch.zeros(size, dtype=torch.int64)
    own[: len(numbers)] = torch.tensor(list(numbers), dtype=torch.int64)
    own = own.to(device_of(group))
    gathered = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(gathered, own, group=group)
    return [one.tolist() for one in gathered]


def route(
    own: Sequence[Document],
    homes: Sequence[Sequence[int]],
    lengths: Sequence[Sequence[int]],
    like: Document,
    group: Any,
) -> dict[int, Document]:
    """Documents to where they are trained on: those of this rank by their number in the batch.

    Numbers count the documents of rank 0, then of rank 1, and so on. own: documents that this
    rank read; lengths: of all documents, by the rank that read them; homes: numbers of the
    documents that each rank trains on; like: names and dtypes of a document.
    """
    firsts = [sum(len(one) for one in lengths[:rank]) for rank in range(len(lengths))]
    me = group.rank()
    read = [range(first, first + len(one)) for first, one in zip(firsts, lengths, strict=True)]
    size_of = dict(enumerate(size for one in lengths for size in one))
    width = sum(value.element_size() for value in like.values())
    wanted = [sorted(n for n in home if n in read[me]) for home in homes]
    coming = [sorted(n for n in homes[me] if n in ns) for ns in read]
    leaving = [_bytes(own[n - firsts[me]], like) for numbers in wanted for n in numbers]
    sent = torch.cat(leaving) if leaving else torch.empty(0, dtype=torch.uint8)
    out_of, into = (
        [width * sum(size_of[n] for n in one) for one in side] for side in (wanted, coming)
    )
    received = _all_to_all(sent, out_of, into, group)
    documents, at = {}, 0
    for number in (n for numbers in coming for n in numbers):
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
    for name, one in like.items():
        end = at + length * one.element_size()
        # A copy: a view needs an address that is a multiple of its element's size.
        document[name] = data[at:end].clone().view(one.dtype)
        at = end
    return document


def device_of(group: Any) -> torch.device:
    """Where tensors lie that travel in the group."""
    if "nccl" in dist.get_backend(group):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
