# SPDX-License-Identifier: Apache-2.0
"""Patches of Megatron's datasets: document boundaries in place of masks, on all pipeline stages.

By default Megatron's data loader makes a dense s x s mask per sample of s tokens. With
BurstAttention, the data loader makes no mask. A causal mask is redundant, because attention is
causal. The mask of `--reset-attention-mask` hides all tokens of earlier documents. It is replaced
by document boundaries (`cu_seqlens`), as with `--dataloader-inter-document-masking`, but documents
end after end-of-document tokens. Position ids restart with each document only with
`--reset-position-ids`, as in Megatron.

If batches have `cu_seqlens`, `pretrain_gpt.py` reads a batch on every pipeline stage and for every
chunk of an interleaved pipeline, because each attention layer needs the documents. Megatron-LM 0.19
and 0.20 build the dataset only on stages that use tokens or labels, so other stages fail. Here such
a dataset is built on all stages.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state

from .. import patching
from ..checks.command_line import INTER_DOCUMENT, RESET
from ..patching import bound_to, log


def replace_masks(args: Any, previous: str | None) -> str | None:
    """Change arguments so that the data loader creates no mask, and log the mask of attention.

    With `--no-create-attention-mask-in-dataloader`, Megatron's data loader ignores
    `--reset-attention-mask`. Here attention still separates the documents.

    Args:
        args: arguments completed by `flags.add_defaults`; changed.
        previous: the result of the previous call in this run, or None. Megatron may validate the
            same arguments twice.

    Returns:
        The flag of Megatron-LM that defines documents, or None.
    """
    masks = getattr(args, "create_attention_mask_in_dataloader", False)
    between_documents = getattr(args, "dataloader_inter_document_masking", False)
    reset = getattr(args, "reset_attention_mask", False)
    if reset and between_documents and previous == RESET:
        return previous
    if masks:
        args.create_attention_mask_in_dataloader = False
    if reset:
        args.dataloader_inter_document_masking = True
        log(
            f"{RESET}: documents end after end-of-document tokens; the data loader makes no s x s "
            "mask"
        )
    elif masks and not between_documents:
        users = getattr(args, "burst_mask", None)
        kind = "is causal" if users is None else f"uses --burst-mask {users}"
        log(f"attention {kind}; the data loader makes no s x s mask")
    return RESET if reset else INTER_DOCUMENT if between_documents else None


def documents_expected() -> str | None:
    """Return the flag that adds `cu_seqlens` to every batch of this run, or None."""
    return patching.run_state().documents


def patch_masks(patches: patching.PatchSet) -> None:
    """Wrap Megatron's GPT dataset, so that documents end after end-of-document tokens."""
    # Imported here: only scripts of Megatron-LM need the dataset.
    from megatron.core.datasets.gpt_dataset import GPTDataset

    for name, around in (
        ("_query_document_sample_shuffle_indices", _ending_documents),
        ("__getitem__", _with_positions),
    ):
        patches.wrap(GPTDataset, name, ["self", "idx"], partial(around, patches))


def lengths_of_documents(text: torch.Tensor, eod: int) -> list[int]:
    """Return the number of tokens of each document in the token ids `text` [n].

    A document ends after each `eod`. An `eod` as the last token is ignored: the last token is only
    a label, and Megatron searches for ends of documents in the other tokens.
    """
    ends = (text[:-1] == eod).nonzero().flatten() + 1
    bounds = torch.cat([ends.new_zeros(1), ends, ends.new_full((1,), len(text))])
    return bounds.diff().tolist()


def _ending_documents(
    patches: patching.PatchSet, original: Callable, self: Any, idx: int
) -> tuple[Any, ...]:
    text, *rest_of_sample = original(self, idx)
    if patches.run.documents != RESET:
        return text, *rest_of_sample
    config = self.config
    tokens = torch.from_numpy(text)
    if not config.add_extra_token_to_sequence:
        tokens = torch.nn.functional.pad(tokens, (0, 1))
    lengths = lengths_of_documents(tokens, config.tokenizer.eod)
    if not config.add_extra_token_to_sequence:
        lengths = [*lengths[:-1], lengths[-1] - 1] if lengths[-1] > 1 else lengths[:-1]
    return text, rest_of_sample[0], lengths


def _with_positions(
    patches: patching.PatchSet, original: Callable, self: Any, idx: int | None
) -> dict[str, Any]:
    """Return a sample with consecutive position ids, unless `--reset-position-ids` is set."""
    sample = original(self, idx)
    if patches.run.documents == RESET and not self.config.reset_position_ids:
        sample["position_ids"] = torch.arange(len(sample["position_ids"]))
    return sample


def patch_stages(patches: patching.PatchSet) -> None:
    """Wrap Megatron's dataset builder to build datasets with `cu_seqlens` on every stage."""
    # Imported here: only scripts of Megatron-LM need the datasets.
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )

    names = ["is_built_on_rank", "config"]
    patches.wrap(BlendedMegatronDatasetBuilder, "__init__", names, _on_every_stage)


def _on_every_stage(original: Callable, *args: Any, **named: Any) -> None:
    bound = bound_to(original, args, named)
    is_built = bound.arguments["is_built_on_rank"]
    if getattr(bound.arguments["config"], "inter_document_masking", False):
        # Other tensor-parallel ranks receive batches from tensor-parallel rank 0.
        bound.arguments["is_built_on_rank"] = lambda: (
            is_built() or parallel_state.get_tensor_model_parallel_rank() == 0
        )
    original(*bound.args, **bound.kwargs)
