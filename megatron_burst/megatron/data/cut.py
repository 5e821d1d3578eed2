# SPDX-License-Identifier: Apache-2.0
"""How a run cuts its batches: its layout, what a layout that is solved per pack goes by, and which
ranks hold one micro-batch.

A run fixes its `BatchCut` once, from the first configuration that chooses BurstAttention, because
data path, rotary embedding and attention must cut alike, on every pipeline stage and every rank.
What a token costs therefore comes from the whole model, and never from the layers of one stage.

Under hybrid or dynamic context parallelism Megatron's schedulers give short documents to few ranks
and long ones to many: the `PackedSeqParams` of a micro-batch names the group that holds it
(`cp_group`) or says that one rank holds all of it (`local_cp_size` 1 without a group).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...autotune import cluster_file
from ...autotune.select import row_cost
from ...comm.consensus import Facts, agree, attempt
from ...config import BurstConfig
from ...layout.balanced import CAUSAL, Window
from ...schedule.sizes import Sizes
from .. import patching
from ..model_shape import layer_windows

_NOTE, _COMPARED = "cut", "cluster file"


@dataclass(frozen=True)
class BatchCut:
    """How packed batches are cut: the same for every batch, model and rank of a run.

    name: the layout. For "balanced" also per_node: ranks per node, None if nobody said; windows:
    what a token sees in each kind of layer, each as often as its share of the layers says;
    multiple: what has to divide the tokens of a rank; row_cost: as of `layout.Balanced`.
    """

    name: str
    per_node: int | None = None
    windows: tuple[Window, ...] = (CAUSAL,)
    multiple: int = 1
    row_cost: tuple[float, float] | None = None


def cut_for(config: Any, burst: BurstConfig) -> BatchCut:
    """The cut of a run with this `TransformerConfig`.

    Layers count as causal. Without windows that is also the balance of models without causality,
    whose tokens see twice as much in every document alike.
    """
    if burst.layout != "balanced":
        return BatchCut(burst.layout)
    sizes = getattr(config, "hierarchical_context_parallel_sizes", None)
    split = getattr(config, "sequence_parallel", False)
    per_node = sizes[0] if sizes else burst.intra_size
    return BatchCut(
        burst.layout,
        per_node=per_node,
        windows=layer_windows(config),
        multiple=config.tensor_model_parallel_size if split else 1,
        row_cost=_row_cost(config, burst, per_node),
    )


def _row_cost(config: Any, burst: BurstConfig, per_node: int | None) -> tuple[float, float] | None:
    """What a row on a link costs, where a cluster file says how fast links are; None for ranks that
    share heads by a number stated, whose all-to-all moves as many rows in every layout.
    """
    shared = burst.ulysses_size is not None and burst.ulysses_size > 1
    if burst.cluster is None or burst.algorithm != "auto" or shared:
        return None
    cluster, tensor = cluster_file.read(burst.cluster), config.tensor_model_parallel_size
    ranks = config.context_parallel_size
    rates = cluster.run_rates(per_node or cluster.cp_per_node(tensor, ranks))
    heads = max(tensor, config.num_attention_heads)
    groups = getattr(config, "num_query_groups", None) or heads
    of_query, of_value = head_sizes(config)
    wire = 2 if burst.wire_dtype == "bf16" else 4
    return row_cost(
        Sizes(1, 1, heads // tensor, max(1, groups // tensor), of_query, of_value, 2, 4, wire,
              (True, True, True)),
        rates,
    )  # fmt: skip


def head_sizes(config: Any) -> tuple[int, int]:
    """Width of queries and keys, and of values, of a `TransformerConfig`."""
    if getattr(config, "multi_latent_attention", False):
        return config.qk_head_dim + config.qk_pos_emb_head_dim, config.v_head_dim
    size = getattr(config, "kv_channels", None) or config.hidden_size // config.num_attention_heads
    return size, size


def attention_cut(burst: BurstConfig) -> BatchCut | None:
    """How softmax attention cuts sequences, where that is not how the run cuts its batches."""
    apart = burst.attention_layout not in (None, burst.layout)
    return BatchCut(str(burst.attention_layout)) if apart else None


def compare_clusters(notes: dict[str, Any], path: str | None) -> None:
    """Compare, once all ranks are there, what the cluster file of each says: packs are cut by it,
    on all stages. Collective over all ranks the first time; notes: of the installed patches, where
    it is remembered.

    Raises the same `ValueError` on every rank where files differ.
    """
    if path is None or _COMPARED in notes or not torch.distributed.is_initialized():
        return

    def contents() -> Facts:
        digest = hashlib.blake2b(Path(path).read_bytes(), digest_size=6).hexdigest()
        return {"the contents of --burst-cluster": digest}

    agree(attempt(contents), gather_from_all)
    notes[_COMPARED] = path  # where they differ, the next call is told so, too


def gather_from_all(header: torch.Tensor) -> list[torch.Tensor]:
    """The headers of all ranks of the job, as `agree` wants them."""
    gathered = [header] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(gathered, header)
    return gathered


def settle_cut(patches: patching.PatchSet, cut: BatchCut) -> None:
    """Fix the cut of the run, unless an earlier configuration has."""
    patches.notes.setdefault(_NOTE, cut)


def installed_layout() -> str | None:
    """The layout of this run, from `install` or from the first `configure`; None before both."""
    return patching.notes().get("layout")


def cut_of_run(layout: str) -> BatchCut:
    """The cut of the run, whose layout is `layout`.

    Raises `ValueError` for layout balanced before a configuration says what its tokens cost.
    """
    cut = patching.notes().get(_NOTE)
    if cut is None and layout == "balanced":
        raise ValueError(
            "layout balanced before configure(): batches are cut by what a token of this model "
            "costs; configure the model first"
        )
    return cut or BatchCut(layout)


def unpacked() -> ValueError:
    """The error for a batch without documents in a run with layout balanced."""
    return patching.user_error(
        "--burst-layout balanced cuts packed batches, and this batch names no documents: pass "
        "packed_seq_params, as --dataloader-inter-document-masking, --reset-attention-mask and "
        "--sft make them; for one document per sequence take --burst-layout zigzag, which is "
        "balanced for it"
    )


class OneRank:
    """What is asked of a process group, for a micro-batch that one rank holds alone."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


ONE_RANK = OneRank()


def group_of(params: Any, static: Any) -> Any:
    """The group that holds the micro-batch of a `PackedSeqParams`: its own, or else `static`.

    `ONE_RANK` if no other rank holds any of it. params: None for a batch that is not packed.
    """
    group, size = getattr(params, "cp_group", None), getattr(params, "local_cp_size", None)
    if group is None and size in (None, static.size()):
        return static
    if group is None and size == 1:
        return ONE_RANK
    if group is None:
        raise ValueError(
            f"packed_seq_params: local_cp_size is {size} and cp_group None: name the group of the "
            f"ranks that hold the micro-batch"
        )
    if size not in (None, group.size()):
        raise ValueError(
            f"packed_seq_params: local_cp_size is {size}, and cp_group has {group.size()} ranks"
        )
    if group.size() > 1 and not isinstance(group, torch.distributed.ProcessGroup):
        raise ValueError(
            f"packed_seq_params: cp_group must be a process group that this rank is in, got "
            f"{group!r:.100}"
        )
    return ONE_RANK if group.size() == 1 else group


def ranks_of(group: Any) -> tuple[int, ...]:
    """The global ranks of a group, in its order."""
    if group is ONE_RANK:
        return (torch.distributed.get_rank(),)
    return tuple(torch.distributed.get_process_group_ranks(group))
