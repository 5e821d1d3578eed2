"""DeepSeek-V3.2 on 512 H100 by the forecast of `megatron-burst advise`: ours and gathered keys.

Nothing was measured on a GPU. Kernels are assumed to reach the rate of dense attention, or the rate
of memory if reading queries and writing results take longer.
"""

from __future__ import annotations

from dataclasses import replace

import megatron_burst as mb
from benchmarks.report import markdown
from megatron_burst.autotune.gpus import gpu
from megatron_burst.plugins.tools.advise import rivals
from megatron_burst.plugins.tools.advise.account.operators import LayerSizes
from megatron_burst.plugins.tools.advise.account.rings import core_of
from megatron_burst.plugins.tools.advise.forecast.attention_time import attention_time
from megatron_burst.plugins.tools.advise.forecast.layer_time import layer_time
from megatron_burst.plugins.tools.advise.settings import Settings
from megatron_burst.plugins.tools.advise.shapes import models
from megatron_burst.schedule.algorithms import ALGORITHMS as TABLE
from megatron_burst.units import byte_size, duration

MODEL, GPU, GPUS, K = "deepseek-v3.2", "h100", 512, 1024
GRIDS = ((128 * K, 1, 16), (128 * K, 1, 64), (1024 * K, 1, 64), (1024 * K, 8, 64))
ALGORITHMS = ("burst", "multicast", "all_gather")  # ours
TAKEN = " (auto)"


def table() -> str:
    """Return a row for each algorithm, length and number of ranks."""
    model, cluster = models.named(MODEL), mb.Cluster(gpu(GPU), GPUS)
    rows = []
    for seq, tp, cp in GRIDS:
        run = Settings(seq, tp=tp, cp=cp, dp=GPUS // (tp * cp), ep=64, recompute="none", side="kv",
                       layout="striped",
                       intra=cluster.cp_per_node(tp, cp))  # fmt: skip
        x = LayerSizes.of(model, run)
        ways = {name: replace(run, algorithm=name) for name in ALGORITHMS}
        times = {name: attention_time(model, cluster, settings) for name, settings in ways.items()}
        auto = min(times, key=lambda name: times[name].seconds * TABLE[name].handicap)
        for name, settings in ways.items():
            own, core = times[name], core_of(x, settings)
            layer = layer_time(model, cluster, settings).seconds
            rows.append([f"{seq // K}K, TP {tp} x CP {cp}", f"ours, {name}{TAKEN * (name == auto)}",
                         duration(own.forward), duration(own.backward), duration(own.seconds),
                         duration(layer), byte_size(core.forward),
                         byte_size(core.backward)])  # fmt: skip
        own = rivals.attention("all_gather", model, cluster, run)
        layer = layer_time(model, cluster, run, attention=lambda *_, own=own, **__: own).seconds
        core = rivals.core("all_gather", x, run)
        rows.append(["", "gathered, as Megatron", duration(own.forward), duration(own.backward),
                     duration(own.seconds), duration(layer), byte_size(core.forward),
                     byte_size(core.backward)])  # fmt: skip
    heads = ["", "", "forward", "backward", "both", "layer", "buffers, forward",
             "buffers, backward"]  # fmt: skip
    return markdown(heads, rows)
