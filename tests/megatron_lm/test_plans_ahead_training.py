"""Plans that threads make while only tensor-parallel rank 0 reads packed batches.

Each run has four or eight ranks, and four micro-batches per step and per evaluation. A forward
makes the plan of the first micro-batch of a step. In the first step it also makes the second plan,
because no layer was called when rank 0 read the second batch.
"""

import re

import pytest
from ranks import COMMON, MIDDLE, SCRIPT, STEPS
from test_training import CP2, INTERLEAVED, TP2, same

pytest.importorskip(
    "megatron.training", reason="megatron.training is in wheels for Python 3.12 and on only"
)
MICRO_BATCHES = 4
EVALUATIONS = STEPS // MIDDLE + 2  # the final ones are of the validation and the test data
FLAGS = f"--packed --broadcast --global-batch-size {MICRO_BATCHES} {CP2} {TP2}"

# Builds of plans by thread. The thread waits for a random time before each plan and each message.
BEFORE = """
import os
import random
import threading
import time
from collections import Counter

import megatron_burst.megatron
from megatron_burst.megatron.attention import plan_book, plans_ahead
from megatron_burst.megatron.data import loader, next_pack

megatron_burst.megatron.install()
threads, waits = Counter(), random.Random(int(os.environ["RANK"]))
builds = plan_book.AttentionOperation.build

def build(self, request):
    threads["planner" in threading.current_thread().name] += 1
    return builds(self, request)

def late(function):
    def call(*args):
        time.sleep(waits.random() / 25)
        return function(*args)
    return call

plan_book.AttentionOperation.build = build
plans_ahead._plan = late(plans_ahead._plan)
next_pack._receive = late(next_pack._receive)
"""
NOTHING_AHEAD = "loader.plan_ahead = lambda batch: None\n"
AFTER = """
    from megatron_burst.megatron import patching
    (book,) = patching.run_state().plan_books.values()
    print(f"plans: {threads[False]} {threads[True]} {book.ahead.started} {book.ahead.used} .")
"""


@pytest.fixture(scope="module")
def counted(ranks, tmp_path_factory):
    """Return `counted(world, flags, before)`, which returns a run and the counts of each rank.

    The counts are plans that forwards built and that the thread built, plans that the thread was
    requested to build, and plans of the thread that a forward used.
    """
    script = tmp_path_factory.mktemp("script") / "train.py"

    def run(world, flags, before=""):
        script.write_text(BEFORE + before + SCRIPT.read_text() + AFTER)
        done = ranks.run(world, [*COMMON, *flags.split()], script=script)
        assert done.codes == [0] * world, "\n".join(done.texts)[-3000:]
        counts = re.findall(r"plans: (\d+) (\d+) (\d+) (\d+) \.", "\n".join(done.texts))
        return done, [tuple(map(int, numbers)) for numbers in counts]

    return run


def test_all_tensor_parallel_ranks_get_plans_from_their_threads(counted, train):
    run, counts = counted(4, FLAGS)
    passes = STEPS + EVALUATIONS
    ahead = passes * (MICRO_BATCHES - 1) - 1
    assert counts == [(passes + 1, ahead, ahead, ahead)] * 4
    plain, plain_counts = counted(4, FLAGS, NOTHING_AHEAD)
    assert plain_counts == [(passes * MICRO_BATCHES, 0, 0, 0)] * 4
    assert (run.steps, run.evaluations) == (plain.steps, plain.evaluations)
    same(run, train(1, f"--packed --global-batch-size {MICRO_BATCHES}"))


@pytest.mark.slow
def test_interleaved_pipeline_with_tensor_parallel_ranks(counted, train):
    """Every chunk of a stage reads and broadcasts the same batches."""
    run, counts = counted(8, f"{FLAGS} {INTERLEAVED}")
    passes = STEPS + EVALUATIONS
    ahead = passes * (MICRO_BATCHES - 1) - 1
    assert counts == [(passes + 1, ahead, ahead, ahead)] * 8
    same(run, train(2, f"--packed {INTERLEAVED}"))


@pytest.mark.slow
def test_packed_documents_with_tensor_parallel_ranks(counted, train):
    """Rank 0 packs the documents of each step anew, in three or four micro-batches."""
    run, counts = counted(4, f"{FLAGS} --burst-pack documents")
    assert len(set(counts)) == 1
    _, made, started, used = counts[0]
    assert made == started == used > STEPS + EVALUATIONS * (MICRO_BATCHES - 1)
    same(run, train(1, f"--packed --alone --global-batch-size {MICRO_BATCHES}"))
