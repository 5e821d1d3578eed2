"""One rank of `million.py`: a step of `pretrain_gpt.py` with counters of memory and time.

    torchrun --nproc-per-node 4 examples/million_step.py --report FILE [flags of pretrain_gpt.py]

The script trains like `pretrain_gpt.py`, inside a counter of live tensors. Rank N writes FILE.N
with the bytes at the peak of each phase and over time, seconds and processor seconds. Global rank 0
shows the progress. The module contains the measurements and the screen output.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from argparse import Namespace
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # for benchmarks, which are not in a package

import arguments  # noqa: E402
import pretrain_gpt  # noqa: E402
from megatron.core.transformer.transformer_layer import TransformerLayer  # noqa: E402
from model import build_model, build_optimizer, model_config  # noqa: E402

import megatron_burst.megatron as burst  # noqa: E402
from benchmarks.memory.live import LiveTensors  # noqa: E402
from megatron_burst import flags  # noqa: E402
from megatron_burst.megatron import patching  # noqa: E402
from megatron_burst.plugins.longseq.host.mover import HostMemory  # noqa: E402
from megatron_burst.plugins.longseq.offload.tier import tier_of  # noqa: E402
from megatron_burst.plugins.testing import cpu  # noqa: E402
from megatron_burst.units import byte_size  # noqa: E402

BACKWARD = 2.2  # weight of a pair in backward relative to forward, about the kernel's ratio
REPORTED = 8  # kinds of tensors at the peak that the report lists
# The operators of attention on a CPU; the backward ones take dout before q.
OPERATORS = {
    "_scaled_dot_product_flash_attention_for_cpu": 0,
    "_scaled_dot_product_flash_attention_for_cpu_backward": 1,
}


def main() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--report", type=Path, required=True)
    own_args, words = parser.parse_known_args()
    args = arguments.parse_args(words)
    cpu.enable()
    pretrain_gpt.join_processes(args)
    rank = torch.distributed.get_rank()
    report = run(args, show=rank == 0)
    path = own_args.report.with_name(f"{own_args.report.name}.{rank}")
    path.write_text(json.dumps(report))
    torch.distributed.destroy_process_group()


def run(args: Namespace, show: bool) -> dict[str, Any]:
    """Run `pretrain_gpt.run` with counters, and return the report of this rank."""
    burst.install(layout=args.burst_layout)
    config = model_config(args)
    choice = flags.burst_config(args)
    burst.configure(config, choice, seq_length=args.seq_length)
    pretrain_gpt.make_groups(args)
    stages = build_model(args, config)
    optimizer, schedule = build_optimizer(args, config, stages)
    states = [p for stage in stages for p in stage.parameters()]
    states += [p.main_grad for p in states if hasattr(p, "main_grad")]
    with Screen(show, pairs(args)) as screen:
        watch = Watch(states, screen)
        watch.follow(stages[0], optimizer)
        base = resident()
        with watch:
            history = pretrain_gpt.train(args, stages, optimizer, schedule, 0, 0)
    watch.begin("end")
    return {
        "loss": history[-1]["loss"],
        "grad_norm": history[-1]["grad_norm"],
        "startup": burst.startup_line(),
        "states": sum({x.untyped_storage()._cdata: x.nbytes for x in states}.values()),
        "peaks": {phase: peak.bytes for phase, peak in watch.peaks.items()},
        "at_peak": watch.largest(),
        "host": memory.peak if (memory := host_memory()) else 0,
        "resident": {"before": base, "peak": resident()},
        "seconds": watch.seconds,
        "processor": watch.processor,
        "timeline": watch.timeline,
    }


def resident() -> int:
    """Return the peak resident memory of this process in bytes."""
    kilo = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * kilo


def pairs(args: Namespace) -> float:
    """Return the (query, key) pairs of this rank over all heads, with backward weighted."""
    n, every = args.seq_length, args.window_attn_skip_freq
    left = n if args.window_size is None else args.window_size[0]
    total = 0
    for layer in range(1, args.num_layers + 1):
        reach = n if every and layer % every == 0 else min(left, n)
        outside = n - reach  # positions that the last token does not attend to
        total += (n * (n + 1) - outside * (outside + 1)) // 2
    return total * args.num_attention_heads / args.context_parallel_size * (1 + BACKWARD)


class Screen:
    """Progress of the step: a bar on a terminal, otherwise a line per layer; only on rank 0."""

    def __init__(self, active: bool, total: float):
        columns = (
            TextColumn("  {task.description}"),
            BarColumn(None),
            TextColumn("{task.fields[at]}"),
        )
        times = TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn()
        self._bar = Progress(*columns, *times, disable=not (active and sys.stdout.isatty()))
        self._task = self._bar.add_task("forward", total=total, at="")
        self._lines, self._start = active and not sys.stdout.isatty(), time.perf_counter()

    def __enter__(self) -> Screen:
        self._bar.start()
        return self

    def __exit__(self, *exc: Any) -> None:
        self._bar.stop()

    def layer(self, text: str, live: int) -> None:
        """Show the start of a layer."""
        self._bar.update(self._task, description=text, at=f"{byte_size(live)} live")
        if self._lines:
            seconds = time.perf_counter() - self._start
            print(f"  {seconds:7.1f} s  {text}  {byte_size(live)} live", flush=True)

    def advance(self, pairs: float) -> None:
        self._bar.advance(self._task, pairs)


class Watch(LiveTensors):
    """Counter of live tensors by phase and second, of seconds by phase, and of attention pairs."""

    def __init__(self, states: list[torch.Tensor], screen: Screen):
        self._screen, self._start, self._clocks = screen, time.perf_counter(), clocks()
        self.seconds: Counter[str] = Counter()  # wall time
        self.processor: Counter[str] = Counter()  # processor time of all threads
        self.timeline: list[list[float]] = []  # second, its peak device bytes, host bytes
        super().__init__(states, host=in_host_memory)

    def follow(self, model: torch.nn.Module, optimizer: Any) -> None:
        """Register hooks that report the phases and layers of a model."""
        layers = [m for m in model.modules() if isinstance(m, TransformerLayer)]
        for layer in layers:
            layer.register_forward_pre_hook(self._layer)
        self._count = len(layers)
        model.register_forward_pre_hook(lambda *_: self.begin("forward"))
        model.register_forward_hook(lambda *_: self.begin("backward"))
        step = optimizer.step

        def watched() -> Any:
            self.begin("optimizer")
            return step()

        optimizer.step = watched

    def begin(self, phase: str) -> None:
        now = clocks()
        self.seconds[self._phase] += now[0] - self._clocks[0]
        self.processor[self._phase] += now[1] - self._clocks[1]
        self._clocks = now
        super().begin(phase)

    def largest(self) -> list[dict[str, Any]]:
        """Return the kinds of tensors at the highest peak, by descending bytes."""
        total: Counter[tuple] = Counter()
        count: Counter[tuple] = Counter()
        for block in self.peak.blocks:
            if block.kind == "device":
                key = block.operator, block.shape, str(block.dtype), block.phase
                total[key] += block.bytes
                count[key] += 1
        names = "operator", "shape", "dtype", "phase"
        return [
            dict(zip(names, key, strict=True)) | {"count": count[key], "bytes": size}
            for key, size in total.most_common(REPORTED)
        ]

    def _layer(self, layer: TransformerLayer, _: Any) -> None:
        kind = "recompute and backward of" if self._phase == "backward" else "forward of"
        text = f"{kind} layer {layer.layer_number}/{self._count}"
        self._screen.layer(text, self.bytes["device"])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = super().__torch_dispatch__(func, types, args, kwargs)
        name = func.name().partition("::")[2].partition(".")[0]
        if name in OPERATORS:
            self._screen.advance(self._work(name, args))
        return output

    @staticmethod
    def _work(name: str, args: tuple) -> float:
        """Return the weighted pairs of an attention call: a triangle if it is causal, else all."""
        backward = OPERATORS[name]
        q, k = args[backward : backward + 2]
        position = 7 if backward else 4
        causal = len(args) > position and args[position]  # torch omits trailing default values
        s, t = q.shape[2], k.shape[2]
        visible = s * (s + 1) // 2 if causal else s * t
        return visible * q.shape[0] * q.shape[1] * (BACKWARD if backward else 1)

    def _add(self, kind: Any, size: int) -> None:
        super()._add(kind, size)
        second = time.perf_counter() - self._start
        memory, device = host_memory(), self.bytes["device"]
        host = memory.used if memory else 0
        if not self.timeline or int(second) > int(self.timeline[-1][0]):
            self.timeline.append([round(second, 2), device, host])
        elif device > self.timeline[-1][1]:
            self.timeline[-1][1:] = [device, host]


def clocks() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def host_memory() -> HostMemory | None:
    """Return the host memory of `--burst-offload`; None without offload."""
    patches = patching.installed("burst")
    tier = tier_of(patches) if patches else None
    return tier.host if tier else None


def in_host_memory(tensor: torch.Tensor) -> bool:
    memory = host_memory()
    return memory is not None and memory.owns(tensor)


if __name__ == "__main__":
    main()
