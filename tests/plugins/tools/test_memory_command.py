"""`megatron-burst memory` on the command line: table, JSON, picture, Megatron's arguments."""

import json
import re
from itertools import chain

import pytest

from megatron_burst.cli.main import main
from megatron_burst.plugins.tools.advise import kernel
from megatron_burst.plugins.tools.memory import picture
from megatron_burst.plugins.tools.model_arguments import read_command
from megatron_burst.plugins.tools.show.colours import MEANINGS

BASE = ["memory", "--model", "llama3-8b", "--gpus", "8"]
FLAGS = ["--sequence-chunks", "32", "--mlp-tiles", "64", "--offload", "1"]


def test_a_table_by_item(capsys):
    assert main([*BASE, "--seq", "1M", "--tp", "4", "--cp", "2", *FLAGS]) == 0
    shown = capsys.readouterr().out
    for words in ("TP 4", "layer inputs", "peak, backward of layer 31", "host", "fits",
                  "not a measurement"):  # fmt: skip
        assert words in shown
    assert "\n1 sequence per step\n" in shown


def test_sizes_that_nobody_gave_are_said(capsys):
    assert main(["memory", "--model", "llama3-8b", "--gpus", "64", "--seq", "1M"]) == 0
    said = "\n1 sequence per step; sizes chosen: TP 8, CP 8 (smallest peak)\n"
    assert said in capsys.readouterr().out


def test_experts_are_shared_out_unless_their_ranks_are_given(capsys):
    """gpt-oss-120b on 64 GPUs: 36 layers of 128 experts, which took 80 of 116 GiB of a rank of TP 8
    where every rank of CP 8 had all of them."""
    words = ["memory", "--model", "gpt-oss-120b", "--gpus", "64", "--seq", "1M", "--json"]
    experts = 36 * 128 * 3 * 2880**2
    ends, heads, router = 2 * 201088 * 2880, 2880 * 64 * (2 * 64 + 2 * 8), 2880 * 128
    dense = ends + 36 * (heads + router)
    for more, tp, ep in ((["--ep", "1"], 8, 1), ([], 4, 16)):
        assert main([*words, *more]) == (ep == 1)
        found = json.loads(capsys.readouterr().out)
        assert found["groups"] == {"tp": tp, "cp": 64 // tp, "pp": 1, "vpp": 1, "ep": ep, "dp": 1}
        held = sum(found["peak"]["items"][name] for name in ("parameters", "gradients"))
        # In bf16 and in fp32; norms are left out here.
        assert held == pytest.approx(6 * (dense / tp + experts / (tp * ep)), rel=1e-3)
    assert main(words[:-1]) == 0
    assert "sizes chosen: TP 4, CP 16, EP 16 (smallest peak)" in capsys.readouterr().out


def test_what_does_not_fit_is_exit_status_1(capsys):
    """All output uses one unit of bytes, and a step that does not fit has no time."""
    assert main([*BASE, "--seq", "5M"]) == 1
    shown = capsys.readouterr().out
    assert "--sequence-chunks 32" in shown
    assert re.findall(r"\d ([KMGT]i?B)\b", shown)
    assert not re.findall(r"\d [kMGT]B\b(?!/s)", shown)
    assert "step time" not in shown
    assert "attention kernel" not in shown
    assert main([*BASE, "--seq", "5M", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["seconds"], found["mfu"], found["kernel"]) == (None, None, None)


def test_the_kernel_of_the_step_time_is_named(capsys, monkeypatch):
    monkeypatch.setattr(kernel, "DRIVER", ())
    assert main([*BASE, "--seq", "512K"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"predicted step time: \d+ min \d+ s \(", shown)
    assert (
        "\nattention kernel: flash3 (FlashAttention 3) is assumed; not checked: no GPU here. The "
        "same step takes " in shown
    )
    assert main([*BASE, "--seq", "512K", "--packed", "64K", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found["kernel"]["seconds_with"]) == ["aten_cudnn", "aten"]


def test_json_and_picture(capsys, tmp_path):
    path = tmp_path / "memory.png"
    words = [*BASE, "--longest", "--tp", "4", "--cp", "2", *FLAGS, "--json", "--out", str(path)]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["seq"] > 5_000_000
    assert found["peak"]["bytes"] == sum(found["peak"]["items"].values())
    assert found["binds"]
    assert path.read_bytes()[:4] == b"\x89PNG"


def test_the_longest_is_searched_with_everything_allowed(capsys):
    """On 8 GPUs 950K tokens fit with the given settings, and 5.9 times as many with a search.

    The search varies everything that `advise` tries. Settings that are given stay; a setting that
    no search varies disables the search.
    """
    assert main([*BASE, "--longest", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["seq"] > 5_600_000
    assert {"--burst-offload 1", "--burst-sequence-chunks 32", "--burst-mlp-tiles 64",
            "--context-parallel-size 2"} <= set(found["flags"])  # fmt: skip
    assert f"--seq-length {found['seq']} --max-position-embeddings {found['seq']}" in found["flags"]
    assert main([*BASE, "--longest", "--offload", "0"]) == 0
    shown = capsys.readouterr().out
    assert "offload 0," in shown
    assert "flags, in addition to the model flags: --seq-length" in shown
    assert main([*BASE, "--longest", "--no-fsdp"]) == 0
    shown = capsys.readouterr().out
    assert "longest sequence: 950,272 tokens" in shown
    assert "with these settings" in shown
    assert main([*BASE, "--longest", "--micro-batches", "1"]) == 0
    assert f"longest sequence: {found['seq']:,} tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "layers"),
    # Interleaved, a first stage of 2 holds 5 of 4 x 8 layers, which it does with 4 micro-batches;
    # 2 make 4 times 8. Not interleaved it holds 2 times 16.
    [("--seq 128K --vpp 2", 5 * 8), ("--seq 128K --vpp 2 --micro-batches 2", 4 * 8),
     ("--seq 128K --vpp 2 --micro-batches 16", 5 * 8), ("--seq 128K", 2 * 16),
     ("--seq 128K --micro-batches 1", 16), ("--longest --offload 0 --vpp 2", 5 * 8),
     ("--longest --offload 0 --vpp 2 --micro-batches 2", 4 * 8)],
)  # fmt: skip
def test_as_many_micro_batches_are_in_flight_as_a_pipeline_holds(given, layers, capsys):
    words = f"memory --model llama3-8b --gpus 8 --pp 2 --tp 2 {given} --json".split()
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)
    groups = found["groups"]
    layer = found["seq"] // groups["tp"] // groups["cp"] * 4096 * 2
    others = found["peak"]["items"].get("other micro-batches", 0)
    assert others == (layers - 16) * layer


def test_a_batch_of_a_command_is_shared_out(capsys):
    """A batch of 4 over 2 data-parallel ranks: each has 2 micro-batches in flight on 4 stages."""
    command = (
        "pretrain_gpt.py --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 4096 "
        "--vocab-size 256 --pipeline-model-parallel-size 4 --recompute-granularity full"
    )
    for batch, held in (("4", 2), ("64", 4), (None, 4)):
        more = [] if batch is None else ["--global-batch-size", batch]
        assert main(["memory", "--gpus", "8", "--json", "--", *command.split(), *more]) == 0
        items = json.loads(capsys.readouterr().out)["peak"]["items"]
        assert items["other micro-batches"] == (held - 1) * 4096 * 64 * 2
    words = ["memory", "--gpus", "8", "--", *command.split(), "--micro-batch-size", "2"]
    assert main([*words, "--global-batch-size", "10"]) == 2
    told = capsys.readouterr().err
    assert "batch of 10 sequences is not a multiple of 4 (micro-batch size 2 x 2 " in told
    assert "use 12 (--global-batch-size" in told


@pytest.mark.parametrize("length", ["--longest", "--seq 128K"])
@pytest.mark.parametrize("stages", ["--pp 4 --vpp 2", "--pp 2 --vpp 2"])
def test_interleaved_stages_take_rounds_of_micro_batches(capsys, length, stages):
    words = f"{length} {stages} --micro-batches 3".split()
    assert main([*BASE, *words]) == 2
    said = f"--micro-batches 3 is not a multiple of {stages[:6]}, which --vpp 2 requires; use 4"
    assert said in capsys.readouterr().err


def test_the_longest_of_virtual_stages_has_stages(capsys):
    """Only numbers of pipeline stages above 1 are searched."""
    assert main([*BASE, "--longest", "--vpp", "4", "--json"]) == 0
    groups = json.loads(capsys.readouterr().out)["groups"]
    assert groups["pp"] > 1
    assert groups["vpp"] == 4
    assert main([*BASE, "--longest", "--vpp", "4", "--micro-batches", "3"]) == 2
    assert "--micro-batches 3 is not a multiple of --pp " in capsys.readouterr().err


def test_a_megatron_command(capsys):
    command = (
        "pretrain_gpt.py --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --swiglu "
        "--num-attention-heads 32 --group-query-attention --num-query-groups 8 --vocab-size "
        "128256 --untie-embeddings-and-output-weights --seq-length 1048576 "
        "--tensor-model-parallel-size 4 --context-parallel-size 2 --recompute-granularity "
        "full --use-distributed-optimizer --burst-offload 1 --burst-sequence-chunks 32 "
        "--burst-mlp-tiles 64 --burst-lm-head-loss single_pass --some-other-flag 3"
    )
    assert main(["memory", "--gpus", "8", "--json", "--", *command.split()]) == 0
    by_command = json.loads(capsys.readouterr().out)
    own = ["--seq", "1M", "--tp", "4", "--cp", "2", "--json"]
    assert main([*BASE, *own, *FLAGS]) == 0
    by_name = json.loads(capsys.readouterr().out)
    assert by_command["groups"] == by_name["groups"]
    # Megatron pads the vocabulary to a multiple of 128 x TP.
    assert by_command["peak"]["bytes"] == pytest.approx(by_name["peak"]["bytes"], rel=1e-3)


@pytest.mark.parametrize(
    ("words", "said"),
    [(["--seq", "5X"], "128K or 5M"), ([], "--seq is required"),
     (["--seq", "1M", "--tp", "3"], "not a multiple of the 3 ranks"),
     (["--seq", "1M", "--gpu", "h99"], "one of a100-40g"),
     (["--gpus", "1", "--longest", "--sequence-chunks", "4"], "chunks 4 requires --cp above 1"),
     (["--seq", "1M", "--host-memory", "lots"], "--host-memory must be a size")],
)  # fmt: skip
def test_bad_input_says_what_would_do(capsys, words, said):
    assert main([*BASE, *words]) == 2
    assert said in capsys.readouterr().err


def test_a_command_without_a_layout_has_that_of_its_store():
    flags = (
        "pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 1024 "
        "--context-parallel-size 4 --tensor-model-parallel-size 2 --vocab-size 256"
    )
    command = flags.split()
    half = ["--recompute-granularity", "full", "--burst-attention-store", "0.5"]
    for more, layout in (([], "striped"), (["--burst-attention-layout", "zigzag"], "zigzag")):
        assert read_command([*command, *half, *more])[1]["layout"] == layout


def test_a_command_that_lacks_a_size(capsys):
    assert main(["memory", "--gpus", "8", "--", "pretrain_gpt.py", "--num-layers", "2"]) == 2
    assert "--hidden-size is missing" in capsys.readouterr().err


def test_the_layers_of_the_first_and_last_stage_are_numbers(capsys):
    sizes = {"--gpus": "16", "--seq": "128K", "--tp": "2", "--pp": "8"}
    words = ["memory", "--model", "llama3-8b", "--gpu", "h100", *chain(*sizes.items())]
    assert main([*words, "--first-layers", "3", "--last-layers", "5"]) == 0
    with pytest.raises(SystemExit):
        main([*words, "--first-layers", "some"])
    assert "argument --first-layers" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "words"),
    [("--sequence-chunks 8 --cp 1", "requires --cp above 1"),
     ("--recompute none --store 0.5", "require --recompute full")],
)  # fmt: skip
def test_what_excludes_any_length_is_named(given, words, capsys):
    run = ["memory", *f"--model llama3-8b --gpus 8 --gpu h100 --longest {given}".split()]
    assert main(run) == 2
    assert words in capsys.readouterr().err


def test_every_item_of_the_picture_has_its_own_colour():
    names = set(picture.ORDER) & set(MEANINGS)
    assert len({MEANINGS[name] for name in names}) == len(names) == 9
