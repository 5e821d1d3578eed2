"""Models with DeepSeek-V4's hybrid attention in `advise` and `memory`: parameters, seconds and
bytes worked out by hand, and what is refused."""

import math
from dataclasses import replace

import pytest
import torch
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as v4
from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config

import megatron_burst as mb
from megatron_burst.autotune.gpus import gpu
from megatron_burst.cli import main
from megatron_burst.plugins.tools import model_arguments
from megatron_burst.plugins.tools.advise import rivals, settings
from megatron_burst.plugins.tools.advise.account.hybrid import hybrid_half
from megatron_burst.plugins.tools.advise.account.operators import LayerSizes
from megatron_burst.plugins.tools.advise.account.rings import core_of
from megatron_burst.plugins.tools.advise.account.tape import Tape
from megatron_burst.plugins.tools.advise.forecast.attention_time import attention_time
from megatron_burst.plugins.tools.advise.forecast.layer_time import products
from megatron_burst.plugins.tools.advise.forecast.step_time import model_operations
from megatron_burst.plugins.tools.advise.search.packed import PackedForecast
from megatron_burst.plugins.tools.advise.shapes import model_config, models
from megatron_burst.plugins.tools.advise.shapes.layer_kinds import Indexer

FLASH = models.named("deepseek-v4-flash")
S, CP, HEADS, D, WINDOW = 4096, 4, 64, 512, 128
KINDS = ["window keys", "CSA", "HCA"]
NAMES = {"CSA": "compressed", "HCA": "heavily"}
GPU = replace(gpu("h100"), memory_rate=math.inf)
RUN = mb.Settings(S, cp=CP, intra=CP, recompute="none", side="kv", wire="bf16", algorithm="auto")


def cluster(**rates):
    """One byte a second within a node; nothing else takes time."""
    known = mb.Rates(intra=1.0, inter=math.inf, compute=math.inf, backward=2.5)
    return mb.Cluster(GPU, CP, CP, rates=replace(known, **rates))


def command(*more):
    words = (
        "pretrain_gpt.py --num-layers 3 --hidden-size 40 --num-attention-heads 4 --seq-length 4096 "
        "--multi-latent-attention --q-lora-rank 24 --v-head-dim 16 --context-parallel-size 4 "
        "--swiglu --ffn-hidden-size 50 --o-groups 2 --o-lora-rank 12 --dsa-indexer-n-heads 3 "
        "--dsa-indexer-head-dim 8 --dsa-indexer-topk 5 --csa-compress-ratios [0,4,16] "
        "--csa-window-size 9"
    )
    return model_arguments.read_command([*words.split(), *more])[0]


def test_shapes_come_from_names_and_commands():
    assert FLASH.kinds == {"window keys": 2, "CSA": 21, "HCA": 20}
    assert 283e9 < FLASH.parameters < 285e9  # published: 284B, 13B of them active
    assert 12e9 < FLASH.active_parameters < 14e9
    small = command()
    assert small.letters == "VSH"
    assert small.hybrid.index == Indexer(3, 8, 5)
    q, out = 40 * 24 + 24 + 24 * 64, 2 * 12 * 32 + 24 * 40  # down, norm, up; groups, projection
    window = q + 40 * 16 + 16 + out
    index = 24 * 3 * 8 + 40 * 3 + 2 * 40 * 16 + 4 * 16 + 8
    csa = window + 2 * 40 * 32 + 4 * 32 + 16 + index
    hca = window + 2 * 40 * 16 + 16 * 16 + 16
    assert [small.hybrid_parameters(kind) for kind in KINDS] == [window, csa, hca]
    dense = command("--csa-dense-mode")
    assert dense.hybrid_parameters("CSA") == csa - index
    for ratios in ("[0,4]", "[8,4,16]"):
        with pytest.raises(ValueError, match=r"--csa-compress-ratios must be a list with 0, 4 or"):
            command("--csa-compress-ratios", ratios)
    with pytest.raises(ValueError, match="V, S and H layers require hybrid"):
        replace(models.named("llama3-8b"), pattern="V" * 32)


def v4_config(**changed):
    """The fields of V4-Flash, with the published kinds of layers."""
    types = ["sliding_attention"] * 2
    types += ["compressed_sparse_attention", "heavily_compressed_attention"] * 20
    types += ["compressed_sparse_attention"]
    return DeepseekV4Config(layer_types=types).to_dict() | changed


def test_a_config_json_is_the_named_model():
    read = model_config.from_config(v4_config(), "V4-Flash")
    same = replace(
        read, name=FLASH.name, also=FLASH.also, family=FLASH.family,
        dense_ffn=FLASH.dense_ffn, expert_pattern=FLASH.expert_pattern,
    )  # fmt: skip
    assert same == FLASH
    assert read.experts_at == FLASH.experts_at
    assert read.also == ("multi-token prediction", "hyper-connections")
    for field in ("flags", "norms", "gate", "numerics"):
        assert getattr(read.family, field) == getattr(FLASH.family, field), field
    assert read.family.lacking == (
        "hyper-connections", "routing by hashes in the first layers",
        "the limit 10 of the activation",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"compress_rates": {"compressed_sparse_attention": 8,
                                "heavily_compressed_attention": 128}},
            "'compress_rates' has 8 for compressed_sparse_attention; only 4 is supported",
        ),
        ({"mlp_layer_types": ["hashed"] * 43}, "mlp_layer_types"),
        ({"layer_types": ["full_attention"] * 43}, "layer_types"),
    ],
    ids=["ratio", "mlp", "layer"],
)  # fmt: skip
def test_other_config_jsons_are_refused(changed, message):
    with pytest.raises(ValueError, match=message):
        model_config.from_config(v4_config(**changed), "V4-Flash")


def test_parameters_are_those_of_transformers():
    """Without sinks, and in layers with compressed keys (transformers has no others by default)."""
    config = DeepseekV4Config()  # the sizes of V4-Flash
    for kind in ("CSA", "HCA"):
        number = next(
            i for i, name in enumerate(config.layer_types) if name.startswith(NAMES[kind])
        )
        with torch.device("meta"):
            layer = v4.DeepseekV4Attention(config, number)
        count = sum(x.numel() for name, x in layer.named_parameters() if name != "sinks")
        assert FLASH.hybrid_parameters(kind) == count


def pairs(kind, seq=S):
    """Pairs of queries and window keys, compressed keys, and keys that the indexer scores."""
    window = sum(min(t + 1, WINDOW) for t in range(seq))
    seen = [(t + 1) // {"window keys": seq + 1, "CSA": 4, "HCA": 128}[kind] for t in range(seq)]
    return window, sum(min(n, 512) for n in seen), sum(seen) * (kind == "CSA")


@pytest.mark.parametrize("kind", KINDS)
def test_time_is_that_of_visible_pairs(kind):
    """On one rank, one operation a second; a query of 2,048 sees at most 512 keys. Pairs of
    compressed keys are counted in a sample."""
    window, attended, scored = pairs(kind, 2048)
    operations = 2 * HEADS * 2 * D * (window + attended)
    alone = replace(RUN, cp=1, seq=2048, layout="contiguous")
    found = attention_time(FLASH, cluster(compute=1.0), alone, kind=kind)
    assert found.forward == pytest.approx(operations + 2 * 64 * 128 * scored, rel=0.02)
    assert found.backward == pytest.approx(2.5 * operations, rel=0.02)
    assert sum(pairs(kind)[:2]) == pytest.approx(S * FLASH.hybrid.seen(kind, S), rel=0.03)


def test_bytes_are_those_of_window_compressed_and_index_keys():
    """Contiguous: rank 0 sends its compressed keys to 3 ranks. In backward, rank r sends keys to
    3 - r ranks and gradients to r ranks. A rank sends 127 window rows to the next rank, and in
    backward also 127 gradients to the previous rank."""
    run = replace(RUN, layout="contiguous", algorithm="all_gather")
    row, halo = D * 2, (WINDOW - 1) * D * 2
    for kind, keys, index in (("window keys", 0, 0), ("HCA", 8, 0), ("CSA", 256, 128 * 2)):
        found, chunk = attention_time(FLASH, cluster(), run, kind=kind), keys * row
        assert found.forward == pytest.approx(halo + 3 * chunk + 3 * keys * index)
        assert found.busy["intra"] == pytest.approx(3 * halo + 6 * chunk + 3 * keys * index)
    with pytest.raises(ValueError, match="use part='layer' or part='step'"):
        mb.simulate(FLASH, cluster(), replace(RUN, wire="fp32"), part="attention")


def kept(x, kind, core):
    tape = Tape()
    hybrid_half(x, kind, S // CP, core).forward(tape, grad=True)
    return tape.moments[-1].bytes


def test_memory_has_compressed_keys_and_the_selection():
    x, rows = LayerSizes.of(FLASH, RUN), S // CP
    run = replace(RUN, algorithm="ring")
    chunk = rows // 4 * D * 2
    cores = {kind: core_of(x, run, kind=kind) for kind in KINDS}
    assert 2 * chunk <= cores["CSA"].forward <= 3 * chunk
    assert cores["CSA"].keys == rows + rows // 4
    assert cores["HCA"].forward == cores["window keys"].forward <= 2 * WINDOW * D * 2
    # Rows and gates in bf16, and both in fp32; the keys.
    wide = rows * D * (2 + 2 + 4 + 4)
    saved = {kind: kept(x, kind, cores[kind]) for kind in KINDS}
    assert saved["HCA"] - saved["window keys"] == pytest.approx(wide + rows // 128 * D * 2, rel=0.5)
    fewer = replace(x, hybrid=replace(x.hybrid, index=Indexer(64, 128, 256)))
    assert saved["CSA"] - kept(fewer, "CSA", cores["CSA"]) == rows * 256 * 4


def test_products_have_all_parameters():
    """Each parameter of a matrix is multiplied once per row; norms and biases are not."""
    small = command()
    run = mb.Settings(4096, cp=4)
    for part in small.parts:
        done = sum(p.rows * p.inner * p.columns * p.times for p in products(small, run, part))
        ratio = small.hybrid.ratio_of(part.attention)
        others = 24 + 16 + (ratio > 0) * 16 + ratio * 16 * (1 + (ratio == 4))
        others += (8 + 4 * 16) * (part.attention == "CSA")
        matrices = small.hybrid_parameters(part.attention) - others + 3 * 40 * 50
        assert done == run.rows * matrices
    seen = sum(small.hybrid.seen(part.attention, 4096) for part in small.parts)
    assert model_operations(small, 4096) == 6 * small.active_parameters + 6 * 4 * 32 * seen


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"store": 0.5, "recompute": "full"}, "--store 0.5 is not supported with the sparse"),
        ({"offload": 1.0, "recompute": "full"}, "--offload 1.0 is not supported with the sparse"),
        ({"wire": "bf16"}, "--wire bf16: the hybrid attention of .* use --wire fp32"),
        ({"ulysses": 2}, "--ulysses 2: .* use 1$"),
        ({"algorithm": "tile"}, "--algorithm tile --side kv: the sparse attention"),
        ({"layout": "striped"}, "--layout striped puts the rows of a compressed key"),
        ({"tp": 16}, "--tp 16 does not divide the 8 output groups of .* use one of 1, 2, 4, 8"),
        ({"seq": 4096 + 64}, "--seq 4160 is not a multiple of 1024 .* use 4096$"),
    ],
)
def test_what_hybrid_attention_has_not_is_refused(given, words):
    with pytest.raises(ValueError, match=words):
        settings.check(FLASH, replace(RUN, **{"wire": "fp32"} | given))
    for kind in ("p2p", "all_gather"):
        assert "does not support DeepSeek-V4" in rivals.refused(kind, FLASH, cluster(), RUN)
    with pytest.raises(ValueError, match="is not predicted for packs; remove"):
        PackedForecast(FLASH, cluster(), None, [4096])


def test_advice_chooses_an_algorithm_for_each_set_of_keys():
    small = replace(command(), hidden=1024, heads=16, hybrid=replace(FLASH.hybrid, ratio=16))
    found = mb.advise(small, "h100", gpus=8, seq="128K", cp=8, tp=1, top=1)
    best = found.best.run
    assert (best.algorithm, best.side, best.ulysses, best.store) == ("auto", "kv", 1, 0.0)
    assert "csa_compress_ratios=[0, 4, 16]" in " ".join(found.no_flag_for)
    settings.check(small, best)


def test_memory_prints_what_is_sent(capsys):
    words = ["--model", "deepseek-v4-flash", "--gpus", "64", "--seq", "64K", "--cp", "64"]
    main.main(["memory", *words, "--gpu", "h100"])
    said = " ".join(capsys.readouterr().out.split())
    # 2 x 127 rows of 1 KiB; of 1,024 rows: 256 compressed keys, 256 index keys, and 8
    assert "its window keys (254 KiB), in CSA layers its compressed keys (256 KiB)" in said
    assert "index keys (64 KiB), in HCA layers its compressed keys (8 KiB)" in said
