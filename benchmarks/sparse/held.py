"""Bytes that sparse attention sends and holds, by ring and by all-gather, counted on CPU ranks.

    python -m benchmarks.sparse --parts held --tokens 8192

One layer with the latent of DeepSeek-V3.2 (576 columns, values the first 512) and fewer heads:
selection, attention forward and backward. Held bytes are the bytes of messages among the live
storages at the peak, in chunks (keys of one rank).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

import megatron_burst as mb

from ..memory.live import LiveTensors
from ..ranks import on_ranks

WIDTH, VALUES, HEADS, INDEX_HEADS, INDEX_WIDTH = 576, 512, 2, 2, 128


def layer(groups: mb.Groups, rows: int, top_k: int, algorithm: str) -> dict[str, tuple[int, int]]:
    """Map each phase to (bytes sent, bytes of messages at the peak) of this rank."""
    torch.manual_seed(groups.rank)
    sizes = (INDEX_HEADS, INDEX_WIDTH), (1, INDEX_WIDTH), (INDEX_HEADS,), (HEADS, WIDTH), (1, WIDTH)
    *index, q, k = (torch.randn(rows, 1, *size) for size in sizes)
    q, k = q.requires_grad_(), k.requires_grad_()
    phase_bytes: dict[str, tuple[int, int]] = {}
    options: Any = {"groups": groups, "algorithm": algorithm}
    with LiveTensors() as live:

        def phase(name: str, run: Any) -> Any:
            sent = groups.counters.intra
            live.begin(name)
            result = run()
            # `comm.packing` allocates a message as a 1D tensor of bytes
            rooms = [
                block.bytes
                for block in live.peaks[name].blocks
                if block.dtype == torch.uint8 and len(block.shape) == 1
            ]
            phase_bytes[name] = groups.counters.intra - sent, sum(rooms)
            return result

        live.begin("start")
        for tensor in (*index, q, k):
            tensor.view(-1)
        chosen = phase("select", lambda: mb.select(*index, rule="dsa", top_k=top_k, **options))
        out = phase(
            "forward",
            lambda: mb.sparse_attention(q, k, None, chosen, value_width=VALUES, **options),
        )
        phase("backward", lambda: out.sum().backward())
    return phase_bytes


def on_rank(tokens: int, top_k: int, algorithm: str) -> dict[str, tuple[int, int]]:
    world = dist.group.WORLD
    assert world is not None
    groups = mb.Groups.flat(world)
    return layer(groups, tokens // groups.size, top_k, algorithm)


def table(tokens: int, ranks: int = 4, top_k: int = 64) -> str:
    """Return a row for each algorithm and pass."""
    rows, lines = tokens // ranks, []
    chunks = {"select": rows * INDEX_WIDTH * 4, "forward": rows * WIDTH * 4}
    chunks["backward"] = chunks["forward"]
    for algorithm in ("burst", "all_gather"):
        results = on_ranks(ranks, on_rank, tokens, top_k, algorithm)
        for phase, chunk in chunks.items():
            sent = max(result[phase][0] for result in results)
            held = max(result[phase][1] for result in results)
            lines.append(
                f"{algorithm:>10} {phase:>8}: a chunk {chunk:,} bytes, a rank sends at most "
                f"{sent / chunk:.2f} chunks, holds messages of {held / chunk:.2f}"
            )
    return "\n".join(lines)
