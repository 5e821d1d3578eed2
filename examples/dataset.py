"""Batches from a Megatron .bin/.idx dataset, equal for all parallel sizes.

The module assigns samples to data-parallel ranks and micro-batches. Every rank of a
context-parallel group reads whole sequences; Megatron's own function then selects its shard.
"""

from __future__ import annotations

import inspect
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from megatron.core import parallel_state, utils
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.packed_seq_params import PackedSeqParams

Batch = dict[str, torch.Tensor]


@dataclass
class FixedVocabulary:
    """The part of a tokenizer that Megatron's datasets read if the text is already tokens."""

    vocab_size: int
    eod: int
    pad: int = -1

    @property
    def unique_identifiers(self) -> dict[str, int]:
        return {"vocab_size": self.vocab_size, "eod": self.eod}


def build(args: Namespace) -> GPTDataset:
    """Return the training samples of a run; their order depends on seed and --train-iters only.

    Args:
        args: Arguments of `arguments.parse_args`.

    Raises:
        ValueError: The text is shorter than one sequence.
    """
    text = IndexedDataset(args.data_path)  # keeps a reference, so that the file stays open
    tokens = int(text.sequence_lengths.sum())
    if tokens <= args.seq_length:
        raise ValueError(
            f"--data-path {args.data_path} contains {tokens} tokens, but one sequence of "
            f"--seq-length {args.seq_length} requires {args.seq_length + 1}; add text or use a "
            "smaller --seq-length"
        )
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=([args.data_path], None),
        split="1",
        path_to_cache=args.data_cache_path,
        tokenizer=FixedVocabulary(args.vocab_size, args.eod),
        reset_position_ids=False,
        reset_attention_mask=dense_mask(args),
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=dense_mask(args),  # s x s; attention needs no causal mask
    )
    sizes = [args.train_iters * args.global_batch_size, None, None]
    train, _, _ = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()
    return train


def dense_mask(args: Namespace) -> bool:
    """Return whether attention needs a dense document mask, as Megatron's local attention does."""
    return args.packed and args.context_parallel_size == 1 and args.transformer_impl == "local"


def micro_batches(samples: GPTDataset, args: Namespace, consumed: int) -> Iterator[Batch]:
    """Yield the micro-batches of this rank for one step.

    Args:
        samples: Samples of the run.
        args: Arguments of `arguments.parse_args`.
        consumed: Number of samples that earlier steps have consumed.

    Yields:
        Tensors [micro-batch, sequence / context-parallel size] by name.
    """
    rank = parallel_state.get_data_parallel_rank()
    stride = args.micro_batch_size * args.data_parallel_size
    for first in range(consumed, consumed + args.global_batch_size, stride):
        first += rank * args.micro_batch_size
        yield _micro_batch(samples, args, first)


def _micro_batch(samples: GPTDataset, args: Namespace, first: int) -> Batch:
    """Return one micro-batch.

    In a separate function, because a generator keeps its local variables (whole sequences) alive.
    """
    rows = [samples[i] for i in range(first, first + args.micro_batch_size)]
    batch = {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
    if args.packed and not dense_mask(args):
        batch["cu_seqlens"] = document_ends(batch["tokens"], args.eod)
    return _on_this_context_parallel_rank({key: x.cuda() for key, x in batch.items()})


def document_ends(tokens: torch.Tensor, eod: int) -> torch.Tensor:
    """Return int32 [1, documents + 1], the cumulative lengths of the documents of tokens [1, s]."""
    last = tokens[0].eq(eod).nonzero()[:, 0] + 1
    inside = last[last < tokens.shape[1]].tolist()
    return torch.tensor([[0, *inside, tokens.shape[1]]], dtype=torch.int32)


def packed_seq_params(batch: Batch) -> PackedSeqParams | None:
    """Return Megatron's description of a packed batch; None if the batch is not packed."""
    if "cu_seqlens" not in batch:
        return None
    ends = batch["cu_seqlens"][0]
    longest = int(ends.diff().max())
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def _on_this_context_parallel_rank(batch: Batch) -> Batch:
    # Read at each call: megatron_burst replaces it for layouts that Megatron does not have.
    split = utils.get_batch_on_this_cp_rank
    parameters = inspect.signature(split).parameters  # they depend on Megatron's version
    options = {"is_hybrid_cp": False, "cp_group": parallel_state.get_context_parallel_group()}
    return split(batch, **{name: options[name] for name in options if name in parameters})
