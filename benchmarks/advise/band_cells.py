"""Every published time and its forecast, at published rates and at rates fitted to its cluster.

`autotune.bands` is derived from these times. No constant was fitted to NVIDIA's NeMo on H100 and
B200, torchtitan on H100, and the other systems of LoongTrain's table. Assumptions: NeMo's TFLOP/s
count all of attention, not its causal half, as `flops_formulas.py` of the same repository does; its
runs recompute nothing outside kernels, and a ring sends keys and values. Torchtitan recomputes
everything and gathers keys and values. Its context parallelism allows FlashAttention 2 and a slower
kernel (the SDPBackend list of its `get_train_context`), so it is forecast at FlashAttention 2's
rate. Llama 3.1 405B is counted with 128 layers instead of 126, because eight stages do not divide
126, and its time is scaled by 126 / 128. MagiAttention's charts are attention calls and not part of
any band: 20 calls of one benchmark would outweigh the steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from benchmarks.advise import attention_fit, burstengine_attention, burstengine_steps
from benchmarks.advise import loongtrain_steps as loongtrain
from benchmarks.advise.published_tables import table
from megatron_burst.autotune.clusters import GB, GPUS, Cluster, Gpu
from megatron_burst.autotune.gpus import with_kernel
from megatron_burst.plugins.tools.advise.forecast.attention_time import (
    RingsOf,
    attention_time,
    cached_ring_passes,
    ring_passes,
)
from megatron_burst.plugins.tools.advise.forecast.step_time import (
    StepTime,
    model_operations,
    step_time,
)
from megatron_burst.plugins.tools.advise.settings import Settings
from megatron_burst.plugins.tools.advise.shapes.model import Model
from megatron_burst.plugins.tools.advise.shapes.models import named

TABLE_4 = "LoongTrain, table 4 (calls)"


class BandCell(NamedTuple):
    """One published time.

    Attributes:
        table, label: Its table and row.
        gpu: Name of the GPU.
        ratio: Published time / forecast, above 1 if the forecast is too short.
        fitted: True if a constant of the forecast was fitted to its table.
        counts: True if a band is derived from it.
    """

    table: str
    label: str
    gpu: str
    ratio: float
    fitted: bool = False
    counts: bool = True

    @property
    def error(self) -> float:
        """Return forecast time / published time, minus one."""
        return 1 / self.ratio - 1


def _nemo(name: str, model: Model, gpu: Gpu, recompute: Any = "none") -> Iterator[BandCell]:
    """Yield NVIDIA's runs, from TFLOP/s per GPU.

    Runs without context parallelism are short. FP8, which is not modelled, dominates them, so no
    band counts them.
    """
    for row in table(name):
        size = {key: int(row[key]) for key in ("tp", "pp", "dp", "cp")}
        run = Settings(
            int(row["seq_k"]) << 10, **size, recompute=recompute, gradients="bf16",
            micro_batches=int(row.get("batch", 4 * size["dp"])) // size["dp"], **RING,
        )  # fmt: skip
        time = step_time(model, Cluster(gpu, run.gpus), run)
        operations = model_operations(model, run.seq) + 6 * model.layers * model.hidden * run.seq
        forecast = operations * time.tokens_per_gpu(run.gpus) / 1e12
        system = "NeMo, Llama-2-7B, H100" if gpu.name == "h100" else "NeMo, Llama-3-8B, B200"
        label = f"{row['seq_k']}K, TP {run.tp}, CP {run.cp}, DP {run.dp}"
        yield BandCell(system, label, gpu.name, forecast / float(row["tflops"]), counts=run.cp > 1)


RING: dict[str, Any] = {"algorithm": "ring", "side": "kv", "wire": "bf16", "route": "ring"}


def nemo_h100(recompute: Any = "none", gpu: Gpu = GPUS["h100"]) -> Iterator[BandCell]:
    """Yield Llama-2-7B, 4K to 1M tokens. Four micro-batches are assumed; no number is published."""
    return _nemo("nemo_llama2_7b_h100", named("llama2-7b"), gpu, recompute)


def nemo_b200() -> Iterator[BandCell]:
    """Yield Llama-3-8B, 8K to 1M tokens."""
    return _nemo("nemo_llama3_8b_b200", named("llama3-8b"), GPUS["b200"])


FLASH_2 = with_kernel(GPUS["h100"], "aten")


def torchtitan(gpu: Gpu = FLASH_2) -> Iterator[BandCell]:
    """Yield Llama 3.1 8B and 405B with FSDP, 32K to 256K tokens.

    Args:
        gpu: The GPU of runs with context parallelism.
    """
    models = {"8b": (named("llama3.1-8b"), 1.0),
              "405b": (replace(named("llama3.1-405b"), layers=128), 126 / 128)}  # fmt: skip
    for row in table("torchtitan_llama3_h100"):
        model, scale = models[row["model"]]
        size = {key: int(row[key]) for key in ("tp", "pp", "dp", "cp")}
        run = Settings(int(row["seq"]), **size, micro_batches=int(row["batch"]), fsdp=True,
                       wire="bf16", lm_head_loss="off", algorithm="all_gather",
                       side="kv")  # fmt: skip
        cluster = Cluster(gpu if run.cp > 1 else GPUS["h100"], run.gpus)
        forecast = step_time(model, cluster, run).tokens_per_gpu(run.gpus) / scale
        label = f"{row['model']}, {run.seq >> 10}K, TP {run.tp}, PP {run.pp}, CP {run.cp}"
        yield BandCell("torchtitan, Llama 3.1, H100", label, "h100",
                       forecast / float(row["tgs"]), counts=run.cp > 1)  # fmt: skip


def trl() -> Iterator[BandCell]:
    """Yield Qwen3-8B, 1M tokens on one node; its time was known before it was predicted."""
    for row in table("trl_qwen3_8b_h100"):
        run = Settings(int(row["seq"]), cp=int(row["cp"]), fsdp=True, offload=1.0,
                       lm_head_loss="recompute", **RING)  # fmt: skip
        time = step_time(named("qwen3-8b"), Cluster(GPUS["h100"], run.gpus), run)
        yield BandCell("TRL, Qwen3-8B, H100", f"{run.seq >> 10}K, CP {run.cp}", "h100",
                       float(row["seconds"]) / time.seconds)  # fmt: skip


def easycontext() -> Iterator[BandCell]:
    """Yield Llama-2-7B on 8 A100, 64K to 700K tokens, with the optimizer on the host."""
    for row in table("easycontext_llama2_7b_a100"):
        dp = int(row["dp"])
        run = Settings(
            int(row["seq"]), dp=dp, cp=int(row["cp"]), micro_batches=int(row["batch"]) // dp,
            fsdp=True, optimizer_offload=1.0, gradients="bf16", lm_head_loss="off", **RING,
        )  # fmt: skip
        time = step_time(named("llama2-7b"), Cluster(GPUS["a100"], run.gpus), run)
        ratio = time.tokens / time.seconds / float(row["tokens_per_s"])
        label = f"{run.seq >> 10}K, CP {run.cp}, DP {run.dp}"
        yield BandCell("EasyContext, Llama-2-7B, A100", label, "a100", ratio)


# Systems of MagiAttention's charts; `ulysses` is the most ranks that share heads.
MAGI_SYSTEMS: dict[str, dict[str, Any]] = {
    "ulysses": {"algorithm": "ulysses", "ulysses": 64}, "ring_p2p": {"algorithm": "ring"},
    "allgather": {"algorithm": "all_gather"}, "usp": {"algorithm": "ring", "ulysses": 8},
    "loongtrain": {"algorithm": "double_ring", "ulysses": 8},
}  # fmt: skip
MAGI_MODEL = Model("MagiAttention's charts", 1, 8192, 64, 8, 8192, 32000)


def magi_calls(rings: RingsOf = ring_passes) -> Iterator[BandCell]:
    """Yield one forward and backward, causal, 8K tokens per GPU."""
    charts = {(row["mask"], row["algo"], row["pass"]): row for row in table("magi_h100")}
    for system, settings in MAGI_SYSTEMS.items():
        for ranks in (8, 16, 32, 64):
            speeds = (float(charts["causal_mask", system, direction][str(ranks)])
                      for direction in ("fwd", "bwd"))  # fmt: skip
            shared = min(settings.get("ulysses", 1), ranks)
            own = settings if shared < ranks else {"algorithm": "ulysses"}
            run = Settings(ranks << 13, cp=ranks, **{**RING, **own, "ulysses": shared})
            time = attention_time(MAGI_MODEL, Cluster(GPUS["h100"], ranks), run, rings=rings)
            forward = 2.0 * run.seq**2 * MAGI_MODEL.heads * MAGI_MODEL.head_dim / ranks
            published = sum(forward * times / speed / 1e12
                            for times, speed in zip((1, 2.5), speeds, strict=True))  # fmt: skip
            label = f"{system}, {ranks} GPUs"
            yield BandCell("MagiAttention's charts, H100 (calls)", label, "h100",
                           published / time.seconds, counts=False)  # fmt: skip


def others_of_loongtrain(rings: RingsOf = ring_passes) -> Iterator[BandCell]:
    """Yield Megatron's ring and DeepSpeed-Ulysses of LoongTrain's table 2.

    The four GQA rows of DeepSpeed-Ulysses repeat its MHA rows digit by digit and are left out.
    """
    for row in table("loongtrain_table2_end_to_end"):
        system, heads = row["system"], row["heads"]
        if system.startswith("hp") or row["tgs"] == "OOM" or (system, heads) == COPIED:
            continue
        shared = loongtrain.RANKS if system == "ds_ulysses" else 1
        run = Settings(
            int(row["seq"]), cp=loongtrain.RANKS, gradients="bf16", lm_head_loss="off",
            ulysses=shared, **{**RING, "algorithm": "ulysses" if shared > 1 else "ring"},
        )  # fmt: skip
        time = _step(attention_fit.MODELS[heads], SHARED_NICS, run, rings)
        ratio = time.tokens_per_gpu(run.gpus) / float(row["tgs"])
        yield BandCell("LoongTrain, table 2 (others)", f"{system}, {heads}, {run.seq >> 10}K",
                       "a100", ratio)  # fmt: skip


COPIED = ("ds_ulysses", "gqa8")
SHARED_NICS = Cluster(GPUS["a100"], loongtrain.RANKS, nics=4, nic_rate=25 * GB)


def _step(model: Model, cluster: Cluster, run: Settings, rings: RingsOf) -> StepTime:
    return step_time(model, cluster, run, attention=partial(attention_time, rings=rings))


def at_published_rates(rings: RingsOf | None = None, every: int = 1) -> list[BandCell]:
    """Return all published times at published rates.

    Args:
        rings: Cache of schedules.
        every: Take only every n-th row of LoongTrain's long tables, to save time.
    """
    rings = rings or cached_ring_passes()
    cells = [*nemo_h100(), *nemo_b200(), *torchtitan(), *trl(), *easycontext(),
             *magi_calls(rings), *others_of_loongtrain(rings)]  # fmt: skip
    for row in loongtrain.published()[::every]:
        time = _step(row.model, SHARED_NICS, row.run, rings)
        ratio = time.tokens_per_gpu(loongtrain.RANKS) / row.published
        cells.append(BandCell("LoongTrain, table 2", row.label, "a100", ratio))
    for row in burstengine_steps.published():
        time = _step(burstengine_steps.MODEL, Cluster(GPUS["a800"], row.gpus), row.run, rings)
        ratio = row.seconds / time.seconds
        cells.append(BandCell("BurstEngine, tables 2 and 5", row.label, "a800", ratio))
    a800 = replace(SHARED_NICS, gpu=GPUS["a800"])
    for (system, seq), value in burstengine_attention.published().items():
        predicted = burstengine_attention.predicted(system, seq, a800, rings)
        cells.append(BandCell("BurstEngine's attention (calls)", f"{system}, {seq >> 10}K", "a800",
                              predicted / value))  # fmt: skip
    a100 = replace(SHARED_NICS, gpus=attention_fit.GPUS)
    for cell in attention_fit.cells()[::every]:
        time = attention_time(cell.model, a100, cell.run, rings=rings)
        cells.append(BandCell(TABLE_4, cell.label, "a100", cell.seconds / time.seconds, True))
    return cells


def at_fitted_rates(rings: RingsOf | None = None, every: int = 1) -> list[BandCell]:
    """Return the times of the clusters to which rates were fitted."""
    rings = rings or cached_ring_passes()
    cells = [
        BandCell("LoongTrain, table 2", row.label, "a100",
                 loongtrain.predicted(row, rings=rings).tokens_per_gpu(loongtrain.RANKS)
                 / row.published, True)
        for row in loongtrain.published()[::every]
    ]  # fmt: skip
    cells += [
        BandCell("BurstEngine, tables 2 and 5", row.label, "a800",
                 row.seconds / burstengine_steps.predicted(row, rings=rings).seconds, True)
        for row in burstengine_steps.published()
    ]  # fmt: skip
    constants = attention_fit.Constants()
    return cells + [
        BandCell(TABLE_4, cell.label, "a100",
                 cell.seconds / attention_fit.predicted(cell, constants, rings).seconds, True)
        for cell in attention_fit.cells()[::every]
    ]  # fmt: skip
