"""Documents out of the batches of a data loader, and micro-batches out of documents.

A document is a dict of equally long tensors, one per sequence of the batch (tokens, labels, loss
mask, position ids): rows are moved and never changed, so every loss stays what it was. What follows
the last row with a loss is left out: attention is causal, so nothing depends on it. That is what a
data loader pads with.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from megatron_burst.megatron.data.packed import pack_of

Document = dict[str, torch.Tensor]
_NAMES = ("tokens", "labels", "loss_mask", "position_ids")


def documents_of(batch: dict[str, Any]) -> list[Document]:
    """The documents of a batch, in order, without those that have no loss.

    batch: tensors [1, tokens] of which ``cu_seqlens`` (and ``cu_seqlens_padded``) [1, n] say where
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
    found = []
    for start, end in pairwise(bounds):
        rows = counts[start:end].nonzero()
        if len(rows):
            end = start + int(rows[-1]) + 1
            found.append({name: value[0, start:end] for name, value in sequences.items()})
    return found


def names_of(batch: dict[str, Any]) -> Document:
    """The sequences of a batch, without tokens: their names and dtypes."""
    return {name: batch[name][0, :0].cpu() for name in _NAMES if batch.get(name) is not None}


def micro_batch(documents: Sequence[Document], like: Document, total: int) -> dict[str, Any]:
    """Documents behind each other, padded to ``total`` tokens: a batch as data loaders make them.

    like: names and dtypes, for a micro-batch without documents. Padding has no loss, and is
    documents of its own, because rotary embeddings of Megatron want ``cu_seqlens`` to end with
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
