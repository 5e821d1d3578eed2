# SPDX-License-Identifier: Apache-2.0
"""The cut of batches over ranks, and the ranks that hold one micro-batch.

The first configuration that selects BurstAttention determines the `BatchCut` of the run: data path,
rotary embedding and attention must cut batches in the same way on every pipeline stage and rank.
Therefore the cost of a token is computed for the whole model, not for the layers of one stage.

Under hybrid or dynamic context parallelism, Megatron's schedulers give short documents to few ranks
and long documents to many. The `PackedSeqParams` of a micro-batch names the group that holds it
(`cp_group`), or states that one rank holds all of it (`local_cp_size` 1 without a group).
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
from ..run_state import RunState


@dataclass(frozen=True)
class BatchCut:
    """Rule by which a run cuts batches over ranks; the same for every batch, model and rank.

    The fields after `name` are used only for layout "balanced".

    Attributes:
        name: The layout.
        per_node: Ranks per node; None if not set.
        windows: Attention windows of the model's layers, reduced to their proportions
            (`model_shape.layer_windows`).
        multiple: The number of tokens per rank must be a multiple of this number.
        row_cost: The cost of sending a row, see `layout.Balanced`; None if unknown.
    """

    name: str
    per_node: int | None = None
    windows: tuple[Window, ...] = (CAUSAL,)
    multiple: int = 1
    row_cost: tuple[float, float] | None = None


def cut_for(config: Any, burst: BurstConfig) -> BatchCut:
    """Return how a run with this `TransformerConfig` cuts batches.

    Work is balanced for causal attention. Without windows this also balances attention without a
    causal mask, because every document then has twice as many visible pairs.

    Args:
        config: a `TransformerConfig`.
        burst: the options of the run.
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
    """Return the cost of sending a row (see `layout.Balanced`) from the rates in a cluster file.

    The result is None without a cluster file or with another algorithm than "auto". It is also
    None with `--burst-ulysses-size` > 1, because the all-to-all of heads sends equally many rows in
    every layout.
    """
    shared = burst.ulysses_size is not None and burst.ulysses_size > 1
    if burst.cluster is None or burst.algorithm != "auto" or shared:
        return None
    cluster, tensor = cluster_file.read(burst.cluster), config.tensor_model_parallel_size
    ranks = config.context_parallel_size
    rates = cluster.run_rates(per_node or cluster.cp_per_node(tensor, ranks))
    heads = max(tensor, config.num_attention_heads)
    groups = getattr(config, "num_query_groups", None) or heads
    key_width, value_width = head_sizes(config)
    wire = 2 if burst.wire_dtype == "bf16" else 4
    return row_cost(
        Sizes(1, 1, heads // tensor, max(1, groups // tensor), key_width, value_width, 2, 4, wire,
              (True, True, True)),
        rates,
    )  # fmt: skip


def head_sizes(config: Any) -> tuple[int, int]:
    """Return (width of queries and keys, width of values) of a `TransformerConfig`."""
    if getattr(config, "multi_latent_attention", False):
        return config.qk_head_dim + config.qk_pos_emb_head_dim, config.v_head_dim
    size = getattr(config, "kv_channels", None) or config.hidden_size // config.num_attention_heads
    return size, size


def attention_cut(burst: BurstConfig) -> BatchCut | None:
    """Return how softmax attention cuts sequences; None if it cuts them as the run does."""
    separate = burst.attention_layout not in (None, burst.layout)
    return BatchCut(str(burst.attention_layout)) if separate else None


def compare_clusters(state: RunState, path: str | None) -> None:
    """Compare the contents of all ranks' cluster files, which determine how packs are cut.

    The first call is a collective of all ranks.

    Args:
        state: the state of the run, which records that files were compared.
        path: the path of this rank's file; None without a file.

    Raises:
        ValueError: The files differ; every rank raises the same error.
    """
    if path is None or state.clusters_compared or not torch.distributed.is_initialized():
        return

    def contents() -> Facts:
        digest = hashlib.blake2b(Path(path).read_bytes(), digest_size=6).hexdigest()
        return {"the contents of --burst-cluster": digest}

    agree(attempt(contents), gather_from_all)
    state.clusters_compared = True  # not set if files differ, so that the next call raises too


def gather_from_all(header: torch.Tensor) -> list[torch.Tensor]:
    """All-gather the header of each rank of the job, as `agree` requires."""
    gathered = [header] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(gathered, header)
    return gathered


def set_cut(patches: patching.PatchSet, cut: BatchCut) -> None:
    """Set how the run cuts batches, unless an earlier configuration has set this."""
    if patches.run.cut is None:
        patches.run.cut = cut


def installed_layout() -> str | None:
    """Return the layout that `install` or the first `configure` has set; None before that."""
    return patching.run_state().layout


def cut_of_run(layout: str) -> BatchCut:
    """Return the rule for cutting batches that `set_cut` has set, or else `BatchCut(layout)`.

    Raises:
        ValueError: The layout is balanced, and no configuration has called `set_cut`.
    """
    cut = patching.run_state().cut
    if cut is None and layout == "balanced":
        raise ValueError(
            "layout balanced cuts by the cost of a token, which configure() computes from the "
            "model; call configure() first"
        )
    return cut or BatchCut(layout)


def unpacked() -> ValueError:
    """Return the error for a batch without documents in a run with layout balanced."""
    return patching.user_error(
        "--burst-layout balanced cuts packed batches, and this batch names no documents: pass "
        "packed_seq_params, which --dataloader-inter-document-masking, --reset-attention-mask and "
        "--sft make; for one document per sequence use --burst-layout zigzag, which balances it"
    )


class OneRank:
    """A stand-in for the process group of a micro-batch that one rank holds."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


ONE_RANK = OneRank()


def group_of(params: Any, static: Any) -> Any:
    """Return the group that holds the micro-batch of a `PackedSeqParams`.

    Args:
        params: the `PackedSeqParams`; None for a batch that is not packed.
        static: the group with which the model was built.

    Returns:
        The micro-batch's own group, or else `static`; `ONE_RANK` if one rank holds the micro-batch.

    Raises:
        ValueError: The size and the group contradict each other.
    """
    group, size = getattr(params, "cp_group", None), getattr(params, "local_cp_size", None)
    if group is None and size in (None, static.size()):
        return static
    if group is None and size == 1:
        return ONE_RANK
    if group is None:
        raise ValueError(
            f"packed_seq_params: local_cp_size is {size} and cp_group is None: set cp_group to the "
            f"group of the ranks that hold the micro-batch"
        )
    if size not in (None, group.size()):
        raise ValueError(
            f"packed_seq_params: local_cp_size is {size}, and cp_group has {group.size()} ranks: "
            "the two must be equal"
        )
    if group.size() > 1 and not isinstance(group, torch.distributed.ProcessGroup):
        raise ValueError(
            f"packed_seq_params: cp_group is {group!r:.100}; it must be a process group that "
            "contains this rank"
        )
    return ONE_RANK if group.size() == 1 else group


def ranks_of(group: Any) -> tuple[int, ...]:
    """Return the global ranks of a group, in the order of the group."""
    if group is ONE_RANK:
        return (torch.distributed.get_rank(),)
    return tuple(torch.distributed.get_process_group_ranks(group))
