"""Training of a hybrid stack on several ranks: three gated delta layers, one softmax layer.

    torchrun --nproc-per-node 4 examples/hybrid_stack.py

Every rank has a part of the sequence. Then each rank trains the same model on the whole sequence,
and the losses are equal. The example requires only torch and this package.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import megatron_burst as mb

LENGTH, VOCABULARY, HEADS, WIDTH, TAPS, STEPS = 128, 32, 4, 8, 4, 5
HIDDEN = HEADS * WIDTH


class DeltaLayer(nn.Module):
    """Norm, projections, short convolution, gated delta rule, gate, residual."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number  # label of the calls, the same on all ranks
        self.norm = nn.LayerNorm(HIDDEN)
        self.mixed = nn.Linear(HIDDEN, 4 * HIDDEN + 2 * HEADS, bias=False)
        self.taps = nn.Parameter(torch.randn(3 * HIDDEN, TAPS) / TAPS)
        self.log_rate = nn.Parameter(torch.zeros(HEADS))
        self.out = nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor, plans: Plans) -> torch.Tensor:
        """Apply the layer to x [s, b, HIDDEN]; s is the number of rows of this rank."""
        sizes = (3 * HIDDEN, HIDDEN, HEADS, HEADS)
        qkv, gate, decay, beta = self.mixed(self.norm(x)).split(sizes, dim=-1)
        qkv = mb.short_convolution(
            qkv, self.taps, activation="silu", plan=plans.states, label=self.number
        )
        q, k, v = qkv.unflatten(-1, (3, HEADS, WIDTH)).unbind(2)
        q, k = (nn.functional.normalize(rows, dim=-1) for rows in (q, k))
        decay = -self.log_rate.exp() * nn.functional.softplus(decay)  # a logarithm, below 0
        out = mb.linear_attention(
            q, k, v, decay=decay, beta=beta.sigmoid(), plan=plans.states, label=self.number
        )
        return x + self.out(out.flatten(2) * nn.functional.silu(gate))


class AttentionLayer(nn.Module):
    """Norm, projections, softmax attention over a ring, residual."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number  # label of the calls, the same on all ranks
        self.norm = nn.LayerNorm(HIDDEN)
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False)
        self.out = nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor, plans: Plans) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, WIDTH)).unbind(2)
        return x + self.out(
            mb.attention(q, k, v, plan=plans.attention, label=self.number).flatten(2)
        )


class Plans:
    """Plans of one micro-batch, one for each kind of layer."""

    def __init__(self, rows: int, groups: mb.Groups, layout: mb.layout.Layout) -> None:
        like = torch.empty(rows, 1, HEADS, WIDTH, requires_grad=True)  # only its shape is read
        gate = torch.empty(rows, 1, HEADS, requires_grad=True)
        self.states = mb.prepare_linear(
            like, like, like, decay=gate, beta=gate, groups=groups, layout=layout
        )
        self.attention = mb.prepare(like, like, like, groups=groups, layout=layout)


def train(groups: mb.Groups, group: dist.ProcessGroup) -> list[float]:
    """Train the stack.

    Args:
        groups: The ranks that share the sequence.
        group: Process group of the same ranks.

    Returns:
        The loss of every step.
    """
    layout = mb.layout.make("zigzag", cp_size=groups.size)
    torch.manual_seed(0)  # every rank makes the same weights, and the same data
    tokens = torch.randint(VOCABULARY, (LENGTH + 1, 1)).sort(0).values
    embed, head = nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(HIDDEN, VOCABULARY, bias=False)
    layers = [DeltaLayer(0), DeltaLayer(1), DeltaLayer(2), AttentionLayer(3)]
    model = nn.ModuleList([embed, *layers, head])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    inputs, labels = (mb.shard(x, layout, groups.rank) for x in (tokens[:-1], tokens[1:]))
    losses = []
    for _ in range(STEPS):
        plans = Plans(len(inputs), groups, layout)
        x = embed(inputs)
        for layer in layers:
            x = layer(x, plans)
        loss = nn.functional.cross_entropy(head(x).flatten(0, 1), labels.flatten(), reduction="sum")
        loss = loss / LENGTH  # the sum over ranks is the mean over the sequence
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=group)
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total, group=group)
        losses.append(float(total))
    return losses


def compare() -> tuple[list[float], list[float]]:
    """Return the losses of all ranks together, and of this rank alone."""
    world: Any = dist.group.WORLD
    together = train(mb.Groups.by_host(world), world)
    single: Any = dist.new_subgroups(1)[0]
    return together, train(mb.Groups.flat(single), single)


def main() -> None:
    dist.init_process_group("gloo")
    together, alone = compare()
    if dist.get_rank() == 0:
        print(f"step  {dist.get_world_size()} ranks   1 rank")
        for step, losses in enumerate(zip(together, alone, strict=True)):
            print(f"{step:4}  {losses[0]:.6f}  {losses[1]:.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
