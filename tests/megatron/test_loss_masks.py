"""One warning of loss masks that make gradients depend on the number of ranks."""

import pytest
import torch
from rotary import config

import megatron_burst as mb
import megatron_burst.megatron as burst
from megatron_burst.megatron import patching
from megatron_burst.megatron.data import loader

WORDS = "a loss mask excludes tokens"


@pytest.fixture
def lines(monkeypatch):
    burst.install("zigzag")
    found = []
    monkeypatch.setattr(patching, "log", found.append)
    yield found
    burst.uninstall()


class Model(torch.nn.Module):
    def __init__(self, per_token=False, algorithm="burst"):
        super().__init__()
        self.config = config(calculate_per_token_loss=per_token)
        burst.configure(self.config, mb.BurstConfig(algorithm))


def stepped(model, masks, **named):
    """Run a step of Megatron's schedules, which reads a micro-batch for each mask."""

    def run(data_iterator, **_):
        return [batch["loss_mask"] for batch in data_iterator]

    batches = iter([{"loss_mask": mask} for mask in masks])
    return loader._noting(
        run, {"data_iterator": batches, "model": [model], "num_microbatches": 1, **named}
    )


FULL, MASKED = torch.ones(2, 8), torch.ones(2, 8).tril()


def test_the_first_mask_that_leaves_out_tokens_is_named_once(lines):
    model = Model()
    assert stepped(model, [FULL, FULL])[0] is FULL
    assert lines == []
    for _ in range(2):
        stepped(model, [FULL, MASKED, MASKED])
        stepped(Model(), [MASKED])
    (line,) = [line for line in lines if WORDS in line]
    assert "add --calculate-per-token-loss" in line


@pytest.mark.parametrize(
    ("settings", "named", "masks"),
    [
        ({"per_token": True}, {}, [MASKED]),
        ({"algorithm": "megatron"}, {}, [MASKED]),
        ({}, {"forward_only": True}, [MASKED]),
        ({}, {}, [None, FULL]),
        ({}, {}, [MASKED.to("meta")]),  # on a device, which nobody waits for
    ],
)
def test_other_masks_and_settings_are_not_named(lines, settings, named, masks):
    stepped(Model(**settings), masks, **named)
    assert not [line for line in lines if WORDS in line]


def test_a_recipe_reads_its_own_setting(lines):
    patching.translate_with(lambda text: text.replace("--calculate-per-token-loss", "model.loss"))
    stepped(Model(), [MASKED])
    patching.translate_with(None)
    assert "add model.loss" in lines[-1]
