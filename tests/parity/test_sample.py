"""A sample of `make parity`: the same runs and the same comparison, for a few combinations."""

import importlib.util

import pytest

pytest.importorskip("tensorboard", reason="Megatron writes its event files with tensorboard")
pytest.importorskip(
    "megatron.training", reason="megatron.training is in wheels for Python 3.12 and on only"
)

import parity
from combinations import COMBINATIONS, SAMPLE, Combination
from ranks import Ranks

BY_NAME = {one.name: one for one in COMBINATIONS}


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    models = importlib.util.find_spec("megatron.training.models")
    if models is None or importlib.util.find_spec(f"{models.name}.gpt") is None:
        pytest.skip("train_gpt.py is written for the interface that Megatron-LM has from 0.19 on")
    folder = tmp_path_factory.mktemp("parity")
    ranks = Ranks(folder)
    yield parity.Bench(ranks, folder)
    ranks.close()


@pytest.mark.parametrize("name", SAMPLE)
def test_ours_is_stock(bench, name):
    result = bench.compare(BY_NAME[name])
    assert result.good, result.line()


def test_the_comparison_notices_another_model(bench):
    window = "--context-parallel-algo burst --context-parallel-size 2 --window-size 48,0"
    result = bench.compare(Combination("planted: a window that stock does not have", "", 2, window))
    assert not result.good
    assert result.worst > 10 * result.allowed


def test_every_combination_has_a_name_of_its_own():
    assert len(BY_NAME) == len(COMBINATIONS) == 77
    assert set(SAMPLE) <= set(BY_NAME)


@pytest.mark.parametrize(
    ("value", "expected", "far"),
    [
        (1.0, 1.0, 0.0),
        (0.0, 0.0, 0.0),
        (3.0, 2.0, 0.5),
        (1e-9, 0.0, float("inf")),
        (float("nan"), 1.0, float("inf")),
        (1.0, float("nan"), float("inf")),
    ],
)
def test_distances(value, expected, far):
    assert parity.distances({"loss": {1: value}}, {"loss": {1: expected}}) == {"loss": far}


def test_what_one_run_wrote_and_the_other_did_not_is_no_parity():
    one, other = {"loss": {1: 1.0, 2: 1.0}}, {"loss": {1: 1.0}}
    with pytest.raises(AssertionError, match="loss"):
        parity.distances(one, other)
    with pytest.raises(AssertionError, match="norm"):
        parity.distances(one | {"norm": {1: 1.0}}, one)
