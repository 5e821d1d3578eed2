"""Which writers get the scalars, and when; `megatron_lm/test_training` reads a run's scalars."""

import sys
from types import SimpleNamespace

import torch

from megatron_burst.megatron import step_metrics
from megatron_burst.megatron.patching import PatchSet
from megatron_burst.plugins.testing import in_process


class Written(list):
    def add_scalar(self, name, value, step):
        self.append((name, value, step))

    def log(self, values, step):
        self += [(*each, step) for each in values.items()]


def training_log(loss_dict, iteration):
    return "reported"


def run(monkeypatch, measured, board, wandb):
    """Run four iterations of a rank with these writers, after a start from iteration 6."""
    megatron = SimpleNamespace(
        get_args=lambda: SimpleNamespace(log_interval=2),
        get_tensorboard_writer=lambda: board, get_wandb_writer=lambda: wandb,
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", megatron)
    monkeypatch.setattr(step_metrics, "metrics", lambda: measured)
    for iteration in range(7, 11):
        assert step_metrics._logging(training_log, {}, iteration=iteration) == "reported"


def measured_rank():
    """Return one rank that has sent 600 bytes and run one layer."""
    groups = in_process.groups(intra=1).ranks[0]
    measured = step_metrics.StepMetrics()
    measured.watch(groups)
    plan = in_process.prepare(*[torch.zeros(8, 1, 2, 4)] * 3, groups=groups)
    measured.count_forward(plan)
    groups.counters.intra += 600
    return measured


def test_each_writer_gets_every_scalar_once_per_interval(monkeypatch):
    board, wandb = Written(), Written()
    run(monkeypatch, measured_rank(), board, wandb)
    assert board == wandb
    within = [each[1:] for each in board if each[0] == "burst/bytes-within-nodes"]
    assert within == [(300.0, 8), (0.0, 10)]
    ratios = [each[1:] for each in board if each[0] == "burst/pairs-busiest-over-mean"]
    assert ratios == [(1.0, 8)]  # no forward ran in the second interval


def test_a_rank_without_a_writer_takes_part_and_writes_nothing(monkeypatch):
    measured = measured_rank()
    run(monkeypatch, measured, None, None)
    assert measured.collect()["burst/bytes-within-nodes"] == 0


def test_nothing_is_measured_unless_a_writer_was_asked_for(monkeypatch):
    patches = PatchSet("unused")
    step_metrics.start_if_written(patches, SimpleNamespace(tensorboard_dir=None, wandb_project=""))
    assert patches.run.metrics is None
    board = Written()
    run(monkeypatch, None, board, None)
    assert board == []
    for given in ({"tensorboard_dir": "runs"}, {"wandb_project": "long"}):
        patches = PatchSet("unused")
        step_metrics.start_if_written(patches, SimpleNamespace(**given))
        assert patches.run.metrics is not None
