"""Every Python block and command of README.md and docs/ runs, or at least is understood."""

import argparse
import contextlib
import importlib.util
import io
import os
import re
import shlex
import subprocess
import sys
from types import SimpleNamespace
from typing import NamedTuple

import documented
import pytest
import torch
import torch.distributed as dist
from documented import NAMES, ROOT
from fork_server import ForkServer

import megatron_burst as mb
from megatron_burst import flags
from megatron_burst.cli import main as cli
from megatron_burst.config import FIELDS

# --- Python blocks -------------------------------------------------------------------------

INSTALLED = {"megatron": "megatron.core", "megatron-ranks": "megatron.core"}
ELSEWHERE = {
    "bridge": "tests/recipes runs it",
    "bridge-diffusion": "tests/plugins/diffusion runs it",
    "megatron-lite": "tests/plugins/lite runs it",
    "nemo2": "NeMo 2 cannot run without a GPU",
}


class Reader(NamedTuple):
    """What must be true after a block, and whether its page runs on four ranks too."""

    then: str
    four: bool = False


# A block of these pages has only what the blocks before it on its page define: a reader pastes a
# page from top to bottom.
READERS = {
    "CONTRIBUTING.md-0": Reader("callable(tables) and AHEAD == 2"),
    "CONTRIBUTING.md-1": Reader("Anticausal().visible(1, 2) and not Anticausal().visible(2, 1)"),
    "CONTRIBUTING.md-2": Reader("DenseKernel().refusal(*[torch.ones(1)] * 3) is None"),
    "CONTRIBUTING.md-3": Reader("'hello' in PLUGIN.commands"),
    "CONTRIBUTING.md-4": Reader("run(argparse.Namespace(ranks=2, seq=8)) is None"),
    "README.md-1": Reader("out.shape == q.shape and groups.size == dist.get_world_size()", True),
    "docs/reference/advise.md-0": Reader("advice.flags()"),
    "docs/reference/attention.md-0": Reader("(groups.size, groups.rank) == (1, 0)"),
    "docs/reference/attention.md-1": Reader("out.shape == q.shape"),
    "docs/reference/attention.md-2": Reader(
        "states.shape == values.shape and mixed.shape == channels.shape and not entering.any()"
    ),
    "docs/reference/attention.md-3": Reader("whole.tolist() == list(range(8))"),
    "docs/reference/attention.md-4": Reader("x.grad.any() and host.peak > 0"),
    "docs/reference/attention.md-5": Reader("loss.ndim == 0"),
    "docs/reference/attention.md-6": Reader("choice.why and measured is not None"),
    "docs/reference/layouts.md-0": Reader("len(layout.positions(0, 32)) == 16"),
    "docs/reference/layouts.md-1": Reader("len(pieces) == 2 and route is not None"),
    "docs/reference/megatron.md-0": Reader("whole.tolist() == [list(range(32))]"),
    "docs/reference/sparse.md-0": Reader("out.shape == q.shape and chosen.counts.max() == 4"),
    "docs/reference/trees.md-0": Reader("tree.tokens.tolist() == same.tokens.tolist()"),
    "docs/reference/trees.md-1": Reader("scores.logprobs.shape == (4,)"),
    "docs/reference/masks.md-0": Reader("ChunkedLocal(4).visible(5, 4) and Cover.PARTIAL"),
    "docs/reference/masks.md-1": Reader("mb.masks.check(ChunkedLocal(5), 16) is None"),
    "docs/advise.md-0": Reader("call.seconds < step.seconds and step.mfu > 0"),
    "docs/cluster.md-0": Reader(
        "plan.choice is not None and plan.describe().startswith('burst attention: algorithm')", True
    ),
    "docs/concepts/host-memory.md-0": Reader(
        "host.peak == host.bytes_out == host.bytes_back == 3 * x.nbytes and "
        "layers[0][0].weight.grad.any()"
    ),
    "docs/gallery.md-0": Reader(
        "prefix_lm().visible(0, 19) and not prefix_lm().visible(0, 20) and "
        "dilated_and_window().visible(8, 4) and not dilated_and_window().visible(9, 4) and "
        "random_blocks().check(128) is None"
    ),
    "docs/linear-attention.md-0": Reader(
        "out.shape == v.shape and out.sum().backward() is None and v.grad.any()", True
    ),
    "docs/linear-attention.md-1": Reader("y.shape == x.shape", True),
    # Piece n of 7 finds 1 + 1/2 + ... of what the n before it have written.
    "docs/linear-attention.md-2": Reader(
        "[round(float(e.max()), 6) for e in entering] == [2 - 2 * 0.5**n for n in "
        "mb.layout.chains(layout, tokens).of(groups.rank)]",
        True,
    ),
    # With the same gates both ways, the mean is the mean of two calls.
    "docs/linear-attention.md-3": Reader(
        "(same := {n: gates[n] for n in ('decay', 'beta')}) and out.shape == v.shape and "
        "torch.allclose(mb.linear_attention(q, k, v, **same, **documents, reverse='both'), sum("
        "mb.linear_attention(q, k, v, **same, **documents, reverse=r) for r in (False, True)) / 2, "
        "atol=1e-5)",
        True,
    ),
    # Of 9 distinct prefixes and rows of padding, as many on each rank.
    "docs/linear-attention.md-4": Reader(
        "tree.rows == 9 and out.shape == (-(-9 // groups.size), 1, 1, 2)", True
    ),
    "docs/lm-head.md-0": Reader("loss.backward() is None and hidden.grad[1].eq(0).all()"),
    "docs/megatron-lm.md-0": Reader("megatron_burst.megatron.installed_layout() is None"),
    "docs/megatron-lm.md-1": Reader(
        "prefix_lm(None, None).visible(0, 1023) and not prefix_lm(None, None).visible(0, 1024)"
    ),
    "docs/trees.md-0": Reader(
        "tree.tokens.tolist() == [11, 12, 13, 14, 21, 22, 23, 24, 31, 41, 0, 0] and "
        "tree.positions.tolist()[:10] == [0, 1, 2, 3, 4, 5, 5, 6, 4, 2] and "
        "tree.describe().startswith('4 trajectories with 21 tokens in total become 10 rows')",
        True,
    ),
    "docs/trees.md-1": Reader(
        "loss.backward() is None and (len(local) == 0 or lm_head.grad.any())", True
    ),
    "docs/trees.md-2": Reader("build(config).vocab_size == 128"),
    "docs/trees.md-3": Reader("sorted(old.index) == sorted(new.index) == [0, 1, 2, 3]"),
    "docs/sparse.md-0": Reader("chosen.counts.max() == 4 and index_k.grad.any()", True),
    "docs/sparse.md-1": Reader("chosen.counts.max() == 3 and out.shape == q.shape", True),
    "docs/sparse.md-2": Reader("out.shape == q.shape and chosen.counts.max() == 3", True),
    "docs/sparse.md-3": Reader("config.num_layers == 2"),
    "docs/sparse.md-4": Reader("len(model.decoder.layers) == 2"),
    "docs/vision.md-0": Reader("burst.installed_layout() == 'zigzag'"),
    "docs/vision.md-1": Reader("rows.shape == (32, 1, 8) and rows[6:18, 0].equal(images)"),
    "docs/vision.md-2": Reader("rows.shape == (32, 1, 8)"),
    "docs/vision.md-3": Reader("spans == [(6, 18)]"),
    "docs/own-script.md-2": Reader("torch.allclose(out[:, 0].transpose(0, 1), expected)"),
    "docs/own-script.md-3": Reader("transformer_config.burst.layout == 'zigzag'"),
}
OWN = documented.blocks("docs/own-script.md")[:2]  # have a test of their own
BLOCKS = [block for page in NAMES for block in documented.blocks(page) if block not in OWN]
HERE = [block for block in BLOCKS if block.needs not in ELSEWHERE]
PAGES = list(dict.fromkeys(block.page for block in HERE))


def execute(blocks):
    """What the blocks of a page print, one after another in one namespace. In a worker the group
    that they would make is there already."""
    printed, space = io.StringIO(), {"__name__": "__main__"}
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        if dist.is_initialized():
            for made in ("init_process_group", "destroy_process_group"):
                patch.setattr(dist, made, lambda *args, **named: None)
        for block, then in blocks:
            exec(compile(block.text, block.name, "exec"), space)
            assert eval(then, space), f"{block.name}: {then}"
    return printed.getvalue()


def read(page, needs=(None,)):
    """The blocks of a page that need one of these, with what must be true after each."""
    blocks = [block for block in HERE if block.page == page and (block.needs or None) in needs]
    return [(block, READERS[block.name].then) for block in blocks]


@pytest.mark.parametrize("page", PAGES)
def test_pages_run_from_top_to_bottom_on_one_rank(page):
    """As a reader pastes them. Blocks on Megatron's ranks run in an interpreter of their own."""
    needs = (None, "megatron") if importlib.util.find_spec("megatron") else (None,)
    try:
        execute(read(page, needs))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        if "megatron" in needs:
            mb.megatron.uninstall()


FOUR = list(dict.fromkeys(block.page for block in HERE if READERS[block.name].four))


@pytest.mark.parametrize("page", FOUR)
def test_pages_run_from_top_to_bottom_on_four_ranks(page, ranks):
    ranks(4).run(execute, read(page))


ON_RANKS = list(dict.fromkeys(block.page for block in HERE if block.needs == "megatron-ranks"))


# Imports what Megatron imports of other packages, and runs each page in a process of its own.
SERVER = """
import runpy
import torch._inductor.compile_fx, transformers
from fork_server import serve
serve(lambda page: runpy.run_path(page, run_name="__main__") and 0)
"""


@pytest.fixture(scope="module")
def interpreter(tmp_path_factory):
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "tests" / "helpers")))
    command = [sys.executable, "-c", SERVER]
    folder = tmp_path_factory.mktemp("pages")
    server = ForkServer.launched(folder, command, {"PYTHONPATH": paths})
    yield server
    server.close()


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="needs megatron.core")
@pytest.mark.parametrize("page", ON_RANKS)
def test_pages_on_megatrons_ranks_run_in_an_interpreter_without_megatron(
    page, interpreter, tmp_path
):
    lines = [f"{block.text}assert {then}\n" for block, then in read(page, (None, "megatron-ranks"))]
    script = tmp_path / "page.py"
    script.write_text("\n".join(lines))
    (done,) = interpreter.run([{"page": str(script)}], 300)
    assert done.code == 0, done.output + done.errors


def test_blocks_that_import_megatron_say_so():
    for block in BLOCKS:
        imports = re.search(r"megatron\.core|megatron_burst\.megatron|mb\.megatron", block.text)
        assert block.needs or not imports, f"{block.name}: <!-- needs: megatron -->"


def test_a_name_that_a_page_does_not_define_is_found():
    """Also one that the module of this test has."""
    page = documented.Block("page.md", 0, "", "out = mb.attention\n")
    with pytest.raises(NameError, match="'mb' is not defined"):
        execute([(page, "True")])
    first = documented.Block("page.md", 0, "", "import megatron_burst as mb\n")
    execute([(first, "True"), (page, "callable(out)")])


def test_no_block_is_looked_for_that_is_not_there():
    assert {block.name for block in HERE} == set(READERS)


@pytest.mark.parametrize("name", NAMES)
def test_no_python_hides_in_another_block(name):
    """Where nothing would run it: indented, or in a fence that does not say `python`."""
    assert not documented.python_lines((ROOT / name).read_text(encoding="utf-8"))


def test_python_that_hides_is_found():
    text = "Text.\n\n    out = mb.attention(q, k, v)\n\n```\nimport torch\n```\n"
    assert documented.python_lines(text) == ["import torch", "out = mb.attention(q, k, v)"]
    assert not documented.python_lines("```python\nimport torch\n```\n\n    make test\n")


def dense(q, k, v, *, plan, label=None):
    """Causal attention written out; q, k, v [s, b, h, d]."""
    scores = torch.einsum("qbhd,kbhd->bhqk", q, k) * q.shape[-1] ** -0.5
    hidden = torch.ones(len(q), len(q)).triu(1).bool()
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("bhqk,kbhd->qbhd", weights, v)


def cross_entropy(x, weight, labels):
    logits = (x @ weight.T).flatten(0, 1)
    return torch.nn.functional.cross_entropy(logits, labels.flatten(), reduction="none")


def numbers(printed):
    return [float(number) for number in re.findall(r"(?:loss|gradient) (\d+\.\d+)", printed)]


@pytest.mark.parametrize("block", OWN, ids=lambda block: block.name)
def test_the_own_script_trains_on_four_ranks_as_without_the_package(block, ranks, monkeypatch):
    alone = [(block, "groups.rank in range(4)")]
    printed, *_ = ranks(4).run(execute, alone)
    one = SimpleNamespace(size=1, rank=0)
    monkeypatch.setattr(mb.Groups, "by_host", lambda group: one)
    monkeypatch.setattr(mb, "prepare", lambda *args, **named: SimpleNamespace(describe=str))
    monkeypatch.setattr(mb, "attention", dense)
    monkeypatch.setattr(mb, "checkpoint", lambda layer, x, plan, keep: layer(x, plan))
    monkeypatch.setattr(mb, "linear_cross_entropy", cross_entropy)
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: None)
    for made in ("init_process_group", "destroy_process_group"):
        monkeypatch.setattr(dist, made, lambda *args, **named: None)
    alone = numbers(execute(alone))
    assert len(alone) == 5 or (block is OWN[0] and len(alone) == 2)
    assert alone[0] - alone[-1] > 1 or block is OWN[0]  # it learns: wrong gradients would show
    assert numbers(printed) == pytest.approx(alone, abs=2e-5)


# --- commands ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def targets():
    """Target -> its recipe and prerequisites, as make reads its file."""
    listed = subprocess.run(
        ["make", "-pn", "help"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return set(re.findall(r"^([a-z][a-z-]*):", listed.stdout, re.M))


def our_command(words, monkeypatch):
    """Parse the words behind `megatron-burst` with the parser that a user's words meet."""
    if words[0] in cli.commands():
        module = importlib.import_module(cli.commands()[words[0]].module)
        monkeypatch.setattr(module, "run", lambda arguments: None)
    try:
        code = cli.main(words)
    except SystemExit as ended:  # --help, or the parser's complaint
        code = ended.code
    if code:
        raise ValueError("megatron-burst does not take these words")
    if words[0] == "pretrain":
        script_flags(words)


def script_flags(words):
    """Check the flags of ours among those of a Megatron script."""
    parser = argparse.ArgumentParser(exit_on_error=False, allow_abbrev=False)
    flags.add_flags(parser, algorithm=flags.OFF)
    try:
        known, others = parser.parse_known_args(words)
    except SystemExit as ended:
        if ended.code:
            raise
        return  # --help
    flags.add_defaults(known)
    flags.burst_config(known)
    unknown = [word for word in others if word.startswith("--burst-")]
    if unknown:
        raise ValueError(f"unknown flags {unknown}")


def python_command(words, monkeypatch):
    """`-m megatron_burst ...`, `-m MODULE ...` or a script of this repository or of Megatron."""
    if words[:2] == ["-m", "megatron_burst"]:
        our_command(words[2:], monkeypatch)
    elif words[0] == "-m":
        if importlib.util.find_spec(words[1]) is None:
            raise ValueError(f"there is no module {words[1]}")
        if words[1] == "benchmarks.cluster" and words[2:]:  # else only the program is named
            importlib.import_module("benchmarks.cluster.__main__").parser().parse_args(words[2:])
    elif words[0] == "examples/pretrain_gpt.py":
        monkeypatch.setenv("WORLD_SIZE", "4")
        data = ["--vocab-size", "64"]  # what the file beside the data says
        importlib.import_module("arguments").parse_args([*words[1:], *data])
    elif not words[0].endswith((".py", "SCRIPT")):
        raise ValueError("neither a module nor a script")
    elif "/" in words[0] and not (ROOT / words[0]).exists():
        raise ValueError(f"there is no {words[0]}")
    else:
        script_flags(words[1:])


def understand(words, targets, monkeypatch):
    """Raise ValueError or SystemExit unless the program would take these words."""
    program, *words = words
    if program == "make":
        asked = [word for word in words if "=" not in word]
        if not set(asked) <= targets:
            raise ValueError(f"the Makefile has no {sorted(set(asked) - targets)}")
    elif program == "megatron-burst":
        our_command(words, monkeypatch)
    elif program == "torchrun":
        from torch.distributed.run import get_args_parser

        run = get_args_parser().parse_args(words)
        script = ["-m"] * run.module + [run.training_script, *run.training_script_args]
        python_command(script, monkeypatch)
    else:
        python_command(words, monkeypatch)


def alternatives(line):
    """The words of a command; `a|b` outside of quotes stands for either, a capital for a number."""
    words = [re.sub("^[A-Z]$", "8", word) for word in shlex.split(line) if word != "..."]
    choices = [word for word in line.split() if re.fullmatch(r"\w+(\|\w+)+", word)]
    for choice in choices[:1]:
        at = words.index(choice)
        return [[*words[:at], one, *words[at + 1 :]] for one in choice.split("|")]
    return [words]


@pytest.mark.parametrize("name", NAMES)
def test_commands_are_understood(name, targets, monkeypatch, capsys):
    wrong = []
    for line in documented.commands((ROOT / name).read_text(encoding="utf-8")):
        for words in alternatives(line):
            try:
                understand(words, targets, monkeypatch)
            except (ValueError, SystemExit, argparse.ArgumentError) as error:
                wrong.append(f"{line}: {error} {capsys.readouterr().err}")
    assert not wrong, "\n".join(wrong)


BAD = {
    "make no-such-target": "Makefile",
    "megatron-burst shwo mask": "these words",
    "megatron-burst show mask --no-such-flag 1": "these words",
    "megatron-burst pretrain x.py --burst-no-such-flag 1": "unknown flags",
    "torchrun --nproc-per-node 2 -m megatron_burst pretrain x.py --burst-side left": "burst-side",
    "torchrun --no-such-flag 2 x.py": "2",
    "python -m benchmarks.no_such": "no module",
    "python benchmarks/no_such.py": "there is no",
    "torchrun --nproc-per-node 4 examples/pretrain_gpt.py --no-such-flag": "2",
}


@pytest.mark.parametrize(("line", "says"), BAD.items())
def test_what_would_not_run_is_found(line, says, targets, monkeypatch):
    assert list(documented.commands(f"Text.\n\n    {line}  # comment\n")) == [line]
    assert list(documented.commands(f"See `{line}`.\n")) == [line]
    with pytest.raises((ValueError, SystemExit), match=says):
        understand(shlex.split(line), targets, monkeypatch)


# --- names ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_flags_and_public_names_that_a_page_mentions_exist(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    named = set(re.findall(r"--burst-[a-z][a-z-]*", text))
    assert named <= {field.flag for field in FIELDS.values()}
    for path in set(re.findall(r"\bmb\.([A-Za-z_]+(?:\.[A-Za-z_]+)*)", text)):
        found = mb
        for part in path.split("."):
            assert hasattr(found, part), f"mb.{path}"
            found = getattr(found, part)
