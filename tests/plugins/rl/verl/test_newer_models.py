"""Models of Bridge 0.6 over ranks equal one rank, even those that it trains on one rank only."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
RUNS = [("gpt", 1), ("gemma3", 1), ("gemma3", 2), ("gemma3 vl", 1), ("mimo", 1), ("mimo", 2)]
RUNS += [("gemma4 dense", 1), ("gemma4 dense", 2), ("gemma4 experts", 1)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return the folder with the results and the output of each run."""
    folder = tmp_path_factory.mktemp("runs")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    paths = [str(ROOT), str(ROOT / "tests" / "helpers"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)), "PORT": str(port),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONWARNINGS": "ignore",
    }  # fmt: skip
    script = Path(__file__).with_name("newer_models.py")
    done = subprocess.run(
        [sys.executable, str(script), str(folder)], env=environment, cwd=folder, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    return folder


def test_chunks_of_rows_do_not_know_the_scale_of_values(runs):
    assert not (runs / "mimo.3").exists()
    said = (runs / "mimo.3.log").read_text()
    assert "--burst-sequence-chunks 2: MiMoV2FlashTEDotProductAttention scales the values" in said


def test_layers_of_gemma_4_do_not_run_tiles(runs):
    assert not (runs / "gemma4 dense.3").exists()
    said = (runs / "gemma4 dense.3.log").read_text()
    assert "mlp_tiles 2: layers are Gemma4DenseTransformerLayer, whose _forward_mlp (" in said


def test_the_fused_loss_knows_no_soft_cap(runs):
    """Bridge sets the cap on the output layer after the model was built."""
    assert not (runs / "gemma4 dense.4").exists()
    said = (runs / "gemma4 dense.4.log").read_text()
    assert (
        "lm_head_loss single_pass requires an output layer that is a ColumnParallelLinear" in said
    )
    assert "got ColumnParallelLinear of Gemma4OutputLayer" in said


def found(folder, model, number):
    output = folder / f"{model}.{number}"
    assert output.exists(), Path(f"{output}.log").read_text()[-3000:]
    return json.loads(output.read_text())


@pytest.mark.parametrize(("model", "number"), RUNS)
def test_over_ranks_equals_one_rank(runs, model, number):
    (loss, norms), (whole, expected) = found(runs, model, number), found(runs, model, 0)
    assert loss == pytest.approx(whole, rel=1e-6)
    assert norms == pytest.approx(expected, rel=1e-4, abs=1e-5)
    if model == "gemma4 dense":  # layers 3 and 4 use the keys of 1 and 2, and none of their own
        assert expected["decoder.layers.2.mlp.linear_fc1.weight"] > 1e-3
    if model == "mimo":  # of the layers with a window only
        sinks = [name for name in norms if name.endswith("softmax_offset") and norms[name] > 1e-3]
        assert [name.split(".layers.")[1][0] for name in sorted(sinks)] == ["1", "2"]
