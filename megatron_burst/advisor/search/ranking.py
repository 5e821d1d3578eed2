"""Runs that were found, in order: what fits, what is faster, what is simpler.

Decides which of two runs that tie is taken, and from when on a run cannot fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...autotune.select import TIE
from ..account.memory import Account, Fit, states_of
from ..forecast.step_time import StepTime
from ..settings import Settings
from ..shapes.models import Model


@dataclass(frozen=True)
class Configuration:
    """One run with its predicted time, its memory, and what that leaves of the cluster's."""

    run: Settings
    time: StepTime
    account: Account
    fit: Fit

    @property
    def seconds(self) -> float:
        """Of one step."""
        return self.time.seconds


def least_bytes(model: Model, run: Settings) -> float:
    """Bytes of a GPU below which no account of a run is: states, and what layers leave."""
    states = max(sum(states_of(model, run, stage)[0].values()) for stage in {0, run.pp - 1})
    plain = model.attentions == model.mlps == model.layers
    rows, hidden = run.rows, run.rows / run.tp * model.hidden
    out = rows * (model.heads // run.tp) * model.value_dim
    if not plain:
        left = hidden * (1 - run.offload)
    elif run.recompute == "full":
        left = (hidden + run.store * out) * (1 - run.offload)
    else:  # inputs of both norms, queries, results, and what goes into the last product
        ffn = model.top_k * model.ffn if model.experts else model.ffn
        ffn = min(ffn, model.dense_ffn) if model.moe_layers not in (0, model.layers) else ffn
        left = 2 * hidden + rows * (model.heads // run.tp) * model.head_dim + out
        left += rows * ffn / run.tp
    return states + 2 * left * (model.layers // run.pp)


def needs_more(run: Settings, other: Settings) -> bool:
    """Does a run with the same groups need at least the GPU memory of another one?"""
    if run.layout != other.layout or run.recompute != other.recompute:
        return False
    return (
        run.store >= other.store
        and run.offload <= other.offload
        and run.optimizer_offload <= other.optimizer_offload
        and run.sequence_chunks <= other.sequence_chunks
        and run.mlp_tiles <= other.mlp_tiles
    )


def lacks(each: Configuration) -> float:
    """Bytes that a run that does not fit lacks, on the GPU and the host together."""
    return -min(0.0, each.fit.device) - min(0.0, each.fit.host)


def simplicity(run: Settings) -> tuple[float, ...]:
    """Of runs that tie the one with the least of these is taken, of equals the fastest: what lies
    on the host, pieces, stages, a part of the store, recompute, ranks that share heads."""
    return (
        run.optimizer_offload,
        run.offload,
        run.sequence_chunks,
        run.mlp_tiles,
        run.vpp,
        run.pp > 1,
        run.store not in (0.0, 1.0),
        run.recompute == "full",
        run.ulysses > 1,
    )


def optimistic(groups: Settings) -> tuple[float, ...]:
    """`simplicity` of the simplest run with these groups."""
    return simplicity(replace(groups, recompute="none", store=0.0, offload=0.0, mlp_tiles=1,
                              optimizer_offload=0.0, sequence_chunks=1, ulysses=1))  # fmt: skip


def simplest_first(found: Sequence[Configuration]) -> tuple[Configuration, ...]:
    """By time, but the simplest of those that tie with the fastest first."""
    if not found:
        return ()
    limit = min(each.seconds for each in found) * (1 + TIE)
    tied = [each for each in found if each.seconds <= limit]
    taken = min(tied, key=lambda each: (simplicity(each.run), each.seconds))
    others = sorted((each for each in found if each is not taken), key=lambda each: each.seconds)
    return (taken, *others)
