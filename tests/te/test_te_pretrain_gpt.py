"""The pretrain_gpt.py of a checkout of Megatron-LM, with Transformer Engine: MEGATRON=path."""

import os
import shutil
from importlib import metadata
from pathlib import Path

import pytest
from test_te_training import EXPERTS, SHORT, SPLIT, TE, TOLERANCE, worst

HERE = Path(__file__).parent
SCRIPTS = ("pretrain_gpt.py", "gpt_builders.py", "model_provider.py")


@pytest.fixture(scope="module")
def checkout(request, transformer_engine, tmp_path_factory):
    """A copy of Megatron-LM with the compiled dataset helpers of the installed Megatron-Core."""
    named = request.config.getoption("--megatron", default="")
    if not named:
        pytest.skip("needs a checkout of Megatron-LM: make test-te MEGATRON=path")
    copy = tmp_path_factory.mktemp("Megatron-LM")
    shutil.copytree(Path(named, "megatron"), copy / "megatron")
    for script in SCRIPTS:
        shutil.copy(Path(named, script), copy)
    for helper in metadata.files("megatron-core"):
        if helper.match("helpers_cpp*.so"):
            shutil.copy(helper.locate(), copy / "megatron/core/datasets")
    return copy


@pytest.fixture(scope="module")
def pretrain(checkout, tmp_path_factory):
    """`pretrain(world, flags)` -> a `Run` of pretrain_gpt.py; every rank came to a good end."""
    from ranks import COMMON, IMPORTED, Ranks

    beside = os.pathsep.join([str(checkout), str(HERE)])
    server = Ranks(tmp_path_factory.mktemp("ranks"), ["te_on_cpu", *IMPORTED], beside)

    def run(world, flags):
        words = [str(checkout / SCRIPTS[0]), "--mock-data", *COMMON, *SHORT, *flags.split()]
        done = server.run(world, words, script=HERE / "pretrain.py")
        assert done.codes == [0] * world, "\n".join(done.texts)[-4000:]
        return done

    yield run
    server.close()


@pytest.mark.parametrize("model", ["--group-query-attention --num-query-groups 2", EXPERTS])
def test_two_ranks_train_like_the_local_layers_on_one(pretrain, model):
    ours = pretrain(2, f"{TE} {model} {SPLIT}")
    assert ours.lines("burst attention: algorithm burst")
    assert ours.lines("of Transformer Engine computes with torch: TELayerNormColumnParallelLinear")
    assert worst(ours, pretrain(1, model)) < TOLERANCE
