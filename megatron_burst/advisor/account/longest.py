"""The longest sequence that fits, and what then binds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from ..clusters import Cluster
from ..settings import Settings
from ..shapes.models import Model
from .memory import Account, Fit, account, fit
from .remedies import does_not_fit, own_flag

GRANULE = 1 << 15  # tokens: sequences are multiples of it, and of 2 x cp


@dataclass(frozen=True)
class Longest:
    """The longest sequence of a run on a cluster: the run at that length, its memory, what is left,
    and what the next longer one lacks."""

    run: Settings
    account: Account
    left: Fit
    binds: str


def longest(model: Model, cluster: Cluster, run: Settings) -> Longest:
    """The longest sequence of `run`, whose own length does not count.

    ValueError, with what would help, if not even a granule of tokens fits.
    """
    unit = 2 * run.cp * -(-GRANULE // (2 * run.cp))

    def tried(units: int) -> tuple[Account, Fit]:
        found = account(model, replace(run, seq=units * unit), every=False)
        return found, fit(found, cluster)

    low, high = 0, 1
    while tried(high)[1].fits:
        low, high = high, 2 * high
    while high - low > max(1, low // 500):
        middle = (low + high) // 2
        low, high = (middle, high) if tried(middle)[1].fits else (low, middle)
    if not low:
        raise ValueError(does_not_fit(tried(1)[0], cluster, own_flag))
    found, left = tried(low)
    _, beyond = tried(high)
    binds = beyond.binds if beyond.device < 0 else "host memory"
    return Longest(found.run, found, left, binds)


def best(model: Model, cluster: Cluster, runs: Iterable[Settings]) -> Longest:
    """Of these runs that with the longest sequence; runs that do not fit are passed over."""
    found: list[Longest] = []
    errors: list[str] = []
    for run in runs:
        try:
            found.append(longest(model, cluster, run))
        except ValueError as error:
            errors.append(str(error))
    if not found:
        raise ValueError(errors[-1] if errors else "no run to try")
    return max(found, key=lambda one: one.run.seq)


def layouts_of(model: Model, cluster: Cluster, run: Settings) -> Iterator[Settings]:
    """The run with every tensor-parallel size that fits a node and the heads; the others are its
    context-parallel ranks, more than one if rows are cut into chunks."""
    tp = 1
    while tp <= cluster.ranks_per_node:
        fits = model.heads % tp == 0 and model.kv_heads % tp == 0 and model.carried(tp)
        if cluster.gpus % (tp * run.pp) == 0 and fits:
            intra, cp = max(1, cluster.ranks_per_node // tp), cluster.gpus // tp // run.pp
            if cp > 1 or run.sequence_chunks == 1:
                yield replace(run, tp=tp, cp=cp, dp=1, intra=intra)
        tp *= 2
