"""What would make a run fit: every change that is named does, and no change that does not."""

import argparse
import re
from dataclasses import replace

import pytest

from megatron_burst.autotune import clusters
from megatron_burst.plugins.tools import memory
from megatron_burst.plugins.tools.advise.account.memory import account, fit
from megatron_burst.plugins.tools.advise.search.remedies import changes, does_not_fit, flag_text
from megatron_burst.plugins.tools.advise.settings import Settings, stage_layers
from megatron_burst.plugins.tools.advise.shapes import models

LLAMA = models.named("llama3-8b")
MEGA = 2**20


def on(gpus, name="h100"):
    return clusters.Cluster(clusters.GPUS[name], gpus)


@pytest.mark.parametrize(
    ("model", "gpus", "run"),
    [
        ("llama3-8b", 8, Settings(MEGA, tp=4, cp=2)),
        ("llama3-8b", 8, Settings(5 * MEGA, tp=4, cp=2)),
        ("llama3-8b", 8, Settings(MEGA, tp=8, recompute="none", lm_head_loss="off")),
        ("llama3-70b", 8, Settings(MEGA // 8, cp=8)),
        ("mixtral-8x22b", 16, Settings(MEGA // 8, tp=8, cp=2)),
        ("deepseek-v3", 64, Settings(MEGA, tp=8, cp=8)),
    ],
)
def test_what_is_named_fits(model, gpus, run):
    model, cluster = models.named(model), on(gpus)
    assert not fit(account(model, run, every=False), cluster).fits
    found = changes(model, cluster, run)
    assert found
    for change in found:
        assert change.run.gpus == (change.gpus or gpus)
        own = {name: getattr(change.run, name) for name in ("intra",)}
        assert replace(run, **change.fields, **own) == change.run
        there = replace(cluster, gpus=change.run.gpus)
        assert fit(account(model, change.run, every=False), there).fits, change


def test_more_stages_have_ends_of_their_own():
    """126 layers on 16 stages: 7 at both ends and 8 on each of the others."""
    run = Settings(MEGA // 8, tp=8, pp=2, cp=4)
    (change,) = changes(models.named("llama3-405b"), on(64), run)
    assert stage_layers(models.named("llama3-405b"), change.run) == [7, *[8] * 14, 7]
    assert change.text == "with 128 GPUs and --cp 1 --pp 16 --first-layers 7 --last-layers 7"
    assert flag_text("first_layers", None) == "without --first-layers"


def test_words_are_flags_that_there_are():
    run = Settings(MEGA, tp=4, cp=2)
    assert changes(LLAMA, on(8), run)[0].text == "--offload 1"
    said = does_not_fit(account(LLAMA, run), on(8))
    assert re.match(
        r"does not fit: a GPU needs [\d.]+ GiB with TP 4 \(22.44 GiB of it for .*\), but only "
        r"75.1 GiB are available; add ",
        said,
    )


def test_flags_that_are_named_are_taken():
    run = Settings(MEGA // 8, cp=8, distributed_optimizer=False)
    said = changes(LLAMA, on(8), run)[0].text
    parser = argparse.ArgumentParser()
    memory.add_arguments(parser)
    assert said == "--distributed-optimizer"
    assert parser.parse_args([said]).distributed_optimizer


def test_host_memory_that_is_too_small_says_so():
    run = Settings(4 * MEGA, tp=4, cp=2, offload=1.0, sequence_chunks=32, mlp_tiles=64)
    small = replace(on(8), host_memory=10**11)
    said = does_not_fit(account(LLAMA, run), small)
    # 10^11 bytes of a node for 8 GPUs.
    assert re.search(r"each GPU needs [\d.]+ GiB of host memory, but only 11.64 GiB per GPU ", said)


def test_what_fits_nowhere_says_so():
    run = Settings(512 * MEGA, tp=8, cp=1)
    assert "use a shorter sequence" in does_not_fit(account(LLAMA, run), on(8, "a100-40g"))


@pytest.mark.parametrize(("model", "gpus", "run"), [
    ("llama3-405b", 64, Settings(MEGA // 8, tp=8, pp=2, cp=4)),
    ("deepseek-v3", 32, Settings(8192, tp=8, cp=4)),
    ("llama3-70b", 16, Settings(MEGA // 8, tp=8, pp=2)),
])  # fmt: skip
def test_states_that_are_too_many_need_a_number_of_gpus(model, gpus, run):
    model, cluster = models.named(model), replace(on(gpus), host_memory=10**9)
    said = does_not_fit(account(model, run, every=False), cluster)
    assert "shorter" not in said
    number = int(re.search(r"it fits with (\d+) GPUs", said)[1])
    assert gpus < number < 64 * gpus
