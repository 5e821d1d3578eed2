# SPDX-License-Identifier: Apache-2.0
"""verl's micro-batches as prefix trees: what trajectories share is computed once.

verl packs a micro-batch with one function and takes the model's output apart with another; both are
called for all that has a value per token (token ids, labels, temperatures, log-probabilities). Here
they go by the rows of a tree, so that the rest of verl stays as it is.

verl wants one label per row, while the last row of a shared prefix has a label per branch. So the
tree is made of pairs, a token with the one that follows: two rows are one where all tokens up to
and including the next one are equal, and each branch has the last row of the prefix by itself. That
costs a row per branch and end.
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
from .. import trees
from ..batch import rows_multiple
from ..tree_pack import TreePack

_NOTE = "micro-batch"


class MergedRows:
    """The rows of one micro-batch of trajectories, and which of them this rank holds.

    input_ids: jagged [trajectories, tokens]. config: the `TransformerConfig` of the model, after
    `configure`. bucket: pad to a multiple of so many rows. params: the `PackedSeqParams` of the
    batch. positions: int64 [1, n], places on their paths of the n rows that this rank holds.
    """

    def __init__(self, input_ids: Any, config: Any, bucket: int | None) -> None:
        group: Any = context_group()
        device, tokens = input_ids.device, input_ids.values().cpu().numpy()
        bounds = input_ids.offsets().cpu().numpy()
        count = np.arange(len(tokens))
        following = count + 1
        following[bounds[1:] - 1] = bounds[:-1]  # verl gives the last token the label of the first
        pairs = np.stack([tokens, tokens[following]], axis=1)
        pairs[bounds[1:] - 1, 1] = -1
        _, ids = np.unique(pairs, axis=0, return_inverse=True)
        tree = trees.pack(
            np.split(ids.reshape(-1), bounds[1:-1]),
            multiple=math.lcm(rows_multiple(config, group.size(), merged=True), bucket or 1),
        )
        pack = TreePack.of(tree, config)
        layout = pack.layout(cut_of_run(config.burst.layout), group.size())
        held = [layout.positions(rank, len(tree.tokens)) for rank in range(group.size())]
        home = np.empty(len(tree.tokens), dtype=np.int64)  # where rows lie, rank after rank
        home[np.concatenate(held)] = np.arange(len(home))
        row = np.concatenate(tree.paths)  # of each token
        first = np.full(len(tree.tokens), len(tokens))  # token of a row; of padding none
        first[row[::-1]] = count[::-1]
        mine = held[group.rank()]

        def sent(index: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(index).to(device)

        self.params = pack.params(device)
        self.positions = sent(tree.positions[mine])[None]
        self.tree = tree
        self._group, self._offsets = group, input_ids.offsets()
        self._following, self._same = sent(following), sent(first[row])
        self._taken, self._home = sent(first[mine]), sent(home[row])

    def packed(self, values: torch.Tensor, following: bool) -> torch.Tensor:
        """[1, n, ...]: the values of this rank's rows, out of jagged [trajectories, tokens, ...];
        following: those of the next token. Raises ValueError where tokens that are merged differ.
        """
        flat = values.values()
        if following:
            flat = flat.index_select(0, self._following)
        if not torch.equal(flat, flat.index_select(0, self._same)):
            raise ValueError(
                "override_transformer_config.burst.pack trees: trajectories with a common prefix "
                f"have different values in it, {values.dtype} of shape {tuple(flat.shape[1:])} per "
                "token, such as temperatures or a teacher's log-probabilities: set pack to off"
            )
        return torch.cat([flat, flat.new_zeros(1, *flat.shape[1:])])[self._taken][None]

    def unpacked(self, output: torch.Tensor) -> torch.Tensor:
        """Jagged [trajectories, tokens, ...], out of [1, n, ...] of each rank. A collective; its
        gradient reaches the rows of this rank, as verl has it.
        """
        parts, size = [output], self._group.size()
        if size > 1:
            parts = [torch.empty_like(output) for _ in range(size)]
            dist.all_gather(parts, output.detach().contiguous(), group=self._group)
            parts[self._group.rank()] = output
        found = torch.cat(parts, dim=1)[0].index_select(0, self._home)
        return torch.nested.nested_tensor_from_jagged(found, offsets=self._offsets)


def patch(patches: PatchSet, util: Any, forward: Any, fused: Any) -> None:
    """Add to a set of patches what lets engines whose `burst.pack` is "trees" merge prefixes.

    util, forward, fused: modules `util`, `model_forward` and `model_forward_fused` of
    `verl.models.mcore`.
    """

    def packing(original: Callable, *args: Any, **named: Any) -> Any:
        rows: MergedRows | None = patches.notes.get(_NOTE)
        if rows is None:
            return original(*args, **named)
        given = given_to(original, args, named)
        if not given.get("pre_process", True):
            return given["input_ids"], rows.params, None
        found = rows.packed(given["input_ids"], given.get("need_roll", False))
        return found, rows.params, rows.positions

    def unpacking(original: Callable, *args: Any, **named: Any) -> Any:
        rows: MergedRows | None = patches.notes.get(_NOTE)
        given = given_to(original, args, named)
        if rows is None or not given.get("post_process", True):
            return original(*args, **named)
        return rows.unpacked(given["output"])

    def merging(original: Callable, *args: Any, **named: Any) -> Any:
        with _in_hand(patches, given_to(original, args, named)):
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
def _in_hand(patches: PatchSet, given: dict[str, Any]) -> Iterator[None]:
    """Inside, verl packs the micro-batch `given["input_ids"]` as a tree if its model takes one."""
    config = given["model"].config
    burst = getattr(config, "burst", None)
    if burst is None or burst.pack != "trees" or burst.algorithm == "megatron":
        yield
        return
    rows = MergedRows(given["input_ids"], config, given.get("pad_to_length_bucket"))
    said = "prefix trees were logged"
    if said not in patches.notes:
        patches.notes[said] = True
        patching.log(f"first micro-batch: {rows.tree.describe()}")
    patches.notes[_NOTE] = rows
    try:
        yield
    finally:
        patches.notes[_NOTE] = None
