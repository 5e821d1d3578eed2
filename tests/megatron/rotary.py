"""Common parts of the tests of rotary tables: kinds of embeddings, and exact angles.

The angles are computed in rational arithmetic and share no code with the package.
"""

import math
from fractions import Fraction

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from megatron.core.transformer.transformer_config import TransformerConfig

import megatron_burst as mb
import megatron_burst.megatron as burst

PI = Fraction("3.14159265358979323846264338327950288419716939937510582097494459230781640628620899")
LAYOUTS = ["zigzag", "striped", "contiguous"]
KINDS = {
    "plain": (RotaryEmbedding, {}),
    "half of the width": (RotaryEmbedding, {"rotary_percent": 0.5}),
    "interleaved": (RotaryEmbedding, {"rotary_interleaved": True}),
    "interpolated": (RotaryEmbedding, {"seq_len_interpolation_factor": 3.7}),
    "llama3": (RotaryEmbedding, {"rope_scaling": True, "rotary_base": 500000}),
    "yarn": (YarnRotaryEmbedding, {"scaling_factor": 40.0, "mscale": 0.7}),
}


class Group:
    """The methods of a process group that the tested functions call, without processes."""

    def __init__(self, rank, size):
        self.rank, self.size = (lambda: rank), (lambda: size)


def config(**changes):
    settings = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
    settings |= {"context_parallel_size": 2, "attention_dropout": 0.0}
    return TransformerConfig(**settings | {"calculate_per_token_loss": True} | changes)


def installed(layout):
    burst.install(layout)
    burst.configure(config(), mb.BurstConfig(layout=layout))


def embedding(kind, group=None):
    cls, changes = KINDS[kind]
    choices = {"kv_channels": 16, "rotary_percent": 1.0, "use_cpu_initialization": True}
    return cls(**choices | changes, cp_group=group or Group(0, 1))


def table(output):
    """Return (angles, scale) of a rotary embedding's output."""
    return output if isinstance(output, tuple) else (output, 1.0)


def exact(position, rate, interpolation=1.0):
    """Return position x rate within +-pi, by rational arithmetic."""
    angle = position * Fraction(interpolation) * Fraction(rate)
    return float(angle - 2 * PI * round(angle / (2 * PI)))


def distance(a, b):
    """Return the distance of two angles, in rad."""
    turned = abs(a - b) % math.tau
    return min(turned, math.tau - turned)


def worst(positions, rates, angles):
    rows = zip(positions.tolist(), angles.double().tolist(), strict=True)
    factor = rates.interpolation
    factor = 1.0 if factor is None else torch.tensor(factor, dtype=torch.float32).item()
    return max(
        distance(angle, exact(position, rate, factor))
        for position, row in rows
        for rate, angle in zip(rates.per_position.tolist(), row, strict=False)
    )
