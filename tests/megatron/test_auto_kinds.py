"""`--context-parallel-algo auto` chooses an algorithm for each kind of layer.

Training equals one rank with Megatron's own attention, and the log names the algorithm of each
kind.
"""

import pytest
import session
from test_parity import TOLERANCE, worst

import megatron_burst as mb
from megatron_burst.autotune import cluster_file
from megatron_burst.autotune.clusters import Cluster
from megatron_burst.megatron.attention.plan_book import LayerKind
from megatron_burst.megatron.data.cut import BatchCut

# Layers 1 and 3 of four have a window.
MODEL = "--num-layers 4 --window-size 9,0 --window-attn-skip-freq 2"
STAGES = "--pipeline-model-parallel-size 2"  # whose weights are drawn by stage
WINDOW, FULL = "for layers with the window (9, 0)", "for layers without a window"


@pytest.fixture(scope="module")
def auto(tmp_path_factory):
    """Return flags of auto, with rates that give windowed and other layers different algorithms.

    Windowed layers fetch their few rows at once, and full layers use tiles.
    """
    path = tmp_path_factory.mktemp("rates") / "rates.toml"
    cluster_file.write(Cluster("h100", 4, 2, rates=mb.Rates(1e8, 1e8, 1e-4, 1e9)), path)
    return f"--burst-intra-size 2 --context-parallel-algo auto --burst-cluster {path}"


def attention_lines(run):
    return [line for line in run.lines if line.startswith("burst attention: ")]


def test_each_kind_of_layers_has_its_algorithm_and_a_line(four, common, train, auto):
    model = f"{MODEL} --train-iters 2"
    flags = f"{model} --context-parallel-size 4 {auto}"
    runs = four(session.train_and_note, [*common, *flags.split()])
    for run in runs:
        assert run.algorithms == {1: "prefetch", 2: "tile", 3: "prefetch", 4: "tile"}
        assert worst(run.steps, train(model)) < TOLERANCE
    windows, full = attention_lines(runs[0])
    assert windows.startswith("burst attention: algorithm prefetch (auto: ")
    assert f"; {WINDOW}" in windows
    assert full.startswith("burst attention: algorithm tile (auto: ")
    assert full.endswith(f"; {FULL}")
    assert not any(attention_lines(run) for run in runs[1:])


def test_a_kind_that_only_a_later_stage_has_is_logged_once(four, common, auto):
    """The second of two stages with two layers each has the third layer, which has no window."""
    flags = f"{MODEL} {STAGES} --context-parallel-size 2 --window-attn-skip-freq 3 {auto}"
    runs = four(session.train_and_note, [*common, *flags.split()])
    first, second = (line for run in runs for line in attention_lines(run))
    assert first in runs[0].lines
    assert WINDOW in first
    assert second in runs[2].lines
    assert FULL in second


def test_layers_with_masks_of_a_function_are_chosen_for_alone(four, common, auto):
    """The masks are causal within chunks and over all tokens, as in Llama 4; each has one line."""
    flags = (
        f"--num-layers 4 --context-parallel-size 4 {auto} --burst-mask own_masks:chunked_local "
        "--train-iters 1"
    )
    runs = four(session.train_and_note, [*common, *flags.split()])
    local, whole = attention_lines(runs[0])
    for run in runs:
        assert run.algorithms[1] == run.algorithms[3]
        assert run.algorithms[2] == run.algorithms[4]
        assert f"algorithm {run.algorithms[1]} (auto: " in local
        assert f"algorithm {run.algorithms[2]} (auto: " in whole
    assert "; for layer 1 and layers with the same mask" in local
    assert whole.endswith("; for layer 2 and layers with the same mask")


@pytest.mark.parametrize(
    ("window", "number", "words"),
    [
        ((9, None), 0, "layers with the window (9, all)"),
        (None, 0, "layers without a window"),
        (None, 3, "layer 3 and layers with the same mask"),
    ],
)
def test_kinds_of_layers_in_words(window, number, words):
    kind = LayerKind(
        mb.BurstConfig("auto"), True, window, None, (4, 4, 8, 8), BatchCut("zigzag"), number=number
    )
    assert kind.layers() == words
