"""Models of Bridge 0.6 over ranks equal one rank, even those that it trains on one rank only."""

import json
from pathlib import Path

import newer_models
import pytest
from jobs import Jobs

RUNS = [("gpt", 1), ("gemma3", 1), ("gemma3", 2), ("gemma3 vl", 1), ("mimo", 1), ("mimo", 2)]
RUNS += [("gemma4 dense", 1), ("gemma4 dense", 2), ("gemma4 experts", 1)]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Return `found(model, number)`, the results of a run, or None, and what its ranks print."""
    folder, known = tmp_path_factory.mktemp("runs"), {}
    paths = [Path(__file__).parents[3] / "recipes"]
    jobs = Jobs(folder, Path(__file__).with_name("newer_models.py"), paths=paths)

    def run(model, number):
        if (model, number) not in known:
            output, world = folder / f"{model}.{number}", newer_models.RUNS[model][number][2]
            _, texts = jobs.run(world, model=model, number=number, output=str(output))
            results = json.loads(output.read_text()) if output.exists() else None
            known[model, number] = results, "".join(texts)
        return known[model, number]

    yield run
    jobs.close()


def test_chunks_of_rows_do_not_know_the_scale_of_values(found):
    results, said = found("mimo", 3)
    assert results is None
    assert "--burst-sequence-chunks 2: MiMoV2FlashTEDotProductAttention scales the values" in said


def test_layers_of_gemma_4_do_not_run_tiles(found):
    results, said = found("gemma4 dense", 3)
    assert results is None
    assert "mlp_tiles 2: layers are Gemma4DenseTransformerLayer, whose _forward_mlp (" in said


def test_the_fused_loss_knows_no_soft_cap(found):
    """Bridge sets the cap on the output layer after the model was built."""
    results, said = found("gemma4 dense", 4)
    assert results is None
    assert (
        "lm_head_loss single_pass requires an output layer that is a ColumnParallelLinear" in said
    )
    assert "got ColumnParallelLinear of Gemma4OutputLayer" in said


@pytest.mark.parametrize(("model", "number"), RUNS)
def test_over_ranks_equals_one_rank(found, model, number):
    split, said = found(model, number)
    assert split is not None, said[-3000:]
    (loss, norms), ((whole, expected), _) = split, found(model, 0)
    assert loss == pytest.approx(whole, rel=1e-6)
    assert norms == pytest.approx(expected, rel=1e-4, abs=1e-5)
    if model == "gemma4 dense":  # layers 3 and 4 use the keys of 1 and 2, and none of their own
        assert expected["decoder.layers.2.mlp.linear_fc1.weight"] > 1e-3
    if model == "mimo":  # of the layers with a window only
        sinks = [name for name in norms if name.endswith("softmax_offset") and norms[name] > 1e-3]
        assert [name.split(".layers.")[1][0] for name in sorted(sinks)] == ["1", "2"]
