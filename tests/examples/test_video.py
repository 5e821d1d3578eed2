"""examples/video.py: two ranks train the video model as one rank does, and draw its samples."""

import pytest
import torch
import torch.distributed as dist
import video

import megatron_burst as mb


def both(steps, path):
    """Losses of all ranks together, of this rank alone, and the frames of the samples."""
    world, single = dist.group.WORLD, dist.new_subgroups(1)[0]
    groups = mb.Groups.flat(world)
    model, together = video.train(groups, world, steps)
    samples = video.sample(model, groups, world)
    if groups.rank == 0:
        video.picture(path, together, samples)
    _, alone = video.train(mb.Groups.flat(single), single, steps)
    return together, alone, video.frames_of(samples).shape


def test_two_ranks_train_like_one(ranks, tmp_path):
    together, alone, shape = ranks(2).run(both, 4, tmp_path / "video.png")[0]
    assert together == pytest.approx(alone, rel=1e-5)
    assert together[-1] < together[0] - 0.1
    assert shape == (4, video.FRAMES, video.SIDE, video.SIDE)
    assert (tmp_path / "video.png").stat().st_size > 10_000


def test_a_clip_moves_as_its_prompt_states():
    labels = torch.arange(4).repeat(3)
    clips = video.frames_of(video.clips(labels, torch.Generator().manual_seed(0)))
    assert [video.direction(clip) for clip in clips] == [*video.PROMPTS] * 3
    assert (clips == 1).sum((2, 3)).eq(video.SQUARE**2).all()
