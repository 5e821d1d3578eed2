# SPDX-License-Identifier: Apache-2.0
"""Micro-batches of verl as prefix trees, which compute shared prefixes once.

verl packs a micro-batch with one function and unpacks the model's output with another function.
verl calls both functions for every value per token (token ids, labels, temperatures,
log-probabilities). The replacements convert between tokens and rows of a tree, so that the rest of
verl stays unchanged.

verl expects one label per row, but the last row of a shared prefix has one label per branch. The
tree therefore merges pairs of a token and its successor. Two rows are merged if all tokens up to
and including the next one are equal. The last row of a prefix therefore has one copy per branch,
and one for trajectories that end with the prefix.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ....megatron import patching
from ....megatron.data.cut import cut_of_run
from ....megatron.data.slicing import context_group
from ....megatron.patching import PatchSet, given_to
from ....megatron.selection import burst_of
from .. import trees
from ..batch import rows_multiple
from ..tree_pack import TreePack

_ROWS = "rl: rows of a micro-batch"  # key of `RunState.plugins`
_LOGGED = "rl: prefix trees"


class MergedRows:
    """One micro-batch of verl as a prefix tree, with the rows of this rank.

    Args:
        input_ids: Token ids, jagged [trajectories, tokens].
        config: `TransformerConfig` of the model, after `configure`.
        bucket: The number of rows is padded to a multiple of this number; None for no further
            padding.

    Attributes:
        params: `PackedSeqParams` of the batch.
        positions: Positions of this rank's n rows on their paths, int64 [1, n].
        tree: Prefix tree of the batch.
    """

    def __init__(self, input_ids: Any, config: Any, bucket: int | None) -> None:
        group: Any = context_group()
        device = input_ids.device
        tokens = input_ids.values().to("cpu", torch.int64).numpy()
        bounds = input_ids.offsets().cpu().numpy()
        count = np.arange(len(tokens))
        following = count + 1
        following[bounds[1:] - 1] = bounds[:-1]  # verl labels the last token with the first one
        successor = tokens[following] + 1
        successor[bounds[1:] - 1] = 0
        # One 64-bit number per pair of a token and its successor: sorting pairs is much slower.
        _, ids = np.unique(tokens * (successor.max(initial=0) + 1) + successor, return_inverse=True)
        tree = trees.pack(
            np.split(ids, bounds[1:-1]),
            multiple=math.lcm(rows_multiple(config, group.size(), merged=True), bucket or 1),
        )
        pack = TreePack.of(tree, config)
        layout = pack.layout(cut_of_run(config.burst.layout), group.size())
        shards = [layout.positions(rank, len(tree.tokens)) for rank in range(group.size())]
        # Index of each row in the concatenated rows of the ranks
        home = np.empty(len(tree.tokens), dtype=np.int64)
        home[np.concatenate(shards)] = np.arange(len(home))
        row = np.concatenate(tree.paths)  # row of each token
        # First token of each row; out of range for padding
        first = np.full(len(tree.tokens), len(tokens))
        first[row[::-1]] = count[::-1]
        own_rows = shards[group.rank()]

        def on_device(index: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(index).to(device)

        self.params = pack.params(device)
        self.positions = on_device(tree.positions[own_rows])[None]
        self.tree = tree
        self._group, self._offsets = group, input_ids.offsets()
        self._following, self._same = on_device(following), on_device(first[row])
        self._taken, self._home = on_device(first[own_rows]), on_device(home[row])

    def packed(self, values: torch.Tensor, following: bool) -> torch.Tensor:
        """Return values of this rank's rows [1, n, ...], taken from values of all tokens.

        Args:
            values: Values per token, jagged [trajectories, tokens, ...].
            following: True to use the value of the next token.

        Raises:
            ValueError: Tokens that are merged have different values.
        """
        flat = values.values()
        if following:
            flat = flat.index_select(0, self._following)
        if not torch.equal(flat, flat.index_select(0, self._same)):
            raise ValueError(
                "override_transformer_config.burst.pack trees: trajectories with a common prefix "
                f"have different values in the prefix ({values.dtype} of shape "
                f"{tuple(flat.shape[1:])} per token), such as temperatures or a teacher's "
                "log-probabilities; set pack to off"
            )
        return torch.cat([flat, flat.new_zeros(1, *flat.shape[1:])])[self._taken][None]

    def unpacked(self, output: torch.Tensor) -> torch.Tensor:
        """Gather the rows of all ranks and return values of all tokens [trajectories, tokens, ...].

        The result is jagged. All ranks must call this method. As in verl, only the rows of this
        rank get gradients.

        Args:
            output: Values of this rank's rows [1, n, ...].
        """
        parts, size = [output], self._group.size()
        if size > 1:
            parts = [torch.empty_like(output) for _ in range(size)]
            dist.all_gather(parts, output.detach().contiguous(), group=self._group)
            parts[self._group.rank()] = output
        tokens = torch.cat(parts, dim=1)[0].index_select(0, self._home)
        return torch.nested.nested_tensor_from_jagged(tokens, offsets=self._offsets)


def patch(patches: PatchSet, util: Any, forward: Any, fused: Any) -> None:
    """Patch verl so that engines with `burst.pack` "trees" merge shared prefixes.

    Args:
        patches: Set of patches.
        util: Module `verl.models.mcore.util`.
        forward: Module `verl.models.mcore.model_forward`.
        fused: Module `verl.models.mcore.model_forward_fused`.
    """

    def packing(original: Callable, *args: Any, **named: Any) -> Any:
        rows: MergedRows | None = patches.run.plugins.get(_ROWS)
        if rows is None:
            return original(*args, **named)
        arguments = given_to(original, args, named)
        if not arguments.get("pre_process", True):
            return arguments["input_ids"], rows.params, None
        values = rows.packed(arguments["input_ids"], arguments.get("need_roll", False))
        return values, rows.params, rows.positions

    def unpacking(original: Callable, *args: Any, **named: Any) -> Any:
        rows: MergedRows | None = patches.run.plugins.get(_ROWS)
        arguments = given_to(original, args, named)
        if rows is None or not arguments.get("post_process", True):
            return original(*args, **named)
        return rows.unpacked(arguments["output"])

    def merging(original: Callable, *args: Any, **named: Any) -> Any:
        with _merged_batch(patches, given_to(original, args, named)):
            return original(*args, **named)

    def making(original: Callable, *args: Any, **named: Any) -> Callable:
        made = original(*args, **named)
        return functools.wraps(made)(lambda *a, **n: merging(made, *a, **n))

    patches.wrap(util, "preprocess_thd_engine", ["input_ids", "pre_process", "need_roll"], packing)
    names = ["output", "packed_seq_params", "input_ids", "post_process"]
    patches.wrap(util, "postprocess_thd_engine", names, unpacking)
    names = ["model", "input_ids", "pad_to_length_bucket"]
    patches.wrap(forward, "gptmodel_forward_model_engine", names, merging)
    patches.wrap(fused, "fused_forward_model_engine", ["vision_model"], making)


@contextmanager
def _merged_batch(patches: PatchSet, arguments: dict[str, Any]) -> Iterator[None]:
    """Return a context in which verl packs `arguments["input_ids"]` as a prefix tree.

    The context changes nothing if `burst.pack` is not "trees".
    """
    config = arguments["model"].config
    burst = burst_of(config)
    if burst is None or burst.pack != "trees" or burst.algorithm == "megatron":
        yield
        return
    rows = MergedRows(arguments["input_ids"], config, arguments.get("pad_to_length_bucket"))
    if _LOGGED not in patches.run.logged:
        patches.run.logged.add(_LOGGED)
        patching.log(f"first micro-batch: {rows.tree.describe()}")
    patches.run.plugins[_ROWS] = rows
    try:
        yield
    finally:
        patches.run.plugins[_ROWS] = None
