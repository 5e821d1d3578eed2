"""`memory --packed`: rows with their padding, and ring buffers of whom documents see."""

import json

import pytest
import torch

import megatron_burst as mb
from megatron_burst.cli.main import main
from megatron_burst.plugins.testing import in_process
from megatron_burst.plugins.tools.advise.account.operators import LayerSizes
from megatron_burst.plugins.tools.advise.account.rings import SHORT, core_of
from megatron_burst.plugins.tools.advise.search.packed import PackedForecast
from megatron_burst.schedule.dry_run import dry_run

MODEL = mb.Model("tiny", layers=2, hidden=64, heads=4, kv_heads=1, ffn=64, vocabulary=128)
CLUSTER = mb.Cluster("h100", 8, 2)
WORDS = ["memory", "--model", "llama3.2-1b", "--gpus", "8", "--seq", "64K", "--tp", "1"]


def held(lengths, cut, run):
    forecast = PackedForecast(MODEL, CLUSTER, None, lengths, cut)
    return forecast.core_of(LayerSizes.of(MODEL, run), run)


@pytest.mark.parametrize("algorithm", ["ring", "burst", "prefetch", "tile"])
@pytest.mark.parametrize("side", ["kv", "query"])
@pytest.mark.parametrize("seq", [4 * SHORT, 4096])
def test_one_document_is_held_as_a_sequence(algorithm, side, seq):
    run = mb.Settings(seq, cp=4, intra=2, algorithm=algorithm, side=side)
    alone = core_of(LayerSizes.of(MODEL, run), run)
    assert held((seq,), "zigzag", run) == alone


def test_documents_that_lie_on_one_rank_need_no_buffers():
    run = mb.Settings(4 * SHORT, cp=4, intra=2)
    alone = core_of(LayerSizes.of(MODEL, run), run)
    found = held((SHORT,) * 4, "balanced", run)
    assert found.forward == 0 < alone.forward
    # A rank's own gradients are no ring's.
    assert found.backward == 0 < alone.backward


@pytest.mark.parametrize("algorithm", ["ring", "burst", "multicast"])
@pytest.mark.parametrize("lengths", [(170, 50, 36), (256 - 16, 16), (100, 100, 56)])
def test_buffers_are_those_of_the_plan_of_a_run(algorithm, lengths):
    """Of the rank that takes most, in rows."""
    run = mb.Settings(4 * SHORT, cp=4, intra=2, algorithm=algorithm, side="kv")
    forecast = PackedForecast(MODEL, CLUSTER, None, lengths, "balanced")
    bounds = forecast.bounds(run)
    groups = in_process.groups(inter=2, intra=2)
    bf16 = {"dtype": torch.bfloat16, "requires_grad": True}  # sizes decide the ring's direction
    q, k, v = ([torch.zeros(SHORT, 1, heads, 16, **bf16) for _ in range(4)] for heads in (4, 1, 1))
    plan = in_process.prepare(
        q, k, v, groups=groups, algorithm=algorithm, side="kv",
        layout=mb.layout.make("balanced", cp_size=4, cu_seqlens=bounds, per_node=2),
        mask=mb.masks.Documents(bounds) & mb.masks.Causal(),
    )  # fmt: skip
    both = forecast._most(run, 0, algorithm, "", 4, 2, "kv", False, False, None, None, False)
    for number, found in enumerate(both):
        each = [dry_run(plan.ranks[rank].schedules[number], rank) for rank in range(4)]

        def rows(one):
            return max(sum(map(sum, moment.values())) for moment in one.moments)

        assert rows(found) == max(map(rows, each))


def test_rows_are_counted_with_the_padding_of_documents(capsys):
    """65 documents of 1,000 tokens and one of 536, each padded to a multiple of 16 over 8 ranks;
    over one rank of the balanced layout, as they are."""
    for layout, seq in (("zigzag", 65 * 1008 + 544), ("balanced", 65536)):
        words = [*WORDS, "--packed", "1000", "--layout", layout]
        assert main([*words, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["seq"] == seq
        assert found["documents"] == [1000] * 65 + [536]
        assert main(words) == 0
        shown = capsys.readouterr().out
        said = f"packs of 66 documents, layout {layout}"
        assert said + ", 528 tokens of padding\n" * (layout == "zigzag") in shown


def test_the_layout_of_a_command_cuts_its_packs(capsys):
    command = (
        "pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 4 --vocab-size 256 "
        "--seq-length 65536 --context-parallel-size 8 --burst-layout"
    )
    for layout in ("zigzag", "balanced"):
        words = ["memory", "--gpus", "8", "--packed", "1000", "--", *command.split(), layout]
        assert main(words) == 0
        assert f"layout {layout}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [(["--seq", "64K", "--packed", "1000", "--layout", "striped"], "is not supported for packs"),
     (["--seq", "64K", "--layout", "balanced"], "--layout balanced requires --packed"),
     (["--longest", "--packed", "1000"], "remove --packed"),
     (["--seq", "64K", "--packed", "128K"], "a document of 131,072 tokens"),
     (["--seq", "64K", "--packed", "1000", "--micro-batch", "2"], "use --micro-batch 1"),
     (["--seq", "64K", "--packed", "1000", "--sequence-chunks", "8"],
      "row chunks are not supported for packs")],
)  # fmt: skip
def test_what_packs_cannot_have_is_refused(capsys, words, said):
    assert main([*WORDS[:5], *words]) == 2
    assert said in capsys.readouterr().err


def test_what_makes_packs_fit_is_tried_with_packs(capsys):
    """Not in chunks of rows, which packs cannot have, and with the padding of other ranks."""
    run = "--model llama3-8b --gpus 8 --seq 2M --packed 512K --tp 2 --cp 4"
    words = ["memory", *run.split()]
    assert main(words) == 1
    assert "; add --offload 1 --mlp-tiles 64, or with 16 GPUs" in capsys.readouterr().out
    assert main([*words, "--offload", "1", "--mlp-tiles", "64"]) == 0
    assert main(["advise", *words[1:], "--offload", "0", "--mlp-tiles", "1"]) == 1
    told = capsys.readouterr().err
    assert "does not fit" in told
    assert "--sequence-chunks" not in told
    forecast = PackedForecast(MODEL, CLUSTER, None, (100, 100, 56), "zigzag")
    assert forecast.account_of(mb.Settings(256, cp=8)).run.seq == 112 + 112 + 64
