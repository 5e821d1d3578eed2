"""MTP heads: shifts follow the layout and the documents, and losses equal one rank's."""

import pytest
import session
import torch
from megatron.core.transformer import multi_token_prediction
from test_parity import TOLERANCE, TWO_BY_TWO, VPP, slow, worst

SEPARATE = hasattr(multi_token_prediction, "process_mtp_loss")  # not lines of GPTModel
KEPT = {
    "all": tuple(range(32)),
    "middle": tuple(range(3, 17)),
    # Fewer than ranks; one has none before the mask moves on, another none after.
    "few": (8, 21, 22),
    "none for the second head": (0, 1),
    "none": (),
}


@pytest.mark.skipif(not SEPARATE, reason="Megatron-Core 0.16: GPTModel does it, see below")
@pytest.mark.parametrize("per_token", [True, False])
@pytest.mark.parametrize("kept", KEPT)
def test_losses_are_those_of_whole_sequences(four, per_token, kept):
    for gradients, logged in four(session.further_losses, per_token, KEPT[kept]):
        assert gradients < 1e-6
        assert logged < 1e-6


@pytest.mark.skipif(not SEPARATE, reason="Megatron-Core 0.16: GPTModel does it, see below")
@pytest.mark.parametrize("per_token", [True, False])
@pytest.mark.parametrize("kept", ["all", "middle"])
def test_losses_of_fp64_models_are_exact(four, per_token, kept):
    for gradients, _ in four(session.further_losses, per_token, KEPT[kept], torch.float64):
        assert gradients < 1e-14


@pytest.mark.skipif(not SEPARATE, reason="Megatron-Core 0.16: GPTModel does it")
@pytest.mark.parametrize("per_token", [True, False])
@pytest.mark.parametrize("kept", ["all", "middle", "few", "none"])
def test_what_megatron_counts_over_groups_is_not_counted_again(four, per_token, kept):
    for gradients, logged in four(session.further_losses_counted, per_token, KEPT[kept]):
        assert gradients < 1e-6
        assert logged < 1e-6


@pytest.mark.skipif(SEPARATE, reason="Megatron-Core 0.16 alone")
def test_gpt_model_counts_an_equal_share_of_all_tokens(four):
    counts = four(session.counted_by_gpt_model, KEPT["middle"])
    assert [ours for ours, _, _ in counts] == [14 / 4] * 4
    assert [stock for _, stock, _ in counts] == [2, 4, 4, 4]
    assert {dtype for _, _, dtype in counts} == {torch.float64}


DOCUMENTS = {
    "no documents": (None, (32,)),
    "of any length": (([0, 5, 6, 20], None), (5, 6, 20, 32)),
    "that divide": (([0, 8, 24, 32], None), (8, 24, 32)),
    "that divide, padded": (([0, 6, 18, 25], [0, 8, 24, 32]), (6, 8, 20, 24, 31, 32)),
}


@pytest.mark.parametrize("layout", ["zigzag", "striped", "contiguous"])
@pytest.mark.parametrize("documents", DOCUMENTS)
def test_every_place_gets_what_the_next_of_its_document_has(four, layout, documents):
    bounds, ends = DOCUMENTS[documents]
    ranks = four(session.rolled, layout, bounds)
    assert sorted(place for places, _ in ranks for place in places) == list(range(32))
    for places, (numbers, floats, mask) in ranks:
        rows = [[0 if p + 1 in ends else p + 2 + more for p in places] for more in (0, 100)]
        assert numbers == floats == (rows, sum(map(sum, rows)))
        other = [[x % 3 == 0 and x > 0 for x in row] for row in rows]
        assert mask == (other, sum(map(sum, other)))


PACKED = {
    "cp2": ("--mtp-num-layers 1", "--context-parallel-size 2"),
    "cp2x2-striped": ("--mtp-num-layers 2", f"{TWO_BY_TWO} --burst-layout striped"),
    "cp4-contiguous": (
        "--mtp-num-layers 1", "--context-parallel-size 4 --burst-layout contiguous",
    ),
    "cp2x2-lm-head": ("--mtp-num-layers 2", f"{TWO_BY_TWO} --burst-lm-head-loss single_pass"),
    "tp2-sp": (
        "--mtp-num-layers 1",
        "--tensor-model-parallel-size 2 --context-parallel-size 2 --sequence-parallel",
    ),
    "vpp2": (f"--mtp-num-layers 1 {VPP}", "--context-parallel-size 2"),
    "vpp2-lm-head": (
        f"--mtp-num-layers 1 {VPP}",
        "--context-parallel-size 2 --burst-layout striped --burst-lm-head-loss recompute",
    ),
}  # fmt: skip


# If heads looked further, losses would differ by more than the tolerance from the third step on.
LONG = "--packed --train-iters 3"
SLOW = ("cp2", "cp2x2-lm-head", "cp4-contiguous", "tp2-sp", "vpp2-lm-head")


@pytest.fixture(scope="module")
def one_rank(four, common):
    """Return `one_rank(flags)`, the cached run on one rank with separate documents."""
    runs = {}

    def run(flags):
        if flags not in runs:
            flagged = [*common, *LONG.split(), *flags.split()]
            runs[flags] = four(session.train_with_heads_inside_documents, flagged)[0]
        return runs[flags]

    return run


@pytest.mark.parametrize("case", [slow(x) if x in SLOW else x for x in PACKED])
def test_heads_look_no_further_than_their_document(train, one_rank, case):
    model, split = PACKED[case]
    assert worst(train(f"{LONG} {model} {split}"), one_rank(model)) < TOLERANCE


@pytest.mark.parametrize("split", ["--context-parallel-size 2", slow(TWO_BY_TWO)])
def test_heads_on_documents_that_are_laid_out_one_by_one(train, one_rank, even_data, split):
    model = f"--mtp-num-layers 2 --data-path {even_data}"
    assert worst(train(f"{LONG} {model} {split}"), one_rank(model)) < TOLERANCE


def test_heads_that_looked_further_would_be_noticed(train, one_rank):
    model = "--mtp-num-layers 2"
    assert worst(train(f"{LONG} {model}"), one_rank(model)) > 20 * TOLERANCE
