"""`megatron-burst pretrain`: how it runs a script, without Megatron-LM."""

import argparse
import sys
from types import SimpleNamespace

import pytest

from megatron_burst.cli import main as cli
from megatron_burst.cli import pretrain
from megatron_burst.cli.parsers import one_line_errors


@pytest.fixture(autouse=True)
def python(monkeypatch):
    """Restore the interpreter's state that a run changes."""
    monkeypatch.setattr(sys, "argv", ["megatron-burst"])
    monkeypatch.setattr(sys, "path", ["first", *sys.path])


@pytest.fixture
def megatron(monkeypatch):
    """Replace megatron_burst.megatron by a recorder of calls, in order."""
    called = []
    fake = SimpleNamespace(
        training_available=lambda: True,
        install=lambda: called.append("install"),
        enable=lambda: called.append("cpu"),  # of plugins.testing.cpu
        is_available=lambda: True,  # as torch.cuda
    )
    # Only as these two modules see it: the package itself imports its names by importlib too.
    monkeypatch.setattr(pretrain, "importlib", SimpleNamespace(import_module=lambda name: fake))
    monkeypatch.setattr(pretrain.registry, "required", lambda hook, user: fake)
    monkeypatch.setattr(cli, "importlib", SimpleNamespace(import_module=lambda name: pretrain))
    return SimpleNamespace(called=called, fake=fake)


def script(tmp_path, text):
    path = tmp_path / "script.py"
    path.write_text(text)
    return str(path)


def test_the_script_runs_as_if_python_had_started_it(megatron, tmp_path, capsys):
    (tmp_path / "beside.py").write_text("print('beside')")
    path = script(
        tmp_path, "import beside, sys\nprint(__name__, sys.argv[1:], sys.path[0], __file__)"
    )
    assert cli.main(["pretrain", path, "--help", "--cpu", "-x", "a b"]) == 0
    told = f"__main__ ['--help', '--cpu', '-x', 'a b'] {tmp_path} {path}"
    assert capsys.readouterr().out == f"beside\n{told}\n"
    assert megatron.called == ["install"]


def test_cpu_is_enabled_before_installing(megatron, tmp_path):
    assert cli.main(["pretrain", "--cpu", script(tmp_path, "")]) == 0
    assert megatron.called == ["cpu", "install"]


def test_without_a_device_the_way_without_one_is_told(megatron, tmp_path, capsys):
    megatron.fake.is_available = lambda: False
    path = script(tmp_path, "print('ran')")
    assert cli.main(["pretrain", path]) == 2
    told = capsys.readouterr()
    assert "torch sees no CUDA device" in told.err
    assert "megatron-burst pretrain --cpu SCRIPT" in told.err
    assert (told.out, megatron.called) == ("", [])
    assert cli.main(["pretrain", path, "--help"]) == 0  # shows what there is anywhere
    assert cli.main(["pretrain", "--cpu", path]) == 0


def test_our_own_errors_are_one_line(megatron, tmp_path, capsys):
    path = script(tmp_path, "from megatron_burst import BurstConfig\nBurstConfig(side='both')")
    assert cli.main(["pretrain", path]) == 2
    error = capsys.readouterr().err
    assert error.startswith("megatron-burst pretrain: error: side (--burst-side) must be one of")
    assert error.count("\n") == 1


@pytest.mark.parametrize("kind", ["ValueError", "RuntimeError"])
def test_errors_of_the_script_keep_their_traceback(megatron, tmp_path, capsys, kind):
    with pytest.raises(SystemExit) as end:
        cli.main(["pretrain", script(tmp_path, f"raise {kind}('theirs')")])
    assert end.value.code == 1
    error = capsys.readouterr().err
    assert "Traceback" in error
    assert f"{kind}: theirs" in error


PARSER = """
import argparse
parser = argparse.ArgumentParser(prog="train.py")
parser.add_argument("--burst-layout")
parser.add_argument("--layers", type=int)
"""


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--burst-layuot", "zigzag"],
         "unrecognized arguments: --burst-layuot zigzag; did you mean --burst-layout?"),
        (["--layers", "2", "--lyaers=3"],
         "unrecognized arguments: --lyaers=3; did you mean --layers?"),
        (["--something-else"], "unrecognized arguments: --something-else"),
        (["--layers", "two"], "argument --layers: invalid int value: 'two'"),
    ],
)  # fmt: skip
def test_errors_of_the_scripts_parser_are_one_line(megatron, tmp_path, capsys, words, told):
    with pytest.raises(SystemExit) as end:
        cli.main(["pretrain", script(tmp_path, f"{PARSER}parser.parse_args()"), *words])
    assert end.value.code == 2
    line = f"megatron-burst pretrain: error: train.py: {told} (--help lists the options)\n"
    assert capsys.readouterr().err == line


def test_a_script_may_accept_unknown_flags(megatron, tmp_path, capsys):
    path = script(tmp_path, f"{PARSER}print(parser.parse_known_args()[1])")
    assert cli.main(["pretrain", path, "--burst-layuot", "zigzag"]) == 0
    assert capsys.readouterr().out == "['--burst-layuot', 'zigzag']\n"


def test_a_parser_that_does_not_exit_is_left_alone(monkeypatch):
    """Since Python 3.13 it also raises for unrecognized arguments."""
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", lambda self, *given: "stock")
    with one_line_errors("pretrain"):
        assert argparse.ArgumentParser(exit_on_error=False).parse_args(["--other"]) == "stock"


def test_argparse_is_the_same_after_the_script(megatron, tmp_path):
    stock = argparse.ArgumentParser.parse_args, argparse.ArgumentParser.error
    cli.main(["pretrain", script(tmp_path, "")])
    assert (argparse.ArgumentParser.parse_args, argparse.ArgumentParser.error) == stock


def test_other_errors_are_left_alone(megatron, tmp_path):
    with pytest.raises(KeyError):
        cli.main(["pretrain", script(tmp_path, "{}['key']")])


def test_no_such_script(capsys):
    assert cli.main(["pretrain", "nowhere.py"]) == 2
    assert "SCRIPT nowhere.py: there is no such file" in capsys.readouterr().err


def test_without_megatron_lm(megatron, tmp_path, capsys):
    megatron.fake.training_available = lambda: False
    assert cli.main(["pretrain", script(tmp_path, "")]) == 2
    assert "megatron.training cannot be imported" in capsys.readouterr().err


@pytest.mark.parametrize("error", [RuntimeError("Megatron-Core 9: foo takes"), ImportError("six")])
def test_a_megatron_that_does_not_fit_is_one_line(megatron, tmp_path, capsys, error):
    def install():
        raise error

    megatron.fake.install = install
    assert cli.main(["pretrain", script(tmp_path, "")]) == 2
    assert str(error) in capsys.readouterr().err
