# SPDX-License-Identifier: Apache-2.0
"""Predicted time of DeepSeek-V4's hybrid attention of one layer, in forward and backward.

Window keys, compressed keys, and the index keys of the selection each have their own ring. If the
algorithm of the run is "auto", each ring has its own algorithm, as in training. The rings run one
after the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from .....autotune import select
from .....autotune.candidates import FixedSettings, Workload
from .....autotune.clusters import Cluster
from .....autotune.simulator import IDLE, PassTime
from .....layout import make
from .....masks import Window
from .....masks.compressed import Compressed
from .....schedule.sizes import Sizes
from .....schedule.topology import Topology
from ..account.rings import key_algorithm
from ..settings import BYTES, Settings
from ..shapes.layer_kinds import CSA, KEY_WINDOW
from ..shapes.models import Model


def key_sets(model: Model, run: Settings, kind: str) -> Iterator[tuple[str, Workload]]:
    """Yield the sets of keys that a layer attends to, and the index keys of its selection.

    Args:
        model: Shape of the model.
        run: Settings of the run.
        kind: Kind of the layer, one of `layer_kinds.HYBRID`.

    Yields:
        Kind of the keys (an argument of `key_algorithm`), and workload of attention to them.
    """
    of, rows, layout = model.hybrid, run.seq // run.cp, make(run.layout, cp_size=run.cp)
    assert of is not None
    ratio, index = of.ratio_of(kind), of.index_of(kind)
    sizes = Sizes(
        rows, run.micro_batch, model.heads // run.tp, 1, model.head_dim, model.head_dim, 2, 4,
        BYTES[run.wire], (True, True, False), values_are_keys=True,
    )  # fmt: skip
    streams = run.relay_stream
    yield KEY_WINDOW, Workload(sizes, Window(of.window - 1, 0), layout, streams=streams)
    if not ratio:
        return
    keys, mask = rows // ratio, Compressed(ratio)
    attended = index.top_k if index else None
    # All rows of a compressed key are on one rank, so the compressed keys have the same layout.
    yield (
        kind,
        Workload(
            replace(sizes, key_tokens=keys),
            mask,
            layout,
            attended=attended,
            key_layout=layout,
            streams=streams,
        ),
    )
    if index is not None:
        scores = Sizes(rows, run.micro_batch, index.heads, 1, index.width, 0, 2, 4,
                       BYTES[run.wire], (False, False, False), keys)  # fmt: skip
        yield (
            CSA,
            Workload(scores, mask, layout, attended=run.seq, key_layout=layout, streams=streams),
        )


def hybrid_passes(
    model: Model, cluster: Cluster, run: Settings, topology: Topology, kind: str
) -> tuple[PassTime, PassTime]:
    """Return the time of forward and of backward, without the indexer's loss.

    Args:
        model: Shape of the model.
        cluster: Cluster of GPUs.
        run: Settings of the run.
        topology: Topology of the context-parallel ranks.
        kind: Kind of the layer, one of `layer_kinds.HYBRID`.
    """
    forward = backward = IDLE
    assert model.hybrid is not None
    for of_keys, work in key_sets(model, run, kind):
        algorithm, _ = key_algorithm(run, model.hybrid, of_keys, model.head_dim)
        fixed, nodes = FixedSettings(algorithm, "kv", 1), cluster.nodes(run.tp)
        taken = select.fastest(work, [topology], cluster.rank_rates(), fixed, nodes)
        forward, backward = forward + taken.forward, backward + taken.backward
    return forward, backward
