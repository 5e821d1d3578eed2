"""Iterations of Megatron-LM's own loop: results with and without our flags are equal.

Losses are compared as Megatron prints them, to seven digits, and gradient norms, to three decimals.
"""

import re
from pathlib import Path

import pytest
from ranks import COMMON, MIDDLE, SCRIPT, STEPS, under_torchrun

pytest.importorskip(
    "megatron.training", reason="megatron.training is in wheels for Python 3.12 and on only"
)


CP2 = "--context-parallel-algo burst --context-parallel-size 2"
CP4 = (
    "--context-parallel-algo burst --context-parallel-size 4 "
    "--hierarchical-context-parallel-sizes 2 2"
)
CP8 = (
    "--context-parallel-algo burst --context-parallel-size 8 "
    "--hierarchical-context-parallel-sizes 4 2"
)
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
PP2 = "--num-layers 2 --pipeline-model-parallel-size 2"
MOE = (
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 48 --moe-aux-loss-coeff 1e-2 "
    "--moe-router-load-balancing-type aux_loss --moe-token-dispatcher-type alltoall "
    "--expert-model-parallel-size 2"
)
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
INTERLEAVED = (
    "--num-layers 4 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 "
    f"--global-batch-size 4 {RECOMPUTE}"
)


def same(ours, stock, steps=range(1, STEPS + 1)):
    for step in steps:
        (loss, norm), (expected, stock_norm) = ours.steps[step], stock.steps[step]
        assert loss == pytest.approx(expected, rel=1e-6), step
        assert norm == pytest.approx(stock_norm, abs=1.1e-3), step
    assert len(stock.evaluations) == 4
    count = len(ours.evaluations)
    assert ours.evaluations == pytest.approx(stock.evaluations[-count:], rel=1e-6)


@pytest.fixture(scope="module")
def saved(tmp_path_factory, train):
    """Return a run on two ranks that saved half-way and at the end, and its folder.

    It also wrote scalars.
    """
    folder = tmp_path_factory.mktemp("checkpoint")
    events = f"--tensorboard-dir {folder / 'events'}"
    return train(2, f"{CP2} --save {folder} --save-interval {MIDDLE} {events}"), folder


def test_two_ranks_train_like_one(train, saved):
    same(saved[0], train(1))


def test_the_loss_falls_so_the_comparison_means_something(train):
    losses = [loss for loss, _ in train(1).steps.values()]
    assert len(losses) == STEPS
    assert losses[-1] < losses[0] - 0.2


def test_the_start_up_line_and_the_flags_are_in_the_log(saved):
    (line,) = saved[0].lines("burst attention:")
    assert line.startswith("> megatron_burst: ")
    assert "algorithm burst | 2 ranks" in line
    (flag,) = saved[0].lines("context_parallel_algo ..")
    assert flag.endswith(" burst")


def test_what_attention_did_is_in_the_event_file(saved):
    """The scalars by hand.

    Each rank has 32 rows of 4 heads of 8 floats in zigzag: rank 0 sees all keys of rank 1, and rank
    1 half of the keys of rank 0; in backward queries are sent. There are two layers and two
    micro-batches.
    """
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = reader.EventAccumulator(str(saved[1] / "events")).Reload()
    found = {
        tag.removeprefix("burst/"): [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
        if tag.startswith("burst/")
    }
    assert {len(steps) for steps in found.values()} == {STEPS}
    row, statistics = 4 * 8 * 4, 2 * 4 * 4
    forward, backward = (16 + 32) * 2 * row, (16 + 32) * (3 * row + statistics)
    assert found["bytes-within-nodes"][0] == (1, 2 * 2 * (forward + backward))
    assert found["bytes-between-nodes"][0] == (1, 0)
    assert all(ratio == 1 for _, ratio in found["pairs-busiest-over-mean"])
    assert found["plan-seconds"][0][1] > 0 == found["plan-seconds"][1][1]
    assert all(0 < seconds < 60 for _, seconds in found["wait-seconds"])


def test_chosen_by_a_spec_alone(train):
    spec = "--spec megatron_burst.megatron.specs burst_layer_spec"
    run = train(2, f"--context-parallel-size 2 {spec}")
    same(run, train(1))
    assert run.lines("algorithm burst")


def test_four_ranks_on_two_nodes(train):
    flags = f"{CP4} {RECOMPUTE} --burst-attention-store 0.5 --burst-lm-head-loss single_pass"
    run = train(4, flags)
    same(run, train(1))
    (line,) = run.lines("burst attention:")
    assert "2 per node x 2 nodes" in line
    assert "layout striped" in line
    assert run.lines("> megatron_burst: LM head loss: single_pass")


def test_under_torchrun(train):
    run = under_torchrun(2, [*COMMON, *CP2.split()])
    assert run.codes == [0], run.texts[0][-3000:]
    same(run, train(1))


# Prints the files of the package in the order in which their functions first run, up to the first
# call of `mb.attention`.
WALK = """
import sys
from pathlib import Path
import megatron_burst
root, walked = Path(megatron_burst.__file__).parent, {}

def note(frame, event, _):
    file = Path(frame.f_code.co_filename)
    if event != "call" or root not in file.parents or frame.f_code.co_name[0] == "<":
        return
    walked.setdefault(str(file.relative_to(root)))
    if "attention.py" in walked:
        sys.setprofile(None)
        print("walked:", *walked)

sys.setprofile(note)
"""


def test_two_lines_in_a_script_do_the_same(train, ranks, tmp_path):
    """CONTRIBUTING lists the files on the way from the flag to attention in the order they run."""
    script = tmp_path / "train.py"
    lines = "import megatron_burst.megatron\nmegatron_burst.megatron.install()\n"
    script.write_text(f"{lines}{WALK}{SCRIPT.read_text()}")
    run = ranks.run(2, [*COMMON, *CP2.split()], script=script)
    assert run.codes == [0, 0], run.texts[0][-3000:]
    same(run, train(1))
    assert run.lines("> megatron_burst: burst attention:")
    walks = [line.split()[1:] for line in run.lines("walked:")]
    assert len(walks) == 2
    page = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text()
    section = page.split("### From the flag to the core attention\n")[1].split("\n##")[0]
    listed = re.findall(r"^\| `([\w/]+\.py)`", section, re.MULTILINE)
    first = listed.index("megatron/training.py")
    assert listed.index("megatron/attention/core_attention.py") - first < 8
    for walk in walks:
        assert [file for file in walk if file in listed[first:]] == listed[first:]


def test_resumes_on_four_ranks_and_says_what_changed(train, saved):
    other = CP4.replace("burst", "double_ring")
    run = train(4, f"{other} --burst-layout striped --load {saved[1]} --ckpt-step {MIDDLE}")
    assert min(run.steps) == MIDDLE + 1
    # Megatron's line of the second iteration after a start is an average over two; evaluations
    # follow it.
    same(run, saved[0], [MIDDLE + 1])
    changed = [line.split("made with ")[1] for line in run.lines("the checkpoint was made with")]
    assert changed == [
        "--context-parallel-algo burst, this run has double_ring",
        "--burst-layout zigzag, this run has striped",
        "--context-parallel-size 2, this run has 4",
        "--hierarchical-context-parallel-sizes None, this run has [2, 2]",
    ]


def test_experts_on_two_ranks(train):
    same(train(2, f"{MOE} {CP2}"), train(2, MOE))


@pytest.mark.parametrize("dtype", ["bf16", "fp16 --initial-loss-scale 1024"])
def test_in_half_precision_two_ranks_train_like_one_within_its_rounding(train, dtype):
    stock, ours = train(1, f"--{dtype}"), train(2, f"--{dtype} {CP2}")
    for step in range(1, STEPS + 1):
        (loss, norm), (expected, stock_norm) = ours.steps[step], stock.steps[step]
        assert loss == pytest.approx(expected, rel=2e-4), step
        assert norm == pytest.approx(stock_norm, rel=5e-3), step
    assert ours.steps[STEPS][0] != train(2, CP2).steps[STEPS][0]  # it did run in half precision


@pytest.mark.parametrize("size", [2, 4])
def test_packed_documents_of_any_length(train, size):
    asked = f"--packed --context-parallel-algo burst --context-parallel-size {size}"
    same(train(size, asked), train(1, "--packed"))


@pytest.mark.parametrize(
    ("world", "more", "stock"),
    [
        (2, CP2, ""),
        pytest.param(4, CP4, "", marks=pytest.mark.slow),
        pytest.param(8, CP8, "", marks=pytest.mark.slow),
        (4, f"{CP2} {TP2}", ""),
        pytest.param(4, f"{CP2} {PP2}", PP2, marks=pytest.mark.slow),
    ],
    ids=["cp2", "cp4", "cp8", "tp2-sequence-parallel", "pp2"],
)
def test_packed_documents_in_balance(train, world, more, stock):
    run = train(world, f"--packed --burst-layout balanced {more}")
    same(run, train(2 if stock else 1, f"--packed {stock}"))
    assert run.lines("layout balanced")


def test_packed_is_not_the_same_as_not_packed(train):
    assert abs(train(1, "--packed").steps[STEPS][0] - train(1).steps[STEPS][0]) > 1e-3


def test_interleaved_pipeline_with_attention_kept(train):
    """Four micro-batches in flight over two stages of two chunks each."""
    same(train(4, f"{INTERLEAVED} {CP2} --burst-attention-store 0.5"), train(2, INTERLEAVED))
