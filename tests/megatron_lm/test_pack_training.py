"""`--burst-pack documents` equals training on each document alone, on one rank.

Documents have 5 to 40 tokens, four sequences of 64 per step; two data-parallel ranks, two ranks for
each sequence.
"""

import re

import pytest
from ranks import MIDDLE, STEPS
from test_training import CP2, same

pytest.importorskip(
    "megatron.training", reason="megatron.training is in wheels for Python 3.12 and on only"
)
PACK = f"--packed {CP2} --burst-pack documents --global-batch-size 8"
ALONE = "--packed --alone --global-batch-size 8"


@pytest.fixture(scope="module")
def saved(tmp_path_factory, train):
    folder = tmp_path_factory.mktemp("packed")
    return train(4, f"{PACK} --save {folder} --save-interval {MIDDLE}"), folder


def test_every_document_as_if_alone(saved, train):
    same(saved[0], train(1, ALONE))
    (line,) = saved[0].lines("--burst-pack documents: in the first step")
    count, made = re.search(
        r"step (\d+) micro-batches on each of 2 .* \((\d+) before", line
    ).groups()
    assert int(made) == 4
    assert int(count) in (4, 5)


def test_documents_that_see_each_other_train_otherwise(train):
    """Shows that the comparison above would detect mixed documents."""
    mixed = train(1, "--global-batch-size 8")
    assert abs(train(1, ALONE).steps[STEPS][0] - mixed.steps[STEPS][0]) > 1e-3


def test_two_stages_of_a_pipeline(train):
    """Without context parallelism, Megatron's own attention uses a dense mask.

    A pipeline starts from other weights than one rank.
    """
    stages = "--packed --global-batch-size 8 --pipeline-model-parallel-size 2"
    run = train(4, f"{stages} --context-parallel-algo burst --burst-pack documents")
    same(run, train(2, stages))
    assert run.lines("--burst-pack documents: in the first step")


def test_resuming(saved, train):
    run = train(4, f"{PACK} --load {saved[1]} --ckpt-step {MIDDLE}")
    assert min(run.steps) == MIDDLE + 1
    same(run, saved[0], [MIDDLE + 1])


def test_consumed_samples_are_those_of_the_data_loader(saved):
    found = [
        int(re.search(r"consumed samples: +(\d+)", line)[1])
        for line in saved[0].lines("consumed samples:")
    ]
    assert found == list(range(8, 8 * STEPS + 1, 8))
