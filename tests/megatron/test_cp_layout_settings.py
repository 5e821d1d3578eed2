"""Megatron's own settings of layouts, and ``--burst-layout auto``; without ranks.

The settings are those of Megatron-LM at commit 010994d536a31a389479f995577f7b05a01f7053
(``TransformerConfig``: ``linear_cp_layout`` and ``attention_cp_layout`` since pull request 6776,
``cp_partition_mode`` from its branch dev).
"""

import logging
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Literal

import pytest
import session
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.transformer_config import TransformerConfig
from parsed import problems_of

import megatron_burst as mb
import megatron_burst.megatron as burst
from megatron_burst import flags
from megatron_burst.megatron import layout_bytes, run_options, specs
from megatron_burst.megatron.checks.config import check_layer

CPLayout = Literal["contiguous", "zigzag"]
TWO_LAYOUTS = mb.BurstConfig(layout="contiguous", attention_layout="zigzag")


@dataclass
class NewerConfig(TransformerConfig):
    """The fields that this commit declares."""

    cp_partition_mode: CPLayout = "zigzag"
    linear_cp_layout: CPLayout = "zigzag"
    attention_cp_layout: CPLayout = "zigzag"


def newer(**settings):
    return NewerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=2, context_parallel_size=2,
        attention_dropout=0.0, **settings,
    )  # fmt: skip


def layouts(config):
    return config.linear_cp_layout, config.attention_cp_layout


@pytest.fixture
def installed():
    burst.install()
    yield
    burst.uninstall()


@pytest.mark.parametrize(
    ("settings", "choices"),
    [
        ({}, mb.BurstConfig()),
        ({"linear_cp_layout": "contiguous"}, TWO_LAYOUTS),
        ({"attention_cp_layout": "contiguous"}, mb.BurstConfig(attention_layout="contiguous")),
        (
            {"linear_cp_layout": "contiguous", "attention_cp_layout": "contiguous"},
            mb.BurstConfig(layout="contiguous"),
        ),
        # The defaults ask for nothing: as with striped, our flags say how tokens lie.
        ({}, TWO_LAYOUTS),
    ],
)
def test_megatron_is_told_of_one_layout_so_that_rows_are_not_exchanged_twice(
    installed, settings, choices
):
    config = newer(**settings)
    for _ in range(2):  # a second model may have the same configuration
        assert burst.configure(config, choices).burst == choices
        assert layouts(config) == (choices.layout, choices.layout)
        check_layer(config, choices)  # as each layer does
    assert burst.installed_layout() == choices.layout


def test_striped_tokens_leave_the_settings_alone(installed):
    config = burst.configure(newer(), mb.BurstConfig(layout="striped"))
    assert layouts(config) == ("zigzag", "zigzag")


@pytest.mark.parametrize("choices", [mb.BurstConfig(), mb.BurstConfig(layout="contiguous")])
def test_a_contradiction_is_refused_by_name(installed, choices):
    with pytest.raises(ValueError, match="--linear-cp-layout contiguous and --attention-cp") as e:
        burst.configure(newer(linear_cp_layout="contiguous"), choices)
    assert f"contradict --burst-layout {choices.layout}" in str(e.value)
    assert "add --burst-layout contiguous --burst-attention-layout zigzag" in str(e.value)


def test_megatrons_own_conversion_around_attention_is_refused(installed):
    with pytest.raises(ValueError, match="--cp-partition-mode contiguous: Megatron then") as e:
        burst.configure(newer(cp_partition_mode="contiguous"), TWO_LAYOUTS)
    assert "remove --cp-partition-mode" in str(e.value)


@pytest.mark.parametrize(
    ("choices", "name"),
    [
        (TWO_LAYOUTS, "cp_partition_mode"),
        (mb.BurstConfig(layout="striped"), "cp_partition_mode"),
        (mb.BurstConfig(layout="striped"), "linear_cp_layout"),
    ],
)
def test_a_setting_that_changed_after_configure_is_refused_by_each_layer(installed, choices, name):
    config = burst.configure(newer(), choices)
    check_layer(config, choices)
    setattr(config, name, "contiguous")
    with pytest.raises(ValueError, match=f"--{name.replace('_', '-')} contiguous"):
        check_layer(config, choices)


def test_where_megatrons_attention_runs_its_settings_are_its_own(installed):
    settings = {"linear_cp_layout": "contiguous", "cp_partition_mode": "contiguous"}
    config = newer(**settings)
    burst.configure(config, mb.BurstConfig(algorithm="megatron"))
    assert layouts(config) == ("contiguous", "zigzag")


def arguments(line="", **settings):
    """Return parsed arguments of a script, completed as `validate_args` does it."""
    import argparse

    parser = argparse.ArgumentParser()
    flags.add_flags(parser, algorithm=flags.OFF)
    args = parser.parse_args(["--context-parallel-algo", "burst", *line.split()])
    vars(args).update({"context_parallel_size": 2} | settings)
    run_options.complete_arguments(args)
    return args


def test_a_command_line_takes_megatrons_settings_where_ours_are_not_given():
    args = arguments(linear_cp_layout="contiguous", attention_cp_layout="zigzag")
    assert flags.burst_config(args) == TWO_LAYOUTS
    same = arguments("--burst-layout zigzag", linear_cp_layout="contiguous")
    said = "\n".join(map(str, problems_of(same)))
    assert "--linear-cp-layout contiguous and --attention-cp-layout zigzag contradict" in said
    assert not [p for p in problems_of(args) if "cp-layout" in str(p)]


def test_a_wrong_layout_of_attention_is_refused_if_no_flag_names_the_layout():
    args = arguments("--burst-attention-layout zigzga")
    said = "\n".join(map(str, problems_of(args)))
    assert "attention_layout (--burst-attention-layout) must be one of" in said


HYBRID = {
    "context_parallel_size": 4, "hybrid_layer_pattern": "GG*-MM", "hidden_size": 64,
    "num_attention_heads": 4, "num_query_groups": 2, "kv_channels": 16, "bf16": True,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4, "mamba_num_heads": 8,
    "mamba_head_dim": 16, "mamba_state_dim": 32, "mamba_num_groups": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    ("more", "settings", "layouts", "excluding"),
    [
        ("", {}, ("striped", None), None),
        ("", {"hybrid_layer_pattern": "M*M-"}, ("zigzag", None), "--hybrid-layer-pattern M*M-"),
        ("--burst-linear megatron", {"experimental_attention_variant": "gdn"}, ("zigzag", None),
         "--experimental-attention-variant gdn"),
        ("--burst-attention-layout zigzag", {}, ("zigzag", "zigzag"),
         "--burst-attention-layout zigzag"),
        ("--burst-attention-layout striped", {}, ("striped", "striped"), None),
        ("", {"multi_latent_attention": True, "apply_rope_fusion": True}, ("zigzag", None),
         "fused rope of latent attention"),
        ("", {"hybrid_layer_pattern": "**-"}, ("striped", None), None),
        # What a user names is refused or honoured, and never changed.
        ("--burst-layout striped", {"hybrid_layer_pattern": "M*M-"}, ("striped", None), None),
    ],
)  # fmt: skip
def test_a_layout_that_nobody_named_is_one_that_works(more, settings, layouts, excluding):
    store = "--burst-attention-store 0.5"
    with session.log_lines(logging.INFO) as lines:
        args = arguments(f"{store} {more}", **settings)
    assert (args.burst_layout, args.burst_attention_layout) == layouts
    said = [line for line in lines if "would select striped" in line]
    assert len(said) == (excluding is not None)
    assert all(excluding in line and store in line for line in said)
    problems = [str(each) for each in problems_of(args)]
    if more == "--burst-layout striped":  # before 0.19 no layout carries states
        refused = "with --burst-layout striped", "requires Megatron-Core 0.19"
        assert any(words in problem for problem in problems for words in refused)
    else:
        assert not [problem for problem in problems if "layout" in problem]


def test_bytes_by_hand():
    model = SimpleNamespace(**HYBRID)
    layers = layout_bytes.layers_of(model)
    assert layers == (2, 2, 1)
    delta_net = 4 * 4 * 16 * 8 + 2 * 3 * (2 * 2 * 8 + 4 * 16)
    mamba = 4 * 8 * 16 * 32 + 2 * 3 * (8 * 16 + 2 * 2 * 32)
    once = 3 * 2 * (delta_net + mamba)
    assert layout_bytes.traffic(model, layers, "zigzag", "zigzag", 64) == (2 * once, 0)
    # Ranks hold 2 x 8 rows: contiguous (0, 1), (2, 3), (4, 5), (6, 7), zigzag (0, 7), (1, 6),
    # (2, 5), (3, 4): only piece 0 stays, and piece 5, which rank 2 has in both.
    row = 2 * (64 + 32 + 32 + 64)
    found = layout_bytes.traffic(model, layers, "contiguous", "zigzag", 64)
    assert found == (once, 6 * 8 * row)


@pytest.mark.parametrize(
    ("length", "pattern", "expected"),
    [
        (64, "GG*-MM", TWO_LAYOUTS),  # states of two layers once more: above 6 KiB x 3, rows 18 KiB
        (4096, "GG*-MM", mb.BurstConfig()),
        (4096, "MMMM-", mb.BurstConfig(layout="contiguous", attention_layout="zigzag")),
        (64, "**--", mb.BurstConfig()),
    ],
)
def test_auto_takes_what_sends_fewer_bytes(length, pattern, expected):
    model = SimpleNamespace(**HYBRID | {"hybrid_layer_pattern": pattern})
    found, why = run_options.resolve_auto_layout(model, mb.BurstConfig(layout="auto"), length)
    assert found == expected
    assert ("no layers of linear attention" if "*" * 2 in pattern else "KiB") in why


@pytest.mark.parametrize(
    ("changed", "choices", "words"),
    [
        ({}, {"linear": "megatron"}, "--burst-linear megatron requires it"),
        ({}, {"sequence_chunks": 2}, "other settings require it"),
        ({"mtp_num_layers": 1}, {}, "other settings require it"),
    ],
)
def test_auto_takes_zigzag_where_nothing_else_is_allowed(changed, choices, words):
    burst = mb.BurstConfig(layout="auto", **choices)
    found, why = run_options.resolve_auto_layout(SimpleNamespace(**HYBRID | changed), burst, 64)
    assert (found.layout, found.attention_layout) == ("zigzag", None)
    assert words in why


def test_auto_needs_to_know_what_it_counts():
    auto = mb.BurstConfig(layout="auto")
    with pytest.raises(ValueError, match=r"pass seq_length to configure"):
        run_options.resolve_auto_layout(SimpleNamespace(**HYBRID), auto, None)
    unknown = SimpleNamespace(context_parallel_size=2, is_hybrid_model=True)
    with pytest.raises(ValueError, match="does not state its pattern"):
        run_options.resolve_auto_layout(unknown, auto, 64)
    sizes = {name: value for name, value in HYBRID.items() if name != "mamba_state_dim"}
    for name in ("linear_num_key_heads", "mamba_state_dim"):
        model = SimpleNamespace(**sizes if name not in sizes else HYBRID | {name: None})
        with pytest.raises(ValueError, match=f"does not state {name}: set it, or name a layout"):
            run_options.resolve_auto_layout(model, auto, 64)
    with pytest.raises(ValueError, match=r"install\(layout='auto'\).*names the layout"):
        burst.install("auto")


def test_a_command_line_says_what_auto_became():
    with session.log_lines(logging.INFO) as lines:
        args = arguments("--burst-layout auto", **HYBRID, seq_length=64)
    assert flags.burst_config(args) == TWO_LAYOUTS
    text = "\n".join(lines)
    assert "--burst-layout auto: --burst-layout contiguous --burst-att" in text
    assert "because ranks send in one forward of a sequence" in text


def test_frequencies_say_which_layers_of_a_gpt_are_linear():
    for frequency in (4, [1, 1, 1, 0, 1, 1, 1, 0]):
        model = SimpleNamespace(
            num_layers=8, experimental_attention_variant="gated_delta_net",
            linear_attention_freq=frequency,
        )  # fmt: skip
        assert layout_bytes.layers_of(model) == (6, 0, 2)


def test_a_spec_resolves_the_layout_that_a_script_stored():
    """A script may store options in a configuration without `configure`."""
    config = TransformerConfig(
        num_layers=2, hidden_size=64, num_attention_heads=8, context_parallel_size=2,
        attention_dropout=0.0,
    )  # fmt: skip
    config.burst = mb.BurstConfig(layout="auto")
    burst.install()
    try:
        specs.burst_layer_spec(config, base=get_gpt_layer_local_spec())
        assert config.burst.layout == burst.installed_layout() == "zigzag"
    finally:
        burst.uninstall()
