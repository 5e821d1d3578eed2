"""A video diffusion model on several ranks: a small transformer learns squares that move.

    torchrun --nproc-per-node 2 examples/video.py        # about two minutes on 2 cores

Every rank has some of the tokens of each clip. Self-attention over the clip uses a ring.
Cross-attention to the words of the prompt sends nothing, because every rank has all words. Rank 0
draws the loss and a sample for each prompt. The example requires torch, matplotlib and this
package.
"""

from __future__ import annotations

import argparse
import itertools
import math
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.utils import vector_to_parameters

import megatron_burst as mb

FRAMES, SIDE, PATCH, SQUARE = 6, 6, 3, 2  # pixels of a frame, of a patch and of the square
GRID = (FRAMES, SIDE // PATCH, SIDE // PATCH)
TOKENS, PIXELS = math.prod(GRID), PATCH * PATCH
PROMPTS = {"right": (0, 1), "left": (0, -1), "down": (1, 0), "up": (-1, 0)}  # rows and columns
HEADS, WIDTH, LAYERS, BATCH = 4, 16, 4, 32
HIDDEN = HEADS * WIDTH
SAMPLING_STEPS = 20


def clips(labels: torch.Tensor, draw: torch.Generator) -> torch.Tensor:
    """Return clips of a square that starts at pixel 0, moves one pixel per frame and wraps around.

    Args:
        labels: Index of the prompt of each clip, int64 [b].
        draw: Generator of the row or column in which the square moves.

    Returns:
        Patches [TOKENS, b, PIXELS] with values -1 and 1.
    """
    speed = torch.tensor(list(PROMPTS.values()))[labels].T
    start = torch.randint(SIDE, (2, len(labels)), generator=draw) * (speed == 0)
    frames = torch.arange(FRAMES)[:, None]
    pixels = torch.arange(SIDE)
    inside = [
        (pixels - start[axis, :, None] - speed[axis, :, None] * frames[..., None]) % SIDE < SQUARE
        for axis in (0, 1)
    ]  # each [frames, b, SIDE]
    video = (inside[0][..., None] & inside[1][..., None, :]) * 2.0 - 1.0
    cells = video.unflatten(2, (-1, PATCH)).unflatten(4, (-1, PATCH))
    return cells.permute(0, 2, 4, 1, 3, 5).reshape(TOKENS, len(labels), PIXELS)


def frames_of(patches: torch.Tensor) -> torch.Tensor:
    """Return the frames [b, FRAMES, SIDE, SIDE] of patches [TOKENS, b, PIXELS]."""
    cells = patches.reshape(*GRID, -1, PATCH, PATCH).permute(3, 0, 1, 4, 2, 5)
    return cells.reshape(-1, FRAMES, SIDE, SIDE)


class Attentions:
    """Attention over the clips and to the prompts, for batches of one size.

    Args:
        groups: Ranks that share the clips.
        batch: Number of clips.
    """

    def __init__(self, groups: mb.Groups, batch: int) -> None:
        self.layout = mb.layout.make("contiguous", cp_size=groups.size)
        rows = torch.empty(TOKENS // groups.size, batch, HEADS, WIDTH, requires_grad=True)
        words = torch.empty(1, batch, HEADS, WIDTH, requires_grad=True)  # one word per prompt
        same: Any = {"groups": groups, "layout": self.layout, "mask": mb.masks.Full()}
        self.clip = mb.prepare(rows, rows, rows, **same)
        # Gradients of weights are summed over ranks, so gradients of keys are not.
        keys = mb.layout.Replicated(sum_gradients=False)
        self.prompt = mb.prepare(rows, words, words, key_layout=keys, **same)


class Layer(nn.Module):
    """Self-attention, cross-attention and MLP; the time scales and shifts the inputs."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number  # label of the calls, the same on all ranks
        self.time = nn.Linear(HIDDEN, 4 * HIDDEN)
        self.qkv, self.query = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.words = nn.Linear(HIDDEN, 2 * HIDDEN)
        self.out, self.cross = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.wide, self.narrow = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)
        for linear in (self.time, self.out, self.cross, self.narrow):  # the layer adds 0 at first
            nn.init.zeros_(linear.weight)

    def forward(
        self, x: torch.Tensor, time: torch.Tensor, prompt: torch.Tensor, attentions: Attentions
    ) -> torch.Tensor:
        """Apply the layer.

        Args:
            x: Rows of this rank, [s, b, HIDDEN].
            time: Embedding of the noise level and the prompt, [b, HIDDEN].
            prompt: Embedding of all words, [1, b, HIDDEN].
            attentions: Attention for this batch.
        """
        scale, shift, wide_scale, wide_shift = self.time(time).chunk(4, dim=-1)
        rows = functional.layer_norm(x, (HIDDEN,)) * (1 + scale) + shift
        q, k, v = self.qkv(rows).unflatten(-1, (3, HEADS, WIDTH)).unbind(2)
        out = mb.attention(q, k, v, plan=attentions.clip, label=self.number)
        x = x + self.out(out.flatten(2))
        q = self.query(functional.layer_norm(x, (HIDDEN,))).unflatten(-1, (HEADS, WIDTH))
        k, v = self.words(prompt).unflatten(-1, (2, HEADS, WIDTH)).unbind(2)
        out = mb.attention(q, k, v, plan=attentions.prompt, label=self.number)
        x = x + self.cross(out.flatten(2))
        rows = functional.layer_norm(x, (HIDDEN,)) * (1 + wide_scale) + wide_shift
        return x + self.narrow(functional.gelu(self.wide(rows)))


class VideoModel(nn.Module):
    """Transformer that predicts the patches of a clip from the noised clip."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.head = nn.Linear(PIXELS, HIDDEN), nn.Linear(HIDDEN, PIXELS)
        self.places = nn.ModuleList(nn.Embedding(size, HIDDEN) for size in GRID)
        self.prompt = nn.Embedding(len(PROMPTS), HIDDEN)
        self.time = nn.Sequential(nn.Linear(1, HIDDEN), nn.SiLU(), nn.Linear(HIDDEN, HIDDEN))
        self.layers = nn.ModuleList(Layer(number) for number in range(LAYERS))

    def forward(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        level: torch.Tensor,
        labels: torch.Tensor,
        attentions: Attentions,
    ) -> torch.Tensor:
        """Return the patches [s, b, PIXELS] of the clip without noise.

        Args:
            x: Noised patches of this rank, [s, b, PIXELS].
            positions: Positions of the rows in the clip, int64 [s].
            level: Level of the noise from 0 to 1, [b].
            labels: Index of the prompt of each clip, int64 [b].
            attentions: Attention for this batch.
        """
        _, height, width = GRID
        cells = positions // (height * width), positions // width % height, positions % width
        rows = self.patch(x)
        for table, cell in zip(self.places, cells, strict=True):
            rows = rows + table(cell)[:, None]
        prompt = self.prompt(labels)[None]
        time = self.time(level[:, None]) + prompt[0]
        for layer in self.layers:
            rows = layer(rows, time, prompt, attentions)
        return self.head(functional.layer_norm(rows, (HIDDEN,)))


def train(
    groups: mb.Groups, group: dist.ProcessGroup, steps: int, *, report: bool = False
) -> tuple[VideoModel, list[float]]:
    """Train the model.

    Args:
        groups: Ranks that share the clips.
        group: Process group of the same ranks.
        steps: Number of steps.
        report: True to print the loss of every 100th step on rank 0.

    Returns:
        The model, and the loss of each step.
    """
    torch.manual_seed(0)  # every rank makes the same weights
    model, attentions = VideoModel(), Attentions(groups, BATCH)
    draw = torch.Generator().manual_seed(1)  # and the same clips and noise
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 4e-3, total_steps=max(steps, 100), pct_start=0.1
    )
    positions = torch.from_numpy(attentions.layout.positions(groups.rank, TOKENS))
    parameters, losses = list(model.parameters()), []
    for step in range(steps):
        labels = torch.randint(len(PROMPTS), (BATCH,), generator=draw)
        clip = clips(labels, draw)
        noise = torch.randn(clip.shape, generator=draw)
        level = torch.rand(BATCH, generator=draw).sqrt()  # motion is learned from strong noise
        noised = (1 - level[:, None]) * clip + level[:, None] * noise
        out = model(noised[positions], positions, level, labels, attentions)
        error = functional.mse_loss(out, clip[positions], reduction="sum")
        loss = error / clip.numel()  # the sum over ranks is the mean over the clips
        optimizer.zero_grad()
        loss.backward()
        sums = torch.cat([loss.detach()[None], *(x.grad.flatten() for x in parameters)])
        dist.all_reduce(sums, group=group)
        losses.append(float(sums[0]))
        vector_to_parameters(sums[1:], [x.grad for x in parameters])
        optimizer.step()
        schedule.step()
        if report and groups.rank == 0 and (step + 1) % 100 == 0:
            print(f"step {step + 1:5}  loss {sum(losses[-100:]) / 100:.4f}", flush=True)
    return model, losses


@torch.no_grad()
def sample(model: VideoModel, groups: mb.Groups, group: dist.ProcessGroup) -> torch.Tensor:
    """Return a clip for each prompt, [TOKENS, prompts, PIXELS], the same on all ranks.

    Args:
        model: The model.
        groups: Ranks that share the clips.
        group: Process group of the same ranks.
    """
    labels = torch.arange(len(PROMPTS))
    attentions = Attentions(groups, len(labels))
    positions = torch.from_numpy(attentions.layout.positions(groups.rank, TOKENS))
    draw = torch.Generator().manual_seed(2)
    rows = torch.randn(TOKENS, len(labels), PIXELS, generator=draw)[positions]
    levels = torch.linspace(1, 0, SAMPLING_STEPS + 1).tolist()
    for level, lower in itertools.pairwise(levels):
        at = torch.full((len(labels),), level)
        clip = model(rows, positions, at, labels, attentions)
        rows = clip + (rows - clip) * (lower / level)  # the same noise at a lower level
    parts = [torch.empty_like(rows) for _ in range(groups.size)]
    dist.all_gather(parts, rows, group=group)
    return torch.cat(parts)  # in the order of the clip, because the layout is contiguous


def picture(path: Path, losses: list[float], samples: torch.Tensor) -> None:
    """Draw the loss and the samples.

    Args:
        path: The PNG.
        losses: Loss of each step.
        samples: Result of `sample`.
    """
    import plot  # also selects the backend of matplotlib
    from matplotlib import pyplot as plt

    with plt.rc_context(plot.STYLE):
        figure, axes = plt.subplots(
            len(PROMPTS) + 1, FRAMES, figsize=(8, 6), height_ratios=[2, *[1] * len(PROMPTS)]
        )
        for axis in axes[0, 1:]:
            axis.remove()
        curve = figure.add_subplot(axes[0, 0].get_gridspec()[0, :])
        axes[0, 0].remove()
        curve.plot(losses, color=plot.BURST, linewidth=0.6)
        curve.set(xlabel="step", ylabel="loss", yscale="log")
        for row, (name, video) in enumerate(zip(PROMPTS, frames_of(samples), strict=True)):
            for axis, frame in zip(axes[row + 1], video, strict=True):
                axis.imshow(frame, cmap="gray", vmin=-1, vmax=1)
                axis.set(xticks=[], yticks=[])
            axes[row + 1, 0].set_ylabel(name, rotation=0, ha="right", va="center")
        figure.tight_layout()
        figure.savefig(path, dpi=120)
        plt.close(figure)


def direction(video: torch.Tensor) -> str:
    """Return the prompt whose motion the frames have: shift each frame, compare with the next.

    Args:
        video: Frames of a clip, [FRAMES, SIDE, SIDE].
    """
    errors = {
        name: float((video[:-1].roll(speed, (1, 2)) - video[1:]).square().mean())
        for name, speed in PROMPTS.items()
    }
    return min(errors, key=lambda name: errors[name])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=1200, help="steps of training")
    parser.add_argument("--output", type=Path, default=Path("video.png"), help="the picture")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    world: Any = dist.group.WORLD
    groups, start = mb.Groups.by_host(world), time.perf_counter()
    model, losses = train(groups, world, arguments.steps, report=True)
    samples = sample(model, groups, world)
    if groups.rank == 0:
        picture(arguments.output, losses, samples)
        right = [direction(video) for video in frames_of(samples)]
        print(f"motion of the samples: {', '.join(right)} (prompts: {', '.join(PROMPTS)})")
        print(f"wrote {arguments.output} after {time.perf_counter() - start:.0f} s")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
