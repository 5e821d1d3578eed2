"""Attention in another layout than the tokens: rows are exchanged, and results do not change."""

from types import SimpleNamespace

import packed_ranks
import pytest
import session
from test_parity import DEEP, GQA, LATENT, PP, TOLERANCE, TWO_BY_TWO, worst

import megatron_burst as mb
from megatron_burst.megatron.checks.problem import report
from megatron_burst.megatron.checks.splitting import two_layout_problems

TWO_LAYOUTS = "--burst-layout contiguous --burst-attention-layout zigzag"
# what is compared -> (flags of the one-rank run, flags added by the split one)
CASES = {
    "gqa": (GQA, f"{TWO_BY_TWO} {TWO_LAYOUTS}"),
    "sequence-parallel": (
        GQA,
        f"--tensor-model-parallel-size 2 --context-parallel-size 2 --sequence-parallel "
        f"{TWO_LAYOUTS}",
    ),
    "striped": ("", f"{TWO_BY_TWO} --burst-layout zigzag --burst-attention-layout striped"),
    "packed": ("--packed", f"{TWO_BY_TWO} {TWO_LAYOUTS}"),
    "store": (
        DEEP,
        f"{TWO_BY_TWO} {TWO_LAYOUTS} --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 1 --burst-attention-store 0.5",
    ),
    "selective": ("--packed", f"{TWO_BY_TWO} {TWO_LAYOUTS} --recompute-granularity selective"),
    "shared-heads": (
        "",
        f"{TWO_BY_TWO} {TWO_LAYOUTS} --context-parallel-algo hybrid --burst-ulysses-size 2",
    ),
    "latent": (LATENT, f"--context-parallel-size 2 {TWO_LAYOUTS}"),
    "pipeline": (f"--packed {PP}", f"--context-parallel-size 2 {TWO_LAYOUTS} --micro-batch-size 1"),
    "micro-batch-2": ("", f"{TWO_BY_TWO} {TWO_LAYOUTS} --micro-batch-size 2"),
}
QUICK = ("sequence-parallel", "packed", "store")


@pytest.mark.parametrize(
    "case", [x if x in QUICK else pytest.param(x, marks=pytest.mark.slow) for x in CASES]
)
def test_split_run_equals_one_rank(train, case):
    one_rank, split = CASES[case]
    assert worst(train(f"{one_rank} {split}"), train(one_rank)) < TOLERANCE


@pytest.mark.parametrize(
    ("stream", "attention", "padded", "window"),
    [("contiguous", "zigzag", True, 9), ("zigzag", "striped", False, None)],
)
def test_core_attention_against_a_dense_mask(four, stream, attention, padded, window):
    for errors, empty in four(packed_ranks.worst_errors, stream, padded, window, attention):
        assert max(errors) < 1e-10
        assert empty == 0


def test_the_comparison_notices_rows_that_do_not_come_home(four):
    for errors, _ in four(packed_ranks.without_the_way_back, "contiguous", "zigzag"):
        assert errors[0] > 0.1


def test_the_start_up_line_says_what_it_costs(four, common):
    flags = [*common, *f"--context-parallel-size 2 {TWO_LAYOUTS}".split()]
    lines = [line for told in four(session.logged, flags) for line in told]
    # fp32, width 32: of rank 0's 32 rows, those from 16 on are in the last quarter of zigzag's
    # rank 1; it sends 16 rows of q, k and v, and 16 of out.
    assert 16 * 4 * 32 * 4 == 8 << 10  # rows, tensors, width, bytes of a number
    cost = "8 KiB from a rank in forward"
    assert any("tokens are contiguous and attention is zigzag" in x and cost in x for x in lines)


def problems(cp=2, **choices):
    config = SimpleNamespace(context_parallel_size=cp)
    for name in ("mtp_num_layers", "hybrid_context_parallel"):
        if name in choices:
            setattr(config, name, choices.pop(name))
    found = (*two_layout_problems(config, mb.BurstConfig(**choices)),)
    return report(found) if found else ""


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ({"layout": "striped"}, "--burst-layout striped: a separate layout of attention"),
        ({"layout": "contiguous", "sequence_chunks": 2}, "--burst-sequence-chunks 2"),
        ({"layout": "contiguous", "sequence_chunks": "auto"}, "--burst-sequence-chunks auto"),
        ({"layout": "contiguous", "offload": 0.5}, "--burst-offload 0.5"),
        ({"layout": "contiguous", "mtp_num_layers": 1}, "was not tested with --mtp-num-layers"),
        ({"layout": "contiguous", "hybrid_context_parallel": True}, "--hybrid-context-parallel"),
        (
            {"layout": "contiguous", "algorithm": "megatron"},
            "requires --context-parallel-algo burst",
        ),
        ({"layout": "contiguous", "cp": 1}, "> 1, but they are burst and 1"),
    ],
)
def test_what_was_not_tested_is_refused_by_name(choices, words):
    said = problems(attention_layout="zigzag", **choices)
    assert "--burst-attention-layout" in said
    assert words in said
    assert not problems(**choices, attention_layout=choices["layout"])
