"""`megatron-burst advise`: tables, flags that are read back, JSON, errors, progress."""

import json
import os
import re
import shlex
import subprocess
from dataclasses import fields, replace

import pytest

from megatron_burst.autotune import cluster_file
from megatron_burst.autotune.clusters import Cluster
from megatron_burst.autotune.gpus import GPUS
from megatron_burst.cli.doctor.hazards import hazards, refusals
from megatron_burst.cli.main import main
from megatron_burst.cli.megatron_arguments import parse
from megatron_burst.megatron.checks import splitting
from megatron_burst.plugins.sparse.megatron import checks as sparse
from megatron_burst.plugins.tools import model_arguments
from megatron_burst.plugins.tools.advise.advice import advise
from megatron_burst.plugins.tools.advise.search import model_flags, pasted
from megatron_burst.plugins.tools.advise.search.job import job_name, time_limit
from megatron_burst.plugins.tools.advise.settings import Settings
from megatron_burst.plugins.tools.advise.shapes import layer_kinds, models
from megatron_burst.plugins.tools.advise.shapes.layer_kinds import Latent
from megatron_burst.plugins.tools.advise.shapes.model import Model

FEW = ["--gpus", "8", "--seq", "64K", "--tokens-per-step", "512K", "--tp", "4", "--cp", "2"]
BASE = ["advise", "--model", "llama3-8b", *FEW]
DENSE = Model("dense", 8, 1024, 16, 8, 4096, 32000)
MOE = Model("moe", 8, 1024, 16, 4, 512, 32000, head_dim=128, tied=True, experts=8, top_k=2,
            moe_layers=8, shared=256)  # fmt: skip
SHAPE = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocabulary", "head_dim", "gated", "tied",
         "experts", "top_k", "shared", "moe_layers")  # fmt: skip
# Not said by flags of one rank: how many ranks there are. `read` counts them from the batch.
COUNTED = ("dp", "micro_batches", "intra")


@pytest.mark.parametrize("fixed", [
    {}, {"cp": 8}, {"cp": 4, "algorithm": "hybrid", "ulysses": 2}, {"pp": 2, "vpp": 2, "cp": 4},
    {"cp": 8, "placement": "context_first", "ulysses": 4, "algorithm": "ring"},
    {"cp": 4, "store": 0.5, "offload": 0.5, "mlp_tiles": 4, "wire": "bf16", "side": "query"},
    {"cp": 4, "sequence_chunks": 4, "optimizer_offload": 0.5, "gradients": "bf16"},
    {"cp": 1, "recompute": "none", "lm_head_loss": "off"}, {"cp": 8, "head_chunks": 2, "tp": 1},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("model", [DENSE, MOE], ids=lambda model: model.name)
def test_pasted_flags_say_what_was_advised(model, fixed):
    advice = advise(
        model, Cluster(GPUS["h100"], 16, 4), seq="64K", tokens_per_step="1M", top=2, **fixed
    )
    for index, one in enumerate(advice.ranked):
        words = shlex.split(" ".join(advice.flags(index)))
        read, given = model_arguments.read_command(words)
        assert [getattr(read, name) for name in SHAPE] == [getattr(model, name) for name in SHAPE]
        defaults = {field.name: field.default for field in fields(Settings)}
        for name in defaults:
            if name not in COUNTED and not (one.run.cp == 1 and name in ("algorithm", "layout")):
                assert given.get(name, defaults[name]) == getattr(one.run, name), name
        batch = words[words.index("--global-batch-size") + 1]
        assert int(batch) == one.run.micro_batch * one.run.micro_batches * one.run.dp
        command = parse(words)
        assert not problems(words)
        assert not command.unknown or not any("burst" in name for name in command.unknown)


# Their layers of linear attention are none of Megatron's: read back, all have softmax attention.
FOREIGN = ("kimi-linear-48b-a3b", "minimax-text-01")
# Of Megatron's branch for DeepSeek-V4.
OF_THE_BRANCH = {
    "deepseek-v4-flash": "--csa-compress-ratios=([0]*2+[4,128]*20+[4]) --csa-window-size=128"
}


def of_shape(model):
    """What flags say of a model: not its name, and none of what is not counted. A width of dense
    layers that there are none of is taken to be that of experts."""
    wide = model.dense_ffn or (model.ffn if model.experts else 0)
    return replace(model, name="", also=(), dense_ffn=wide, family=None)


def problems(words):
    command = parse(words)
    found = [*refusals(command, "2.0"), *hazards(command, 4, MACHINE, "2.0")]
    return [each for each in found if each.level == "problem"]


@pytest.fixture
def newest(monkeypatch):
    """The doctor asks which Megatron-Core is installed; flags are written for 0.19."""
    for module in (splitting, sparse):
        monkeypatch.setattr(module, "core_version", lambda: (0, 19))


@pytest.mark.parametrize("model", models.NAMED.values(), ids=lambda model: model.name)
def test_flags_of_every_named_model_are_read_back_and_pass_the_doctor(model, newest):
    stages = 2 if model.layers % 4 == 0 else 1
    mixed = 0 < model.windows < model.attentions
    further = OF_THE_BRANCH.get(model.name, "").split()
    for run, packs in (
        (
            Settings(
                seq=2**17,
                tp=2,
                cp=4,
                pp=stages,
                vpp=stages,
                ep=2 if model.experts else 1,
                window_algorithm="ring" if mixed else None,
            ),
            "",
        ),
        (Settings(seq=2**17, tp=1, cp=8), "balanced"),
        (Settings(seq=2**17, tp=1, cp=8), "zigzag"),
    ):
        words = shlex.split(" ".join(pasted.flags_of(model, run, packs)))
        read, given = model_arguments.read_command([*words, *further])
        expected = of_shape(model)
        if model.name in FOREIGN:
            expected = replace(expected, pattern="", mixer=None)
        assert of_shape(read) == expected
        for name in ("seq", "tp", "cp", "pp", "vpp", "ep"):
            assert given[name] == getattr(run, name), name
        assert given["algorithm"] == ("auto" if run.by_kind else "burst")
        assert not problems(words)
    foreign = [each for each in model_flags.lacking(model) if "build softmax attention" in each]
    assert bool(foreign) is (model.name in FOREIGN)


DELTA = layer_kinds.gated_delta_net(32, 16, 128, 128, 4)
OTHERS = {
    "windows without a period": (
        Model("x", 5, 512, 8, 8, 64, 999, pattern="FWWFW", window=64),
        ["--window-size 63,0", "--window-attn-skip-freq '([0]*1+[1]*2+[0]*1+[1]*1)'"]),
    "windows everywhere": (Model("x", 2, 512, 8, 8, 64, 999, pattern="WW", window=64),
                           ["--window-size 63,0"]),
    "a hybrid with latents, delta nets and experts": (
        Model("x", 6, 512, 8, 8, 64, 999, head_dim=96, value_dim=48, pattern="M-*M-*",
              latent=Latent(128, 32), mixer=DELTA, experts=4, top_k=2, moe_layers=1, dense_ffn=256),
        ["--hybrid-layer-pattern 'G-+|GE+' --spec "
         "megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec"]),
    "linear layers without a period": (
        Model("x", 4, 512, 8, 8, 64, 999, pattern="LFFL", mixer=DELTA, gated=False),
        ["--experimental-attention-variant gated_delta_net --linear-attention-freq "
         "'([1]*1+[0]*2+[1]*1)'"]),
}  # fmt: skip


@pytest.mark.parametrize("case", OTHERS)
def test_flags_of_other_models(case):
    model, said = OTHERS[case]
    run = Settings(seq=4096, tp=1, pp=2 if "*" in model.pattern else 1)
    flags = pasted.flags_of(model, run)
    assert set(said) <= set(flags)
    assert not model_flags.lacking(model)
    read, _ = model_arguments.read_command(shlex.split(" ".join(flags)))
    assert of_shape(read) == of_shape(model)


def test_layers_of_two_halves_are_two_of_a_hybrid_model():
    mamba = layer_kinds.mamba2(16, 2, 32, 64, 4)
    model = Model("x", 3, 512, 8, 8, 64, 999, pattern="LF*", mixer=mamba)
    flags = pasted.flags_of(model, Settings(seq=4096))
    assert any(each.startswith("--hybrid-layer-pattern 'M-*-*' ") for each in flags)
    assert "--mamba-num-heads 16 --mamba-head-dim 64 --mamba-state-dim 32 --mamba-num-groups 2" in (
        flags
    )
    assert model_flags.script_of(model) == "pretrain_hybrid.py"
    assert model_flags.script_of(replace(model, pattern="", mixer=None)) == "pretrain_gpt.py"


@pytest.mark.parametrize(("model", "said"), [
    (Model("x", 2, 512, 8, 8, 64, 999, pattern="WL", window=9, mixer=DELTA), "windows in some"),
    (Model("x", 2, 512, 8, 8, 64, 999, value_dim=32), "values of width 32 with keys of width 64"),
    (Model("x", 2, 512, 8, 8, 64, 999, pattern="M*", mixer=layer_kinds.mamba2(16, 2, 32, 64, 3)),
     "width is 3 rows"),
    (models.NAMED["gemma-3-4b"], "gated by GELU"),
], ids=lambda each: each if isinstance(each, str) else "")  # fmt: skip
def test_what_no_flag_says_is_told(model, said):
    (sentence,) = model_flags.lacking(model)
    assert said in sentence


def test_a_hybrid_model_is_started_by_its_own_script(capsys):
    words = ["advise", "--model", "nemotron-h-8b", *FEW, "--top", "1"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "-m megatron_burst pretrain pretrain_hybrid.py" in out
    assert "--hybrid-layer-pattern M-M" not in out  # its stars would be for the shell to expand
    assert "--hybrid-layer-pattern 'M-M-M-M*-" in out


def test_what_megatron_lacks_is_told_and_everything_else_printed(capsys):
    words = ["advise", "--model", "kimi-linear-48b-a3b", "--gpus", "64", "--seq", "64K", "--tp",
             "4", "--cp", "2", "--ep", "4", "--dp", "8", "--top", "1", "--ulysses", "1",
             "--algorithm", "burst", "--store", "1", "--offload", "0", "--mlp-tiles", "4",
             "--optimizer-offload", "0", "--wire", "fp32", "--micro-batch", "1"]  # fmt: skip
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "Megatron-LM has no flag for Kimi delta attention: these flags build softmax" in out
    assert "Not tried: --burst-attention-layout, a second layout" in out
    for flag in (
        "--multi-latent-attention --kv-lora-rank 512",
        "--context-parallel-size 2",
        "--expert-model-parallel-size 4",
        "--moe-layer-freq '([0]*1+[1]*26)'",
    ):
        assert flag in out
    assert "--burst-linear" not in out


MACHINE = {"variables": {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, "gpus": ["H100 sm_90"] * 4}


def test_a_table_with_everything(capsys):
    assert main(BASE) == 0
    out, err = capsys.readouterr()
    for words in ("llama3-8b, sequences of 65,536 tokens", "published rates", "tokens/s/GPU", "MFU",
                  "90 % of 13 published runs on H100 took 1 to 1.67 times their forecast if "
                  "`advise --kernel` names the kernel that runs",
                  "at published rates; `megatron-burst calibrate` narrows it)",
                  "Recommended: row 1", "parallel configurations", "step of row 1",
                  "attention", "memory of row 1", "reserved for CUDA and NCCL", "parameters",
                  "Megatron's own attention", "--tensor-model-parallel-size 4",
                  "--burst-lm-head-loss single_pass", "Analytical estimate"):  # fmt: skip
        assert words in out
    assert err in ("", "searching parallel configurations ...\n")  # on a slow machine


def test_what_is_to_be_pasted_is_one_command(capsys, monkeypatch):
    """Whole lines on a narrow terminal too, whose table leaves columns out."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert main([*BASE, "--tp", "4", "--store", "1"]) == 0
    out = re.sub("\x1b\\[[0-9;]*m", "", capsys.readouterr().out)
    text = out.split("Command to start it, on every node\n")[1].split("\nNot included: data, ")[0]
    exported, text = text.split("\n", 1)
    assert shlex.split(exported, comments=True) == ["export", "CUDA_DEVICE_MAX_CONNECTIONS=1"]
    words = shlex.split(text)
    assert words[:3] == ["torchrun", "--nproc-per-node", "8"]
    assert words[words.index("-m") :][:4] == ["-m", "megatron_burst", "pretrain", "pretrain_gpt.py"]
    assert words[words.index("--context-parallel-size") + 1] == "2"
    assert "--burst-attention-store" in words
    table = out.split("\n\n")[0].splitlines()
    assert "not shown in 80 columns: EP" in out
    assert max(map(len, table)) <= 80


def test_the_command_for_blackwell_keeps_the_hardware_queues(capsys):
    """`--gpu b200`: no variable that Megatron requires only before Blackwell."""
    assert main([*BASE, "--gpu", "b200", "--tp", "4"]) == 0
    out = capsys.readouterr().out
    assert "Command to start it, on every node\n  torchrun" in out
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in out


def test_pins_without_meaning_are_named(capsys):
    words = [*BASE[:-1], "1", "--top", "1", "--algorithm", "burst", "--placement", "head_first"]
    assert main(words) == 0
    assert "without effect in row 1: --algorithm, --placement" in capsys.readouterr().out


def test_json_is_all_there_is_on_standard_output(capsys):
    assert main([*BASE, "--json", "--top", "1"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"model", "parameters", "layers", "seq", "tokens_per_step", "cluster",
                          "kernel", "ways", "tried", "ranked", "megatron",
                          "megatron_fastest", "flags", "no_flag_for",
                          "uncounted"}  # fmt: skip
    assert all("refused" in each or each["seconds"] > 0 for each in found["megatron"])
    assert found["megatron_fastest"]["fits"]
    (one,) = found["ranked"]
    assert one["groups"] == {"tp": 4, "pp": 1, "first_layers": None, "last_layers": None,
                             "vpp": 1, "ep": 1, "cp": 2, "dp": 1, "micro_batch": 1,
                             "micro_batches": 8}  # fmt: skip
    assert sum(one["parts"].values()) == pytest.approx(one["seconds"], rel=1e-9)
    assert sum(one["memory"]["items"].values()) == one["memory"]["bytes"]
    each = one["tokens_per_second_per_gpu"] * one["seconds"] * 8
    assert each == pytest.approx(found["tokens_per_step"])
    low, high = one["seconds_range"]
    band = found["cluster"]["band"]
    assert (low, high) == (one["seconds"], 1.67 * one["seconds"])  # of H100, by hand
    assert band == {
        "low": 1.0,
        "high": 1.67,
        "cells": 13,
        "gpus": "H100",
        "provided": " if `advise --kernel` names the kernel that runs",
    }
    assert set(one["attention"]) == {"algorithm", "window_algorithm", "chunk_algorithm", "kernel",
                                     "side", "layout", "ulysses", "placement", "head_chunks",
                                     "intra", "linear"}  # fmt: skip


def job(capsys, *words):
    """The script that --sbatch prints, which bash can read."""
    assert main(["advise", "--model", "llama3-8b", "--gpus", "16", *FEW[2:], *words]) == 0
    script = capsys.readouterr().out
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    return script


def submitted(tmp_path, script, ends="exit 0", **variables):
    """(exit status, the words of each command that torchrun gets on the second node)."""
    (tmp_path / "job").write_text(script)
    stand_ins = {
        "scontrol": "echo first; echo second",
        "srun": 'shift; SLURM_NODEID=1 "$@"',
        "torchrun": f"""echo started; printf '%s\\n' "$@"; {ends}""",
        "date": "echo 1000000",
        "megatron-burst": "echo doctor of one rank",
    }
    for name, body in stand_ins.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    slurm = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "-", "SLURMD_NODENAME": "second",
        "MEGATRON_LM": "/checkout", "SLURM_SUBMIT_DIR": "/submit",
    }  # fmt: skip
    done = subprocess.run(["bash", str(tmp_path / "job"), "--data-path", "a b"], text=True,
                          env=slurm | variables, capture_output=True)  # fmt: skip
    return done.returncode, [
        part.splitlines()[1:] for part in re.split("(?m)(?=^started)", done.stdout)[1:]
    ]


def test_the_job_starts_the_doctor_and_then_the_flags_on_every_node(capsys, tmp_path):
    """Run by bash with stand-ins for what a cluster has: what torchrun is given on the second."""
    status, (doctor, train) = submitted(tmp_path, job(capsys, "--sbatch"))
    assert status == 0
    flags = advise(
        "llama3-8b", "h100", gpus=16, seq="64K", tokens_per_step="512K", tp=4, cp=2
    ).flags()
    torchrun = ["--nnodes", "2", "--nproc-per-node", "8", "--local-addr", "second", "--rdzv-id",
                "7", "--rdzv-backend", "c10d", "--rdzv-endpoint", "first:29500", "--rdzv-conf",
                "is_host=0", "-m", "megatron_burst"]  # fmt: skip
    assert doctor == [
        *torchrun, "doctor", "--distributed", "--tensor-model-parallel-size", "4",
        "--context-parallel-size", "2", "--gpus-per-node", "8",
    ]  # fmt: skip
    resume = ["--save", "/submit/llama3-8b-checkpoints", "--load", "/submit/llama3-8b-checkpoints"]
    assert train[: -len(resume) - 5] == [
        *torchrun, "pretrain", "/checkout/pretrain_gpt.py", *shlex.split(" ".join(flags)),
    ]  # fmt: skip
    assert train[-len(resume) - 5 :] == [
        *resume, "--save-interval", "274", "--exit-signal-handler", "--data-path", "a b",
    ]  # fmt: skip


def test_a_doctor_that_finds_problems_ends_the_job(capsys, tmp_path):
    status, commands = submitted(tmp_path, job(capsys, "--sbatch"), ends="exit 1")
    assert (status, len(commands)) == (1, 1)


def test_the_time_limit_follows_from_the_forecast(capsys, tmp_path):
    """6.573 s a step, at most 1.67 times as long: 1,000 take 10,977 s, 3 h 3 min, and 30 min
    besides. Unknown, it is a word that sbatch refuses. Megatron-LM stops 11 minutes before it."""
    script = job(capsys, "--sbatch", "--train-iters", "1000")
    assert "\n#SBATCH --time=0-03:33:00\n" in script
    assert "Not included: data, tokenizer, learning rate\n" in script
    _, (_, train) = submitted(tmp_path, script, SLURM_JOB_END_TIME=str(1_000_000 + 60 * 60))
    assert train[train.index("--train-iters") + 1] == "1000"
    assert train[train.index("--exit-duration-in-mins") + 1] == "49"
    _, (_, train) = submitted(tmp_path, script, SLURM_JOB_END_TIME=str(1_000_000 + 60 * 5))
    assert train[train.index("--exit-duration-in-mins") + 1] == "1"
    script = job(capsys, "--sbatch")
    assert "\n#SBATCH --time=SET_ME\n" in script
    assert "Not included: data, tokenizer, learning rate, --train-iters\n" in script
    for line in ("--requeue", "--cpus-per-task=64", "--gpus-per-node=8", "--open-mode=append"):
        assert f"\n#SBATCH {line}\n" in script


@pytest.mark.parametrize(
    ("seconds", "text"), [(1, "0-00:01:00"), (3600, "0-01:00:00"), (86_401, "1-00:01:00")]
)
def test_time_limits_as_slurm_writes_them(seconds, text):
    assert time_limit(seconds) == text


@pytest.mark.parametrize(
    ("model", "name"),
    [("llama3-8b", "llama3-8b"), ("meta-llama/Llama-3.1-8B", "Llama-3.1-8B"),
     ("/models/my model/config.json", "my-model"), ("config.json", "burst"), ("$(id)", "id")],
)  # fmt: skip
def test_a_job_has_the_last_part_of_the_name_of_its_model(model, name):
    assert job_name(model) == name


def test_a_job_without_context_parallelism_has_no_rings_to_check(capsys, tmp_path):
    words = ["--cp", "1", "--tp", "8", "--sbatch"]
    status, (train,) = submitted(tmp_path, script := job(capsys, *words))
    assert (status, train[train.index("-m") + 2]) == (0, "pretrain")
    assert "\nsrun --kill-on-bad-exit=1 megatron-burst doctor --quick\n" in script


def test_a_cluster_file_and_packed_documents(capsys, tmp_path):
    path = tmp_path / "cluster.toml"
    cluster_file.write(replace(Cluster(GPUS["h200"], 8), source="a test"), path)
    words = ["advise", "--model", "llama3-8b", "--cluster", str(path), *FEW[2:]]
    assert main([*words, "--packed", "8K,32K", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["cluster"]["gpu"] == "h200"
    assert "--burst-pack documents" in found["flags"]
    assert main([*words, "--gpu", "h100"]) == 2
    assert "--gpu and --cluster both" in capsys.readouterr().err


def test_a_megatron_command_keeps_its_model(capsys):
    """Only flags of the run are printed: the shape, the norm and the vocabulary are the user's."""
    flags = [each for each in SMALL if each != "--vocab-size 32000"]
    words = ["advise", *FEW[:2], "--tp", "4", "--top", "1"]
    assert main([*words, "--", "pretrain_gpt.py", *" ".join(flags).split()]) == 0
    out = capsys.readouterr().out
    assert "Flags that replace flags of your command" in out
    assert "your command has no --vocab-size: a vocabulary of 131,072 was assumed" in out
    for name in (
        "num-layers",
        "vocab-size 131072",
        "normalization",
        "disable-bias",
        "position-emb",
    ):
        assert f"--{name}" not in out.replace("--max-position-embeddings", "")
    assert main([*words, "--json", "--", "pretrain_gpt.py", *" ".join(SMALL).split()]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["seq"] == 65536
    assert "--tensor-model-parallel-size 4 --sequence-parallel" in found["flags"]
    assert not any("hidden-size" in each for each in found["flags"])


SMALL = ["--num-layers 8", "--hidden-size 1024", "--num-attention-heads 16", "--seq-length 65536",
         "--vocab-size 32000"]  # fmt: skip


@pytest.mark.parametrize(("name", "flags"), [
    ("llama3-8b", ["--rotary-base 500000"]), ("mistral-7b", []),
    ("llama3.1-8b", ["--rotary-base 500000 --use-rope-scaling --rope-scaling-factor 8"]),
    ("llama3.2-1b", ["--rotary-base 500000 --use-rope-scaling --rope-scaling-factor 32"]),
    ("mixtral-8x7b", ["--rotary-base 1000000"]),
    ("qwen3-8b", ["--qk-layernorm", "--norm-epsilon 1e-06 --rotary-base 1000000"]),
    ("qwen2.5-7b", ["--add-qkv-bias", "--norm-epsilon 1e-06 --rotary-base 1000000"]),
    ("qwen2.5-14b", ["--add-qkv-bias", "--rotary-base 1000000"]),
])  # fmt: skip
def test_flags_of_a_family(name, flags):
    model = models.named(name)
    said = list(model_flags.model_flags(model))
    assert said[said.index("--normalization RMSNorm --disable-bias-linear "
                           "--position-embedding-type rope") + 1 :] == flags  # fmt: skip
    assert ("--rotary-base" in pasted.left_to_the_user(model)) is not bool(flags)


@pytest.mark.parametrize(("words", "status", "said"), [
    (["--model", "llama3-70b", "--gpus", "2", "--seq", "128K"], 1, "does not fit"),
    (["--model", "llama3-8b", "--gpus", "12", "--seq", "1M"], 2, "use a multiple, such as 16"),
    (["--model", "llama3-8b", "--gpus", "8", "--seq", "1M", "--gpu", "x9"], 2, "unknown; use one"),
    (["--model", "llama9", "--gpus", "8", "--seq", "1M"], 2, "llama3-8b"),
    (["--gpus", "8", "--seq", "1M"], 2, "--model is required"),
    (["llama3-8b", "--gpus", "8", "--seq", "1M"], 2, "use --model llama3-8b"),
    (["--model", "llama3-8b", "--seq", "1M"], 2, "--gpus is required"),
    (["--model", "llama3-8b", "--gpus", "8"], 2, "--seq is required"),
    (["--model", "llama3-8b", "--gpus", "8", "--seq", "1M", "--json", "--sbatch"], 2,
     "one of them"),
    ([*BASE[1:], "--train-iters", "7"], 2, "--train-iters requires --sbatch"),
    ([*BASE[1:], "--sbatch", "--train-iters", "0"], 2, "--train-iters must be an integer >= 1"),
    (["--gpus", "8", "--seq", "1M", "--sbatch", "--", "pretrain_gpt.py", "--num-layers", "8"], 2,
     "--sbatch and a Megatron command exclude each other"),
    (["--model", "llama3-8b", "--gpus", "7", "--seq", "8K"], 2, "use --tokens-per-step 4186112"),
    (["--model", "llama3-8b", "--gpus", "8", "--seq", "1"], 2, "--seq a power of two, such as 2"),
    (["--model", "llama3-8b", "--gpus", "8", "--seq", "1K", "--packed", ","], 2,
     "--packed ',' contains no length; use lengths such as 8K,32K"),
    ([*BASE[1:], "--algorithm", "foo"], 2, "--algorithm foo does not exist; use "),
    ([*BASE[1:], "--ep", "4"], 2, "--ep 4 requires experts, and llama3-8b has none"),
    ([*BASE[1:], "--", "pretrain_gpt.py", "--num-layers", "8"], 2, "--model llama3-8b and the"),
], ids=str)  # fmt: skip
def test_errors(words, status, said, capsys):
    assert main(["advise", *words]) == status
    out, err = capsys.readouterr()
    assert not out
    assert said in err
    assert len(err.splitlines()) == 1
