"""Diffusion models of Megatron-Bridge, tiny and random, with their real classes, on forked ranks.

Runs are jobs (`jobs`), by their names in `RUNS`.
"""

import importlib
import sys
import types

from jobs import serve_jobs
from loaded import BRIDGE, load

# Name of the run -> module with `run`, number of ranks, and its work.
RUNS = {
    "llada whole": ("llada_ranks", 1, {}),
    "llada zigzag": ("llada_ranks", 2, {}),
    "llada striped": ("llada_ranks", 2, {"choices": {"layout": "striped"}}),
    "llada contiguous": (
        "llada_ranks", 4, {"choices": {"layout": "contiguous", "offload": 0.5,
                                       "lm_head_loss": "single_pass"}},
    ),
    "llada packed whole": ("llada_ranks", 1, {"packed": True}),
    "llada packed zigzag": (
        "llada_ranks", 2, {"packed": True, "choices": {"sequence_chunks": 2, "mlp_tiles": 2}},
    ),
    "llada packed balanced": (
        "llada_ranks", 4, {"packed": True, "choices": {"layout": "balanced"}},
    ),
    "nemotron whole": ("nemotron_ranks", 1, {}),
    "nemotron zigzag": ("nemotron_ranks", 2, {}),
    "nemotron striped": ("nemotron_ranks", 4, {"choices": {"layout": "striped"}}),
    "nemotron recomputed": (
        "nemotron_ranks", 2, {"choices": {"store": 0.5, "mlp_tiles": 2, "offload": 0.5}},
    ),
    "wan whole": ("wan_ranks", 1, {}),
    "wan one rank": ("wan_ranks", 1, {"apply": True}),
    "wan zigzag": ("wan_ranks", 2, {"multiple": 4}),
    "wan balanced": ("wan_ranks", 2, {"choices": {"layout": "balanced"}}),
    "wan striped": ("wan_ranks", 2, {"choices": {"layout": "striped"}}),
    "wan contiguous": ("wan_ranks", 2, {"choices": {"layout": "contiguous"}}),
    "wan recomputed": ("wan_ranks", 4, {"choices": {"layout": "balanced", "store": 0.5}}),
    "wan tensor whole": ("wan_ranks", 2, {"tensor": 2, "multiple": 2}),
    "wan tensor": ("wan_ranks", 4, {"tensor": 2, "choices": {"layout": "balanced"}}),
    "flux whole": ("flux_ranks", 1, {}),
    "flux zigzag": ("flux_ranks", 2, {}),
    "flux contiguous": ("flux_ranks", 4, {"choices": {"layout": "contiguous"}}),
    "flux tensor whole": ("flux_ranks", 2, {"tensor": 2}),
    "flux tensor striped": ("flux_ranks", 4, {"tensor": 2, "choices": {"layout": "striped"}}),
    "errors": ("error_ranks", 2, {}),
    "checks": ("check_ranks", 1, {}),
}  # fmt: skip

# Modules of Bridge that every rank would import.
LOADED = [
    f"megatron.bridge.diffusion.{name}"
    for name in (
        "models.common.dgpt_step", "models.wan.wan_step", "models.flux.flux_step",
        "recipes.wan.wan",
    )
]  # fmt: skip


def without_inference():
    """Put empty packages where Bridge's Flux imports its inference, which needs more packages."""
    models = importlib.import_module("megatron.bridge.diffusion.models")
    for name in ("flux", "flux.flow_matching"):
        package = types.ModuleType(f"{models.__name__}.{name}")
        package.__path__ = [f"{models.__path__[0]}/{name.replace('.', '/')}"]
        sys.modules[package.__name__] = package


def job(work):
    module, _, extra = RUNS[work["name"]]
    importlib.import_module(module).run(work | extra)


if __name__ == "__main__":
    from megatron_burst.plugins.testing import recipes

    recipes.import_bridge()
    import te_modules

    te_modules.use()
    from dense_attention import DenseAttention
    from megatron.core import tensor_parallel
    from megatron.core.extensions import transformer_engine

    transformer_engine.TEDotProductAttention = DenseAttention
    transformer_engine.TEColumnParallelLinear = tensor_parallel.ColumnParallelLinear
    without_inference()
    load([*BRIDGE, *LOADED, *(module for module, _, _ in RUNS.values())])
    serve_jobs(job)
