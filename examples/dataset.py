"""Batches from a Megatron .bin/.idx dataset, the same for every way of splitting the model.

Owns: which sample goes to which data-parallel rank in which micro-batch. Every rank of a
context-parallel group reads whole sequences; Megatron's own function then takes its share.
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
    """What Megatron's datasets ask of a tokenizer when the text is already tokens."""

    vocab_size: int
    eod: int
    pad: int = -1

    @property
    def unique_identifiers(self) -> dict[str, int]:
        return {"vocab_size": self.vocab_size, "eod": self.eod}


def build(args: Namespace) -> GPTDataset:
    """The training samples of the whole run; the order depends on seed and --train-iters only.

    Raises ``ValueError`` when the text is shorter than one sequence.
    """
    text = IndexedDataset(args.data_path)  # kept: its arrays are views of a file it closes
    tokens = int(text.sequence_lengths.sum())
    if tokens <= args.seq_length:
        raise ValueError(
            f"--data-path {args.data_path} holds {tokens} tokens, too few for one sequence of "
            f"--seq-length {args.seq_length} and the token after it; add text or lower --seq-length"
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
        create_attention_mask=dense_mask(args),  # s x s; a causal mask is known to the attention
    )
    sizes = [args.train_iters * args.global_batch_size, None, None]
    train, _, _ = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()
    return train


def dense_mask(args: Namespace) -> bool:
    """Does the attention need its document mask as a table? Megatron's own local one does."""
    return args.packed and args.context_parallel_size == 1 and args.transformer_impl == "local"


def micro_batches(samples: GPTDataset, args: Namespace, consumed: int) -> Iterator[Batch]:
    """One step's micro-batches of this rank, starting after ``consumed`` samples of the run.

    Each entry is [micro batch, sequence / context-parallel size].
    """
    rank = parallel_state.get_data_parallel_rank()
    stride = args.micro_batch_size * args.data_parallel_size
    for first in range(consumed, consumed + args.global_batch_size, stride):
        first += rank * args.micro_batch_size
        yield _micro_batch(samples, args, first)


def _micro_batch(samples: GPTDataset, args: Namespace, first: int) -> Batch:
    """Not in the generator above, which would hold whole sequences until the next one is asked."""
    rows = [samples[i] for i in range(first, first + args.micro_batch_size)]
    batch = {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
    if args.packed and not dense_mask(args):
        batch["cu_seqlens"] = document_ends(batch["tokens"], args.eod)
    return _on_this_context_parallel_rank({key: x.cuda() for key, x in batch.items()})


def document_ends(tokens: torch.Tensor, eod: int) -> torch.Tensor:
    """int32 [1, documents + 1]: cumulative lengths of the documents of one sequence [1, s]."""
    last = tokens[0].eq(eod).nonzero()[:, 0] + 1
    inside = last[last < tokens.shape[1]].tolist()
    return torch.tensor([[0, *inside, tokens.shape[1]]], dtype=torch.int32)


def packed_seq_params(batch: Batch) -> PackedSeqParams | None:
    """Megatron's description of a packed batch; None for a plain one."""
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
    # Looked up at each call: megatron_burst replaces it for layouts that Megatron does not have.
    split = utils.get_batch_on_this_cp_rank
    takes = inspect.signature(split).parameters  # more from version to version
    asked = {"is_hybrid_cp": False, "cp_group": parallel_state.get_context_parallel_group()}
    return split(batch, **{name: asked[name] for name in asked if name in takes})
