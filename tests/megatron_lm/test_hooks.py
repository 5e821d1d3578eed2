"""The hooks into `megatron.training`, in this process and without ranks."""

import argparse
import dataclasses
import importlib.util
import inspect
import logging
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip(
    "megatron.training", reason="megatron.training is in wheels for Python 3.12 and on only"
)

from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training import arguments, checkpointing, yaml_arguments

import megatron_burst as mb
import megatron_burst.megatron as burst
from megatron_burst import flags
from megatron_burst.megatron import patching, training
from megatron_burst.megatron.checks import config as config_checks
from megatron_burst.megatron.data import datasets

WRAPPED = [
    (arguments, "add_megatron_arguments"),
    (arguments, "validate_args"),
    (arguments, "core_transformer_config_from_args"),
    (yaml_arguments, "validate_yaml"),
    (checkpointing, "check_checkpoint_args"),
    (parallel_state, "initialize_model_parallel"),
]


@pytest.fixture(autouse=True)
def clean():
    burst.uninstall()
    yield
    burst.uninstall()


def state():
    return [inspect.getattr_static(owner, name) for owner, name in WRAPPED]


def asked(**changes):
    args = SimpleNamespace(context_parallel_size=2, context_parallel_algo="burst", **changes)
    flags.add_defaults(args)
    return args


def test_uninstall_restores_what_install_wrapped():
    before = state()
    burst.install()
    assert all(new is not old for new, old in zip(state(), before, strict=True))
    assert burst.installed_layout() is None
    burst.install()
    assert burst.uninstall()
    assert state() == before


def test_with_a_layout_only_megatron_core_is_touched():
    before = state()
    burst.install("striped")
    assert state() == before
    assert burst.installed_layout() == "striped"


def test_from_imports_made_before_and_after_see_the_wrapped_function():
    from megatron.training import argument_utils

    burst.install()
    name = "core_transformer_config_from_args"
    assert getattr(argument_utils, name) is getattr(arguments, name)


@pytest.mark.filterwarnings("ignore:'type' is deprecated")  # Megatron's, in its own arguments
def test_flags_are_off_unless_asked_for():
    burst.install()
    parser = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    args = parser.parse_args([])
    assert args.context_parallel_algo == "megatron"
    assert "\nmegatron-burst:" in parser.format_help()


def test_a_function_with_other_parameters_is_named_with_the_version(monkeypatch):
    before = state()
    monkeypatch.setattr(checkpointing, "check_checkpoint_args", lambda: None)
    with pytest.raises(
        RuntimeError, match=r"Megatron-Core \d.*training.checkpointing.check_checkpoint_args has"
    ):
        burst.install()
    monkeypatch.undo()
    assert state() == before


def test_a_function_that_is_gone_is_named_with_the_version(monkeypatch):
    monkeypatch.delattr(arguments, "validate_args")
    with pytest.raises(RuntimeError, match=r"has no training.arguments.validate_args"):
        burst.install()


def test_too_old_a_megatron_is_refused(monkeypatch):
    import megatron.core

    monkeypatch.setattr(megatron.core, "__version__", "0.15.1")
    with pytest.raises(RuntimeError, match=r"Megatron-Core 0\.15\.1 is older than 0\.16"):
        patching.check_version()


@pytest.mark.parametrize("given", ["--cp-comm-type p2p", "--cp-comm-type=a2a"])
def test_the_type_of_communication_is_refused_only_where_given(given):
    with pytest.raises(ValueError, match="remove --cp-comm-type"):
        training.check_flags(asked(cp_comm_type=["p2p"]), given.split())
    training.check_flags(asked(cp_comm_type=["p2p"]), [])
    off = asked(cp_comm_type=["p2p"])
    off.context_parallel_algo = "megatron"
    training.check_flags(off, given.split())


NO_HEADS_FOR_ALL = {
    # heads, key/value groups, ranks, our flags: what is said to add
    (2, None, 4, ""): "--context-parallel-algo hybrid --burst-ulysses-size 2",
    (3, None, 4, ""): "--context-parallel-algo auto",
    (12, 4, 8, ""): "--context-parallel-algo hybrid --burst-ulysses-size 4",
}


@pytest.mark.parametrize("case", NO_HEADS_FOR_ALL)
def test_too_few_heads_for_ulysses_in_terms_of_what_was_given(case):
    heads, groups, cp, _ = case
    config = SimpleNamespace(
        context_parallel_size=cp, tensor_model_parallel_size=1, num_attention_heads=heads,
        num_query_groups=groups,
    )  # fmt: skip
    (problem,) = config_checks.layer_problems(config, mb.BurstConfig("ulysses"))
    reason = f"--context-parallel-algo ulysses at --context-parallel-size {cp}: "
    assert problem.reason.startswith(reason)
    assert f"{heads} query heads and {groups or heads} key/value heads" in problem.reason
    assert "--burst-ulysses-size" not in problem.reason
    assert " ".join(problem.add) == NO_HEADS_FOR_ALL[case]
    algorithm, *size = [word for word in " ".join(problem.add).split() if "--" not in word]
    chosen = mb.BurstConfig(algorithm, ulysses_size=int(size[0]) if size else None)
    assert not list(config_checks.layer_problems(config, chosen))  # what is said does work


@pytest.mark.parametrize(
    ("world", "sizes", "words"),
    [
        (8, {"context_parallel_size": 4}, None),
        (8, {"context_parallel_size": 6}, "does not divide the 8 ranks.*add --context-par.* 4$"),
        (8, {"context_parallel_size": 2, "pipeline_model_parallel_size": 8}, "a multiple of 16"),
        (4, {"context_parallel_size": 2, "tensor_model_parallel_size": 3},
         "size 2 x --tensor-model-parallel-size 3 does not divide the 4 ranks"),
    ],
)  # fmt: skip
def test_ranks_that_the_sizes_do_not_divide(world, sizes, words):
    args = SimpleNamespace(context_parallel_algo="burst", world_size=world, **sizes)
    flags.add_defaults(args)
    if words is None:
        training.check_flags(args, [])
        return
    with pytest.raises(ValueError, match=words):
        training.check_flags(args, [])


@pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is not None, reason="needs it to be missing"
)
def test_the_hybrid_stack_without_transformer_engine():
    stack = ["megatron.core.models.hybrid.hybrid_layer_specs", "hybrid_stack_spec"]
    training.check_flags(asked(hybrid_layer_pattern="M-M-", spec=stack), [])
    with pytest.raises(ValueError, match=r"M\*M- has attention .* requires Transformer Engine"):
        training.check_flags(asked(hybrid_layer_pattern="M*M-", spec=stack), [])


@pytest.mark.parametrize(
    ("given", "mask", "packed", "line"),
    [
        ({}, False, False, "attention is causal; the data loader makes no s x s mask"),
        ({"reset_attention_mask": True}, False, True, "documents end after end-of-document"),
        ({"create_attention_mask_in_dataloader": False}, False, False, ""),
        ({"create_attention_mask_in_dataloader": False, "reset_attention_mask": True}, False,
         True, "documents end after end-of-document"),
        ({"dataloader_inter_document_masking": True}, False, True, ""),
        ({"context_parallel_size": 1}, True, False, ""),
        ({"context_parallel_algo": "megatron"}, True, False, ""),
    ],
)  # fmt: skip
def test_the_mask_of_the_data_loader_is_not_made(capsys, given, mask, packed, line):
    burst.install()
    settings = {
        "create_attention_mask_in_dataloader": True, "reset_attention_mask": False,
        "dataloader_inter_document_masking": False, "micro_batch_size": 1,
        "context_parallel_size": 2, "context_parallel_algo": "burst",
    } | given  # fmt: skip
    args = SimpleNamespace(**settings)
    with pytest.raises(AttributeError):  # Megatron's own check: these are too few arguments
        arguments.validate_args(args)
    assert args.create_attention_mask_in_dataloader == mask
    assert args.dataloader_inter_document_masking == packed
    asked_for = datasets.documents_expected()
    with pytest.raises(AttributeError):  # validated again, as it is now
        arguments.validate_args(args)
    assert args.dataloader_inter_document_masking == packed
    assert datasets.documents_expected() == asked_for
    assert (asked_for is not None) == packed
    said = [text for text in capsys.readouterr().out.splitlines() if "mask" in text]
    assert line in said[0] if line else not said


def test_documents_of_two_kinds_are_refused():
    both = asked(
        reset_attention_mask=True, dataloader_inter_document_masking=True, micro_batch_size=1
    )
    words = "--dataloader-inter-document-masking .* use one .* remove --reset-attention-mask"
    with pytest.raises(ValueError, match=words):
        training.check_flags(both, [])


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        ([5, 5, 5, 5], [4]),
        ([5, 0, 5, 5], [2, 2]),
        ([0, 0, 5, 0, 5], [1, 1, 2, 1]),
        ([5, 5, 0, 5], [3, 1]),  # the last of the tokens that are read
        ([5, 5, 5, 0], [4]),  # the one that is only predicted ends nothing
    ],
)
def test_documents_end_behind_end_of_document_tokens(text, lengths):
    assert datasets.lengths_of_documents(torch.tensor(text), eod=0) == lengths


@pytest.mark.parametrize("given", ["", "--burst-side kv"])
def test_a_yaml_file_is_refused(given):
    """Megatron-LM itself cannot train from one; see `test_megatron_cannot_train_from_yaml`."""
    with pytest.raises(ValueError, match=r"--yaml-cfg run.yaml: Megatron.*; remove --yaml-cfg"):
        training.check_flags(asked(yaml_cfg="run.yaml"), given.split())
    off = asked(yaml_cfg="run.yaml")
    off.context_parallel_algo = "megatron"
    training.check_flags(off, [])


def test_megatron_cannot_train_from_yaml():
    """If this fails, Megatron-LM supports yaml files, and we need not refuse them."""
    name = "account_for_embedding_in_pipeline_split"
    assert f"args.{name}" in inspect.getsource(yaml_arguments.validate_yaml)
    assert name in {field.name for field in dataclasses.fields(TransformerConfig)}
    merged = "SimpleNamespace(**args.__dict__, **args.language_model.__dict__)"
    assert merged in inspect.getsource(yaml_arguments.validate_yaml)


def test_changes_since_a_checkpoint():
    now = flags.stated(asked(burst_side="kv")) | {"--context-parallel-size": 2}
    assert training.changes(SimpleNamespace(context_parallel_size=2), now) == [
        "the checkpoint was made with --context-parallel-algo megatron, this run has burst",
        "the checkpoint was made with --burst-side auto, this run has kv",
    ]
    assert training.changes(asked(burst_side="kv"), now) == []


def test_our_lines_are_shown_once_and_no_longer_after_uninstall(capsys):
    burst.install()
    logger = logging.getLogger("megatron_burst")
    before = logger.level, list(logger.handlers)
    args = SimpleNamespace()
    with pytest.raises(AttributeError):  # Megatron's own check: these are no arguments
        arguments.validate_args(args)
    logger.info("a line")
    assert capsys.readouterr().out.count("> megatron_burst: a line\n") == 1
    burst.uninstall()
    assert (logger.level, list(logger.handlers)) == before
