"""Stand-ins for the modules of Transformer Engine that models of Megatron-Bridge name, on the CPU:
Megatron's own linear layers with a norm before them, and attention written out as a dense matrix.

`use` must come before Bridge's module of the model is imported, which looks for them then.
"""

import importlib
import math

import torch
from megatron.core import tensor_parallel
from megatron.core.extensions import transformer_engine
from megatron.core.transformer.module import MegatronModule


class Norm(torch.nn.Module):
    """RMS norm whose weight counts from one."""

    def __init__(self, config, hidden_size, eps=1e-6, **_):
        super().__init__()
        self.weight, self.eps = torch.nn.Parameter(torch.zeros(hidden_size)), eps

    def forward(self, x):
        return x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt() * (1 + self.weight)


class NormColumn(tensor_parallel.ColumnParallelLinear):
    def __init__(self, input_size, output_size, *, config, **named):
        super().__init__(input_size, output_size, config=config, **named)
        self.norm = Norm(config, input_size)

    def forward(self, x, *args, **named):
        return super().forward(self.norm(x), *args, **named)


class Row(tensor_parallel.RowParallelLinear):
    """Under the name that Bridge's classes derive from."""


class Dense(MegatronModule):
    """What Transformer Engine's attention computes on one rank, of [s, 1, heads, width].

    A mask of kind arbitrary is a tensor, true where a key is hidden; a window of (left, 0) hides
    keys further back, and none ahead that such a mask shows.
    """

    def __init__(
        self, config, layer_number, attn_mask_type, attention_type, attention_dropout=None,
        softmax_scale=None, k_channels=None, v_channels=None, cp_comm_type=None,
        pg_collection=None,
    ):  # fmt: skip
        super().__init__(config=config)
        assert config.context_parallel_size == 1
        self.scale, self.kind = softmax_scale, attn_mask_type.name
        assert config.window_size is None or config.window_size[1] == 0
        self.left = None if config.window_size is None else config.window_size[0]
        self.softmax_offset = None
        if getattr(config, "softmax_type", "vanilla") == "learnable":
            self.softmax_offset = torch.nn.Parameter(torch.zeros(config.num_attention_heads))

    def forward(
        self, query, key, value, attention_mask, attn_mask_type=None, attention_bias=None,
        packed_seq_params=None, num_splits=None,
    ):  # fmt: skip
        (s, _, heads, width), per = query.shape, query.shape[2] // key.shape[2]
        key, value = (x.repeat_interleave(per, 2)[:, 0].transpose(0, 1) for x in (key, value))
        logits = query[:, 0].transpose(0, 1) @ key.transpose(1, 2)
        logits = logits * (1 / math.sqrt(width) if self.scale is None else self.scale)
        behind = torch.arange(s)[:, None] - torch.arange(s)
        seen = behind >= 0
        if self.kind == "arbitrary":
            seen = ~attention_mask[0, 0]
        if self.kind == "no_mask":
            seen = attention_bias[0, 0] == 0
        if self.left is not None:
            seen = seen & (behind <= self.left)
        logits = logits.masked_fill(~seen, -torch.inf)
        if self.softmax_offset is not None:
            sinks = self.softmax_offset[:, None, None].expand(heads, s, 1)
            logits = torch.cat([logits, sinks], 2)
        out = logits.softmax(2)[:, :, :s] @ value
        return out.transpose(0, 1).reshape(s, 1, -1)


def use(*modules):
    """Put them where Megatron-Bridge looks for Transformer Engine's, and import `modules` anew."""
    transformer_engine.TENorm = Norm
    transformer_engine.TELayerNormColumnParallelLinear = NormColumn
    transformer_engine.TERowParallelLinear = Row
    transformer_engine.TEDotProductAttention = Dense
    transformer_engine.SplitAlongDim = lambda x, dim, sizes: torch.split(x, sizes, dim)
    for name in modules:
        importlib.reload(importlib.import_module(name))
