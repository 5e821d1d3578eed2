"""Megatron-LM's own loop with activations in host memory: every log line is the same.

Offload is strict and includes tensors of any size. tests/plugins/longseq/megatron/test_offload.py
compares bits; losses here are rounded.
"""

import re

import pytest
from ranks import COMMON, MIDDLE, SCRIPT, STEPS
from test_training import CP2, CP4, INTERLEAVED, MOE, RECOMPUTE, TP2

pytest.importorskip(
    "megatron.training", reason="megatron.training is in wheels for Python 3.12 and on only"
)
from test_hybrid_model_training import DELTA_NETS
from test_hybrid_model_training import EXPERTS as MIXERS
from test_hybrid_model_training import MTP as HYBRID_HEADS

BEFORE = """
import functools
import megatron_burst.megatron
from megatron.training import training
from megatron_burst.plugins.longseq.offload import tier
from megatron_burst.megatron import patching
tier.MIN_BYTES = 1
tier.HostMemory = functools.partial(tier.HostMemory, strict=True)
megatron_burst.megatron.install()
_evaluate = training.evaluate

def host():
    return tier.tier_of(patching.installed("burst")).host

def evaluate(*args, **named):
    before = host().bytes_out
    found = _evaluate(*args, **named)
    print("moved in evaluation:", host().bytes_out - before)
    return found

training.evaluate = evaluate
"""
AFTER = """
    print(f"host memory: {host().used} left, {host().bytes_out} moved, {host().frames} frames")
"""


@pytest.fixture(scope="module")
def moved(ranks, tmp_path_factory):
    """Return `moved(world, flags)`, a `Run` with --burst-offload that offloaded everything."""
    script = tmp_path_factory.mktemp("script") / "train.py"
    script.write_text(BEFORE + SCRIPT.read_text() + AFTER)

    def run(world, flags):
        done = ranks.run(world, [*COMMON, *flags.split()], script=script)
        assert done.codes == [0] * world, "\n".join(done.texts)[-3000:]
        ends = re.findall(r"host memory: (\d+) left, (\d+) moved, (\d+) f", "\n".join(done.texts))
        assert len(ends) == world
        assert all(left == frames == "0" and int(out) for left, out, frames in ends)
        evaluations = done.lines("moved in evaluation")
        assert evaluations
        assert all(line.endswith(" 0") for line in evaluations)
        return done

    return run


def same(ours, plain, steps=range(1, STEPS + 1)):
    assert [ours.steps[step] for step in steps] == [plain.steps[step] for step in steps]
    assert ours.evaluations == plain.evaluations[-len(ours.evaluations) :]


# what is shown -> (ranks, flags of both runs, fraction)
LONG = {
    "four micro-batches over two stages of two chunks, attention in the store": (
        4,
        f"{INTERLEAVED} {CP2} --burst-attention-store 0.5",
        "0.5",
    ),
    "experts, nothing recomputed": (2, f"{MOE} {CP2}", "1.0"),
    "packed": (2, f"--packed {CP2} {RECOMPUTE}", "1.0"),
    "further heads": (2, f"--mtp-num-layers 1 {CP2} {RECOMPUTE}", "1.0"),
    "tensor and sequence parallel": (4, f"{CP2} {TP2} --recompute-activations", "auto"),
    "Megatron's attention, data parallel": (2, "", "1.0"),
    "mixers, experts and attention": (2, f"{MIXERS} {CP2}", "1.0"),
    "further heads of a hybrid model, recomputed": (2, f"{HYBRID_HEADS} {CP2} {RECOMPUTE}", "1.0"),
    "gated delta nets, more ranks than heads": (4, f"{DELTA_NETS} {CP4}", "0.5"),
}


@pytest.mark.parametrize("case", LONG)
@pytest.mark.slow
def test_the_log_is_the_same(moved, train, case):
    world, flags, fraction = LONG[case]
    run = moved(world, f"{flags} --burst-offload {fraction}")
    same(run, train(world, flags))
    (line,) = run.lines("of saved activations")
    assert "> megatron_burst: --burst-offload " in line


@pytest.mark.slow
def test_a_resumed_run_repeats_the_rest(moved, train, tmp_path):
    flags = f"{CP2} {RECOMPUTE} --burst-offload 1.0"
    whole = moved(2, f"{flags} --save {tmp_path} --save-interval {MIDDLE}")
    same(whole, train(2, f"{CP2} {RECOMPUTE}"))
    resumed = moved(2, f"{flags} --load {tmp_path} --ckpt-step {MIDDLE}")
    assert min(resumed.steps) == MIDDLE + 1
    # Megatron's line of the second iteration after a start is an average over two.
    same(resumed, whole, [MIDDLE + 1])


def test_what_excludes_it_is_refused_at_the_start(ranks):
    flags = f"{CP2} --burst-offload 1.0 --burst-host-memory much --cpu-offloading-num-layers 1"
    run = ranks.run(2, [*COMMON, *flags.split()])
    assert all(code == 2 for code in run.codes)
    first, other = (
        text.partition("megatron-burst pretrain: error (all ranks): ")[2] for text in run.texts
    )
    assert "--burst-offload 1.0 with --cpu-offloading-num-layers" in first
    assert "host_memory (--burst-host-memory) must be a size" in first
    assert not other
