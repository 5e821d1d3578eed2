"""`--burst-cluster`: algorithm "auto" of a run uses the rates of a cluster file."""

import logging
import os
import tempfile
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig

import megatron_burst as mb
from megatron_burst.autotune import cluster_file
from megatron_burst.autotune.clusters import Cluster
from megatron_burst.autotune.places import Nodes
from megatron_burst.megatron import training, uninstall
from megatron_burst.megatron.attention import plan_book
from megatron_burst.megatron.checks.config import cluster_problems
from megatron_burst.megatron.data.cut import BatchCut
from megatron_burst.megatron.data.packed import Pack
from megatron_burst.megatron.linear import state_layers
from megatron_burst.megatron.patching import PatchSet
from megatron_burst.megatron.run_state import RunState
from megatron_burst.plugins.tools.advise.settings import Settings
from megatron_burst.plugins.tools.advise.shapes.models import Model
from megatron_burst.plugins.tools.advise.simulate import simulate
from megatron_burst.recipes.layers import burst_layer_spec

RATES = mb.Rates(
    3e9, 1e9, 1e-6, 1e12, 2e-6, backward=2.9, half_rows=16, slowdown=0.1, memory=3.35e12
)


def written(path, **fields):
    cluster = Cluster("h100", 4, 2, rates=RATES, **fields)
    cluster_file.write(cluster, path)
    return cluster


def packs(total):
    """Return two packs of so many tokens, each of two documents."""
    return [Pack(total, (0, end, total), total, (0, end, total)) for end in (9, 20)]


def planned(path):
    """Make plans of two packs in a row of a layer on 2 nodes of 2 ranks.

    Return (rates, candidate) of each plan that chose an algorithm, the start-up line, and the files
    that were read.
    """
    book = plan_book.PlanBook(groups=mb.Groups.from_topology(dist.group.WORLD, intra=2))
    kind = plan_book.LayerKind(
        mb.BurstConfig("auto", cluster=path),
        True,
        None,
        None,
        (8, 4, 16, 16),
        BatchCut("zigzag"),
    )
    shapes = {"q": (64, 1, 8, 16), "k": (64, 1, 4, 16), "v": (64, 1, 4, 16)}
    tensors = {name: torch.zeros(shape).bfloat16() for name, shape in shapes.items()}
    read, asked = cluster_file.read, []
    with mock.patch.object(cluster_file, "read", lambda name: asked.append(name) or read(name)):
        plans = [book.plan(kind, True, tensors, pack) for pack in packs(256)]
    choices = [(p.choice.rates, p.choice.taken) for p in plans if p.choice is not None]
    return choices, book.startup, asked


@pytest.mark.world_size(4)
def test_auto_takes_the_rates_of_the_file(ranks, tmp_path):
    """The prediction equals `mb.simulate`, which calls the same code.

    The second plan has an algorithm, and reads nothing.
    """
    path = str(tmp_path / "mine.toml")
    cluster = written(path)
    for choices, startup, asked in ranks(4).run(planned, path):
        ((rates, taken),) = choices
        assert rates == replace(RATES, room=float(cluster.room), host=cluster.host_time)
        assert startup.endswith(f"; rates of {path}; for layers without a window")
        assert asked == [path]
    model = Model("small", 1, 128, 8, 4, 256, 512, head_dim=16)
    run = Settings(
        256, cp=4, algorithm=taken.algorithm, side=taken.side, head_chunks=taken.head_chunks
    )
    found = simulate(model, cluster, run, part="attention")
    assert taken.seconds == pytest.approx(found.seconds)


def test_ranks_that_share_a_nic_are_told_so(tmp_path):
    """The two GPUs of a node share one NIC.

    Both are context-parallel, or one is tensor-parallel.
    """
    shared = written(tmp_path / "one.toml", nics=1)
    alone = replace(RATES, room=float(shared.room), host=shared.host_time)
    assert written(tmp_path / "two.toml").run_rates(2) == alone
    assert shared.run_rates(2) == replace(alone, shared=Nodes(2, 1, 1))
    assert shared.run_rates(1) == replace(alone, shared=Nodes(2, 1, 2))
    assert "2 ranks of a node share 1 NICs" in shared.run_rates(1).describe()


def planned_states(path):
    """Make two plans of a layer that carries states.

    Return their lines and the files that were read.
    """
    book, lines = plan_book.PlanBook(groups=mb.Groups.from_topology(dist.group.WORLD, intra=2)), []
    burst = mb.BurstConfig("burst", cluster=path)
    kind = state_layers.LinearKind(burst, "linear", (4, 4, 16, 16, 4), plan_book.BatchCut("zigzag"))
    inputs = dict.fromkeys("qkv", torch.zeros(8, 1, 4, 16))
    read, asked = cluster_file.read, []
    with (
        mock.patch.object(cluster_file, "read", lambda name: asked.append(name) or read(name)),
        mock.patch.object(book, "log", lines.append),
    ):
        made = [book.plan(kind, True, inputs, pack) for pack in packs(32)]
    return [plan.why for plan in made], lines, asked


@pytest.mark.world_size(4)
def test_layers_that_carry_states_take_them_too(ranks, tmp_path):
    path = str(tmp_path / "mine.toml")
    written(path)
    for whys, (startup,), asked in ranks(4).run(planned_states, path):
        assert [why.endswith("at given rates") for why in whys] == [True, True]
        assert startup.endswith(f"; rates of {path}")
        assert asked == [path]


def lines_of_kinds():
    """Return the log lines of two plans each of two kinds of layers on this rank."""
    book, told = plan_book.PlanBook(groups=mb.Groups.from_topology(dist.group.WORLD, intra=2)), []
    inputs = dict.fromkeys("qkv", torch.zeros(8, 1, 4, 16))
    with mock.patch.object(logging.getLogger("megatron_burst"), "info", told.append):
        for form in ("linear", "scalar_decay") * 2:
            burst, sizes = mb.BurstConfig("burst"), (4, 4, 16, 16, 4)
            kind = state_layers.LinearKind(burst, form, sizes, plan_book.BatchCut("zigzag"))
            more = {"decay": torch.zeros(8, 1, 4)} if form == "scalar_decay" else {}
            book.plan(kind, True, inputs | more)
    return told


@pytest.mark.world_size(4)
def test_each_kind_of_layers_has_one_line(ranks):
    first, *others = ranks(4).run(lines_of_kinds)
    assert [line.split(" | ")[3] for line in first] == ["form linear", "form scalar_decay"]
    assert not any(others)


def told(config=None, **choices):
    return [problem.reason for problem in cluster_problems(mb.BurstConfig(**choices), config)]


def test_files_that_cannot_serve(tmp_path):
    path = tmp_path / "mine.toml"
    written(path)
    assert told() == told(algorithm="auto", cluster=str(path)) == []
    (reason,) = told(cluster=str(path))
    assert "has an effect only with --context-parallel-algo auto, not with burst" in reason
    hybrid = SimpleNamespace(is_hybrid_model=True)
    assert told(hybrid, cluster=str(path)) == []
    assert told(hybrid, cluster=str(path), linear="scan") == [reason]
    (reason,) = told(algorithm="auto", cluster=str(tmp_path / "none.toml"))
    assert reason.endswith(
        "none.toml: cannot be read: No such file or directory; copy the file to every node"
    )
    path.write_text('[cluster]\ngpu = 8\n[gpu]\nname = "h100"\n')
    (reason,) = told(algorithm="auto", cluster=str(path))
    assert reason.startswith(f"--burst-cluster {path}: cluster.gpu is unknown")


def by_flags():
    """Compare when Megatron-LM makes its groups; a second attempt raises again."""
    patches = PatchSet("burst", RunState(flags={"--burst-cluster": "mine.toml"}))
    hooks = training.TrainingHooks(patches)
    with suppress(ValueError):
        hooks.initialize_model_parallel(lambda: "made")
    return hooks.initialize_model_parallel(lambda: "made")


def by_recipe():
    """Compare when a recipe calls the function for the layers of its model."""
    config = TransformerConfig(
        num_layers=2, hidden_size=64, num_attention_heads=4, context_parallel_size=2,
        attention_dropout=0.0,
    )  # fmt: skip
    layers = get_gpt_layer_local_spec()
    uninstall()
    try:
        burst_layer_spec(config, base=layers, algorithm="auto", cluster="mine.toml")
    finally:
        uninstall()
    return "made"


def compared(way, gpus):
    """Return the result of comparing all ranks; each rank's file states another number of GPUs."""
    here = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        cluster_file.write(Cluster("h100", gpus[dist.get_rank()], 2, rates=RATES), "mine.toml")
        try:
            return way()
        except ValueError as error:
            return str(error)
        finally:
            os.chdir(here)


@pytest.mark.parametrize("way", [by_flags, by_recipe], ids=lambda way: way.__name__)
def test_ranks_compare_what_their_cluster_files_say(ranks, way):
    """Every pipeline stage cuts packs by the file, and each reads its own file."""
    assert ranks(2).run(compared, way, (4, 4)) == ["made", "made"]
    for told in ranks(2).run(compared, way, (4, 8)):
        assert "rank 0 has the contents of" in told
