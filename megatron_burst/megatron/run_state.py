# SPDX-License-Identifier: Apache-2.0
"""State of a run that the replacements of Megatron's functions share until `uninstall`.

All values are listed in one class, with the modules that own them. The state belongs to the set of
patches "burst" (`patching.run_state`): removal of the patches removes the state. Modules that own a
value import this module, so their classes are named only in the docstring.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class RunState:
    """State of a run. A value has its default until the module that owns it sets it.

    Attributes:
        for_scripts: Whether `install` added flags to the command line of Megatron-LM.
        flags: Values of our flags and the parallel sizes, by flag name; set when arguments are
            validated.
        clusters_compared: Whether ranks compared the contents of their cluster files.
        selecting: Whether configurations inside `patching.selecting_burst` select BurstAttention.
        layout: Layout of the run, from `install` or the first `configure_model`.
        slicing_patched: Whether the functions that cut batches and angles are replaced.
        cut: `data.cut.BatchCut` from the first `configure_model`.
        documents: Flag of Megatron-LM by which its data loader separates documents; set when
            arguments are validated, read in every forward.
        packs_documents: Whether a configuration has `--burst-pack documents`.
        logged: Log lines that appear once in a run, or names of their subjects.
        packs: `data.packed.Packs`, the cache of the documents of packed batches.
        mrope_angles: Weak reference to the last angles of M-RoPE.
        rotary_tables: `data.rope.RotaryTables`.
        redundant_masks: `WeakIdKeyDictionary` from a mask tensor to its version, and whether the
            mask changes no result.
        plan_books: `attention.plan_book.PlanBook` by context-parallel group and topology.
        planner: Thread pool of `attention.plans_ahead`, whose thread makes plans.
        read_ahead: (data loader, batch) of each batch that a step read and did not use.
        next_pack: `data.packed.Pack` of the batch that was read ahead last; None if the batch after
            the current one is unknown.
        shares_packs: Whether tensor-parallel rank 0 broadcasts the next pack (`data.next_pack`).
        lm_head_startup: Line that the fused loss logged in its first forward.
        mtp_counts: (group, whether `process_mtp_loss` sums counts over this group).
        metrics: `step_metrics.StepMetrics`, if the run writes metrics.
        translate_error: Translates flags in error messages to settings of recipes.
        plugins: State of plugins, by keys that each plugin defines.
    """

    for_scripts: bool = False
    flags: dict[str, Any] | None = None
    clusters_compared: bool = False
    selecting: bool = False
    layout: str | None = None
    slicing_patched: bool = False
    cut: Any = None
    documents: str | None = None
    packs_documents: bool = False
    logged: set[str] = field(default_factory=set)
    packs: Any = None
    mrope_angles: Any = None
    rotary_tables: Any = None
    redundant_masks: Any = None
    plan_books: dict[tuple, Any] = field(default_factory=dict)
    planner: Any = None
    read_ahead: list[tuple[Any, Any]] = field(default_factory=list)
    next_pack: Any = None
    shares_packs: bool = False
    lm_head_startup: str | None = None
    mtp_counts: list[tuple[Any, bool]] = field(default_factory=list)
    metrics: Any = None
    translate_error: Callable[[str], str] | None = None
    plugins: dict[str, Any] = field(default_factory=dict)
