"""`megatron-burst`: user errors are one line on stderr with exit status 2."""

import re
import subprocess
import sys
import time

import pytest

import megatron_burst as mb
from megatron_burst.cli import console
from megatron_burst.cli.main import COMMANDS, commands, main

BAD = {
    "--nonsense": "required: COMMAND",
    "pertain": "invalid choice: 'pertain'; did you mean pretrain?",
    "zzz": "choose from ",
    "-- pertain": "invalid choice: ",
    # memory
    "memory": "--model is required: one of",
    "memory --pc 8 --model llama3-8b": "unrecognized arguments: --pc; did you mean --cp?",
    "memory --gpus 8": "--model is required: one of",
    "memory --gpus 8 --model llama3-8b": "--seq is required",
    # doctor: more of a Megatron command's in test_doctor
    "doctor --nonsense": "--nonsense",
    "doctor --per-node": "--gpus-per-node/--per-node: expected one argument",
    "doctor --gpus-per-node two": "invalid int value: 'two'",
    "doctor --quick --gpus-per-node 0": "--gpus-per-node must be at least 1, got 0",
    "doctor --quick --gpus-per-node -8": "--gpus-per-node must be at least 1, got -8",
    "doctor --quick --context-parallel-size 0": "--context-parallel-size must be at least 1",
    "doctor --quick --tensor-model-parallel-size -1": "--tensor-model-parallel-size must be at",
    "doctor --tensor-model-parallel-size 3 --gpus-per-node 8": "-size 3 does not divide the 8 GPUs",
    "doctor --distributed": "torchrun --nproc-per-node",
    "doctor --quick -- --context-parallel-size": "-parallel-size: expected one argument",
    "doctor --quick -- --context-parallel-algo burst --num-attention-heads": "expected one arg",
    "doctor --device cpu": "--device requires --gpu-report FILE",
    # show, trace: more of them in tests/tools
    "show": "required: PICTURE",
    "show picture": "invalid choice: 'picture'",
    "show mask --out x.png --colour": "unrecognized arguments: --colour (--help",
    "show mask --ranks x": "invalid int value: 'x'",
    "show mask --layout zagzig": "zagzig",
    "show mask --out x.png --seq 0": "--seq must be at least 1",
    "show mask --out no/such/folder/x.png": "--out no/such/folder/x.png: its folder does not exist",
    "show schedule --side left": "invalid choice: 'left'",
    "show mask": "the following arguments are required: --out",
    "show layout --layout block_striped(x)": "did you mean block_striped?",
    "trace --out x.png --nodes 40": "at most 16 processes",
    "trace --out x.png --algorithm ulysses": "invalid choice: 'ulysses'",
    "trace --out x.png --head-chunks 0": "--head-chunks must be at least 1",
    "trace --chrome no/such/folder/x.json": "--chrome no/such/folder/x.json: its folder does not",
    # patch
    "patch": "pass one MEGATRON",
    "patch one --check two": "pass one MEGATRON",
    "patch --check": "--check: expected one argument",
    "patch --check no/such/folder": "has no megatron/core/package_info.py",
    "patch --check pyproject.toml": "has no megatron/core/package_info.py",
    # advise
    "advise --gpus 8 --seq 128K": "--model is required",
    "advise --model llama3-8b --gpus 8 --gpu h99 --seq 128K": "--gpu h99: unknown; use one of",
    "advise --model llama3-8b --gpus 8 --seq 128K --sbatch --json": "use only one of them",
    "advise --model llama3-8b --seq 128K": "--gpus is required",
    "advise --model gpt9 --gpus 8 --seq 64K": "--model gpt9",
    "advise --model llama3-8b --cluster nowhere.toml --seq 64K": "nowhere.toml",
    # calibrate
    "calibrate --minutes 0": "--minutes must be above 0, got 0.0",
    "calibrate --gpu h99": "--gpu h99: unknown; use one of a100-40g",
    "calibrate --model gpt9": "--model gpt9",
    "calibrate --out no/such/folder/x.toml": "its folder does not exist",
    "calibrate --per-node 3": "--per-node 3 does not divide the 1 ranks",
    # recipe
    "recipe": "NAME is missing",
    "recipe --nonsense": "--nonsense",
    "recipe no_such_recipe burst.store": "write burst.store=value",
    "recipe no_such_recipe --nonsense": "--nonsense is not an option",
    "recipe no_such_recipe --print store=1 burst.store": "write burst.store=value",
    "recipe no_such_recipe +model.x=1": "write setting=value",
    # pretrain
    "pretrain no/such/script.py": "no/such/script.py",
}


@pytest.mark.parametrize(("words", "says"), BAD.items(), ids=lambda text: text.replace(" ", "_"))
def test_what_a_user_gets_wrong_is_one_line(words, says, capsys, monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    try:
        code = main(words.split())
    except SystemExit as ended:  # the parser's own way out
        code = ended.code
    told = capsys.readouterr()
    assert code == 2, told
    (line,) = told.err.splitlines()
    assert line.startswith("megatron-burst")
    if "unrecognized" in says:
        assert line.startswith(f"megatron-burst {words.split()[0]}")
    assert ": error: " in line
    assert says in line
    assert told.out == ""


def test_a_requirement_that_is_missing_is_one_line(capsys, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("megatron_burst.cli.doctor")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "rich.table", None)
    assert main(["doctor", "--quick"]) == 2
    assert capsys.readouterr().err == "megatron-burst needs rich: pip install rich\n"


def test_what_another_program_lacks_keeps_its_traceback(tmp_path, monkeypatch):
    (tmp_path / "own_script.py").write_text("import tomli\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "tomli", None)
    monkeypatch.setitem(COMMANDS, "own", ("own_script", "import what is missing"))
    with pytest.raises(ModuleNotFoundError, match="tomli"):
        main(["own"])


def test_every_command_is_among_them():
    assert {words.split()[0] for words in BAD} > set(commands())


def test_long_work_is_not_silent(capsys, monkeypatch):
    monkeypatch.setattr(console, "PATIENCE", 0.05)
    with console.progress("searching") as tell:
        tell(1, 2)
    assert capsys.readouterr().err == ""  # it was short
    with console.progress("searching"):
        time.sleep(0.2)
    told = capsys.readouterr()
    assert (told.out, told.err) == ("", "searching ...\n")


def test_long_work_on_a_terminal_has_a_bar(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    with console.progress("searching") as tell:
        tell(1, 4)
    told = capsys.readouterr()
    assert told.out == ""
    assert "searching" in told.err
    assert "25%" in told.err


def test_sizes_have_the_names_of_megatron_too(capsys):
    words = "--model llama3.2-1b --gpus 4 --seq-length 8K --json"
    long = "--gpus-per-node 4 --tensor-model-parallel-size 2 --context-parallel-size 2"
    told = []
    for each in (long, "--per-node 4 --tp 2 --cp 2"):
        main(f"memory {words} {each}".split())
        told.append(capsys.readouterr().out)
    assert told[0] == told[1]
    assert '"tp": 2' in told[0]


def test_bare_words_show_the_help(capsys):
    assert main([]) == 0
    help_ = capsys.readouterr().out
    assert help_.startswith("usage: megatron-burst ")
    assert all(re.search(rf"^ +{name}\s+\S", help_, re.MULTILINE) for name in commands())


def test_the_version_is_that_of_the_package(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"megatron-burst {mb.__version__}\n"


QUICK = """
import sys, time
sys.modules["torch"] = None  # importing it raises ImportError
from megatron_burst.cli.main import COMMANDS, commands, main

def code(words):
    try:
        return main(words)
    except SystemExit as ended:
        return ended.code

for words in (["--help"], *([name, "--help"] for name in commands())):
    assert not code(words), words
for words in sys.argv[1:]:
    assert code(words.split()) == 2, words
assert time.process_time() < 1.5, time.process_time()  # 0.4 s, in one process, as this is written
"""
# What the ranks, which torch starts, agree on.
LATER = ("calibrate --out", "calibrate --per-node", "doctor --distributed")


def test_help_and_errors_of_arguments_do_not_wait_for_torch():
    words = [text for text in BAD if not text.startswith(LATER)]
    done = subprocess.run([sys.executable, "-c", QUICK, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("usage: ") > len(commands())
    assert done.stderr.count(": error: ") == len(words)
