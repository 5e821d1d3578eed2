"""Models with sparse attention in `advise` and `memory`: shapes, seconds, bytes worked out by hand,
and what is refused."""

import json
import math
from dataclasses import replace

import pytest

import megatron_burst as mb
from megatron_burst.autotune.candidates import reading
from megatron_burst.autotune.gpus import gpu
from megatron_burst.cli import main
from megatron_burst.plugins.tools import model_arguments
from megatron_burst.plugins.tools.advise import rivals, settings
from megatron_burst.plugins.tools.advise.account.operators import LayerSizes, attention_half
from megatron_burst.plugins.tools.advise.account.rings import core_of
from megatron_burst.plugins.tools.advise.account.tape import Tape
from megatron_burst.plugins.tools.advise.forecast.attention_time import attention_time, sizes_of
from megatron_burst.plugins.tools.advise.shapes import models
from megatron_burst.plugins.tools.advise.shapes.layer_kinds import Indexer

MODEL = models.named("deepseek-v3.2")
S, CP, HEADS, INDEX = 4096, 4, 128, Indexer(64, 128, 2048)
# One byte a second within a node, and one operation; nothing else takes time.
RATES = mb.Rates(intra=1.0, inter=math.inf, compute=math.inf, backward=2.5)
GPU = replace(gpu("h100"), memory_rate=math.inf)
RUN = mb.Settings(S, cp=CP, intra=CP, recompute="none", side="kv", wire="bf16")


def cluster(**rates):
    return mb.Cluster(GPU, CP, CP, rates=replace(RATES, **rates))


def command(*more):
    words = (
        "pretrain_gpt.py --num-layers 4 --hidden-size 256 --num-attention-heads 8 --seq-length 4096"
        " --multi-latent-attention --q-lora-rank 96 --kv-lora-rank 64 --qk-pos-emb-head-dim 16 "
        "--context-parallel-size 4 --swiglu --ffn-hidden-size 512"
    )
    return model_arguments.read_command([*words.split(), *more])


def test_shapes_come_from_names_commands_and_config_files(tmp_path):
    assert MODEL.indexer == INDEX
    dense = models.named("deepseek-v3")
    of_layer = 1536 * 64 * 128 + 7168 * (128 + 64) + 2 * 128
    assert MODEL.parameters - dense.parameters == 61 * of_layer
    index = ["--dsa-indexer-n-heads", "4", "--dsa-indexer-head-dim", "32"]
    index += ["--dsa-indexer-topk", "512"]
    found, _ = command("--experimental-attention-variant", "dsa", *index)
    assert found.indexer == Indexer(4, 32, 512)
    assert command("--experimental-attention-variant", "dsa")[0].indexer == INDEX
    assert command(*index)[0].indexer is None
    config = {
        "model_type": "deepseek_v32", "first_k_dense_replace": 4,
        "num_attention_heads": 8, "hidden_size": 256, "num_hidden_layers": 4, "vocab_size": 128,
        "intermediate_size": 512, "kv_lora_rank": 64, "q_lora_rank": 96, "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 32, "v_head_dim": 32, "index_n_heads": 4, "index_head_dim": 32,
        "index_topk": 512,
    }  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    assert models.named(str(path)).indexer == Indexer(4, 32, 512)
    with pytest.raises(ValueError, match="indexer requires latent attention"):
        replace(models.named("llama3-8b"), indexer=INDEX)


def test_seconds_are_those_of_both_passes():
    """S below top_k: attention is that of all visible keys."""
    short = replace(RUN, seq=2048, cp=1)
    pairs = 2048 * 2049 / 2
    scores, attention = 2 * 64 * 128 * pairs, 2 * HEADS * (576 + 512) * pairs
    found = attention_time(MODEL, cluster(compute=1.0), short)
    assert found.forward == pytest.approx(scores + attention)
    assert found.backward == pytest.approx(2.5 * attention)
    # Twice as many rows as keys are selected: the later half of them all, as do half of the others.
    longer = attention_time(MODEL, cluster(compute=1.0), replace(RUN, seq=8192, cp=1)).forward
    scores = 2 * 64 * 128 * 8192 * 8193 / 2
    attended = 4096 * 2048 + 4096 * 2048  # halves of the sequence, by what a query sees on average
    assert longer == pytest.approx(scores + 2 * HEADS * 1088 * attended, rel=1e-3)


def test_where_few_keys_are_selected_queries_and_results_decide():
    slow = mb.Cluster(replace(GPU, memory_rate=1.0), CP, CP, rates=RATES)
    free = replace(slow, rates=replace(RATES, intra=math.inf))
    rows = S // CP * HEADS
    forward, backward = rows * (2 * 576 + 8 * 512), rows * (2 * 576 + 2 * 512 + 8 * 576)
    assert reading(sizes_of(MODEL, RUN), 1.0, latent=True) == (forward, backward)
    # compute takes no time, so no pair is counted as computed; with any it is one call per chunk
    free = replace(free, rates=replace(free.rates, compute=1e30))
    for algorithm, calls in (("burst", CP), ("multicast", 1), ("all_gather", 1)):
        found = attention_time(MODEL, free, replace(RUN, algorithm=algorithm))
        assert found.forward == pytest.approx(calls * forward)
        assert found.backward == pytest.approx(calls * backward)


def test_what_travels_are_index_keys_once_and_latents_with_their_gradients():
    """Rank r of 4 has pieces r and 7 - r of 8, and rank q needs pieces up to 7 - q: r sends its
    first half to all others and its second to those before it, 3 chunks at most; of gradients as
    many come back, 4.5 chunks both ways for every rank."""
    chunk = S // CP * 2
    found = attention_time(MODEL, cluster(), replace(RUN, algorithm="all_gather"))
    assert found.busy["intra"] == pytest.approx(chunk * (3 * 128 + (3 + 4.5) * 576))
    gathered = rivals.attention("all_gather", MODEL, cluster(), RUN)
    assert gathered.forward == pytest.approx((CP - 1) * chunk * (128 + 576))
    assert gathered.backward == pytest.approx((CP - 1) * chunk * 576)
    assert "requires --cp-comm-type all_gather" in rivals.refused("p2p", MODEL, cluster(), RUN)
    assert rivals.refused("all_gather", MODEL, cluster(), RUN) == ""


def test_memory_has_latents_on_the_ring_and_the_selection():
    x, chunk = LayerSizes.of(MODEL, RUN), S // CP * 576 * 2
    core = core_of(x, RUN)
    assert core.forward % chunk == 0
    assert 2 * chunk <= core.forward <= 4 * chunk
    assert rivals.core("all_gather", x, RUN).forward == 2 * S * 576 * 2 + S * 128 * 2
    tape = Tape()
    attention_half(x, S // CP, core).forward(tape, grad=True)
    kept = tape.moments[-1].bytes
    tape = Tape()
    fewer = replace(x, indexer=replace(INDEX, top_k=1024))
    attention_half(fewer, S // CP, core).forward(tape, grad=True)
    assert kept - tape.moments[-1].bytes == S // CP * 1024 * 4


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"store": 0.5, "recompute": "full"}, "--store 0.5 is not supported with the sparse"),
        ({"sequence_chunks": 4, "recompute": "full"}, "--sequence-chunks 4 is not supported"),
        ({"ulysses": 2}, "--ulysses 2: .* use 1$"),
        ({"algorithm": "tile"}, "--algorithm tile --side kv: the sparse attention"),
        ({"side": "query"}, "sends keys, not queries"),
    ],
)
def test_what_sparse_attention_has_not_is_refused(given, words):
    with pytest.raises(ValueError, match=words):
        settings.check(MODEL, replace(RUN, **given))


def test_advice_takes_a_ring_of_keys():
    small = command("--experimental-attention-variant", "dsa", "--dsa-indexer-topk", "512")[0]
    found = mb.advise(small, "h100", gpus=8, seq="128K", cp=8, tp=1, top=1)
    best = found.best.run
    assert best.side == "kv"
    assert (best.ulysses, best.head_chunks, best.store, best.sequence_chunks) == (1, 1, 0.0, 1)
    settings.check(small, best)


def test_both_commands_say_what_travels(capsys):
    said = settings.selection_text(MODEL, RUN)
    assert said is not None
    assert "64 index heads select 2,048 keys" in said
    assert "index keys (256 KiB) and latents (1.125 MiB)" in said  # 1,024 rows of 256 and 1,152
    assert settings.selection_text(models.named("llama3-8b"), RUN) is None
    words = ["--model", "deepseek-v3.2", "--gpus", "64", "--seq", "64K", "--cp", "64"]
    main.main(["memory", *words, "--gpu", "h100"])
    assert " ".join(said.split()[:9]) in " ".join(capsys.readouterr().out.split())
