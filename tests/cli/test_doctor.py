"""`megatron-burst doctor`: recommended sizes, reported hazards, checked groups."""

import ast
import json
import math
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from ranks import Ranks

import megatron_burst as mb
from megatron_burst import flags
from megatron_burst.cli import console
from megatron_burst.cli.doctor import hazards as examined
from megatron_burst.cli.doctor import installed, kernels, machine, report, rings
from megatron_burst.cli.doctor.hazards import hazards, refusals
from megatron_burst.cli.doctor.report import absent, note, ok, problem, status
from megatron_burst.cli.doctor.sizes import hierarchical_sizes
from megatron_burst.cli.main import main
from megatron_burst.cli.megatron_arguments import (
    FREQUENCIES,
    INTEGERS,
    LISTS,
    SWITCHES,
    TEXTS,
    parse,
)
from megatron_burst.config import FIELDS
from megatron_burst.kernels import torch_features
from megatron_burst.megatron.checks import command_line
from megatron_burst.megatron.checks.config import backend_problems

ROOT = Path(__file__).parents[2]
NOWHERE = {"host": "here", "gpus": [], "nics": {}, "variables": {}}
GOOD = (
    "--context-parallel-algo burst --context-parallel-size 16 --seq-length 131072 "
    "--hierarchical-context-parallel-sizes 8 2 --attention-dropout 0 --transformer-impl local "
    "--num-attention-heads 32 --group-query-attention --num-query-groups 8 "
    "--calculate-per-token-loss --no-create-attention-mask-in-dataloader"
)


# --- sizes ---------------------------------------------------------------------------------


def runs(tp, cp, per_node, world=3840):
    """Return the longest runs of consecutive ranks that stay on one node, by enumeration."""
    node_of = [rank // per_node for rank in range(world)]
    groups = [
        [node_of[block * tp * cp + i * tp + t] for i in range(cp)]
        for block in range(world // (tp * cp))
        for t in range(tp)
    ]
    fits = [
        n
        for n in range(1, cp + 1)
        if cp % n == 0 and all(len(set(g[i : i + n])) == 1 for g in groups for i in range(0, cp, n))
    ]
    return max(fits)


@pytest.mark.parametrize("per_node", [4, 8])
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("cp", [2, 3, 4, 6, 8, 12, 16, 32])
def test_sizes_are_the_longest_runs_that_stay_in_a_node(tp, cp, per_node):
    sizes = hierarchical_sizes(tp, cp, per_node)
    assert sizes.intra * sizes.inter == cp
    assert sizes.intra == runs(tp, cp, per_node)
    assert sizes.flat == (sizes.flags == "") == (1 in sizes[:2])


def test_a_node_full_of_tensor_parallelism_has_no_ring_of_its_own():
    sizes = hierarchical_sizes(8, 4, 8)
    assert sizes[:2] == (1, 4)
    assert "uses all GPUs of a node" in sizes.reason


def table(gpus_per_node=8, tps=(1, 2, 4, 8)):
    """Return the sizes of some clusters as a Markdown table."""
    cps = (2, 4, 8, 16, 32, 64)
    lines = [
        "| TP \\ CP | " + " | ".join(map(str, cps)) + " |",
        "|-|" + "-|" * len(cps),
    ]
    for tp in tps:
        found = [hierarchical_sizes(tp, cp, gpus_per_node) for cp in cps]
        cells = [f"flat, {s.inter} nodes" if s.intra == 1 else "flat" if s.flat
                 else f"`{s.intra} {s.inter}`" for s in found]  # fmt: skip
        lines.append(f"| {tp} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def test_the_table_of_the_documentation():
    assert table() in (ROOT / "docs" / "troubleshooting.md").read_text()


def constants():
    """Return all string literals of the package; the parts of an f-string are separate."""
    for path in Path(mb.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def test_the_messages_of_the_documentation_are_real():
    """Code in the first column of the symptoms must be a message of the package."""
    page = (ROOT / "docs" / "troubleshooting.md").read_text().split("## Symptoms")[1]
    cells = [line.split("|")[1] for line in page.splitlines() if line.startswith("| ")][1:]
    theirs = {"CUDA_DEVICE_MAX_CONNECTIONS", "--cp-comm-type a2a+p2p", "doctor --distributed"}
    theirs |= {"terminate called without an active exception"}  # C++'s own
    quoted = {code for cell in cells for code in cell.split("`")[1::2]} - theirs
    said = list(constants())
    assert len(quoted) > 12
    assert not [code for code in quoted if not any(code in text for text in said)]


# --- the user's command --------------------------------------------------------------------


def found(words, *, environment=None, gpus=(), te=None, per_node=8):
    here = NOWHERE | {"variables": environment or {}, "gpus": list(gpus)}
    command = parse(words.split())
    return [*hazards(command, per_node, here, te), *refusals(command, te)]


def worst(findings, topic):
    levels = [f.level for f in findings if f.topic == topic]
    return max(levels, key=("ok", "note", "problem").index, default=None)


def without(flag, count=1):
    words = GOOD.split()
    at = words.index(flag)
    return " ".join(words[:at] + words[at + count :])


def test_a_good_command_has_no_problem():
    findings = found(GOOD, environment={"CUDA_DEVICE_MAX_CONNECTIONS": "1"})
    assert {f.level for f in findings} == {"ok"}
    assert "BurstAttention" in {f.topic for f in findings}


def test_what_the_launcher_refuses_beside_settings_of_the_model_is_told_too():
    words = f"{GOOD} --reset-attention-mask --sft"
    words += " --hybrid-layer-pattern M* --micro-batch-size 2"
    told = [f"{f.what} {f.fix}" for f in found(words) if f.topic == "refused at start"]
    for part in (
        "--reset-attention-mask at --micro-batch-size 2",
        "--reset-attention-mask does not work with --sft",
        "--reset-attention-mask does not work with --hybrid-layer-pattern",
        "--hybrid-layer-pattern M* has attention",
    ):
        assert any(part in one for one in told), (part, told)


HOPPER = ["NVIDIA H100, 80 GiB, sm_90"]


MASK, TOKENS = "--no-create-attention-mask-in-dataloader", "--calculate-per-token-loss"
ALGORITHM, SIZES = "--context-parallel-algo", "--hierarchical-context-parallel-sizes"
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
HAZARDS = [
    (without(TOKENS), "loss mean", "note", TOKENS),
    (without(TOKENS) + " --eod-mask-loss", "loss mean", "problem", TOKENS),
    (without(MASK), "attention mask", "ok", ""),
    (GOOD + " --reset-attention-mask", "attention mask", "ok", ""),
    (
        f"--context-parallel-size 2 --reset-attention-mask {MASK}",
        "attention mask",
        "problem",
        f"remove {MASK} or --reset-attention-mask",
    ),
    ("--context-parallel-size 2 --seq-length 32768", "attention mask", "problem", MASK),
    ("--context-parallel-size 2 --seq-length 4096", "attention mask", "note", MASK),
    (GOOD + " --cp-comm-type p2p", "--cp-comm-type", "problem", "remove --cp-comm-type"),
    ("--context-parallel-size 2 --cp-comm-type a2a+p2p", "--cp-comm-type", "problem", SIZES),
    ("--context-parallel-algo burst", ALGORITHM, "note", ""),
    ("--context-parallel-size 2", ALGORITHM, "note", "burst"),
    (GOOD.replace("8 2", "4 2"), SIZES, "problem", f"{SIZES} 8 2"),
    (GOOD.replace("8 2", "4 4"), SIZES, "note", f"{SIZES} 8 2"),
    (without(SIZES, 3), SIZES, "note", f"{SIZES} 8 2"),
    (GOOD + " --tensor-model-parallel-size 3", "nodes", "problem", "--gpus-per-node"),
    (GOOD, CONNECTIONS, "problem", f"export {CONNECTIONS}=1"),
    (without("--transformer-impl", 2), "--transformer-impl", "problem", "local"),
]


@pytest.mark.parametrize(("words", "topic", "level", "fix"), HAZARDS)
def test_hazards(words, topic, level, fix):
    findings = found(words, gpus=HOPPER)
    assert worst(findings, topic) == level
    assert any(fix in f.fix for f in findings if f.topic == topic)


def test_environment_hazards_depend_on_the_gpu_and_fsdp():
    name = CONNECTIONS
    assert worst(found(GOOD, gpus=["B200, 180 GiB, sm_100"]), name) == "note"
    assert worst(found(GOOD, gpus=HOPPER, environment={name: "1"}), name) == "ok"
    fsdp = GOOD + " --use-megatron-fsdp"
    assert worst(found(fsdp, gpus=HOPPER, environment={name: "1"}), name) == "problem"
    assert worst(found(fsdp, gpus=HOPPER), name) is None
    assert worst(found(""), name) is None


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (without("--attention-dropout", 2), "--attention-dropout 0"),
        (GOOD.replace("131072", "131080"), "--seq-length 131080"),
        (GOOD + " --burst-layout zagzig", "--burst-layout"),
        (GOOD + " --burst-ulysses-size 3", "--burst-ulysses-size 3"),
        (GOOD + " --burst-attention-store 2", "--burst-attention-store"),
        (GOOD + " --burst-attention-store 0.5", "--recompute-granularity"),
        (GOOD.replace("algo burst", "algo brust"), "--context-parallel-algo"),
        (GOOD + " --burst-layout striped --mtp-hsm", "--burst-layout zigzag"),
        (GOOD + " --sft --mtp-hsm", "--mtp-hsm"),
        (
            GOOD + " --reset-attention-mask --dataloader-inter-document-masking",
            "and --dataloader-inter-document-masking ends them",
        ),
        (
            GOOD + " --experimental-attention-variant dsa --burst-sparse megatron "
            "--overlap-grad-reduce",
            "--dsa-indexer-loss-coeff 0.001",
        ),
        (GOOD + " --burst-lm-head-loss single_pass --fp16", "--fp16"),
        (
            GOOD + " --burst-ulysses-size 2 --num-attention-heads 12 --num-query-groups 4 "
            "--context-parallel-size 12 "
            "--hierarchical-context-parallel-sizes 3 4 --seq-length 2400",
            "--burst-placement head_first",
        ),
        ("--context-parallel-size 2 --burst-layout striped", "--burst-layout striped"),
        ("--context-parallel-algo brust", "--context-parallel-algo"),
        ("--burst-lm-head-loss nonsense", "--burst-lm-head-loss"),
    ],
)
def test_what_the_plugin_would_refuse(words, says):
    (refused,) = [f for f in found(words) if f.topic == "refused at start"]
    assert refused.level == "problem"
    assert says in f"{refused.what}; {refused.fix}"
    assert "--" in refused.fix


@pytest.mark.parametrize(
    "words",
    [
        "--qk-clip --cuda-graph-impl local",
        "--qk-clip --cuda-graph-impl transformer_engine --cuda-graph-modules mlp attn",
        "--qk-clip --cuda-graph-impl transformer_engine --cuda-graph-scope attn",
        "--qk-clip --enable-cuda-graph",
        "--sft --external-cuda-graph",
        "--cuda-graph-impl full_iteration",
        "--dynamic-context-parallel",
        "--hybrid-context-parallel",
        "--sequence-packing-scheduler dp_balanced",
        "--use-kitchen-attention",
        "--fp8-multi-head-attention",
        "--burst-attention-store 1 --recompute-granularity full "
        "--fine-grained-activation-offloading",
        "--burst-attention-store 1 --recompute-granularity full --fp4-format e2m1",
        "--burst-lm-head-loss recompute --fp8-output-proj",
        "--burst-offload 1.0 --fine-grained-activation-offloading",
        "--burst-offload auto --cpu-offloading-num-layers 2",
        "--burst-sparse megatron --burst-layout striped --experimental-attention-variant dsa",
        "--attention-backend local",
        "--burst-nccl-max-ctas 4 --distributed-backend gloo",
        "--use-megatron-fsdp",
        "--yaml-cfg model.yaml",
    ],
)
def test_settings_of_the_model_that_end_a_run_are_known(words):
    flag = words.split("--")[-1].split()[0]
    findings = found(f"{GOOD} {words}")
    (told,) = [f for f in findings if f.topic == "refused at start"]
    assert flag.split("-")[0] in f"{told.what} {told.fix}"
    assert worst(findings, "BurstAttention") is None


def test_graphs_that_leave_attention_out_are_let_be():
    graphs = "--qk-clip --cuda-graph-impl transformer_engine --cuda-graph-modules mlp moe_router"
    assert worst(found(f"{GOOD} {graphs}"), "BurstAttention") == "ok"


class Read(SimpleNamespace):
    """Arguments that record which of them were read."""

    def __getattribute__(self, name):
        if not name.startswith("__"):
            super().__getattribute__("__dict__")[READ].add(name)
        return super().__getattribute__(name)


READ = "names that were read"
# No flag sets it; the launcher counts the processes; Megatron's other name of --cuda-graph-scope;
# what `configure` sets.
NO_FLAG = {
    "attn_logit_softcapping", "world_size", "cuda_graph_scope_deprecated", "burst",
    "kimi_kda_layers",
}  # fmt: skip


def test_the_doctor_knows_all_that_the_launcher_reads_of_the_arguments():
    """Each flag is tested alone, to find flags that are read only together with another one."""
    read, known = set(), set()
    more = "--burst-attention-store 0.5 --burst-lm-head-loss recompute --burst-layout striped"
    singles = ["", *SWITCHES, *(f"{name} 2" for name in (*INTEGERS, *TEXTS, *FREQUENCIES, *LISTS))]
    lines = [f"{base} {one}" for base in (GOOD, f"{GOOD} {more}") for one in singles]
    for words in (line.split() for line in (*lines, f"{GOOD} {STATES}", f"{GOOD} {HYBRID}")):
        command = parse(words)
        settings = vars(examined._config(command))
        known = settings.keys()
        ours = [field.dest for field in FIELDS.values()]
        args = Read(**{READ: read}, **{k: settings[k] for k in known - ours})
        values, wrong = command.burst_arguments()
        vars(args).update(vars(values))
        assert not wrong
        flags.add_defaults(args)
        burst, errors = flags.options_and_errors(args)
        list(command_line.problems(args, burst, words, errors))
        list(backend_problems(args, mb.BurstConfig()))
    assert {"cuda_graph_impl", "fp8", "spec", "mtp_hsm", "window_size"} < read
    assert read - known - NO_FLAG == set()


HYBRID = "--hybrid-layer-pattern M*-"
STATES = "--experimental-attention-variant gated_delta_net --burst-linear megatron"


def test_heads_of_layers_that_carry_states_are_told():
    words = f"{GOOD} {STATES} --linear-num-key-heads 4 --linear-num-value-heads 8"
    told = [f.what for f in found(words) if f.topic == "refused at start"]
    assert [t.split(" is not")[0] for t in told if "is not divisible" in t] == [
        "--linear-num-key-heads 4", "--linear-num-value-heads 8"
    ]  # fmt: skip


def test_a_way_for_states_that_no_layer_has():
    (told,) = [f for f in found(f"{GOOD} --burst-linear ring") if f.topic == "flags"]
    assert (told.what, told.fix) == (
        "--burst-linear has no effect: the model has no linear-attention or Mamba layers",
        "remove --burst-linear",
    )


def test_a_flag_of_ours_that_the_doctor_does_not_know():
    (told,) = [f for f in found(GOOD + " --burst-cheese 1") if f.topic == "flags"]
    assert "--burst-cheese" in told.what


def test_all_refusals_are_told_at_once_each_with_its_flag():
    words = GOOD.replace("131072", "131080") + (
        " --burst-layuot striped --burst-kernel fash --burst-side querry"
        " --burst-ulysses-size x --burst-lm-head-loss recompute --fp16"
        " --apply-query-key-layer-scaling"
    )
    told = {f.what: f.fix for f in found(words) if f.topic in ("flags", "refused at start")}
    for flag, fix in (
        ("--burst-layuot", "--burst-layout"),
        ("--burst-kernel", "--burst-kernel"),
        ("--burst-side", "--burst-side"),
        ("--burst-ulysses-size", "--burst-ulysses-size"),
        ("--seq-length", "--seq-length"),
        ("query-key layer scaling", "remove --apply-query-key-layer-scaling"),
        ("--burst-lm-head-loss", "--fp16"),
    ):
        (shown,) = [fixed for what, fixed in told.items() if flag in what]
        assert fix in shown
    assert len(told) == 7


def test_flags_that_nothing_follows():
    (told,) = [f for f in found("--context-parallel-size 2 --burst-side kv")
               if f.topic == "flags"]  # fmt: skip
    assert (told.level, told.fix) == ("problem", "--context-parallel-algo burst")


@pytest.mark.parametrize(
    "words",
    [
        " --recompute-granularity full --burst-attention-store 0.5",
        " --recompute-activations --burst-attention-store 0.5",
        " --recompute-activations --burst-attention-store 0.5 --burst-attention-layout zigzag",
    ],
)
def test_the_doctor_settles_flags_as_a_run_does(words):
    assert worst(found(GOOD + words), "BurstAttention") == "ok"


def test_a_command_is_parsed_as_megatron_parses_it():
    words = (
        "srun -n 4 -- torchrun --nproc-per-node 8 pretrain_gpt.py --seq-length=3 --fp16 --new 1 2 "
        "--hierarchical-context-parallel-sizes 8 2 --window-size (4,0) --burst-side query "
        "--cp-comm-type p2p a2a --seq-len 4 --burst-layuot=zigzag --spec"
    )
    command = parse(words.split())
    assert command.seq_length == 3  # --seq-len is no abbreviation of it
    assert command.fp16
    assert not command.sft
    assert command.sizes == [8, 2]
    assert command.window_size == [4, 0]
    assert command.cp_comm_type == ["p2p", "a2a"]
    assert (command.burst_side, command.burst_layout, command.spec) == ("query", None, [])
    assert command.unknown == ["--nproc-per-node", "--new", "--seq-len", "--burst-layuot"]
    assert (command.cp, command.cp_given, command.tp) == (1, False, 1)
    again = parse(
        ["--context-parallel-size", "2", "--context-parallel-size=4", "--window-size=4,0"]
    )
    assert (again.cp, again.cp_given, again.window_size) == (4, True, [4, 0])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--seq-length", "--seq-length: expected one argument"),
        ("--seq-length --fp16", "--seq-length: expected one argument"),
        ("--seq-length 4K", "--seq-length: invalid int value: '4K'"),
        ("--attention-dropout x", "--attention-dropout: invalid float value: 'x'"),
        ("--hierarchical-context-parallel-sizes", "sizes: expected at least one argument"),
        ("--hierarchical-context-parallel-sizes 8,2", "sizes: invalid int value: '8,2'"),
        ("--window-size 4x0", "--window-size: expected two integers as 4,0, got '4x0'"),
        ("--fp16=1", "--fp16: ignored explicit argument '1'"),
    ],
)
def test_a_command_that_megatron_could_not_parse(words, says):
    with pytest.raises(ValueError, match=f"{re.escape(says)}$"):
        parse(words.split())


def test_sizes_of_the_doctor_give_way_to_those_of_the_command(capsys):
    own = "doctor --quick --json --tensor-model-parallel-size 2 --context-parallel-size 2"
    main([*own.split(), "--", *["x.py", "--context-parallel-size", "16", "--seq-length", "4096"]])
    (sizes,) = [f for f in json.loads(capsys.readouterr().out)["findings"] if f["topic"] == "sizes"]
    assert sizes["what"].startswith("for TP 2, CP 16, ")


# --- this machine --------------------------------------------------------------------------


def test_network_interfaces(tmp_path):
    for name, files in {
        "net/eth0": {"operstate": "up", "speed": "100000", "device/vendor": ""},
        "net/eth1": {"operstate": "down", "speed": "100000", "device/vendor": ""},
        "net/eth2": {"operstate": "unknown", "speed": "-1", "device/vendor": ""},
        "net/docker0": {"operstate": "up", "speed": "10000"},
        "infiniband/mlx5_0/ports/1": {"rate": "400 Gb/sec (4X NDR)"},
    }.items():
        for file, text in files.items():
            path = tmp_path / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + "\n")
    assert machine.nics(tmp_path) == {
        "mlx5_0": "RDMA, 400 Gb/sec (4X NDR)",
        "eth0": "100 Gb/s",
        "eth2": "speed unknown",
    }
    assert machine.nics(tmp_path / "nothing") == {}


def test_kernels_are_run_not_asked():
    told = {f.topic: f for f in kernels.kernels()}
    assert set(told) == {f"kernel {name}" for name in (*kernels.KERNELS, "auto")} - {
        "kernel reference"
    }
    if not torch.cuda.is_available():
        within = r"runs on cpu, within \de-\d\d of the reference; windows: within \de-\d\d$"
        assert told["kernel aten"].level == "ok"
        assert re.match(within, told["kernel aten"].what)
        assert told["kernel aten_cudnn"].level == "absent"
        assert told["kernel auto"].what == "selects aten"
        assert "cuda" in told["kernel aten_cudnn"].what

    real = kernels.by_pairs
    broken = lambda *a: [x * math.nan for x in real(*a)]  # noqa: E731
    with mock.patch.object(kernels, "by_pairs", broken):
        findings = {f.topic: f for f in kernels.kernels()}
    assert findings.pop("kernel auto").level == "problem"
    levels = {f.level for f in findings.values()}
    assert levels == {"problem", "absent"}  # what ran is wrong, what did not run is not there
    assert findings["kernel reference"].level == "problem"
    for finding in findings.values():
        words = "wrong results on" if finding.level == "problem" else "not usable on"
        assert words in finding.what


@pytest.mark.megatron
def test_hooks_that_do_not_fit_are_a_problem():
    pytest.importorskip("megatron.core")
    import megatron_burst.megatron as burst

    assert [f.level for f in installed.hooks()] == ["ok"]
    assert burst.installed_layout() is None
    wrong = RuntimeError("Megatron-Core 0.99: utils.x has the parameters [], but lacks ['batch']")
    with mock.patch.object(burst, "install", side_effect=wrong):
        (told,) = installed.hooks()
    assert told.level == "problem"
    assert "Megatron-Core 0.99: utils.x" in told.what


def test_what_torch_cannot_do_is_asked_of_it(monkeypatch):
    features = tuple(each._replace(present=lambda: False) for each in torch_features.FEATURES)
    monkeypatch.setattr(torch_features, "FEATURES", features)
    monkeypatch.setattr(torch, "__version__", "2.9.0a0+50eac811a6.nv25.09")
    first, *told = installed.torch_findings()
    assert first.what.startswith("2.9.0a0+50eac811a6.nv25.09, a development build")
    assert [finding.level for finding in told] == ["problem", "note", "note"]
    assert [finding.fix for finding in told] == ["torch 2.8 or newer", "", ""]
    assert all("before 2." in finding.what for finding in told)


def test_what_nobody_has_to_install_takes_one_line(capsys):
    shown = report.Report(as_json=False)
    shown.add([ok("torch", "2.13"), absent("triton", "not installed"), absent("csrc", "not built")])
    shown.end({})
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["ok", "absent", "0"]
    assert lines[1].endswith("not installed, not needed: triton, csrc")
    assert lines[1].count("absent") == 1
    assert status(shown.findings) == 0


def test_versions():
    told = {f.topic: f for f in installed.versions(True)}
    assert told["torch"].what == torch.__version__
    with mock.patch.object(installed, "TESTED", ("9.9",)):
        again = {f.topic: f for f in installed.versions(True)}
    if told["Megatron-Core"].level != "problem":
        assert (told["Megatron-Core"].level, again["Megatron-Core"].level) == ("ok", "note")


def test_the_version_of_megatron_is_that_of_the_source_which_would_be_imported(
    tmp_path, monkeypatch
):
    """A checkout on the path may be newer than the wheel."""
    paths = lambda where: mock.Mock(submodule_search_locations=where)  # noqa: E731
    core = tmp_path / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "package_info.py").write_text("MAJOR = 7\nMINOR = 21\nPATCH = 3\nPRE_RELEASE = 'rc1'\n")
    with mock.patch.object(installed.util, "find_spec", return_value=paths([core])):
        assert installed.megatron_version() == "7.21.3rc1"
    with mock.patch.object(installed.util, "find_spec", side_effect=ModuleNotFoundError):
        assert installed.megatron_version() is None
        needed, alone = ({f.topic: f for f in installed.versions(each)} for each in (True, False))
        assert list(installed.hooks()) == []
    levels = [each["Megatron-Core"].level for each in (needed, alone)]
    assert levels == ["problem", "note"]  # a script of one's own does without
    assert "pip install --no-deps 'megatron-core>=0.16'" in needed["Megatron-Core"].fix


@pytest.mark.megatron
def test_the_version_read_is_the_version_imported():
    core = pytest.importorskip("megatron.core")
    assert core.__version__.split("+")[0] == installed.megatron_version()


def test_quick_imports_no_megatron_and_takes_what_torch_takes():
    """Compare processor time with torch alone, in one process.

    When the test was written, it took 2.2 s to 2.6 s, of which 0.3 s are the doctor's.
    """
    code = (
        "import sys, time, torch; start = time.process_time()\n"
        "from megatron_burst.cli.main import main\n"
        f"main(['doctor', '--quick', '--', 'pretrain_gpt.py', *{GOOD.split()!r}])\n"
        "print('megatron.core' in sys.modules, time.process_time() - start)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=ROOT
    )
    imported, seconds = done.stdout.splitlines()[-1].split()
    assert imported == "False"
    assert float(seconds) < 1.5
    assert "supports these settings" in done.stdout
    assert "kernel aten" not in done.stdout


# --- the report ----------------------------------------------------------------------------


def printed(findings, as_json, capsys):
    shown = report.Report(as_json)
    shown.add(findings)
    shown.end({"machine": {}})
    return capsys.readouterr().out


def test_report(capsys):
    findings = [ok("a", "fine [x]"), note("b", "so so " * 40), problem("c", "bad", "mend it")]
    lines = [line.rstrip() for line in printed(findings, False, capsys).splitlines()]
    at = lines[0].index("fine [x]")
    assert lines == [
        "ok       a".ljust(at) + "fine [x]",
        "note     b".ljust(at) + ("so so " * 40).rstrip(),
        "problem  c".ljust(at) + "bad",
        " " * at + "-> mend it",
        "1 problem, 1 note",
    ]
    assert [status(findings), status(findings[:2])] == [1, 0]
    told = json.loads(printed(findings, True, capsys))
    assert told["counts"] == {"ok": 1, "note": 1, "problem": 1, "absent": 0}
    assert told["findings"][2] == findings[2]._asdict()


def test_findings_are_shown_when_they_are_known(capsys):
    def section():
        yield ok("first", "fine")
        seen.append(capsys.readouterr().out)
        yield ok("second", "fine")

    seen, shown = [], report.Report(as_json=False)
    shown.add(section(), "trying")
    assert "first" in seen[0]
    assert [one.topic for one in shown.findings] == ["first", "second"]


def test_a_log_shows_that_trials_take_long(capsys, monkeypatch):
    monkeypatch.setattr(console, "PATIENCE", 0.05)
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    report.Report(as_json=False).add((time.sleep(0.2) or ok(x, "fine") for x in "a"), "trying")
    assert capsys.readouterr().err == "trying ...\n"


@pytest.mark.parametrize("as_json", [True, False], ids=["json", "text"])
@pytest.mark.parametrize("terminal", [True, False], ids=["terminal", "log"])
def test_a_terminal_shows_progress_and_wraps(capsys, monkeypatch, as_json, terminal):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    if terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes any stream for a terminal
    shown = report.Report(as_json)
    shown.add([ok("kernel aten", "fine " * 20)], "trying kernels")
    told = capsys.readouterr()
    assert ("trying kernels" in (told.err if as_json else told.out)) == terminal
    assert ("kernel aten  " in told.out) != as_json
    assert ("fine " * 20 in told.out) == (not as_json and not terminal)
    assert "fine" not in told.err


@pytest.mark.parametrize("dashes", [["--"], []], ids=["with --", "without"])
def test_the_command_line(capsys, dashes):
    own = "doctor --tensor-model-parallel-size 2 --gpus-per-node 8 --quick --json"
    theirs = "x.py --context-parallel-size 16 --eod-mask-loss"
    exit_code = main([*own.split(), *dashes, *theirs.split()])
    told = json.loads(capsys.readouterr().out)
    assert exit_code == 1
    (sizes,) = [f for f in told["findings"] if f["topic"] == "sizes"]
    assert "--hierarchical-context-parallel-sizes 4 4" in sizes["what"]
    assert set(told["machine"]) == {"host", "gpus", "nics", "variables"}


# --- the real groups -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def four(ranks):
    """Return `four().run(...)` on four ranks that end with this module.

    Each group made in them has a thread, which would slow down later tests.
    """
    yield lambda: ranks(4)
    ranks(4).close()


def examine(words, per_node, fault=None):
    """Return the exit status and rank 0's output of the check of this process group."""
    import contextlib
    import io

    import torch.distributed as dist

    real = mb.attention

    def wrong_on_rank_1(q, *rest, **choices):
        out = real(q, *rest, **choices)
        return out + 1e-6 * (dist.get_rank() == 1)

    def raises_on_all(q, *rest, **choices):
        raise RuntimeError("exchange failed")

    faults = {None: real, "wrong": wrong_on_rank_1, "raises": raises_on_all}
    printed = io.StringIO()
    with (
        mock.patch("megatron_burst.attention", faults[fault]),
        mock.patch.object(rings.measure, "LONG", 0.01),
        contextlib.redirect_stdout(printed),
    ):
        code = rings.examine(parse(words.split()), per_node, as_json=True)
    return code, printed.getvalue()


@pytest.mark.parametrize(
    ("words", "per_node", "shape", "algorithms"),
    [
        ("", 2, "2 per node x 2 nodes", 20),
        ("", 4, "4 ranks", 17),
        ("--tensor-model-parallel-size 2", 2, "1 per node x 2 nodes", 17),
        ("--context-parallel-size 2", 4, "2 ranks", 17),
    ],
)
def test_the_real_groups(four, words, per_node, shape, algorithms):
    results = four().run(examine, words, per_node)
    assert [code for code, _ in results] == [0, 0, 0, 0]
    assert [bool(out) for _, out in results] == [True, False, False, False]
    told = {f["topic"]: f for f in json.loads(results[0][1])["findings"]}
    assert told["sizes"]["what"].startswith(shape)
    assert sum(topic.startswith("attention") for topic in told) == algorithms
    there = {k for k in ("intra", "inter") if "B/s per rank" in told[f"bandwidth {k}"]["what"]}
    intra, inter = (*map(int, re.findall(r"\d+", shape)), 1)[:2]
    assert there == {k for k, n in (("intra", intra), ("inter", inter)) if n > 1}


@pytest.mark.parametrize("fault", ["wrong", "raises"])
def test_a_wrong_result_is_a_problem_on_all_ranks(four, fault):
    results = four().run(examine, "", 2, fault)
    assert [code for code, _ in results] == [1, 1, 1, 1]
    told = [f for f in json.loads(results[0][1])["findings"] if f["topic"].startswith("attention")]
    assert {f["level"] for f in told} == {"problem"}
    bad = "[1]" if fault == "wrong" else "[0, 1, 2, 3]"
    assert all(f"wrong on ranks {bad}" in f["what"] for f in told)


def test_sizes_that_do_not_fit_the_processes(four):
    with pytest.raises(Exception, match="does not fit the 4 processes"):
        four().run(examine, "--context-parallel-size 3", 4)


@pytest.mark.slow
def test_on_ranks_that_torchrun_would_start(tmp_path):
    server = Ranks(tmp_path, [])
    done = server.run(2, ["--distributed", "--gpus-per-node", "1"], command=["doctor"])
    server.close()
    assert done.codes == [0, 0], done.texts[0][-3000:]
    printed = done.texts[0]
    assert "attention burst, side query" in printed
    assert "bandwidth inter" in printed
    assert "0 problems" in printed
