"""Small fakes of interfaces of Megatron-LM and Transformer Engine after the last tested commit.

That commit is d98e8a64 of August 2026. Each fake has the parameters of its original and the part of
its behaviour that matters for a run with BurstAttention, written anew. Its docstring names the
source: pull request, file, date.
"""

import enum
import itertools
import sys
import types
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core import utils
from megatron.core.packed_seq_params import PackedSeqParams

CORE = "megatron.core"


@dataclass
class NewerParams(PackedSeqParams):
    """`PackedSeqParams` with `cp_partition_mode`, as in `packed_seq_params.py` of Megatron-LM main.

    September 2026.
    """

    cp_partition_mode: str = "zigzag"


@dataclass
class Batches:
    """`ContextParallelBatch` (pull request 6912, `core/context_parallel/utils.py`, September
    2026)."""

    boundary_layout: str
    batches_by_layout: dict[str, Any]
    packed_seq_params_by_layout: dict[str, Any]
    thd_plan: Any = None
    calls: list = field(default_factory=list)

    def get_batch(self, layout=None):
        return self.batches_by_layout[layout or self.boundary_layout]

    def get_packed_seq_params(self, layout=None):
        return self.packed_seq_params_by_layout[layout or self.boundary_layout]


def zigzag(tokens, ends, size, rank):
    """Return the tokens [1, t] that a rank holds with every document in zigzag order."""
    rows = []
    for start, end in itertools.pairwise(ends):
        chunk = (end - start) // (2 * size)
        for number in (rank, 2 * size - 1 - rank):
            rows += range(start + number * chunk, start + (number + 1) * chunk)
    return tokens[:, rows]


def cut_batch(
    batch, is_hybrid_cp, cp_group=None, hybrid_cp_group_func=None, use_per_sequence_balancing=False,
    use_contiguous_cp=False,
):  # fmt: skip
    """Fake `utils.get_batch_on_this_cp_rank` after pull request 6912.

    The argument `use_contiguous_cp` is new.
    """
    size, rank = cp_group.size(), cp_group.rank()
    if is_hybrid_cp and int(batch["local_cp_size"]) == 1:
        return batch | {"hybrid_cp_group": hybrid_cp_group_func(group_size=1)}
    for name, tensor in batch.items():
        if name in ("tokens", "labels"):
            length = tensor.shape[1]
            rows = slice(rank * length // size, (rank + 1) * length // size)
            batch[name] = (
                tensor[:, rows] if use_contiguous_cp else zigzag(tensor, (0, length), size, rank)
            )
    return batch


def get_batches_on_this_cp_rank(
    batch, boundary_layout, is_hybrid_cp, cp_group, additional_layouts=(),
    hybrid_cp_group_func=None, use_per_sequence_balancing=False, sequence_parallel=False,
    tp_group=None, tp_cp_group=None, tokens_per_sample=None,
):  # fmt: skip
    """Pull request 6912, `core/context_parallel/utils.py`, September 2026.

    Packs that need zigzag within documents are cut here, and others by
    `get_batch_on_this_cp_rank`. The original also pads documents.
    """
    layouts = {boundary_layout, *additional_layouts}
    ends, own = batch.get("cu_seqlens"), batch.get("local_cp_size")
    within = use_per_sequence_balancing or len(layouts) > 1
    if ends is not None and "zigzag" in layouts and within:
        bounds = ends[0].tolist()
        parts = {
            "zigzag": batch
            | {"tokens": zigzag(batch["tokens"], bounds, cp_group.size(), cp_group.rank())}
        }
    else:
        parts = {
            layout: utils.get_batch_on_this_cp_rank(
                batch=dict(batch),
                is_hybrid_cp=is_hybrid_cp,
                cp_group=cp_group,
                hybrid_cp_group_func=hybrid_cp_group_func,
                use_per_sequence_balancing=use_per_sequence_balancing,
                use_contiguous_cp=layout == "contiguous",
            )
            for layout in layouts
        }
    params = {
        layout: ends is not None
        and NewerParams("thd", ends[0], ends[0], cp_partition_mode=layout,
                        local_cp_size=None if own is None else int(own),
                        cp_group=part.get("hybrid_cp_group"))
        for layout, part in parts.items()
    }  # fmt: skip
    return Batches(boundary_layout, parts, params)


def get_cp_partition_indices(cu_seqlens, total_tokens, cp_size, cp_rank, layout):
    """`core/context_parallel/partition.py` of Megatron-LM main, September 2026."""
    tokens = torch.arange(total_tokens)[None]
    if layout == "contiguous":
        return slice(cp_rank * total_tokens // cp_size, (cp_rank + 1) * total_tokens // cp_size)
    return zigzag(tokens, cu_seqlens.tolist(), cp_size, cp_rank)[0]


def roll_contiguous(tensor, dims, cp_group, packed_seq_params=None, fill_value=0):
    """`core/context_parallel/sequence_roll.py` of Megatron-LM main, September 2026."""
    return "shifted as contiguous rows"


def roll_contiguous_fields(tensors, cp_group, packed_seq_params=None, fill_values=None):
    """In the same file."""
    return "shifted as contiguous rows"


def prepare_mtp_sequence_roll_context(tensor, cp_group, packed_seq_params, dims=-1):
    """`core/transformer/mtp_sequence_roll.py` of Megatron-LM's branch dev, September 2026."""
    return "a context"


def convert_module_input_tensors_cp_partition_mode(
    *, hidden_states, packed_seq_params, target_partition_mode, sequence_parallel, config,
    source_partition_mode=None, cp_group=None, tp_group=None, tp_cp_group=None,
    attention_mask=None, attention_bias=None, key_value_states=None,
):  # fmt: skip
    """Fake `core/context_parallel/conversion.py` of Megatron-LM main, September 2026.

    It is the entry of an attention module, which exchanges rows for zigzag rows and states this in
    the parameters.
    """
    source = packed_seq_params.cp_partition_mode if packed_seq_params else config.cp_partition_mode
    if source == target_partition_mode:
        return hidden_states, None
    if packed_seq_params:
        packed_seq_params.cp_partition_mode = target_partition_mode
    return "rows of another layout", "a converter"


class CPLoadBalancingStrategy(enum.Enum):
    """The enum of Transformer Engine 2.20.2 (pull request 3221, `pytorch/constants.py`)."""

    DUAL_CHUNK_SWAP = "dual_chunk_swap"
    NO_LOAD_BALANCE = "no_load_balance"


def get_thd_partitioned_indices(
    cu_seqlens_padded, total_tokens, cp_size, cp_rank, device=None,
    load_balancing_strategy=CPLoadBalancingStrategy.DUAL_CHUNK_SWAP,
):  # fmt: skip
    """Fake `dot_product_attention/context_parallel.py` of Transformer Engine 2.20.2.

    Contiguous rows are selected without a call of the library's `thd_get_partitioned_indices`.
    """
    contiguous = load_balancing_strategy is CPLoadBalancingStrategy.NO_LOAD_BALANCE
    layout = "contiguous" if contiguous else "zigzag"
    rows = get_cp_partition_indices(cu_seqlens_padded, total_tokens, cp_size, cp_rank, layout)
    return torch.arange(total_tokens)[rows]


def get_batch_on_this_cp_rank(
    cu_seqlens_padded, input_ids_padded, labels_padded, position_ids_padded, cp_group=None,
    qvk_format="thd", load_balancing_strategy=CPLoadBalancingStrategy.DUAL_CHUNK_SWAP,
):  # fmt: skip
    """Fake the function in the same file; on a CPU neither strategy calls the library."""
    return "rows of this rank"


class HybridModel:
    """`core/models/hybrid/hybrid_model.py` of Megatron-LM main, September 2026: the arguments of
    its forward."""

    def __init__(self, config):
        self.config = config

    def forward(
        self, input_ids, position_ids, attention_mask, decoder_input=None, labels=None,
        inference_context=None, runtime_gather_output=None, *, inference_params=None,
        loss_mask=None, mtp_input_mask=None, packed_seq_params=None, padding_mask=None,
        compute_mtp_loss=True, cp_batch=None, shared_prefix_layout=None,
    ):  # fmt: skip
        return {"mtp_input_mask": mtp_input_mask, "cp_batch": cp_batch,
                "compute_mtp_loss": compute_mtp_loss}  # fmt: skip


MODULES = {
    f"{CORE}.context_parallel.utils": [get_batches_on_this_cp_rank],
    f"{CORE}.context_parallel.partition": [get_cp_partition_indices],
    f"{CORE}.context_parallel.sequence_roll": [roll_contiguous, roll_contiguous_fields],
    f"{CORE}.context_parallel.conversion": [convert_module_input_tensors_cp_partition_mode],
    f"{CORE}.transformer.mtp_sequence_roll": [prepare_mtp_sequence_roll_context],
    f"{CORE}.models.hybrid.hybrid_model": [HybridModel],
    "transformer_engine.pytorch.attention.dot_product_attention.context_parallel": [
        get_thd_partitioned_indices,
        get_batch_on_this_cp_rank,
    ],
}


def put_in(monkeypatch):
    """Give the installed Megatron these modules; return them by the last part of their names."""
    monkeypatch.setattr(utils, "get_batch_on_this_cp_rank", cut_batch)
    made = {}
    for path, contents in MODULES.items():
        module = types.ModuleType(path)
        for content in contents:
            setattr(module, content.__name__, content)
        monkeypatch.setitem(sys.modules, path, module)
        made[path.rpartition(".")[2]] = module
    made["engine"] = made.pop("context_parallel")
    return types.SimpleNamespace(**made)
