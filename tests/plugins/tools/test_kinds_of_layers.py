"""An algorithm for each kind of layers in the forecast, the account and the advice: times are those
of every kind alone, added; memory is that of the larger one; flags are read back."""

import json
import shlex
from dataclasses import replace

import pytest

import megatron_burst as mb
from megatron_burst.autotune import select
from megatron_burst.autotune.clusters import Cluster
from megatron_burst.autotune.host_time import HostTime
from megatron_burst.cli.main import main
from megatron_burst.plugins.tools import model_arguments
from megatron_burst.plugins.tools.advise import rivals
from megatron_burst.plugins.tools.advise.account.memory import account
from megatron_burst.plugins.tools.advise.account.rings import ring_held
from megatron_burst.plugins.tools.advise.advice import advise
from megatron_burst.plugins.tools.advise.forecast.attention_time import attention_time
from megatron_burst.plugins.tools.advise.forecast.layer_time import layer_time
from megatron_burst.plugins.tools.advise.forecast.step_time import step_time
from megatron_burst.plugins.tools.advise.report import attention_text, configuration_facts
from megatron_burst.plugins.tools.advise.search.attention_choice import AttentionForecast
from megatron_burst.plugins.tools.advise.search.packed import PackedForecast
from megatron_burst.plugins.tools.advise.settings import Settings, check
from megatron_burst.plugins.tools.advise.shapes.model import LayerPart, Model
from megatron_burst.schedule.algorithms import ALGORITHMS

K = 1024
# Layers 1, 2, 4 and 5 of six have a window.
TWO = Model("two kinds", 6, 1024, 8, 2, 4096, 32000, pattern="WWFWWF", window=K)
ONE = replace(TWO, pattern="")
SLIM = replace(ONE, ffn=64, vocabulary=8)  # whose peak is in attention
# Launches are free, so that layers wait for none and times add up.
NODES = Cluster("h100", 8, 4, host_time=HostTime(0.0, 0.0, 0.0, 0.0))
RUN = Settings(
    64 * K, cp=8, intra=4, micro_batches=2, algorithm="tile", side="kv", recompute="none"
)


def call(algorithm, window):
    """Seconds of an attention call, forward and backward."""
    return attention_time(TWO, NODES, replace(RUN, algorithm=algorithm), window=window).seconds


def seconds(**fields):
    return step_time(TWO, NODES, replace(RUN, **fields)).seconds


# --- time ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("own", "others"),
    [
        ({"window_algorithm": "ring"}, {("ring", K): 4}),
        ({"window_algorithm": "prefetch", "chunk_algorithm": "burst"},
         {("prefetch", K): 2, ("burst", K): 2}),
    ],
)  # fmt: skip
def test_a_step_takes_the_calls_of_every_kind(own, others):
    """Two micro-batches; other layers have tile. Chunks of 2K count as windows of 1K. others:
    (algorithm, window): layers."""
    model = replace(TWO, pattern="WCFWCF", chunk=2 * K) if "chunk_algorithm" in own else TWO
    taken, alike = (step_time(model, NODES, replace(RUN, **each)).seconds for each in (own, {}))
    more = sum(n * (call(name, w) - call("tile", w)) for (name, w), n in others.items())
    assert abs(more) > 1e-5
    assert taken - alike == pytest.approx(2 * more, rel=1e-9)


def test_a_call_alone_has_one_algorithm():
    run = replace(RUN, window_algorithm="ring")
    with pytest.raises(
        ValueError, match=r"window_algorithm ring, .*: part='attention' predicts one call"
    ):
        mb.simulate(TWO, NODES, run, part="attention")
    assert mb.simulate(TWO, NODES, run).seconds == seconds(window_algorithm="ring")
    turned = replace(TWO, pattern="FFWFFW")  # part "layer" is the last one
    last = mb.simulate(turned, NODES, run, part="layer").core
    alone = attention_time(TWO, NODES, replace(RUN, algorithm="ring"), window=K)
    assert (last.forward, last.backward) == (alone.forward, alone.backward)


# --- memory ----------------------------------------------------------------------------------


@pytest.mark.parametrize("recompute", ["full", "none"])
def test_buffers_are_those_of_one_layer_at_a_time(recompute):
    """So a run with two algorithms takes as much as the larger of them alone."""

    def peak(**fields):
        run = Settings(16 * K, cp=8, intra=4, recompute=recompute, mlp_tiles=1, **fields)
        return account(replace(SLIM, pattern=TWO.pattern), run).peak.bytes

    alone = {name: peak(algorithm=name) for name in ("ring", "all_gather")}
    assert alone["all_gather"] > 1.02 * alone["ring"]
    # The last layer, whose backward is the peak, has no window.
    assert peak(algorithm="all_gather", window_algorithm="ring") == alone["all_gather"]
    assert peak(algorithm="ring", window_algorithm="all_gather") == alone["ring"]


def test_a_window_has_room_for_the_rows_that_it_sees():
    """Four ranks in a row, of 64 rows each: a query sees 16 rows before its own, so a rank fetches
    16 rows of the one before it in forward, and in backward sends their gradients there."""
    forward, backward = ring_held("ring", "contiguous", 4, 4, "kv", False, False, None, 16)
    assert forward.longest["kv"] == 16
    assert backward.longest["kv"] == 16
    whole, _ = ring_held("ring", "contiguous", 4, 4, "kv", False, False, None, None)
    assert whole.longest["kv"] == 64


def test_windows_with_an_algorithm_of_their_own_hold_little():
    """What holds all chunks at once holds those that a window sees: 1K of 8K rows."""
    only, plain = replace(SLIM, pattern="WWWWWW"), Settings(64 * K, cp=8, intra=4)
    held, far = (
        account(only, replace(plain, **fields)).peak.items["ring buffers"]
        for fields in (
            {"algorithm": "ring", "window_algorithm": "all_gather"},
            {"algorithm": "all_gather"},
        )
    )
    assert held < far / 4


# --- what cannot be --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"window_algorithm": "hybrid"}, "window_algorithm hybrid: must be one of burst"),
        ({"chunk_algorithm": "ring"},
         "chunk_algorithm ring: two kinds has no chunked layers; remove chunk_algorithm"),
        ({"window_algorithm": "ring", "cp": 1}, "requires ranks that form a ring, got --cp 1"),
        ({"window_algorithm": "ring", "algorithm": "ulysses", "cp": 2, "ulysses": 2, "intra": 2},
         r"got --ulysses 2 \(equal to --cp\); use --ulysses below 2"),
        ({"window_algorithm": 5}, "--window-algorithm must be a string, got 5"),
    ],
)  # fmt: skip
def test_a_kind_without_a_choice_is_refused(fields, words):
    with pytest.raises(ValueError, match=words):
        check(TWO, replace(RUN, **fields))


# --- the advice ------------------------------------------------------------------------------

# gemma-3-12b with full layers as tiles, which windows would pay for.
ASKED = {"gpus": 64, "seq": "128K", "cp": 32, "ulysses": 1, "tp": 1, "pp": 1, "top": 1}


@pytest.fixture(scope="module")
def gemma():
    return advise("gemma-3-12b", "h100", **ASKED)


def test_windows_have_the_algorithm_that_is_fastest_for_them(gemma):
    run, model, cluster = gemma.best.run, gemma.model, gemma.cluster
    assert run.algorithm == "tile"
    algorithm = run.window_algorithm
    assert run.by_kind == {"window": algorithm}

    def of(name):
        """Seconds of one layer with a window."""
        alone = replace(run.uniform(), algorithm=name)
        return layer_time(model, cluster, alone, part=LayerPart("window", True, False)).seconds

    fastest = min(of(name) for name, each in ALGORITHMS.items() if each.automatic)
    assert of(algorithm) <= fastest * (1 + select.TIE)
    # 40 of 48 layers have a window.
    gained = 40 * run.micro_batches * (of("tile") - of(algorithm))
    alike = step_time(model, cluster, run.uniform()).seconds
    assert alike - gemma.best.seconds == pytest.approx(gained, rel=1e-6)
    assert gained > select.TIE * gemma.best.seconds
    share = f"{gained / alike:.1%}"
    assert gemma.by_kind == (
        f"--context-parallel-algo auto: {algorithm} in window layers, a step {share} shorter than "
        "with tile in all layers"
    )


def test_it_fits_and_is_shown(gemma):
    assert gemma.best.fit.fits
    run = gemma.best.run
    own = f"{run.window_algorithm} in window layers"
    assert f"tile, {run.side}, zigzag, {own}" in attention_text(run)
    shown = configuration_facts(gemma.best, gemma.cluster)["attention"]
    assert (shown["window_algorithm"], shown["chunk_algorithm"]) == (run.window_algorithm, None)
    assert rivals.settings("p2p", gemma.model, gemma.cluster, run).by_kind == {}


def test_the_flags_are_read_back(gemma):
    words = shlex.split(" ".join(gemma.flags()))
    assert words[words.index("--context-parallel-algo") + 1] == "auto"
    read, given = model_arguments.read_command(words)
    assert given["algorithm"] == "auto"
    assert read.letters == gemma.model.letters


def test_what_gains_less_than_a_tie_is_not_printed():
    groups = {"tp": 1, "cp": 16, "pp": 1, "ulysses": 1, "recompute": "full", "store": 1.0}
    found = advise("gpt-oss-20b", "h100", gpus=64, seq="64K", top=1, **groups)
    run = AttentionForecast(found.model, found.cluster).by_kind(found.best.run)
    assert (found.best.run.algorithm, run.window_algorithm) == ("tile", "prefetch")
    gain = found.best.seconds - step_time(found.model, found.cluster, run).seconds
    assert 0 < gain < select.TIE * found.best.seconds
    assert found.best.run.by_kind == {}
    assert found.by_kind == ""
    assert "--context-parallel-algo tile" in found.flags()


def test_an_algorithm_that_is_fixed_is_that_of_all_layers():
    found = advise("gemma-3-12b", "h100", **ASKED, algorithm="tile")
    assert found.best.run.by_kind == {}


def test_one_kind_of_layers_is_not_searched_again(monkeypatch):
    """Nor are ranks that all share heads, nor packs, of which only an estimate is known."""
    forecast = AttentionForecast(ONE, NODES)
    monkeypatch.setattr(select, "fastest", None)
    assert forecast.by_kind(RUN) is RUN
    assert AttentionForecast(replace(TWO, pattern="WWWWWW"), NODES).by_kind(RUN) is RUN
    shared = replace(RUN, ulysses=8)
    assert AttentionForecast(TWO, NODES).by_kind(shared) is shared
    assert PackedForecast(TWO, NODES, None, (K,) * 64).by_kind(RUN) is RUN


# --- memory of a command ---------------------------------------------------------------------


def test_memory_of_a_command_with_auto_is_that_of_each_kind(capsys, gemma):
    """With the flags that `advise` has printed, `memory` predicts the same step."""
    words = ["memory", "--gpus", "64", "--", "pretrain_gpt.py"]
    words += shlex.split(" ".join(gemma.flags()))
    assert main(words) == 0
    shown = " ".join(capsys.readouterr().out.split())
    own = gemma.best.run.window_algorithm
    assert f"--context-parallel-algo auto: tile, {own} in window layers" in shown
    assert main(["memory", "--json", *words[1:]]) == 0
    assert json.loads(capsys.readouterr().out)["seconds"] == pytest.approx(gemma.best.seconds)


def test_memory_of_a_command_with_auto_on_one_rank_and_in_packs(capsys):
    """One rank has no ring, and of packs no schedules are made: burst is counted."""
    flags = (
        "--num-layers 2 --hidden-size 1024 --num-attention-heads 8 --vocab-size 256 --bf16 "
        "--recompute-granularity full"
    )

    def facts(algorithm, cp, *more):
        words = ["memory", "--gpus", str(cp), "--json", *more, "--", "pretrain_gpt.py"]
        words += [*flags.split(), "--seq-length", "16384", "--context-parallel-size", str(cp)]
        assert main([*words, "--context-parallel-algo", algorithm]) == 0
        return json.loads(capsys.readouterr().out)["peak"]

    for cp, more in ((1, []), (4, ["--packed", "4K"])):
        assert facts("auto", cp, *more) == facts("burst", cp, *more)
