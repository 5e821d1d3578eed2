"""The choices of a call are one object: every list of them elsewhere is this one."""

import argparse
import ast
import dataclasses
import inspect
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, get_type_hints

import pytest
import torch

import megatron_burst as mb
from megatron_burst import config, flags, options, spine_options
from megatron_burst import registry as plugins
from megatron_burst.kernels import registry
from megatron_burst.megatron.checks.features import option_problems
from megatron_burst.megatron.checks.problem import Problem
from megatron_burst.option_table import Option
from megatron_burst.planning.validate import WIRE
from megatron_burst.plugins.testing import in_process

ROOT = Path(__file__).parents[2]
NAMES = [field.name for field in dataclasses.fields(options.AttentionOptions)]


def test_the_number_of_public_names_never_rises():
    """A new public name replaces another one; lower the number when a name is removed."""
    assert len(set(dir(mb)) - {"__version__"}) <= 41


def test_editors_see_the_public_names():
    tree = ast.parse((ROOT / "megatron_burst" / "__init__.pyi").read_text(encoding="utf-8"))
    (listed,) = [ast.literal_eval(node.value) for node in tree.body if isinstance(node, ast.Assign)]
    assert listed == sorted(set(dir(mb)) - {"__version__"})
    imported = {a.asname or a.name for n in tree.body if hasattr(n, "names") for a in n.names}
    (options,) = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    public = {name for name in imported if not name.startswith("_")}
    assert public | {options.name} == set(listed)
    bases = {base.id.removeprefix("_") for base in options.bases}
    assert bases == {cls.__name__ for cls in plugins.option_classes()}


def test_an_option_class_that_is_no_dataclass_is_refused(monkeypatch):
    class Beats(spine_options.SpineOptions):
        pass

    monkeypatch.setattr(plugins, "load", lambda name, place: Beats)
    with pytest.raises(ValueError, match=r"Beats.* is not a dataclass; add @dataclass"):
        plugins.option_classes()


def test_an_option_of_type_bool_is_refused():
    with pytest.raises(TypeError, match="option beats has type bool; use Literal"):

        class Beats(spine_options.SpineOptions):
            beats: Annotated[bool, Option("Whether to beat")] = False


def test_keywords_are_the_fields_with_their_types():
    hints = [
        get_type_hints(one, None, {"torch": torch})
        for one in (options.AttentionOptions, options.AttentionKeywords)
    ]
    assert hints[0] == hints[1]
    assert list(hints[0]) == NAMES


@pytest.mark.parametrize("function", [mb.attention, mb.prepare, options.AttentionOptions])
def test_docstrings_tell_of_every_option(function):
    text = inspect.getdoc(function) or ""
    assert "AttentionOptions" in text or all(f"{name}: " in text for name in NAMES)


def test_registries_have_the_names_that_may_be_asked_for():
    assert {"auto", *registry.KERNELS} == set(options.KERNELS)
    assert {*WIRE, "auto"} == set(options.WIRE_DTYPES)
    assert set(spine_options.NAMED_LAYOUTS) == {*mb.layout.LAYOUTS, "balanced"}


def test_a_config_states_options_of_the_same_name():
    stated = mb.BurstConfig(side="kv", wire_dtype="bf16").keywords()
    assert set(stated) <= set(NAMES)
    assert options.AttentionOptions(**stated).grad_wire_dtype == "bf16"


def test_options_exclude_options_that_exist():
    excluded = {name for field in config.FIELDS.values() for name in field.option.excludes}
    assert {"attention_layout", "mask"} <= excluded <= set(config.FIELDS)


def test_the_number_of_options_does_not_grow():
    assert len(NAMES) <= 13
    assert len(dataclasses.fields(mb.BurstConfig)) <= 22


def test_a_flag_for_every_field_of_a_config():
    fields = dataclasses.fields(mb.BurstConfig)
    assert [*config.FIELDS] == [field.name for field in fields]
    assert [field.flag for field in config.FIELDS.values()][:3] == [
        "--context-parallel-algo", "--burst-layout", "--burst-side",
    ]  # fmt: skip
    shown = {name: field.metavar for name, field in config.FIELDS.items()}
    assert shown["side"] == "{auto,kv,query}"
    assert (shown["ulysses_size"], shown["store"]) == ("N", "F")


def test_a_plugin_checks_its_options_with_the_sequence_length(monkeypatch):
    def refused(config, burst, seq_length):
        yield Problem(f"{config.num_layers} layers, {burst.mlp_tiles} tiles, {seq_length} tokens")

    found = {"option_problems": refused}
    monkeypatch.setattr(plugins, "hooked", lambda hook: iter([("longseq", found[hook])]))
    config, burst = SimpleNamespace(num_layers=2), mb.BurstConfig(mlp_tiles=4)
    (problem,) = option_problems(config, burst, 8192)
    assert problem.reason == "2 layers, 4 tiles, 8192 tokens"


def test_flags_that_the_readme_shows_are_understood():
    """A flag without a value must exist; a value must be one that the flag accepts."""
    readme = (ROOT / "README.md").read_text()
    section = readme.split("\n## Does it fit my run?\n")[1].split("\n## ")[0]
    rows = [row for row in section.splitlines() if row.startswith("|")]
    shown = re.findall(r"`(--[^`]+)`", "\n".join(rows))
    parser = argparse.ArgumentParser()
    flags.add_flags(parser, algorithm="megatron")
    assert len(shown) == 7
    for text in shown:
        name, *values = text.split()
        assert name in parser._option_string_actions
        if values:
            parser.parse_args([name, *values])


def test_the_site_has_a_row_for_every_flag():
    rows = flags.table().splitlines()
    assert "| `--burst-side` | `auto`, `kv`, `query` |" in "\n".join(rows)
    assert len(rows) == 2 + len(config.FIELDS)
    assert "<!-- flags -->" in (ROOT / "docs" / "reference" / "command-line.md").read_text()


def test_an_unknown_keyword_is_named():
    groups = in_process.groups(intra=1)
    q = torch.zeros(4, 1, 2, 8)
    with pytest.raises(TypeError, match="head_groups"):
        in_process.attention([q], [q], [q], groups=groups, head_groups=2)


def test_wire_dtypes_have_names():
    groups = in_process.groups(intra=2)
    qs = [torch.randn(4, 1, 2, 8, requires_grad=True) for _ in range(2)]
    by_name, by_dtype = (
        in_process.prepare(qs, qs, qs, groups=groups, grad_wire_dtype=dtype)
        for dtype in ("bf16", torch.bfloat16)
    )
    assert by_name.identity == by_dtype.identity
    with pytest.raises(ValueError, match=r"grad_wire_dtype .*fp32.*got 'fp8'"):
        in_process.prepare(qs, qs, qs, groups=groups, grad_wire_dtype="fp8")
