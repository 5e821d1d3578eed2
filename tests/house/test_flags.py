"""The flags: one definition, whose defaults are those of BurstConfig."""

import argparse
import dataclasses
from types import SimpleNamespace

import pytest

from megatron_burst import BurstConfig, flags
from megatron_burst.config import FIELDS
from megatron_burst.units import size_of


def parsed(line="", algorithm="burst"):
    parser = argparse.ArgumentParser()
    flags.add_flags(parser, algorithm=algorithm)
    args = parser.parse_args(line.split())
    flags.add_defaults(args)
    return args


def test_every_choice_has_a_flag_and_the_same_default():
    assert set(FIELDS) == {field.name for field in dataclasses.fields(BurstConfig)}
    assert flags.burst_config(parsed()) == BurstConfig()


def test_all_flags_reach_the_configuration():
    args = parsed(
        "--context-parallel-algo hybrid --burst-layout contiguous --burst-side kv "
        "--burst-kernel aten --burst-intra-size 2 --burst-ulysses-size 4 "
        "--burst-placement context_first --burst-attention-store 0 --burst-wire-dtype bf16 "
        "--burst-lm-head-loss recompute --burst-nccl-max-ctas 8 --burst-pack documents "
        "--burst-offload 0.5 --burst-host-memory 1.5TB --burst-sequence-chunks auto "
        "--burst-mlp-tiles 4 --burst-head-chunks 2 --burst-cluster cluster.toml "
        "--burst-linear scan --burst-attention-layout striped --burst-sparse ring"
    )
    assert flags.burst_config(args) == BurstConfig(
        algorithm="hybrid",
        layout="contiguous",
        side="kv",
        kernel="aten",
        intra_size=2,
        ulysses_size=4,
        placement="context_first",
        wire_dtype="bf16",
        store=0.0,
        lm_head_loss="recompute",
        linear="scan",
        nccl_max_ctas=8,
        pack="documents",
        offload=0.5,
        host_memory="1.5TB",
        sequence_chunks="auto",
        mlp_tiles=4,
        head_chunks=2,
        cluster="cluster.toml",
        attention_layout="striped",
        sparse="ring",
    )


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ({"offload": 1.5}, r"offload .--burst-offload. must be a fraction from 0 to 1 or auto"),
        ({"offload": "all"}, r"must be a fraction from 0 to 1 or auto, got 'all'"),
        ({"sequence_chunks": 0}, r"must be an integer >= 1 or auto, got 0"),
        ({"mlp_tiles": "few"}, r"must be an integer >= 1 or auto, got 'few'"),
        ({"host_memory": "much"}, r'--burst-host-memory. must be a size such as "1.5TB"'),
        ({"host_memory": 5}, "must be a size"),
        ({"host_memory": "0GB"}, "must be a size"),
        ({"cluster": ""}, r"--burst-cluster. must be the path of a file, got ''"),
        ({"cluster": 5}, "must be the path of a file, got 5"),
        ({"mask": ""}, r"--burst-mask. must be MODULE:NAME of a function, got ''"),
        ({"mask": 5}, "must be MODULE:NAME of a function, got 5"),
    ],
)
def test_numbers_that_may_be_names(choices, words):
    with pytest.raises(ValueError, match=words):
        BurstConfig(**choices)


@pytest.mark.parametrize(
    ("text", "size"), [("1.5TB", 1500 * 10**9), ("2GiB", 2**31), ("12", 12), ("3 kB".upper(), 3000)]
)
def test_sizes(text, size):
    assert size_of(text, "x") == size


@pytest.mark.parametrize(
    ("line", "layout"),
    [
        ("", "zigzag"),
        ("--burst-attention-store 0.5", "striped"),
        ("--burst-attention-store 1", "zigzag"),
        ("--burst-attention-store 0.5 --burst-layout zigzag", "zigzag"),
        ("--burst-attention-store 0.5 --context-parallel-algo megatron", "zigzag"),
    ],
)
def test_the_layout_follows_from_the_store(line, layout):
    assert parsed(line).burst_layout == layout


def test_arguments_without_our_flags_leave_the_attention_alone():
    args = SimpleNamespace(burst_attention_store=0.5)
    flags.add_defaults(args)
    assert flags.burst_config(args) == BurstConfig(algorithm="megatron", store=0.5)


def test_a_program_that_has_such_a_flag_is_refused():
    parser = argparse.ArgumentParser()
    parser.add_argument("--burst-side")
    with pytest.raises(ValueError, match="--burst-side is a flag of this program already"):
        flags.add_flags(parser, algorithm="burst")


def test_which_flags_a_command_line_has():
    argv = ["--burst-side=kv", "--lr", "1", "--context-parallel-algo", "burst", "--burst-sides"]
    assert list(flags.present(argv)) == ["--context-parallel-algo", "--burst-side"]
    assert list(flags.present(argv, "--lr", "--wd")) == ["--lr"]


def test_fractions_are_numbers_from_0_to_1():
    for bad in ("x", True, -0.1, 2):
        with pytest.raises(ValueError, match="must be a fraction from 0 to 1"):
            BurstConfig(store=bad)


def test_documents_that_are_packed_anew_are_laid_out_in_balance():
    def layout(words, **more):
        parser = argparse.ArgumentParser()
        flags.add_flags(parser, algorithm=flags.OFF)
        args = parser.parse_args(words.split())
        vars(args).update(more)
        flags.add_defaults(args)
        return args.burst_layout

    asked = "--context-parallel-algo burst --burst-pack documents"
    assert layout(asked, context_parallel_size=2) == "balanced"
    assert layout(asked, context_parallel_size=1) == "zigzag"
    assert layout(f"{asked} --burst-layout striped", context_parallel_size=2) == "striped"
    assert layout("--burst-pack documents", context_parallel_size=2) == "zigzag"
    assert layout("--context-parallel-algo burst", context_parallel_size=2) == "zigzag"


def test_every_invalid_value_is_reported_and_replaced_by_its_default():
    args = parsed("--context-parallel-algo burst --burst-layout striped")
    args.burst_side, args.burst_kernel = "no", 7
    options, messages = flags.options_and_errors(args)
    assert options == BurstConfig(algorithm="burst", layout="striped")
    assert [message.split(" must")[0] for message in messages] == [
        "side (--burst-side)", "kernel (--burst-kernel)",
    ]  # fmt: skip


def test_an_error_of_a_plugin_that_names_no_flag_is_raised_itself(monkeypatch):
    def broken(**fields):
        raise ValueError("beats must be even")

    args = parsed("--context-parallel-algo burst")
    monkeypatch.setattr(flags, "BurstConfig", broken)
    with pytest.raises(ValueError, match=r"^beats must be even$"):
        flags.options_and_errors(args)
