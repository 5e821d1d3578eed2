"""The blocks of README.md and docs/nemo.md that need Megatron-Bridge run with it.

`pretrain` only reads its arguments here; test_bridge tests the training.
"""

import documented

BLOCKS = [block for page in documented.NAMES for block in documented.blocks(page)]
BLOCKS = [block for block in BLOCKS if block.needs == "bridge"]
# Page and number -> what must be true afterwards.
READERS = {
    "README.md-0": "cfg.model.cross_entropy_loss_fusion is False",
    "docs/nemo.md-0": "calls == [(cfg, forward_step)] and cfg.model.seq_length == 2**20",
    "docs/nemo.md-1": "cfg.model.context_parallel_size == 4",
}
SCRIPT = """
import os
os.environ["WORLD_SIZE"] = "64"
import megatron.bridge.training.pretrain as module
spaces = {}  # of each page: a block has what those before it define
for page, name, text, then in blocks:
    space = spaces.setdefault(page, {"calls": [], "__name__": page})
    calls = space["calls"]
    module.pretrain = lambda config, step: calls.append((config, step))
    exec(compile(text, name, "exec"), space)
    assert space["cfg"].model.transformer_layer_spec.func.__name__ == "burst_layer_spec", name
    assert eval(then, space), f"{name}: {then}"
    print("ran", name)
"""


def test_blocks_that_need_bridge_run(serve):
    blocks = [(block.page, block.name, block.text, READERS[block.name]) for block in BLOCKS]
    code, text, _ = serve(1, code=SCRIPT, names={"blocks": blocks}, launched=False)
    assert code == 0, text[-3000:]
    for name in READERS:  # all of them, and no others: READERS[...] above
        assert f"ran {name}\n" in text
