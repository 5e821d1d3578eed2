"""A user's short training script on Megatron-LM, without code of this project.

It trains a GPT from Megatron-LM's flags, or a hybrid model with `--hybrid-layer-pattern`, with
Megatron-LM's `pretrain`, on `--data-path` or on counting sequences of documents with uneven
lengths. `--packed` prevents documents from seeing each other; with `--alone` too, one rank runs the
model on each document separately. With `--broadcast`, only tensor-parallel rank 0 reads data, and
the other ranks receive its batches, as in pretrain_gpt.py.
"""

from functools import partial
from itertools import pairwise

import numpy as np
import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.enums import ModelType
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.transformer import multi_token_prediction
from megatron.core.utils import get_batch_on_this_cp_rank, get_batch_on_this_tp_rank
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import (
    gpt_config_from_args,
    hybrid_config_from_args,
    pretrain_cfg_container_from_args,
)
from megatron.training.arguments import parse_and_validate_args
from megatron.training.utils import is_first_or_last_pipeline_stage

VOCABULARY = 61


class Counting(torch.utils.data.Dataset):
    """Documents of 5 to 40 tokens that count up in steps of 1 to 3.

    The last token is not predicted.
    """

    def __init__(self, samples, seed, args):
        self.samples, self.seed, self.length, self.packed = (
            samples, seed, args.seq_length, args.packed,
        )  # fmt: skip

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        draw = np.random.default_rng([self.seed, index])
        ends, tokens, places = [0], [], []
        while ends[-1] < self.length + 1:
            size = int(draw.integers(5, 40))
            tokens += list((draw.integers(1, 4, size).cumsum()) % VOCABULARY)
            places += range(size)
            ends.append(ends[-1] + size)
        bounds = np.array([*[end for end in ends if end < self.length], self.length])
        text = np.array(tokens[: self.length + 1])
        mask = np.ones(self.length, np.float32)
        mask[bounds[1:] - 1] = 0
        sample = {
            "tokens": text[:-1],
            "labels": text[1:],
            "loss_mask": mask,
            "position_ids": np.array(places[: self.length] if self.packed else range(self.length)),
        }
        return sample | ({"cu_seqlens": bounds.astype(np.int32)} if self.packed else {})


def datasets(sizes, vp_stage=None):
    args = get_args()
    if args.broadcast and mpu.get_tensor_model_parallel_rank():
        return [None for _ in sizes]
    if args.data_path:
        # A dense mask is for every stage; else as pretrain_gpt.py does it.
        masks = args.create_attention_mask_in_dataloader
        return indexed(sizes, args, lambda: masks or is_first_or_last_pipeline_stage(vp_stage))
    return [Counting(size or 0, seed, args) if size else None for seed, size in enumerate(sizes)]


def indexed(sizes, args, used):
    """Return Megatron's own datasets, as pretrain_gpt.py makes them."""
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=(args.data_path, None),
        split=args.split,
        path_to_cache=args.data_cache_path,
        tokenizer=build_tokenizer(args),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        inter_document_masking=args.dataloader_inter_document_masking,
    )
    return BlendedMegatronDatasetBuilder(GPTDataset, sizes, used, config).build()


datasets.is_distributed = True  # every rank reads for itself


def loss_function(loss_mask, losses, model=None):
    mask = loss_mask.view(-1).float()
    total, count = (losses.view(-1).float() * mask).sum(), mask.sum()
    return total, count.to(torch.int), {"lm loss": torch.stack([total.detach(), count])}


def forward_step(data_iterator, model):
    args = get_args()
    batch = received(data_iterator, args) if args.broadcast else dict(next(data_iterator))
    lengths = batch.get("cu_seqlens")
    group = mpu.get_context_parallel_group()
    batch = get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=group)
    mask, params = batch.get("attention_mask"), None
    if args.alone:
        return separate_documents(model, batch)
    if lengths is not None and group.size() == 1:  # Megatron's local attention knows no packs
        places = torch.arange(args.seq_length)
        document = torch.bucketize(places, lengths[0], right=True)
        hidden = (document[:, None] != document) | (places[:, None] < places)
        mask = hidden[None, None]
        shift = multi_token_prediction._roll_tensor_packed_seq  # which does, in the further heads
        multi_token_prediction.roll_tensor = partial(whole_roll, shift, packed(lengths[0]))
    elif lengths is not None:
        params = packed(lengths[0])
    losses = model(
        batch["tokens"],
        batch["position_ids"],
        mask,
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
        packed_seq_params=params,
    )
    return losses, partial(loss_function, batch["loss_mask"])


KEYS = (
    "tokens", "labels", "loss_mask", "position_ids", "attention_mask", "cu_seqlens",
    "cu_seqlens_padded", "max_seqlen", "local_cp_size", "hybrid_cp_group",
)  # fmt: skip


def received(data_iterator, args):
    """Return the batch that tensor-parallel rank 0 reads."""
    batch, rank = {}, mpu.get_tensor_model_parallel_rank()
    if rank == 0:
        batch = dict.fromkeys(KEYS) | next(data_iterator)
        if args.packed:
            batch["max_seqlen"] = batch["cu_seqlens"].diff().max().view(1)
        batch = {key: value if value is None else value.cuda() for key, value in batch.items()}
    return get_batch_on_this_tp_rank(
        batch,
        has_cu_seqlens=args.packed,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=False,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        cp_size=args.context_parallel_size,
        tp_rank=rank,
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=False,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(),
    )


def packed(ends):
    longest = int(ends.diff().max())
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def whole_roll(shift, params, tensor, shifts, dims, **unused):
    return shift(tensor, shifts, dims, params)


def separate_documents(model, batch):
    """Compute losses without any packing, as the reference for packed documents."""
    losses = [
        model(*(batch[name][:, start:end] for name in ("tokens", "position_ids")), None,
              labels=batch["labels"][:, start:end])
        for start, end in pairwise(batch["cu_seqlens"][0].tolist())
    ]  # fmt: skip
    return torch.cat(losses, 1), partial(loss_function, batch["loss_mask"])


def add_own_flags(parser):
    parser.add_argument("--packed", action="store_true")
    parser.add_argument("--alone", action="store_true")
    parser.add_argument("--broadcast", action="store_true")
    return parser


if __name__ == "__main__":
    args = parse_and_validate_args(extra_args_provider=add_own_flags)
    of_args = gpt_config_from_args if args.hybrid_layer_pattern is None else hybrid_config_from_args
    config = pretrain_cfg_container_from_args(args, of_args(args))
    pretrain(config, datasets, ModelType.encoder_or_decoder, forward_step)
