"""The installed package trains without each plugin.

A wheel is built and the folder of the plugin is deleted. Two ranks train a small model as with the
whole tree, and a model that needs the plugin is refused with an error that names it. The processes
are forked from one that has imported torch and Megatron, which takes longer than what they do.
"""

import compileall
import json
import re
import shutil
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest
from fork_server import ForkServer

from megatron_burst import registry

ROOT = Path(__file__).parents[2]
PLUGINS = sorted(path.parent.name for path in ROOT.glob("megatron_burst/plugins/*/entry.py"))

TRAINING = """
import importlib.util, json, os, sys, warnings
from pathlib import Path

import torch
import torch.distributed as dist

warnings.simplefilter("ignore")
import megatron_burst as mb

rank, store, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3]
assert Path(mb.__file__).parent == Path(folder) / "megatron_burst", mb.__file__
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
torch.manual_seed(0)
S, H, D, V = 64, 4, 8, 32
groups = mb.Groups.flat(dist.group.WORLD)
layout = mb.layout.make("striped", cp_size=2)
embed = torch.nn.Parameter(torch.randn(V, H * D) * 0.3)
qkv = [torch.nn.Parameter(torch.randn(3, H * D, H * D) * 0.2) for _ in range(2)]
head = torch.nn.Parameter(torch.randn(V, H * D) * 0.3)
parameters = [embed, *qkv, head]
optimizer = torch.optim.AdamW(parameters, lr=1e-2)
tokens = torch.randint(0, V, (S + 1, 1))
mine, labels = (mb.shard(x, layout, rank, dim=0) for x in (tokens[:-1], tokens[1:]))
losses = []

def layer(x, weight, plan):
    q, k, v = (torch.nn.functional.linear(x, w).unflatten(-1, (H, D)) for w in weight)
    return x + mb.attention(q, k, v, plan=plan).flatten(2)

for _ in range(4):
    x = embed[mine]
    q = x.detach().unflatten(-1, (H, D)).requires_grad_()
    plan = mb.prepare(q, q, q, groups=groups, layout="striped", store=0.5)
    for weight in qkv:
        x = mb.checkpoint(layer, x, weight, plan, keep=0.5)
    loss = mb.linear_cross_entropy(x, head, labels).sum() / S
    loss.backward()
    for p in parameters:
        dist.all_reduce(p.grad)
    optimizer.step()
    optimizer.zero_grad()
    total = loss.detach().clone()
    dist.all_reduce(total)
    losses.append(total.item())

installed = None
if rank == 0 and importlib.util.find_spec("megatron"):
    import megatron_burst.megatron as burst
    burst.install()
    installed = burst.uninstall()
print(json.dumps({"losses": losses, "installed": installed}), flush=True)
dist.destroy_process_group()
os._exit(0)  # gloo's threads may still abort an interpreter that ends, once in hundreds of runs
"""


# Runs code with the package in a folder; the server itself must not import it.
SERVER = """
import contextlib, importlib, os, sys

import torch.distributed
from fork_server import serve

for name in ("megatron.core.models.gpt", "megatron.core.pipeline_parallel", "transformers"):
    with contextlib.suppress(ImportError):
        importlib.import_module(name)

def run(code, arguments, folder):
    assert not [name for name in sys.modules if name.startswith("megatron_burst")]
    sys.path.insert(0, folder)
    sys.argv = ["-c", *arguments]
    os.chdir(folder)
    exec(code, {"__name__": "__main__"})
    return 0

serve(run)
"""


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    """`processes(code, folder, *arguments)`: run code once for each list of arguments."""
    environment = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo",
                   "PYTHONPATH": str(Path(__file__).parents[1] / "helpers")}  # fmt: skip
    command = [sys.executable, "-c", SERVER]
    server = ForkServer.launched(tmp_path_factory.mktemp("processes"), command, environment)

    def run(code, folder, *arguments):
        tasks = [{"code": code, "arguments": words, "folder": str(folder)} for words in arguments]
        return server.run(tasks, limit=240)

    yield run
    server.close()


def trained(processes, folder, store):
    """Train on two ranks with the package in this folder, and return what both print."""
    ranks = [[str(rank), str(store), str(folder)] for rank in (0, 1)]
    ends = processes(TRAINING, folder, *ranks)
    assert [rank.code for rank in ends] == [0, 0], ends
    return [json.loads(rank.output.splitlines()[-1]) for rank in ends]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The files of a wheel, built of a copy of the sources."""
    folder = tmp_path_factory.mktemp("wheel")
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    shutil.copytree(ROOT / "megatron_burst", folder / "source" / "megatron_burst", ignore=ignored)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, folder / "source" / name)
    build = "from setuptools.build_meta import build_wheel; build_wheel('..')"
    built = subprocess.run(
        [sys.executable, "-c", build], cwd=folder / "source", capture_output=True, text=True
    )
    assert built.returncode == 0, built.stderr
    (made,) = folder.glob("*.whl")
    zipfile.ZipFile(made).extractall(folder / "installed")
    compileall.compile_dir(folder / "installed", quiet=1)  # once, not in every copy
    return folder / "installed"


def test_links_of_the_readme_are_absolute_on_a_package_index(wheel):
    (made,) = wheel.glob("*.dist-info/METADATA")
    links = re.findall(r"\]\(([^)]+)\)", made.read_text(encoding="utf-8").partition("\n\n")[2])
    assert len(links) > 10
    assert all(link.startswith("https://") for link in links)


@pytest.fixture(scope="module")
def whole(processes, tmp_path_factory):
    """What ranks print that train with the whole tree."""
    return trained(processes, ROOT, tmp_path_factory.mktemp("whole") / "store")


# What needs a plugin, and raises a ValueError without it. Megatron Lite and verl import theirs.
NEEDS = {
    "diffusion": """
from megatron_burst.recipes.diffusion_models import diffusion_recipes
home = "megatron.bridge.diffusion.models.wan.wan_provider"
diffusion_recipes(type("WanModelProvider", (), {"__module__": home})())
""",
    "rl": """
import types
from megatron_burst.megatron.checks import features
config = types.SimpleNamespace(context_parallel_size=1)
refuse(features.packing_problems(config, mb.BurstConfig(pack="trees")))
""",
    "sparse": """
import types
from megatron_burst.megatron.checks import sparse
config = types.SimpleNamespace(experimental_attention_variant="dsa", context_parallel_size=2)
refuse(sparse.sparse_problems(config, mb.BurstConfig()))
""",
    "testing": """
from megatron_burst.cli import main
sys.exit(main.main(["pretrain", "--cpu", "FOLDER/script.py"]))
""",
    "tools": """
from megatron_burst.cli import main
sys.exit(main.main(["doctor", "--gpu-report", "FOLDER/report.md", "--device", "cpu", "--quick"]))
""",
    "vision": """
import types
from megatron_burst.recipes.vision_models import vision_recipes
vision_recipes(types.SimpleNamespace(vision_config=None))
""",
}
REFUSING = """
import sys
import megatron_burst as mb
from megatron_burst.megatron.checks.problem import refuse
try:
    {needs}
except ValueError as error:
    print(error, file=sys.stderr)
    sys.exit(2)
"""


@pytest.mark.parametrize("name", PLUGINS)
def test_training_needs_no_plugin(name, processes, wheel, whole, tmp_path):
    folder = tmp_path / "installed"
    shutil.copytree(wheel, folder)
    shutil.rmtree(folder / "megatron_burst" / "plugins" / name)
    without = trained(processes, folder, tmp_path / "store")
    assert without[0]["losses"] == without[1]["losses"] == whole[0]["losses"]
    assert without[0]["losses"][-1] < without[0]["losses"][0]
    assert all(rank["installed"] in (True, None) for rank in without + whole)


OPTIONS = {
    "longseq": ["offload", "host_memory", "sequence_chunks", "mlp_tiles"],
    "sparse": ["sparse"],
}
LISTING = """
import dataclasses
import megatron_burst as mb
print(*(field.name for field in dataclasses.fields(mb.BurstConfig)), len(mb.BurstConfig.FIELDS))
"""


@pytest.mark.parametrize("name", OPTIONS)
def test_options_and_flags_go_with_their_plugin(name, processes, wheel, tmp_path):
    folder = tmp_path / "installed"
    shutil.copytree(wheel, folder)

    def listed():
        (listing,) = processes(LISTING, folder, [])
        assert listing.code == 0, listing.errors
        *fields, flags = listing.output.split()
        assert int(flags) == len(fields)
        return fields

    before = listed()
    shutil.rmtree(folder / "megatron_burst" / "plugins" / name)
    assert [field for field in before if field not in OPTIONS[name]] == listed()
    assert set(OPTIONS[name]) < set(before)


def test_every_plugin_with_options_is_tested():
    assert {name for name, entry in registry.plugins().items() if entry.options} == {*OPTIONS}


@pytest.mark.parametrize("name", NEEDS)
def test_what_needs_a_plugin_is_refused_by_name(name, processes, wheel, tmp_path):
    folder = tmp_path / "installed"
    shutil.copytree(wheel, folder)
    (folder / "script.py").touch()
    needs = textwrap.indent(NEEDS[name].replace("FOLDER", str(folder)).strip(), "    ").strip()
    words = f"needs the plugin {name} of megatron_burst, which is not installed"

    def run():
        (ended,) = processes(REFUSING.format(needs=needs), folder, [])
        return ended

    assert words not in run().errors
    shutil.rmtree(folder / "megatron_burst" / "plugins" / name)
    refused = run()
    assert (refused.code, words in refused.errors) == (2, True), refused.errors
