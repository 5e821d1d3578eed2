"""The attention masks that Megatron's data loader would make: known by what they mean instead.

Megatron makes a dense s x s mask per sample unless told not to. A causal one says nothing that
attention does not know. One of ``--reset-attention-mask`` says that a token sees nothing before
the end-of-document tokens between: these documents travel as ``cu_seqlens``, the way of
``--dataloader-inter-document-masking``, but end where that mask would have ended them, and
position ids stay those of ``--reset-position-ids`` or its absence.

Owns: that no such mask is made, and what arrives instead. Must not know: attention, plans.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from megatron_burst.megatron.checks.command_line import RESET
from megatron_burst.megatron.log import log
from megatron_burst.megatron.patching import registry
from megatron_burst.megatron.patching.compatibility import require_parameters

_DOCUMENTS = "documents of the data loader"


def replace_masks(args: Any, patches: registry.PatchSet) -> None:
    """Let the data loader of settled arguments make no mask, and say what holds instead."""
    patches.notes[_DOCUMENTS] = False
    if not getattr(args, "create_attention_mask_in_dataloader", False):
        if getattr(args, "reset_attention_mask", False):
            log(f"{RESET} does nothing with --no-create-attention-mask-in-dataloader")
        return
    args.create_attention_mask_in_dataloader = False
    if getattr(args, "dataloader_inter_document_masking", False):
        return  # nor would Megatron
    if not getattr(args, "reset_attention_mask", False):
        log("attention is causal; the data loader makes no s x s mask of it")
        return
    args.dataloader_inter_document_masking = True
    patches.notes[_DOCUMENTS] = True
    log(f"{RESET}: documents end after end-of-document tokens; the data loader makes no s x s mask")


def documents_expected() -> bool:
    """Must every batch of this run say where its documents end?"""
    patches = registry.installed("burst")
    return patches is not None and patches.notes.get(_DOCUMENTS, False)


def patch(patches: registry.PatchSet) -> None:
    """Let Megatron's GPT dataset end documents where ``--reset-attention-mask`` would."""
    from megatron.core.datasets.gpt_dataset import GPTDataset

    query = GPTDataset._query_document_sample_shuffle_indices
    require_parameters(query, ["self", "idx"], "GPTDataset._query_document_sample_shuffle_indices")
    patches.replace(
        GPTDataset, "_query_document_sample_shuffle_indices", _ending_documents(query, patches)
    )
    item = GPTDataset.__getitem__
    require_parameters(item, ["self", "idx"], "GPTDataset.__getitem__")
    patches.replace(GPTDataset, "__getitem__", _with_positions(item, patches))


def lengths_of_documents(text: torch.Tensor, eod: int) -> list[int]:
    """Tokens of each document in ``text`` [n], which ends behind every ``eod`` but the last token.

    The last token is the one that is only predicted: Megatron looks for ends in the others.
    """
    ends = (text[:-1] == eod).nonzero().flatten() + 1
    bounds = torch.cat([ends.new_zeros(1), ends, ends.new_full((1,), len(text))])
    return bounds.diff().tolist()


def _ending_documents(original: Callable, patches: registry.PatchSet) -> Callable:
    @functools.wraps(original)
    def query(self: Any, idx: int) -> tuple[Any, ...]:
        text, *others = original(self, idx)
        if not patches.notes.get(_DOCUMENTS):
            return text, *others
        config = self.config
        tokens = torch.from_numpy(text)
        if not config.add_extra_token_to_sequence:
            tokens = torch.nn.functional.pad(tokens, (0, 1))
        lengths = lengths_of_documents(tokens, config.tokenizer.eod)
        if not config.add_extra_token_to_sequence:
            lengths = [*lengths[:-1], lengths[-1] - 1] if lengths[-1] > 1 else lengths[:-1]
        return text, others[0], lengths

    return query


def _with_positions(original: Callable, patches: registry.PatchSet) -> Callable:
    """Position ids that run through the sequence, unless Megatron was asked to reset them."""

    @functools.wraps(original)
    def __getitem__(self: Any, idx: int | None) -> dict[str, Any]:
        sample = original(self, idx)
        if patches.notes.get(_DOCUMENTS) and not self.config.reset_position_ids:
            sample["position_ids"] = torch.arange(len(sample["position_ids"]))
        return sample

    return __getitem__
