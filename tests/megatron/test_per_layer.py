"""Algorithms per layer (`--burst-per-layer`): training equals one rank with Megatron's own
attention, every layer runs what was asked for it, and what names no layer is refused."""

from types import SimpleNamespace

import pytest
import session
from test_parity import TOLERANCE, worst

import megatron_burst as mb
from megatron_burst.autotune import cluster_file
from megatron_burst.autotune.clusters import Cluster
from megatron_burst.megatron import stream_layout
from megatron_burst.megatron.attention.plan_book import LayerKind
from megatron_burst.megatron.checks import command_line
from megatron_burst.megatron.checks.config import config_problems
from megatron_burst.schedule.per_layer import layer_choices

# The first and the third of four layers have a window.
MODEL = "--num-layers 4 --window-size 9,0 --window-attn-skip-freq 2"
STAGES = "--pipeline-model-parallel-size 2"  # whose weights are drawn by stage
FOUR = "--context-parallel-size 4 --burst-intra-size 2"
WAYS = {
    "cp2-kinds": ("--context-parallel-size 2", "window=ring,full=tile", "rtrt"),
    "cp4-kinds": (FOUR, "window=all_gather,full=multicast", "amam"),
    "cp4-one-kind": (f"{FOUR} --context-parallel-algo tile", "window=prefetch", "ptpt"),
    "cp4-numbers": (f"{FOUR} --burst-layout striped", "2-3=token_ring,window=ring", "rttb"),
    "cp2-pp2": (f"--context-parallel-size 2 {STAGES}", "1=ring,4=tile", "rbbt"),
    "cp4-heads": (
        f"{FOUR} --context-parallel-algo hybrid --burst-ulysses-size 2", "window=ring", "rhrh",
    ),
    "cp2-store": (
        "--context-parallel-size 2 --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 1 --burst-attention-store 1.0", "full=tile", "btbt",
    ),
}  # fmt: skip


SHORT = ("cp2-kinds", "cp4-numbers", "cp2-pp2")
SOME = [way if way in SHORT else pytest.param(way, marks=pytest.mark.slow) for way in WAYS]


@pytest.mark.parametrize("way", SOME)
def test_training_equals_one_rank(train, way):
    split, asked, _ = WAYS[way]
    ours = train(f"{MODEL} {split} --burst-per-layer {asked}")
    whole = train(f"{MODEL} {STAGES}" if STAGES in split else MODEL)
    assert worst(ours, whole) < TOLERANCE


@pytest.mark.parametrize("way", SOME)
def test_every_layer_runs_what_was_asked_for_it(four, common, way):
    split, asked, letters = WAYS[way]
    flags = [*common, *MODEL.split(), *split.split(), "--train-iters", "1"]
    ranks = four(session.algorithms_of_layers, [*flags, "--burst-per-layer", asked])
    found = {}
    for layers in ranks:
        found |= layers
        if STAGES not in split:
            assert len(layers) == 4
    assert "".join(found[number][0] for number in sorted(found)) == letters


def test_auto_chooses_for_each_kind_of_layers(four, common, train, tmp_path):
    """At these rates a window's few rows are fetched at once, and all rows go round as tiles."""
    rates = mb.Rates(1e8, 1e8, 1e-4, 1e9)
    path = tmp_path / "rates.toml"
    cluster_file.write(Cluster("h100", 4, 2, rates=rates), path)
    flags = f"{MODEL} {FOUR} --context-parallel-algo auto --burst-cluster {path}"
    for steps, layers in four(session.train_and_note_algorithms, [*common, *flags.split()]):
        assert [layers[number] for number in (1, 2, 3, 4)] == ["prefetch", "tile"] * 2
        assert worst(steps, train(MODEL)) < TOLERANCE


@pytest.mark.parametrize(
    ("per_layer", "window", "said"),
    [
        ("window=ring", (9, None), "layers with the window (9, all)"),
        ("2-3=ring,window=ring", (9, 0), "layers with the window (9, 0) that have ring"),
        ("2-3=ring", None, "layers without a window that have ring"),  # and 4 has burst
    ],
)
def test_layers_named_by_number_are_not_all_of_their_kind(per_layer, window, said):
    chosen = mb.BurstConfig("ring", per_layer=per_layer)
    assert LayerKind(chosen, True, window, None, (4, 4, 8, 8)).which() == said


def test_the_log_says_which_layers_have_which(four, common):
    flags = f"{MODEL} {FOUR} --burst-per-layer window=ring,full=tile"
    told, *others = four(session.logged, [*common, *flags.split()])
    first, second = (line for line in told if line.startswith("burst attention: "))
    assert "algorithm ring" in first
    assert "; per layer window=ring,full=tile, this is layers with the window (9, 0)" in first
    assert "algorithm tile" in second
    assert second.endswith("; this is layers without a window")
    assert not any("burst attention: " in line for lines in others for line in lines)


def test_kinds_that_only_a_later_stage_has_are_logged_once(four, common):
    """Of two stages with two layers each the second has the third layer, which has no window."""
    model = f"{MODEL} {STAGES} --context-parallel-size 2 --window-attn-skip-freq 3"
    flags = f"{model} --burst-per-layer window=ring,full=tile"
    ranks = four(session.logged, [*common, *flags.split()])
    lines = [line for told in ranks for line in told if line.startswith("burst attention: ")]
    first, second = lines
    assert first in ranks[0]
    assert first.endswith("this is layers with the window (9, 0)")
    assert second in ranks[2]
    assert second.endswith("this is layers without a window")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("window=ring", ["ring", None, "ring", None]),
        ("full=tile,window=ring", ["ring", "tile", "ring", "tile"]),
        ("window=ring,2-3=tile", ["ring", "tile", "tile", None]),
        ("3=burst, full=ring", [None, "ring", "burst", "ring"]),
    ],
)
def test_what_a_text_states(text, found):
    choices = layer_choices(text)
    assert [choices.algorithm(n, n % 2 == 1) for n in (1, 2, 3, 4)] == found


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "WHICH=ALGORITHM"),
        ("window", "must be one of burst"),
        ("window=auto", "'window=auto': the algorithm must be one of burst"),
        ("window=hybrid", "must be one of"),
        ("windows=ring", "'windows=ring' must be WHICH=ALGORITHM"),
        ("sparse=ring", "--burst-sparse is for such layers"),
        ("linear=scan", "--burst-linear is for such layers"),
        ("0=ring", "count from 1"),
        ("4-2=ring", "from its lower end"),
        ("window=ring,window=tile", "window=ring and window=tile are of the same layers"),
        ("1-3=ring,2=tile", "1-3=ring and 2=tile are of the same layers"),
        ("window=ring,", "'' must be"),
    ],
)
def test_a_text_that_states_nothing(text, words):
    with pytest.raises(ValueError, match=words) as caught:
        mb.BurstConfig(per_layer=text)
    assert "--burst-per-layer" in str(caught.value)


def test_a_forecast_of_the_wire_needs_one_algorithm():
    with pytest.raises(ValueError, match="--burst-wire-dtype"):
        mb.BurstConfig("auto", wire_dtype="auto", per_layer="window=ring")


def problems(per_layer="window=ring", changes=(), **choices):
    """What is refused of a model whose first and third of four layers have a window."""
    fields = {
        "context_parallel_size": 4, "tensor_model_parallel_size": 1, "num_attention_heads": 4,
        "num_query_groups": 4, "num_layers": 4, "window_size": (9, 0), "window_attn_skip_freq": 2,
    }  # fmt: skip
    burst = mb.BurstConfig(per_layer=per_layer, **choices)
    config = SimpleNamespace(**fields | dict(changes))
    return [str(each) for each in config_problems(config, burst) if "per-layer" in str(each)]


@pytest.mark.parametrize(
    ("per_layer", "changes", "choices", "words"),
    [
        ("window=ring", {"context_parallel_size": 1}, {}, "context-parallel-size above 1"),
        ("window=ring", {}, {"algorithm": "megatron"}, "needs --context-parallel-algo burst"),
        ("window=ring", {}, {"algorithm": "ulysses"}, "all ranks share heads"),
        ("window=ring", {}, {"ulysses_size": 4}, "share heads by --burst-ulysses-size"),
        ("window=ring", {"window_size": None}, {}, "window=ring is of no layer"),
        ("full=ring", {"window_attn_skip_freq": None}, {}, "full=ring is of no layer"),
        ("3-5=ring", {}, {}, "3-5=ring, and the model has 4 layers"),
        ("1=ring", {"mtp_num_layers": 1}, {}, "--mtp-num-layers"),
        ("1=ring", {"hybrid_layer_pattern": "M*M*"}, {}, "1=ring is of no layer"),
        ("2=ring,5=tile", {"hybrid_layer_pattern": "M*|M*/M*"}, {}, "model has 4 layers"),
        (
            "1-3=ring",
            {"experimental_attention_variant": "gated_delta_net", "linear_attention_freq": 4},
            {},
            "1-3=ring is of no layer",
        ),
    ],
)
def test_what_names_no_layer_is_refused(per_layer, changes, choices, words):
    (told,) = problems(per_layer, changes, **choices)
    assert f"--burst-per-layer {per_layer}" in told
    assert words in told


@pytest.mark.parametrize(
    ("per_layer", "changes"),
    [
        ("window=ring,full=tile,4=burst", {}),
        ("window=ring", {"mtp_num_layers": 1}),
        ("window=ring", {"num_layers": None, "window_size": None}),
        ("2-3=ring", {"hybrid_layer_pattern": "M*M*", "num_layers": None}),
        ("2=ring", {"hybrid_layer_pattern": "M+M*", "num_layers": None}),
        ("7=ring", {"num_layers": None}),  # nobody knows
    ],
)
def test_what_is_honoured(per_layer, changes):
    assert problems(per_layer, changes) == []


DELTA = {"experimental_attention_variant": "gated_delta_net", "window_size": None}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"window_attn_skip_freq": [1, 0]}, "--window-attn-skip-freq [1, 0] is of 2 layers"),
        (
            {"window_attn_skip_freq": [1, 0, 1], "hybrid_layer_pattern": "M*|M*/M*"},
            "[1, 0, 1] is of 3 layers, and the model has 4: give an entry for each, or a number",
        ),
        (DELTA | {"linear_attention_freq": [1] * 3}, "--linear-attention-freq [1, 1, 1]"),
    ],
)
@pytest.mark.parametrize("per_layer", [None, "window=ring"])
def test_lists_of_too_few_layers(changes, said, per_layer):
    fields = {"context_parallel_size": 4, "num_layers": 4, "window_size": (9, 0)} | changes
    config = SimpleNamespace(
        **fields, num_attention_heads=4, num_query_groups=4, tensor_model_parallel_size=1
    )
    told = [str(each) for each in config_problems(config, mb.BurstConfig(per_layer=per_layer))]
    assert sum(said in line for line in told) == 1
    assert stream_layout.layers_of(config).softmax > 0  # raises nothing of its own


EXCHANGES = [
    ("p2p", False), (["p2p"], False), (["a2a", "a2a"], False), (None, False),
    (["p2p", "a2a"], True),
]  # fmt: skip


@pytest.mark.parametrize(("kinds", "refused"), EXCHANGES)
def test_megatrons_own_list_of_exchanges(kinds, refused):
    told = problems(changes={"cp_comm_type": kinds})
    assert len(told) == refused
    assert all("--cp-comm-type p2p a2a" in line for line in told)


def test_a_list_on_the_command_line_is_refused_once():
    args = SimpleNamespace(
        context_parallel_size=2, cp_comm_type=["p2p", "a2a"], num_attention_heads=4, num_layers=2,
    )  # fmt: skip
    from megatron_burst import flags

    flags.settle(args)
    args.context_parallel_algo = "burst"
    found = command_line.problems(args, ["--cp-comm-type", "p2p", "a2a"])
    (told,) = (str(each) for each in found if "--cp-comm-type" in str(each))
    assert "--burst-per-layer" in told
