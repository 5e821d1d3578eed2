"""Diffusion models of Megatron-Bridge, tiny and random, with their real classes, on forked ranks.

Called with a folder, it writes NAME.json and NAME.log for every run of `RUNS`.
"""

import functools
import importlib
import os
import sys
from pathlib import Path

import torch

# Name of the run -> module with `run`, number of ranks, and its work.
RUNS = {
    "llada whole": ("llada_ranks", 1, {}),
    "llada zigzag": ("llada_ranks", 2, {}),
    "llada contiguous": ("llada_ranks", 4, {"choices": {"layout": "contiguous"}}),
    "llada packed whole": ("llada_ranks", 1, {"packed": True}),
    "llada packed zigzag": ("llada_ranks", 2, {"packed": True}),
    "llada packed balanced": (
        "llada_ranks", 4, {"packed": True, "choices": {"layout": "balanced"}},
    ),
    "nemotron whole": ("nemotron_ranks", 1, {}),
    "nemotron zigzag": ("nemotron_ranks", 2, {}),
    "nemotron striped": ("nemotron_ranks", 4, {"choices": {"layout": "striped"}}),
    "nemotron recomputed": ("nemotron_ranks", 2, {"choices": {"store": 0.5}}),
}  # fmt: skip


def main(folder, names):
    from megatron_burst.plugins.testing import recipes

    recipes.import_bridge()
    import te_modules

    te_modules.use()
    from dense_attention import DenseAttention
    from megatron.core.extensions import transformer_engine
    from train import fork

    transformer_engine.TEDotProductAttention = DenseAttention
    modules = {module: importlib.import_module(module) for module, _, _ in RUNS.values()}
    for name in names or RUNS:
        module, world, extra = RUNS[name]
        work = {"world": world, "output": str(folder / f"{name}.json"), "port": os.environ["PORT"]}
        work |= {"log": str(folder / f"{name}.log"), **extra}
        job = functools.partial(modules[module].run, work)
        for child in [fork(job, rank, work) for rank in range(world)]:
            os.waitpid(child, 0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), sys.argv[2:])
