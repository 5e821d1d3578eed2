"""The step that `million.py` takes: the model, its command line, its memory by the account.

Owns the model and its sizes. It needs no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_burst.plugins.tools.advise.account.memory import account
from megatron_burst.plugins.tools.advise.settings import Settings
from megatron_burst.plugins.tools.advise.shapes.models import Model

VOCABULARY = 320  # bytes and the end of a document, padded to a multiple of 64


@dataclass(frozen=True)
class Job:
    """What is run, but for the number of ranks. window: positions that a layer sees, itself
    included; every `full_every`-th layer sees all. offload to mlp_tiles
    are the flags of that name; dtype: bf16 or fp32, and the memory account knows bf16 alone."""

    seq_length: int = 1_000_000
    layers: int = 8
    hidden: int = 128
    ffn: int = 384
    heads: int = 1
    width: int = 8
    window: int = 1024
    full_every: int = 4
    offload: str = "1"
    sequence_chunks: int = 8
    mlp_tiles: int = 8
    dtype: str = "bf16"

    def flags(self, prefix: str, ranks: int) -> list[str]:
        """The command line of `pretrain_gpt.py`."""
        whole, own = self.full_every, f"--burst-sequence-chunks {self.sequence_chunks}"
        line = f"""
            --data-path {prefix} --seq-length {self.seq_length} --train-iters 1 --seed 1234
            --num-layers {self.layers} --hidden-size {self.hidden} --ffn-hidden-size {self.ffn}
            --num-attention-heads {self.heads} --kv-channels {self.width} --init-method-std 0.09
            --window-size {self.window - 1},0 --window-attn-skip-freq {whole}
            --context-parallel-size {ranks} --context-parallel-algo burst
            --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
            --burst-attention-store 1 --burst-lm-head-loss single_pass
            --burst-offload {self.offload} {own} --burst-mlp-tiles {self.mlp_tiles}
            --distributed-timeout-minutes 60"""
        return [*line.split(), *["--bf16"] * (self.dtype == "bf16")]

    def account(self, ranks: int, plain: bool = False):
        """The memory of one rank, as `megatron-burst memory` counts it; plain: without our flags
        of memory."""
        model = Model(
            "million", self.layers, self.hidden, self.heads, self.heads, self.ffn, VOCABULARY,
            head_dim=self.width, tied=True,
        )  # fmt: skip
        own: dict[str, Any] = {} if plain else {
            "offload": float(self.offload), "sequence_chunks": self.sequence_chunks,
            "mlp_tiles": self.mlp_tiles,
        }  # fmt: skip
        return account(
            model,
            Settings(self.seq_length, cp=ranks, store=1.0, path="cpu",
                     distributed_optimizer=False, **own),
        )  # fmt: skip

    @property
    def pairs(self) -> int:
        """(query, key) pairs that attention sees forward, of all layers and heads."""
        n = self.seq_length
        full = n * (n + 1) // 2
        outside = max(0, n - self.window)
        windows = full - outside * (outside + 1) // 2
        whole = self.layers // self.full_every
        return self.heads * (whole * full + (self.layers - whole) * windows)
