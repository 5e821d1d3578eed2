"""`--reset-attention-mask`: documents on two ranks equal Megatron's dense mask on one.

The data are Megatron's own dataset. End-of-document tokens occur inside the documents of the
dataset, and some of these have no such token at their end: only the tokens count.
"""

import numpy as np
import pytest
from ranks import COMMON, STEPS
from test_training import same

pytest.importorskip(
    "megatron.training", reason="megatron.training is in wheels for Python 3.12 and on only"
)
CP2 = "--context-parallel-algo burst --context-parallel-size 2"
EOD = 60  # of NullTokenizer with --vocab-size 61


def slow(value):
    return pytest.param(value, marks=pytest.mark.slow)


LEARNED = "--position-embedding-type learned_absolute"


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Return flags for 400 documents of 10 to 70 tokens that count up in steps of 1 to 3."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    prefix = str(tmp_path_factory.mktemp("text") / "text")
    builder, draw = (
        IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16),
        np.random.default_rng(7),
    )
    for _ in range(400):
        tokens = draw.integers(1, 4, draw.integers(10, 70)).cumsum() % EOD
        tokens[draw.integers(0, len(tokens), 2)] = EOD
        if draw.random() < 0.5:
            tokens[-1] = EOD
        builder.add_document(tokens, [len(tokens)])
    builder.finalize(f"{prefix}.idx")
    return f"--data-path {prefix} --split 80,10,10 --data-cache-path {prefix}-cache"


@pytest.mark.parametrize(
    "how", ["--eod-mask-loss", LEARNED, f"{LEARNED} --reset-position-ids --eod-mask-loss"]
)
def test_documents_of_the_mask(train, text, how):
    asked = f"{text} --reset-attention-mask {how}"
    stock, ours = train(1, asked), train(2, f"{asked} {CP2}")
    same(ours, stock)
    assert ours.lines("--reset-attention-mask: documents end after end-of-document tokens")


NO_MASK = "--no-create-attention-mask-in-dataloader"


def test_documents_are_kept_where_no_mask_is_made(train, text):
    """The reference is Megatron's dense mask on one rank, which --no-create-... would not make."""
    asked = f"{text} --reset-attention-mask --eod-mask-loss"
    run = train(2, f"{asked} {NO_MASK} {CP2} --burst-layout balanced")
    same(run, train(1, asked))
    assert run.lines("--reset-attention-mask: documents end after end-of-document tokens")


@pytest.mark.parametrize("how", ["--eod-mask-loss", slow(f"{LEARNED} --reset-position-ids")])
def test_documents_of_the_mask_balanced(train, text, how):
    asked = f"{text} --reset-attention-mask {how}"
    run = train(2, f"{asked} {CP2} --burst-layout balanced")
    same(run, train(1, asked))
    assert run.lines("layout balanced")


def test_documents_of_the_dataset_balanced(train, text):
    """Documents of --dataloader-inter-document-masking train equally in balanced and zigzag.

    The CP 1 of pretrain_gpt.py with a dense mask cannot distinguish them.
    """
    asked = f"{text} --dataloader-inter-document-masking {CP2}"
    same(train(2, f"{asked} --burst-layout balanced"), train(2, asked))


INTERLEAVED = (
    "--num-layers 4 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"
)


@pytest.mark.slow
def test_documents_reach_every_chunk_of_an_interleaved_pipeline(train, text):
    """Also middle chunks, for which Megatron builds no dataset."""
    asked = f"{text} --reset-attention-mask {INTERLEAVED}"
    same(train(4, f"{asked} {CP2}"), train(2, asked))


def test_the_mask_and_the_positions_count(train, text):
    """The comparisons above would pass if the mask had no effect; this one would not."""
    losses = {
        how: train(1, f"{text} {how}").steps[STEPS][0]
        for how in (
            LEARNED,
            f"{LEARNED} --reset-attention-mask",
            f"{LEARNED} --reset-attention-mask --reset-position-ids",
        )
    }
    assert min(abs(np.diff(list(losses.values())))) > 1e-4, losses


def test_a_causal_mask_is_not_made_and_nothing_changes(train, text):
    same(train(2, f"{text} {CP2}"), train(1, text))
    assert train(2, f"{text} {CP2}").lines("the data loader makes no s x s mask")


@pytest.mark.parametrize("flag", ["--reset-attention-mask", "--dataloader-inter-document-masking"])
def test_a_script_that_drops_the_documents_is_told(ranks, flag):
    run = ranks.run(2, [*COMMON, *CP2.split(), flag])
    assert run.codes == [2, 2]
    assert run.lines(f"{flag} is set, but the script passed no packed_seq_params")


def test_masks_that_make_gradients_depend_on_the_ranks_are_named_once(ranks, text):
    common = [flag for flag in COMMON if flag != "--calculate-per-token-loss"]
    run = ranks.run(2, [*common, *text.split(), *CP2.split(), "--eod-mask-loss"])
    assert run.codes == [0, 0]
    assert len(run.lines("a loss mask excludes tokens")) == 1
