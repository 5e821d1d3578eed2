# SPDX-License-Identifier: Apache-2.0
"""Checks of functions of Megatron and Transformer Engine that cut, shift or reorder batches.

The run has one layout. Functions that bypass `get_batch_on_this_cp_rank` may use another layout.
Ranks would then hold other tokens than attention expects. The shapes would be valid, so no error
would occur. Each of these functions is wrapped if the installed version has it. The wrapper raises
`ValueError` if the function's layout differs from the layout of the run. `check_cut` checks packs
in attention, because an unknown function may have cut them.

`Packs.note_cut` records every pack that this process cuts in the layout of the run. A pack without
a record was cut by other code. Its layout is then assumed to be contiguous if
`PackedSeqParams.cp_partition_mode` is "contiguous", and otherwise zigzag within each document (the
convention of Megatron and Transformer Engine). For a pack with a record, `cp_partition_mode`
"zigzag" is ignored, because it is the default.

The wrappers follow the interfaces of Megatron-LM in September 2026, after commit d98e8a64:
`context_parallel/utils.py` (pull request 6912), `sequence_roll.py`, `conversion.py` and
`partition.py` in the same package, and `transformer/mtp_sequence_roll.py` of the branch dev. For
Transformer Engine they follow `context_parallel.py` of 2.20.2 (pull request 3221).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state

from ...layout import DocumentZigzag
from .. import homes, patching
from ..patching import Wrap, bound_to, given_to
from ..selection import STREAMS, burst_of, splits_with_burst
from .cut import BatchCut
from .packed import Pack, packs

_ENGINE = "transformer_engine_torch"
_ENGINE_PYTHON = "transformer_engine.pytorch.attention.dot_product_attention.context_parallel"
# Strategies of Transformer Engine's `CPLoadBalancingStrategy`, and our names of their layouts.
_STRATEGIES = {"DUAL_CHUNK_SWAP": "zigzag", "NO_LOAD_BALANCE": "contiguous"}


def guard_other_cuts(patches: patching.PatchSet, layout: str) -> None:
    """Replace the functions of Megatron and Transformer Engine that cut batches themselves.

    Args:
        patches: the installed set of patches.
        layout: the layout of the run.
    """
    for wrap in _megatron_wraps(layout):
        patches.wrap(*wrap)
    if layout != "zigzag":  # thd_get_partitioned_indices supports only zigzag
        _guard(patches, _ENGINE, "thd_get_partitioned_indices", partial(_native_indices, layout))
    _guard(patches, _ENGINE_PYTHON, "get_thd_partitioned_indices", partial(_indices, layout))
    _guard(patches, _ENGINE_PYTHON, "get_batch_on_this_cp_rank", partial(_engine_batch, layout))


def check_cut(params: Any, pack: Pack, cut: BatchCut, size: int, cuts: bool) -> None:
    """Raise an error if ranks hold other tokens of a pack than the run's layout requires.

    Other code than this package may have distributed ("cut") the pack over the ranks.

    Args:
        params: the `PackedSeqParams` of the pack.
        pack: the documents of the pack.
        cut: how the run distributes batches over ranks.
        size: number of ranks that hold the pack.
        cuts: whether this rank distributes its batches itself (see `cuts_batches`).

    Raises:
        ValueError: The pack was distributed in another layout.
    """
    if size == 1:
        return
    mode = partition_mode(params, cut)
    if not cuts or packs().was_cut(pack):
        return
    if pack.spans is not None and len(pack.bounds) == 2 and cut.name != "balanced":
        return  # `vision.with_spans` of one sequence, which was cut as an unpacked batch
    if mode == "contiguous":
        fits = pack.end == pack.total  # a loader may have clipped the lengths to its own rows
    else:
        fits = isinstance(pack.layout(cut, size), DocumentZigzag)
    if fits:
        return
    remedy = (
        f"pad every document to a multiple of 2 x --context-parallel-size ({2 * size}) tokens"
        if cut.name == "zigzag"
        else "use --burst-layout zigzag"
    )
    raise patching.user_error(
        f"layout {cut.name}: another function (of Transformer Engine, or a loader for another "
        f"model) cut the {pack.total} tokens of this pack, in zigzag order within each document or "
        "in its own order. In the training process, cut whole packs with "
        "utils.get_batch_on_this_cp_rank of Megatron-Core or megatron_burst.megatron."
        f"shard_sequence; or {remedy}"
    )


def partition_mode(params: Any, cut: BatchCut) -> str:
    """Return `PackedSeqParams.cp_partition_mode`, "zigzag" by default.

    Args:
        params: the `PackedSeqParams`.
        cut: how the run cuts batches.

    Raises:
        ValueError: The value contradicts the layout of the run.
    """
    mode = getattr(params, "cp_partition_mode", None) or "zigzag"
    if mode not in ("zigzag", cut.name):
        raise patching.user_error(
            f"packed_seq_params: cp_partition_mode is {mode!r}, and the run has --burst-layout "
            f"{cut.name}, so rows would get positions of other rows; "
            + (f"use --burst-layout {mode}, or " if mode in STREAMS else "")
            + "omit cp_partition_mode"
        )
    return mode


def cuts_batches(config: Any, pg_collection: Any) -> bool:
    """Return whether this rank cuts its batches itself.

    Other ranks of a tensor-parallel group may receive batches that tensor-parallel rank 0 has cut,
    and later pipeline stages receive activations.
    """
    if pg_collection.tp.rank() != 0:
        return False
    if getattr(config, "pipeline_model_parallel_size", 1) == 1:
        return True
    return parallel_state.get_pipeline_model_parallel_rank() == 0


def refuse_layout(layout: str, function_layout: str, tokens: int | None, name: str) -> None:
    """Raise an error if a function cuts batches in another layout than the run.

    Args:
        layout: the layout of the run.
        function_layout: the layout of the function.
        tokens: tokens of the pack; None for a batch that is not packed.
        name: the name of the function.

    Raises:
        ValueError: The layouts differ.
    """
    if function_layout == layout:
        return
    batch_text = "this batch" if tokens is None else f"the {tokens} tokens of this pack"
    remedy = f"use --burst-layout {function_layout}, or " if function_layout in STREAMS else ""
    raise patching.user_error(
        f"--burst-layout {layout}: {name} would cut {batch_text} in {function_layout} order, which "
        f"attention does not expect: {remedy}cut whole packs with "
        "megatron_burst.megatron.shard_sequence"
    )


def _megatron_wraps(layout: str) -> list[Wrap]:
    """Return a wrapper for each function in the table that the installed Megatron has."""
    core = "megatron.core"
    rows = [
        (f"{core}.context_parallel.utils", "get_batches_on_this_cp_rank",
         ["batch", "boundary_layout", "additional_layouts", "use_per_sequence_balancing"],
         _batches),
        (f"{core}.context_parallel.partition", "get_cp_partition_indices",
         ["cu_seqlens", "total_tokens", "cp_size", "layout"], _partition),
        (f"{core}.context_parallel.sequence_roll", "roll_contiguous", ["cp_group"], _roll),
        (f"{core}.context_parallel.sequence_roll", "roll_contiguous_fields", ["cp_group"], _roll),
        (f"{core}.transformer.mtp_sequence_roll", "prepare_mtp_sequence_roll_context",
         ["cp_group", "packed_seq_params"], _roll_context),
    ]  # fmt: skip
    name = "convert_module_input_tensors_cp_partition_mode"
    home = next(
        (package for package in ("context_parallel", "context_parallel_layout")
         if homes.imported(f"{core}.{package}.conversion") is not None), None,
    )  # fmt: skip
    if home is not None:
        names = ["hidden_states", "packed_seq_params", "target_partition_mode", "config"]
        rows.append((f"{core}.{home}.conversion", name, names, _conversion))
    return [
        Wrap(module, function, names, partial(around, layout))
        for path, function, names, around in rows
        if hasattr(module := homes.imported(path), function)
    ]


def _batches(layout: str, original: Callable, *args: Any, **kwargs: Any) -> Any:
    """Run `context_parallel.utils.get_batches_on_this_cp_rank` in the layout of the run.

    With per-sequence balancing the original cuts packs itself, in zigzag order within padded
    documents; otherwise it calls `get_batch_on_this_cp_rank`. In a zigzag run, both methods give
    the same positions.
    """
    bound = bound_to(original, args, kwargs)
    bound.apply_defaults()
    arguments = bound.arguments
    if arguments["cp_group"].size() == 1 and not arguments.get("is_hybrid_cp"):
        return original(*args, **kwargs)
    # Megatron knows only these two layouts; `get_batch_on_this_cp_rank` cuts in any other layout.
    run_layout = layout if layout in STREAMS else "zigzag"
    requested = {arguments["boundary_layout"], *arguments["additional_layouts"]}
    if requested not in ({"zigzag"}, {run_layout}):
        raise patching.user_error(
            f"--burst-layout {layout}: get_batches_on_this_cp_rank was called for layouts "
            f"{' and '.join(sorted(requested))}, and BurstAttention exchanges rows itself: remove "
            "--linear-cp-layout and --attention-cp-layout, or use --burst-layout contiguous "
            "(with --burst-attention-layout zigzag for attention in zigzag order)"
        )
    arguments["boundary_layout"], arguments["additional_layouts"] = run_layout, ()
    if layout != "zigzag":
        arguments["use_per_sequence_balancing"] = False
    return original(*bound.args, **bound.kwargs)


def _partition(layout: str, original: Callable, *args: Any, **kwargs: Any) -> Any:
    """Run `context_parallel.partition.get_cp_partition_indices` and record the cut.

    Raise `ValueError` if its layout is not the layout of the run.
    """
    arguments = given_to(original, args, kwargs)
    if arguments["cp_size"] > 1:
        _note(layout, arguments["layout"], arguments["cu_seqlens"], arguments["total_tokens"],
              "get_cp_partition_indices of Megatron-Core")  # fmt: skip
    return original(*args, **kwargs)


def _conversion(layout: str, original: Callable, *args: Any, **kwargs: Any) -> Any:
    """Run `convert_module_input_tensors_cp_partition_mode` without an exchange to zigzag rows.

    Megatron's attention accepts only zigzag rows, and our attention accepts rows in the run's
    layout. The wrapper requests the layout that the rows have, for which the original returns its
    input.
    """
    bound = bound_to(original, args, kwargs)
    arguments = bound.arguments
    config, params, group = (
        arguments["config"],
        arguments["packed_seq_params"],
        arguments.get("cp_group"),
    )
    burst = burst_of(config)
    shared = group is not None and group.size() > 1
    splits = shared and splits_with_burst(config, burst)
    source = getattr(params, "cp_partition_mode", None) or arguments.get("source_partition_mode")
    source = source or getattr(config, "cp_partition_mode", None) or "zigzag"
    if splits and arguments["target_partition_mode"] == "zigzag" and source != "zigzag":
        refuse_layout(layout, source, None, "cp_partition_mode")
        arguments["target_partition_mode"] = source
    return original(*bound.args, **bound.kwargs)


def _roll(layout: str, original: Callable, *args: Any, **kwargs: Any) -> Any:
    """Run a shift of `context_parallel.sequence_roll` (for MTP), which assumes contiguous tokens.

    Raise `ValueError` if the layout of the run is not contiguous.
    """
    group = given_to(original, args, kwargs).get("cp_group")
    if group is not None and group.size() > 1 and layout != "contiguous":
        raise patching.user_error(
            f"--burst-layout {layout} with --mtp-num-layers: Megatron shifts the tokens of this "
            "batch in contiguous order (cp_partition_mode or --attention-cp-layout contiguous); "
            "use --burst-layout contiguous, or remove Megatron's setting"
        )
    return original(*args, **kwargs)


def _roll_context(layout: str, original: Callable, *args: Any, **kwargs: Any) -> Any:
    """Run `mtp_sequence_roll.prepare_mtp_sequence_roll_context` of Megatron-LM's branch dev.

    If the layouts differ, return None: Megatron then calls `roll_tensor`, which our patches adapt
    to the layout of the run.
    """
    arguments = given_to(original, args, kwargs)
    group, params = arguments["cp_group"], arguments["packed_seq_params"]
    if params is None or group is None or group.size() == 1:
        return original(*args, **kwargs)
    mode = partition_mode(params, BatchCut(layout))
    return original(*args, **kwargs) if mode == layout else None


def _guard(patches: patching.PatchSet, path: str, name: str, around: Callable) -> None:
    """Replace a function of Transformer Engine, if it is loaded and has the function."""
    home = sys.modules.get(path)
    original: Any = getattr(home, name, None)
    if original is not None:
        replacement = functools.wraps(original)(partial(around, original))
        patches.replace_function(home, name, replacement)


def _native_indices(
    layout: str, original: Callable, cu_seqlens: Any, tokens: int, size: int, rank: int
) -> Any:
    """Run `thd_get_partitioned_indices` of Transformer Engine's library, which is always zigzag.

    NeMo 2, Megatron's `MimoModel` and models of Megatron-Bridge call it.
    """
    if size > 1:
        refuse_layout(layout, "zigzag", tokens, "thd_get_partitioned_indices of Transformer Engine")
    return original(cu_seqlens, tokens, size, rank)


def _indices(layout: str, original: Callable, *args: Any, **kwargs: Any) -> Any:
    """Run `get_thd_partitioned_indices` of Transformer Engine and record the cut."""
    arguments = given_to(original, args, kwargs)
    if arguments["cp_size"] > 1:
        ends, tokens = arguments["cu_seqlens_padded"], arguments["total_tokens"]
        name = "get_thd_partitioned_indices of Transformer Engine"
        _note(layout, _order_of(arguments), ends, tokens, name)
    return original(*args, **kwargs)


def _engine_batch(layout: str, original: Callable, *args: Any, **kwargs: Any) -> Any:
    """Run `get_batch_on_this_cp_rank` of Transformer Engine for a packed batch; record the cut."""
    arguments = given_to(original, args, kwargs)
    ends = arguments["cu_seqlens_padded"]
    if torch.distributed.get_world_size(arguments.get("cp_group")) > 1:
        _note(layout, _order_of(arguments), ends, int(ends[-1]),
              "get_batch_on_this_cp_rank of Transformer Engine")  # fmt: skip
    return original(*args, **kwargs)


def _order_of(arguments: dict[str, Any]) -> str:
    """Return the layout of a call's load-balancing strategy; zigzag if it has no such argument."""
    strategy = arguments.get("load_balancing_strategy")
    name = "DUAL_CHUNK_SWAP" if strategy is None else strategy.name
    return _STRATEGIES.get(name, name)


def _note(layout: str, function_layout: str, ends: Any, tokens: int, name: str) -> None:
    """Record that a function cut a pack; raise `ValueError` if its layout is not the run's."""
    refuse_layout(layout, function_layout, tokens, name)
    if ends is not None and layout != "zigzag":
        packs().note_cut(packs().of(tokens, ends))
