"""Model of `million.py`: its sizes, its command line, and its predicted memory.

The module does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_burst.plugins.tools.advise.account.memory import account
from megatron_burst.plugins.tools.advise.settings import Settings
from megatron_burst.plugins.tools.advise.shapes.models import Model

VOCABULARY = 320  # 256 bytes and the end of a document, padded to a multiple of 64


@dataclass(frozen=True)
class Job:
    """Settings of the step, except the number of ranks.

    Attributes:
        seq_length: Tokens of the sequence.
        layers: Number of layers.
        hidden: Width of the model.
        ffn: Width of the MLP.
        heads: Attention heads.
        width: Width of a head.
        window: Positions that a token attends to, including its own.
        full_every: Every `full_every`-th layer has full attention.
        offload: Value of --burst-offload.
        sequence_chunks: Value of --burst-sequence-chunks.
        mlp_tiles: Value of --burst-mlp-tiles.
        dtype: bf16 or fp32; the memory account supports only bf16.
    """

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
        """Return the command line of `pretrain_gpt.py`."""
        chunks = f"--burst-sequence-chunks {self.sequence_chunks}"
        line = f"""
            --data-path {prefix} --seq-length {self.seq_length} --train-iters 1 --seed 1234
            --num-layers {self.layers} --hidden-size {self.hidden} --ffn-hidden-size {self.ffn}
            --num-attention-heads {self.heads} --kv-channels {self.width} --init-method-std 0.09
            --window-size {self.window - 1},0 --window-attn-skip-freq {self.full_every}
            --context-parallel-size {ranks} --context-parallel-algo burst
            --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
            --burst-attention-store 1 --burst-lm-head-loss single_pass
            --burst-offload {self.offload} {chunks} --burst-mlp-tiles {self.mlp_tiles}
            --distributed-timeout-minutes 60"""
        return [*line.split(), *["--bf16"] * (self.dtype == "bf16")]

    def account(self, ranks: int, plain: bool = False):
        """Return the memory of one rank, as `megatron-burst memory` counts it.

        Args:
            ranks: Number of ranks.
            plain: Count without offload, row chunks and MLP tiles.
        """
        model = Model(
            "million", self.layers, self.hidden, self.heads, self.heads, self.ffn, VOCABULARY,
            head_dim=self.width, tied=True,
        )  # fmt: skip
        savings: dict[str, Any] = {} if plain else {
            "offload": float(self.offload), "sequence_chunks": self.sequence_chunks,
            "mlp_tiles": self.mlp_tiles,
        }  # fmt: skip
        return account(
            model,
            Settings(self.seq_length, cp=ranks, store=1.0, path="cpu",
                     distributed_optimizer=False, **savings),
        )  # fmt: skip

    @property
    def pairs(self) -> int:
        """Visible (query, key) pairs of a forward pass, over all layers and heads."""
        n = self.seq_length
        full = n * (n + 1) // 2
        outside = max(0, n - self.window)
        windows = full - outside * (outside + 1) // 2
        full_layers = self.layers // self.full_every
        return self.heads * (full_layers * full + (self.layers - full_layers) * windows)
