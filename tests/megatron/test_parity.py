"""Splitting the sequence changes nothing: loss and gradient norm of two steps.

The reference is one rank per sequence with Megatron's own attention, from the same seed.
"""

import pytest
import session

TOLERANCE = 1e-5  # relative, fp32

GQA = "--num-query-groups 2 --qk-layernorm --untie-embeddings-and-output-weights"
DEEP = "--num-layers 4"
PP = "--num-layers 4 --pipeline-model-parallel-size 2"
VPP = f"{PP} --num-virtual-stages-per-pipeline-rank 2 --global-batch-size 4"  # 4 micro-batches
WINDOW = "--window-size 12,0"
LATENT = (
    "--multi-latent-attention --kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 4 "
    "--v-head-dim 12"
)
MTP = "--train-iters 3 --mtp-num-layers"  # an error of heads shows in the third step
TWO_BY_TWO = "--context-parallel-size 4 --hierarchical-context-parallel-sizes 2 2"

# what is compared -> (flags of the one-rank run, flags added by the split one)
CASES = {
    "cp2": ("", "--context-parallel-size 2"),
    "cp2x2": ("", TWO_BY_TWO),
    "cp2-contiguous": ("", "--context-parallel-size 2 --burst-layout contiguous"),
    "ring-striped": (
        "",
        "--context-parallel-size 4 --context-parallel-algo ring --burst-layout striped",
    ),
    "double-ring": ("", f"{TWO_BY_TWO} --context-parallel-algo double_ring"),
    "tp2-mqa": ("--num-query-groups 1", "--tensor-model-parallel-size 2 --context-parallel-size 2"),
    "sequence-parallel": (
        GQA,
        "--tensor-model-parallel-size 2 --context-parallel-size 2 --sequence-parallel "
        "--burst-layout striped --use-distributed-optimizer",
    ),
    "window": (WINDOW, TWO_BY_TWO),
    "sink-learnable": ("--softmax-type learnable", TWO_BY_TWO),
    # Megatron draws the sinks of each tensor-parallel rank for itself: compared with TP, unsplit.
    "sink-learnable-tp2": (
        "--softmax-type learnable --tensor-model-parallel-size 2",
        "--context-parallel-size 2 --burst-layout striped",
    ),
    "latent": (LATENT, TWO_BY_TWO),
    "latent-striped": (LATENT, f"{TWO_BY_TWO} --burst-layout striped"),
    "latent-tp2": (LATENT, "--tensor-model-parallel-size 2 --context-parallel-size 2"),
    "mtp-striped": (f"{MTP} 2", f"{TWO_BY_TWO} --burst-layout striped"),
    "packed-gqa-tp2": (
        f"--packed {GQA}",
        "--tensor-model-parallel-size 2 --context-parallel-size 2",
    ),
    "packed-latent": (f"--packed {LATENT}", "--context-parallel-size 2"),
    "packed-recompute": (
        f"--packed {DEEP}",
        f"{TWO_BY_TWO} --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 1",
    ),
    "packed-pp2": (f"--packed {PP}", "--context-parallel-size 2"),
    "balanced-sequence-parallel": (
        f"--packed {GQA}",
        "--tensor-model-parallel-size 2 --context-parallel-size 2 --sequence-parallel "
        "--burst-layout balanced --use-distributed-optimizer",
    ),
    "balanced-store": (
        f"--packed {DEEP}",
        f"{TWO_BY_TWO} --burst-layout balanced --recompute-granularity full "
        "--recompute-method uniform --recompute-num-layers 1 --burst-attention-store 0.5",
    ),
    "packed-vpp2": (f"--packed {VPP}", "--context-parallel-size 2"),
    "all-gather": ("", f"{TWO_BY_TWO} --context-parallel-algo all_gather"),
    "ulysses": ("", "--context-parallel-size 4 --context-parallel-algo ulysses"),
    "hybrid-context-first": (
        GQA,
        f"{TWO_BY_TWO} --context-parallel-algo hybrid --burst-ulysses-size 2 "
        "--burst-placement context_first --burst-layout striped",
    ),
    "store-half-uniform": (
        DEEP,
        f"{TWO_BY_TWO} --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 2 --burst-attention-store 0.5",
    ),
    "store-vpp2": (
        VPP,
        "--context-parallel-size 2 --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 1 --burst-attention-store 0.5",
    ),
    "store-vpp2-block": (
        VPP,
        "--context-parallel-size 2 --recompute-granularity full --recompute-method block "
        "--recompute-num-layers 1 --burst-attention-store 0.25",
    ),
    "auto": ("", f"{TWO_BY_TWO} --context-parallel-algo auto"),
    "pp2-recompute": (
        PP,
        "--context-parallel-size 2 --burst-layout striped "
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    ),
    # Rows of docs/compatibility.md of one flag each; in CI others above have these flags together.
    "cp4": ("", "--context-parallel-size 4"),
    "distributed-optimizer": ("", f"{TWO_BY_TWO} --use-distributed-optimizer"),
    "gqa-qknorm-untied": (GQA, TWO_BY_TWO),
    "gqa-qknorm-untied-striped": (GQA, f"{TWO_BY_TWO} --burst-layout striped"),
    "mqa": ("--num-query-groups 1", "--context-parallel-size 4"),
    "tp2": ("", "--tensor-model-parallel-size 2 --context-parallel-size 2"),
    # Stages draw their weights from seeds of their own: compared with two stages, unsplit.
    "pp2": (PP, "--context-parallel-size 2"),
    "vpp2": (VPP, "--context-parallel-size 2"),
    "recompute-uniform": (
        DEEP,
        f"{TWO_BY_TWO} --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 1",
    ),
    "recompute-block": (
        DEEP,
        "--context-parallel-size 2 --recompute-granularity full --recompute-method block "
        "--recompute-num-layers 3",
    ),
    "recompute-selective": ("", f"{TWO_BY_TWO} --recompute-granularity selective"),
    "store-all-block": (
        DEEP,
        f"{TWO_BY_TWO} --recompute-granularity full --recompute-method block "
        "--recompute-num-layers 3 --burst-attention-store 1.0",
    ),
    "window-striped-skip": (
        f"{WINDOW} --window-attn-skip-freq 2",
        f"{TWO_BY_TWO} --burst-layout striped",
    ),
    "sink-off-by-one": ("--softmax-type off-by-one", "--context-parallel-size 2"),
    "mtp": (f"{MTP} 1", "--context-parallel-size 2"),
    "mtp-contiguous": (
        f"{MTP} 1",
        "--context-parallel-size 4 --burst-layout contiguous",
    ),
    "packed": ("--packed", TWO_BY_TWO),
    "packed-striped": ("--packed", f"{TWO_BY_TWO} --burst-layout striped"),
    "packed-contiguous": ("--packed", "--context-parallel-size 2 --burst-layout contiguous"),
    "hybrid": ("", f"{TWO_BY_TWO} --context-parallel-algo hybrid --burst-ulysses-size 2"),
}

# One of each kind of model, algorithm, layout and recomputation; the others, which combine what
# these have, are the long tail. Further flags are compared with stock by `make parity`.
QUICK = (
    "cp2", "cp2x2", "cp2-contiguous", "ring-striped", "double-ring", "sequence-parallel", "window",
    "sink-learnable", "latent", "mtp-striped", "packed-vpp2", "balanced-sequence-parallel",
    "all-gather", "ulysses", "hybrid-context-first", "store-half-uniform", "store-vpp2", "auto",
)  # fmt: skip


def slow(value):
    return pytest.param(value, marks=pytest.mark.slow)


def worst(a, b):
    """Return the largest relative difference in loss or gradient norm over the steps."""
    assert len(a) == len(b) > 0
    steps = zip(a, b, strict=True)
    return max(abs(x - y) / abs(y) for p, q in steps for x, y in zip(p, q, strict=True))


@pytest.mark.parametrize("case", [x if x in QUICK else slow(x) for x in CASES])
def test_split_run_equals_one_rank(train, case):
    one_rank, split = CASES[case]
    assert worst(train(f"{one_rank} {split}"), train(one_rank)) < TOLERANCE


@pytest.mark.parametrize("layout", [slow("zigzag"), slow("striped"), "balanced"])
def test_packed_documents_with_a_window(four, common, train, layout):
    # Megatron's local attention drops one of the two masks: the reference has both in a table.
    reference = four(session.train_windowed_by_mask, [*common, "--packed"], 12)[0]
    split = train(f"--packed {WINDOW} {TWO_BY_TWO} --burst-layout {layout}")
    assert worst(split, reference) < TOLERANCE
    assert worst(split, train("--packed")) > 100 * TOLERANCE


@pytest.mark.parametrize("split", [TWO_BY_TWO, slow(f"{TWO_BY_TWO} --burst-layout striped")])
def test_packed_documents_that_divide_are_laid_out_one_by_one(
    four, common, train, even_data, split
):
    flags = f"--packed --data-path {even_data}"
    assert worst(train(f"{flags} {split}"), train(flags)) < TOLERANCE


def test_in_bf16_splitting_costs_less_than_the_format(train):
    one_rank, exact, split = train("--bf16"), train(), train(f"--bf16 {TWO_BY_TWO}")
    losses = [[loss for loss, _ in run] for run in (split, one_rank, exact)]
    far, near = (
        [abs(x / y - 1) for x, y in zip(losses[1], losses[i], strict=True)] for i in (2, 0)
    )
    assert 0 < max(near) < max(far)


def test_wire_dtype_reaches_the_ring(train):
    wide, narrow = (train(f"{TWO_BY_TWO}{more}") for more in ("", " --burst-wire-dtype bf16"))
    assert 1e-9 < worst(narrow, wide) < 1e-2


def test_a_run_in_deterministic_mode_is_bit_for_bit_the_same_again(four, common):
    flags = [*common, *f"{TWO_BY_TWO} --num-query-groups 2".split()]
    first, second = (four(session.train_deterministically, flags) for _ in range(2))
    assert first == second
    other = four(session.train_deterministically, [*flags, "--seed", "5"])
    assert all(a != b for a, b in zip(first, other, strict=True))


def test_packed_documents_do_not_see_each_other(train):
    assert worst(train("--packed"), train()) > 100 * TOLERANCE


def test_it_trains(train):
    assert train()[-1][0] < train()[0][0] - 0.05


@pytest.mark.parametrize("wrong", [session.train_without_exchange, session.train_misplaced])
def test_the_comparison_notices_wrong_attention(four, common, train, wrong):
    flags = [*common, "--context-parallel-size", "2"]
    assert worst(four(wrong, flags)[0], train()) > 100 * TOLERANCE
