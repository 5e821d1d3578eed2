"""The blocks of README.md and docs/nemo.md that need Megatron-Bridge run with it.

Training is left out: `pretrain` only looks at what it is given. Training itself is test_bridge's.
"""

import json
import subprocess
import sys

import documented

BLOCKS = [block for page in documented.NAMES for block in documented.blocks(page)]
BLOCKS = [block for block in BLOCKS if block.needs == "bridge"]
FOUND = "from megatron_burst.recipes import apply_burst\n"
FINETUNE = "from megatron.bridge.recipes.llama import llama3_8b_sft_config\n"
# Page and number -> what the reader has imported, and what must be true afterwards.
READERS = {
    "README.md-0": ("", "cfg.model.cross_entropy_loss_fusion is False"),
    "docs/nemo.md-0": ("", "calls == [(cfg, forward_step)] and cfg.model.seq_length == 2**20"),
    "docs/nemo.md-1": (FOUND + FINETUNE, "cfg.model.context_parallel_size == 4"),
}
SCRIPT = """
import json, sys
from megatron_burst.testing import recipes as cpu
cpu.enable()
import megatron.bridge.training.pretrain as module
for name, has, text, then in json.load(sys.stdin):
    space = {"calls": [], "__name__": name}
    module.pretrain = lambda config, step: space["calls"].append((config, step))
    exec(has, space)
    exec(compile(text, name, "exec"), space)
    assert space["cfg"].model.transformer_layer_spec.func.__name__ == "burst_layer_spec", name
    assert eval(then, space), f"{name}: {then}"
    print("ran", name)
"""


def test_blocks_that_need_bridge_run(environment, tmp_path):
    work = [(block.name, *READERS[block.name], block.text) for block in BLOCKS]
    work = [(name, has, text, then) for name, has, then, text in work]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment | {"WORLD_SIZE": "64"}, cwd=tmp_path,
        input=json.dumps(work), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    for name in READERS:  # all of them, and no others: READERS[...] above
        assert f"ran {name}\n" in done.stdout
