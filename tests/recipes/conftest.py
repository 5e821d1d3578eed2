"""Runs of Megatron-Bridge on the CPU; only if it is installed (`make test-recipes`)."""

import importlib.util
import itertools
import json
from pathlib import Path

import pytest
from jobs import Jobs
from shrunk import PRETRAIN

# What the hub has of the model: its sizes are public, its weights are not needed.
LLAMA3 = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "rope_scaling": None, "vocab_size": 128256,
    "attention_bias": False, "attention_dropout": 0.0, "initializer_range": 0.02,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture(scope="session", autouse=True)
def bridge():
    if importlib.util.find_spec("megatron.bridge") is None:
        pytest.skip("megatron-bridge is not installed here; make test-recipes installs it")


@pytest.fixture(scope="session")
def environment(tmp_path_factory):
    """Return variables for no network; the hub's cache has the model's sizes."""
    home = tmp_path_factory.mktemp("hub")
    for model in ("meta-llama--Meta-Llama-3-8B", "meta-llama--Llama-2-7b-hf"):
        folder = home / "hub" / f"models--{model}"
        (folder / "refs").mkdir(parents=True)
        (folder / "refs" / "main").write_text("0")
        (folder / "snapshots" / "0").mkdir(parents=True)
        (folder / "snapshots" / "0" / "config.json").write_text(json.dumps(LLAMA3))
    return {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}


@pytest.fixture(scope="module")
def bridge_here(environment):
    """Import Bridge's classes in this process, without a network or Transformer Engine."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)

        from megatron_burst.plugins.testing import recipes as cpu

        cpu.enable()
        yield
        cpu.disable()


@pytest.fixture(scope="session")
def serve(tmp_path_factory, environment):
    """Return `serve(world, **work)`, which runs a job and returns its results.

    These are exit status, output and, if it trained, its steps. One process has imported Bridge and
    forks the ranks of every job.
    """
    folder, count = tmp_path_factory.mktemp("jobs"), itertools.count()
    script = Path(__file__).with_name("train.py")
    jobs = Jobs(folder, script, variables=environment)

    def run(world, **work):
        output = folder / f"{next(count)}.json"
        code, texts = jobs.run(world, output=str(output), **work)
        steps = json.loads(output.read_text()) if output.exists() else None
        return code, "".join(texts), steps

    yield run
    jobs.close()


@pytest.fixture(scope="session")
def train(serve):
    """Return `train(world, recipe=..., overrides=..., choices=..., ...)`, cached.

    It returns [(loss, norm)] of the steps, and the output.
    """
    results = {}

    def run(world, recipe="llama3_8b_64k_pretrain_config", overrides=(), small=PRETRAIN, **more):
        sizes = [f"model.context_parallel_size={world}"]
        work = {"world": world, "recipe": recipe, "overrides": [*small, *sizes, *overrides], **more}
        name = json.dumps(work, sort_keys=True)
        if name not in results:
            code, text, steps = serve(**work)
            assert code == 0, text[-3000:]
            results[name] = steps, text
        return results[name]

    return run


@pytest.fixture(scope="session")
def recipe(serve):
    """Return `recipe("NAME ...", ranks)`, exit code and output of `megatron-burst recipe --cpu`.

    Ranks have the environment that torchrun gives them; without `ranks` there is one, without it.
    """

    def launch(words, ranks=None):
        return serve(ranks or 1, words=words.split(), launched=ranks is not None)[:2]

    return launch
