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
from megatron_burst.schedule.algorithms import ALGORITHMS
from megatron_burst.tools import model_arguments
from megatron_burst.tools.advise import rivals
from megatron_burst.tools.advise.account.memory import account
from megatron_burst.tools.advise.account.rings import ring_rooms
from megatron_burst.tools.advise.advice import advise
from megatron_burst.tools.advise.forecast.attention_time import attention_time
from megatron_burst.tools.advise.forecast.layer_time import layer_time
from megatron_burst.tools.advise.forecast.step_time import step_time
from megatron_burst.tools.advise.report import attention_said, one_of
from megatron_burst.tools.advise.search.attention_choice import AttentionForecast
from megatron_burst.tools.advise.search.packed import PackedForecast
from megatron_burst.tools.advise.settings import Settings, check
from megatron_burst.tools.advise.shapes.model import LayerPart, Model
from megatron_burst.tools.advise.shapes.models import named

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
    ("per_layer", "others"),
    [
        ("window=ring", {("ring", K): 4}),
        ("full=multicast", {("multicast", 0): 2}),
        ("window=ring,full=burst", {("ring", K): 4, ("burst", 0): 2}),
        ("2-3=ring", {("ring", K): 1, ("ring", 0): 1}),
        ("3=burst,4-6=ring,window=prefetch",
         {("burst", 0): 1, ("ring", K): 2, ("ring", 0): 1, ("prefetch", K): 2}),
    ],
)  # fmt: skip
def test_a_step_takes_the_calls_of_every_kind(per_layer, others):
    """Two micro-batches; other layers have tile. others: (algorithm, window): layers."""
    more = sum(n * (call(name, w) - call("tile", w)) for (name, w), n in others.items())
    assert abs(more) > 1e-5
    assert seconds(per_layer=per_layer) - seconds() == pytest.approx(2 * more, rel=1e-9)


def test_numbers_count_over_the_stages_of_a_pipeline():
    """Layer 5 is the second of the second stage, which its call makes longer."""
    halves = {"pp": 2, "cp": 4}

    def of(name):
        run = replace(RUN, algorithm=name, **halves)
        return attention_time(TWO, NODES, run, window=K).seconds

    assert of("token_ring") > of("tile") * 1.05
    longer = seconds(**halves, per_layer="5=token_ring") - seconds(**halves)
    # Each of two micro-batches waits for it, as the busiest stage has the head and is the second.
    assert longer == pytest.approx(2 * (of("token_ring") - of("tile")), rel=1e-9)
    assert seconds(**halves, per_layer="2=token_ring") - seconds(**halves) == pytest.approx(
        of("token_ring") - of("tile"),
        rel=1e-9,  # of the first stage once, in the bubble
    )


def test_a_call_alone_has_one_algorithm():
    run = replace(RUN, per_layer="window=ring")
    with pytest.raises(ValueError, match="per_layer window=ring: part attention is one call"):
        mb.simulate(TWO, NODES, run, part="attention")
    assert mb.simulate(TWO, NODES, run).seconds == seconds(per_layer="window=ring")
    last = mb.simulate(TWO, NODES, replace(run, per_layer="6=ring"), part="layer").core
    alone = attention_time(TWO, NODES, replace(run, algorithm="ring"))
    assert (last.forward, last.backward) == (alone.forward, alone.backward)


# --- memory ----------------------------------------------------------------------------------


@pytest.mark.parametrize("recompute", ["full", "none"])
def test_buffers_are_those_of_one_layer_at_a_time(recompute):
    """So a run with two algorithms takes as much as the larger of them alone."""

    def peak(**fields):
        run = Settings(16 * K, cp=8, intra=4, recompute=recompute, mlp_tiles=1, **fields)
        return account(SLIM, run).peak.bytes

    alone = {name: peak(algorithm=name) for name in ("ring", "all_gather")}
    assert alone["all_gather"] > 1.02 * alone["ring"]
    assert peak(algorithm="ring", per_layer="6=all_gather") == alone["all_gather"]
    assert peak(algorithm="all_gather", per_layer="1-5=ring") == alone["all_gather"]
    assert peak(algorithm="all_gather", per_layer="1-6=ring") == alone["ring"]


def test_a_window_has_room_for_the_rows_that_it_sees():
    """Four ranks in a row, of 64 rows each: a query sees 16 rows before its own, so a rank fetches
    16 rows of the one before it in forward, and in backward sends their gradients there."""
    forward, backward = ring_rooms("ring", "contiguous", 4, 4, "kv", False, False, None, 16)
    assert forward.rows["kv"] == 16
    assert backward.rows["kv"] == 16
    whole, _ = ring_rooms("ring", "contiguous", 4, 4, "kv", False, False, None, None)
    assert whole.rows["kv"] == 64


def test_windows_with_an_algorithm_of_their_own_hold_little():
    """What holds all chunks at once holds those that a window sees: 1K of 8K rows."""
    only, plain = replace(SLIM, pattern="WWWWWW"), Settings(64 * K, cp=8, intra=4)
    held, far = (
        account(only, replace(plain, **fields)).peak.items["ring buffers"]
        for fields in (
            {"algorithm": "ring", "per_layer": "window=all_gather"},
            {"algorithm": "all_gather"},
        )
    )
    assert held < far / 4


# --- what cannot be --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"per_layer": "window"}, "--per-layer window: 'window' must be|must be one of"),
        ({"per_layer": "7=ring"}, "7=ring is of no layer with attention of two kinds, which has 6"),
        ({"per_layer": "5-7=ring"}, "5-7=ring is of no layer"),
        ({"per_layer": "window=ring", "cp": 1}, "with --cp 1 there is no ring"),
        ({"per_layer": "window=ring", "algorithm": "ulysses", "cp": 2, "ulysses": 2, "intra": 2},
         "with --algorithm ulysses"),
        ({"per_layer": "window=ring", "cp": 2, "ulysses": 2, "intra": 2},
         "with --ulysses 2, which is --cp, there is no ring .* take --ulysses below 2"),
        ({"per_layer": 5}, "--per-layer must be a text, got 5"),
    ],
)  # fmt: skip
def test_what_names_no_layer_is_refused(fields, words):
    with pytest.raises(ValueError, match=words):
        check(TWO, replace(RUN, **fields))


def test_a_kind_that_the_model_lacks_is_refused():
    with pytest.raises(ValueError, match="window=ring is of no layer with attention"):
        check(ONE, replace(RUN, per_layer="window=ring"))


def test_keys_of_sparse_attention_must_travel():
    run = Settings(64 * K, cp=8, side="kv", per_layer="2=multicast")
    check(named("deepseek-v3.2"), run)
    with pytest.raises(ValueError, match="do not with tile: take burst or multicast"):
        check(named("deepseek-v3.2"), replace(run, per_layer="2=tile"))


# --- the advice ------------------------------------------------------------------------------

# gemma-3-12b with full layers as tiles, which windows would pay for.
ASKED = {"gpus": 64, "seq": "128K", "cp": 32, "ulysses": 1, "tp": 1, "pp": 1, "top": 1}


@pytest.fixture(scope="module")
def gemma():
    return advise("gemma-3-12b", "h100", **ASKED)


def test_windows_have_the_algorithm_that_is_fastest_for_them(gemma):
    run, model, cluster = gemma.best.run, gemma.model, gemma.cluster
    assert run.algorithm == "tile"
    kind, algorithm = run.per_layer.split("=")
    assert kind == "window"

    def of(name):
        """Seconds of one layer with a window."""
        alone = replace(run, algorithm=name, per_layer=None)
        return layer_time(model, cluster, alone, part=LayerPart("window", True, False)).seconds

    fastest = min(of(name) for name, each in ALGORITHMS.items() if each.automatic)
    assert of(algorithm) <= fastest * (1 + select.TIE)
    # 40 of 48 layers have a window.
    gained = 40 * run.micro_batches * (of("tile") - of(algorithm))
    alike = step_time(model, cluster, replace(run, per_layer=None)).seconds
    assert alike - gemma.best.seconds == pytest.approx(gained, rel=1e-6)
    assert gained > select.TIE * gemma.best.seconds
    share = f"{gained / alike:.1%}"
    assert gemma.by_kind == (
        f"--burst-per-layer window={algorithm}: a step {share} shorter than with tile in all layers"
    )


def test_it_fits_and_is_shown(gemma):
    assert gemma.best.fit.fits
    assert gemma.best.run.per_layer in attention_said(gemma.best.run)
    assert one_of(gemma.best, gemma.cluster)["attention"]["per_layer"] == gemma.best.run.per_layer
    assert rivals.settings("p2p", gemma.model, gemma.cluster, gemma.best.run).per_layer is None


def test_the_flags_are_read_back(gemma):
    words = shlex.split(" ".join(gemma.flags()))
    asked = gemma.best.run.per_layer
    assert words[words.index("--burst-per-layer") + 1] == asked
    read, given = model_arguments.read_command(words)
    assert given["per_layer"] == asked
    assert read.letters == gemma.model.letters


def test_what_gains_less_than_a_tie_is_not_printed():
    groups = {"tp": 1, "cp": 16, "pp": 1, "ulysses": 1, "recompute": "full", "store": 1.0}
    found = advise("gpt-oss-20b", "h100", gpus=64, seq="64K", top=1, **groups)
    run = AttentionForecast(found.model, found.cluster).by_kind(found.best.run)
    assert (found.best.run.algorithm, run.per_layer) == ("tile", "window=prefetch")
    gain = found.best.seconds - step_time(found.model, found.cluster, run).seconds
    assert 0 < gain < select.TIE * found.best.seconds
    assert found.best.run.per_layer is None
    assert found.by_kind == ""
    assert not any("per-layer" in flag for flag in found.flags())


def test_an_algorithm_that_is_fixed_is_that_of_all_layers():
    found = advise("gemma-3-12b", "h100", **ASKED, algorithm="tile")
    assert found.best.run.per_layer is None


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


def test_memory_of_a_command_counts_its_layers(capsys):
    """SLIM as flags, with 2,048 rows of 1,024 on each rank; backward begins at the last layer."""
    flags = (
        "--num-layers 6 --hidden-size 1024 --ffn-hidden-size 64 --num-attention-heads 8 "
        "--group-query-attention --num-query-groups 2 --swiglu --vocab-size 8 "
        "--make-vocab-size-divisible-by 1 --untie-embeddings-and-output-weights --bf16 "
        "--seq-length 16384 --context-parallel-size 8 --recompute-granularity full "
        "--use-distributed-optimizer --burst-lm-head-loss single_pass --burst-side kv"
    )

    def peak(*more):
        words = ["memory", "--gpus", "8", "--per-node", "4", "--json", "--", "pretrain_gpt.py"]
        assert main([*words, *flags.split(), *more]) == 0
        return json.loads(capsys.readouterr().out)["peak"]["bytes"]

    ring, far = (peak("--context-parallel-algo", name) for name in ("ring", "all_gather"))
    assert far > 1.02 * ring
    ours = "--context-parallel-algo", "ring", "--burst-per-layer"
    assert peak(*ours, "6=all_gather") == far
    assert peak(*ours, "full=all_gather,6=ring") == far - 2 * 1024 * 2048  # the input of one layer
    assert peak(*ours, "2=all_gather") == far - 4 * 2 * 1024 * 2048  # those of four are gone then
    assert peak(*ours, "1-6=ring") == ring
