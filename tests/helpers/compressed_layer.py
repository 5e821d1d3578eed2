"""A DeepSeek-V4 layer's attention on ranks in one process, made of the operations under test."""

from typing import NamedTuple

import torch
from compressed_oracle import ROWS, SHARED, normalized

import megatron_burst as mb
from megatron_burst.planning.plan import Plan
from megatron_burst.plugins.sparse.attention import selected_plan


class LayerPlans(NamedTuple):
    """Plans of one rank; `compressed` is None for layers with only a window."""

    window: Plan
    compressed: Plan | None


class Placed(NamedTuple):
    """Where the rows and the compressed keys of a layer are.

    Attributes:
        layout: `mb.layout` object of the rows, or a name.
        positions: Positions of each rank's rows.
        key_layout: The same for compressed keys.
        key_positions: Positions of each rank's compressed keys.
    """

    layout: object
    positions: list
    key_layout: object
    key_positions: list


def masks(shape, documents=True, explicit=True):
    """Masks of the window and of the compressed keys.

    Args:
        shape: `compressed_oracle.LayerShape`.
        documents: False for masks of one document, without cumulative lengths.
        explicit: Whether the mask gets the numbers of compressed keys, or counts them.
    """
    window = mb.masks.Window(shape.window, 0)
    if not documents:
        return window, mb.masks.Compressed(shape.ratio)
    window = mb.masks.Documents(list(shape.bounds), shape.padding) & window
    keys = {"key_cu_seqlens": list(shape.key_bounds)} if explicit else {}
    return window, mb.masks.Compressed(shape.ratio, cu_seqlens=list(shape.bounds), **keys)


def plans(groups, *arguments, **options):
    """`rank_plans` of each rank of `groups`, which are in one process."""
    return groups.run(lambda own: rank_plans(own, *arguments, **options), groups.ranks)


def rank_plans(
    groups, shape, placed, layer_masks, needs, dtype=torch.float64, window=None, far=None
):
    """`LayerPlans` of one rank.

    Args:
        groups: `mb.Groups` of the rank.
        shape: `compressed_oracle.LayerShape`.
        placed: Layouts.
        layer_masks: Result of `masks`.
        needs: Names of the tensors that need gradients.
        dtype: dtype of q.
        window: Further options of the plan for the window.
        far: Further options of the plan for the compressed keys.
    """

    def rows(positions, heads, need):
        size = len(positions[groups.rank]), shape.batch, heads, shape.width
        return torch.empty(size, dtype=dtype, requires_grad=need)

    shared = {"groups": groups, "layout": placed.layout, "softmax_scale": shape.scale}
    q = rows(placed.positions, shape.heads, "q" in needs)
    kv = rows(placed.positions, shape.key_heads, "kv" in needs)
    near = mb.prepare(q, kv, kv, mask=layer_masks[0], **shared, **(window or {}))
    if shape.kind == "window":
        return LayerPlans(near, None)
    needed = not {"values", "gates", "bias"}.isdisjoint(needs)
    keys = rows(placed.key_positions, shape.compressed_heads, needed)
    options = shared | {"mask": layer_masks[1], "key_layout": placed.key_layout} | (far or {})
    return LayerPlans(near, mb.prepare(q, keys, keys, **options))


def attend(shape, x, both, kernel="auto", with_loss=False, swapped=False, label=None):
    """The layer on one rank: (out, loss or None, selected ids or None).

    Args:
        shape: `compressed_oracle.LayerShape`.
        x: Tensors of this rank by name.
        both: `LayerPlans`.
        kernel: Of the selected keys.
        with_loss: Whether to compute the indexer's loss.
        swapped: Whether compressed keys are the first set.
        label: Of all calls.
    """
    sink = x["sink"] if shape.sink else None
    sets, loss, ids = [(x["kv"], x["kv"], both.window)], None, None
    if both.compressed is not None:
        plan = both.compressed
        keys = mb.compress(
            x["values"], x["gates"], x["bias"], plan=plan, overlap=shape.overlap,
            label=label and (label, "keys"),
        )  # fmt: skip
        keys = normalized(keys.unflatten(2, (shape.compressed_heads, -1)))
        of_set = plan
        if shape.kind == "csa":
            index_k = mb.compress(
                x["index_values"], x["index_gates"], x["index_bias"], plan=plan,
                overlap=shape.overlap, label=label and (label, "index keys"),
            )  # fmt: skip
            index = x["index_q"], index_k.unsqueeze(2), x["index_weights"]
            selection = mb.select(*index, rule="dsa", top_k=shape.top_k, plan=plan, label=label)
            of_set = selected_plan(
                x["q"], keys, keys, selection, plan=plan, sink=sink, kernel=kernel
            )
            ids = selection.ids
            if with_loss:
                loss = mb.indexer_loss(
                    *index, x["q"], keys, selection, rule="dsa", plan=plan, label=label
                )
        sets.append((keys, keys, of_set))
    out = mb.joint_attention(x["q"], sets[::-1] if swapped else sets, sink=sink, label=label)
    return out, loss, ids


def split(tensors, placed, needs, strided=torch.clone):
    """Tensors by name -> a dictionary per rank; ranks share the tensors of `SHARED`.

    Args:
        tensors: Tensors of the whole sequence by name.
        placed: Layouts.
        needs: Names of the tensors that need gradients.
        strided: Function that lays out a copy in memory.
    """
    shared = {name: tensors[name].clone().requires_grad_(name in needs) for name in SHARED}
    return [
        {name: strided(tensors[name][rows]).detach().requires_grad_(name in needs)
         for name in ROWS} | shared
        for rows in placed.positions
    ]  # fmt: skip


def joined(parts, positions):
    """The whole sequence from parts whose rows are at `positions`."""
    whole = parts[0].new_zeros(sum(map(len, positions)), *parts[0].shape[1:])
    for part, rows in zip(parts, positions, strict=True):
        whole[rows] = part.detach()
    return whole


def gradients(shards, placed):
    """Gradients of the whole sequence by name; None for tensors without a gradient on all ranks."""
    found = {name: shards[0][name].grad for name in SHARED}
    for name in ROWS:
        parts = [x[name].grad for x in shards]
        some = [part for part in parts if part is not None]
        assert len(some) in (0, len(parts)), name
        found[name] = joined(parts, placed.positions) if some else None
    return found
