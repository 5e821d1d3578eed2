"""Unsupported settings end every rank with the same message and no traceback."""

import pytest
from ranks import COMMON

pytest.importorskip(
    "megatron.training", reason="megatron.training is in wheels for Python 3.12 and on only"
)


BURST = "--context-parallel-algo burst"
CP2 = f"{BURST} --context-parallel-size 2"
BAD = {
    f"{CP2} --hierarchical-context-parallel-sizes 2 2": "[2, 2] has the product 4",
    f"{CP2} --burst-side both": "side (--burst-side) must be one of auto, ",
    f"{CP2} --burst-side querry": "--burst-side",
    "--context-parallel-size 2 --burst-layout striped": "--burst-layout striped with",
    f"{BURST} --hybrid-context-parallel": "Megatron-LM's training loop does not work with it",
}
# What one start is told of them, and what it is to add and to remove.
BLOCKS = [
    (
        "--attention-dropout 0.1 --cp-comm-type p2p --transformer-impl transformer_engine "
        "--seq-length 66 --burst-attention-store 0.5",
        ["attention dropout is 0.1", "--cp-comm-type chooses how", "is not installed",
         "--seq-length 66 is not divisible by 2 x", "nothing is recomputed"],
        "--attention-dropout 0 --transformer-impl local",
        "--cp-comm-type",
    ),
    (
        "--reset-attention-mask --sft --apply-query-key-layer-scaling",
        ["--reset-attention-mask does not work with --sft", "query-key layer scaling"],
        "",
        "--apply-query-key-layer-scaling --reset-attention-mask",
    ),
    (
        "--reset-attention-mask --micro-batch-size 2 --pipeline-model-parallel-size 3",
        ["--context-parallel-size 2 x --pipeline-model-parallel-size 3 does not divide the 2 ranks "
         "of this run: start a multiple of 6",
         "--reset-attention-mask at --micro-batch-size 2"],
        "--micro-batch-size 1",
        "",
    ),
]  # fmt: skip


def messages(run):
    """Return the message of rank 0; other ranks print nothing, and no rank a traceback."""
    assert all(code == 2 for code in run.codes), (run.codes, "\n".join(run.texts)[-3000:])
    assert not run.lines("Traceback")
    first, *others = [text.partition("megatron-burst pretrain: error")[2] for text in run.texts]
    assert first.startswith(" (all ranks): ")
    assert not any(others)
    return first.removeprefix(" (all ranks): ")


@pytest.mark.parametrize("flags", BAD)
def test_bad_flags(ranks, flags):
    told = messages(ranks.run(2, [*COMMON, *flags.split()]))
    assert BAD[flags] in told


@pytest.mark.parametrize(("flags", "reasons", "add", "remove"), BLOCKS)
def test_all_that_is_wrong_is_told_at_once_with_what_to_paste(ranks, flags, reasons, add, remove):
    told = messages(ranks.run(2, [*COMMON, *f"{CP2} {flags}".split()]))
    first, *lines = told.strip().splitlines()
    assert first == f"{len(reasons)} settings are not supported:"
    said = [line for line in lines if line.startswith("  - ")]
    assert len(said) == len(reasons)
    for reason in reasons:
        assert any(reason in line for line in said), reason
    fixes = {line.split(":")[0].strip(): line.split(":")[1].strip() for line in lines[len(said) :]}
    assert fixes == {k: x for k, x in (("add", add), ("remove", remove)) if x}


def test_a_mistyped_flag_is_one_line_without_megatrons_usage(ranks):
    told = messages(ranks.run(2, [*COMMON, *CP2.split(), "--burst-layuot", "striped"]))
    assert told.splitlines()[0].endswith(
        "unrecognized arguments: --burst-layuot striped; did you mean --burst-layout? "
        "(--help lists the options)"
    )
    assert "usage:" not in told


def test_a_value_that_a_flag_does_not_take_is_one_line(ranks):
    told = messages(ranks.run(2, [*COMMON, *CP2.split(), "--burst-intra-size", "two"]))
    assert "argument --burst-intra-size: invalid int value: 'two'" in told.splitlines()[0]
    assert "usage:" not in told


def test_a_rank_with_other_flags_than_the_rest(ranks):
    run = ranks.run(2, [*COMMON, *CP2.split()], odd=["--burst-side", "query"])
    assert "rank 0 has --burst-side 'auto', rank 1 has --burst-side 'query'" in messages(run)


def test_one_rank_works_and_is_told_that_the_flag_does_nothing(train):
    run = train(1, BURST)
    assert run.steps == train(1).steps
    (line,) = run.lines("has no effect")
    assert f"{BURST} has no effect at --context-parallel-size 1" in line


def test_one_rank_per_node_is_flat_and_says_so(train):
    run = train(2, f"{CP2} --burst-intra-size 1 --train-iters 1")
    assert run.lines("the ring of all 2 ranks uses only links between nodes")


def test_help_shows_the_group(ranks):
    run = ranks.run(1, ["--help"])
    assert run.codes == [0]
    group = run.texts[0].split("\nmegatron-burst:\n")[1]
    assert "--context-parallel-algo {burst," in group
    assert "--burst-lm-head-loss" in group


def test_errors_of_the_script_keep_their_traceback(ranks):
    run = ranks.run(1, [*COMMON, "--seed", "-1"])  # a ValueError of Megatron's
    assert run.codes == [1]
    assert run.lines("Traceback")
    assert not run.lines("megatron-burst pretrain: error")
