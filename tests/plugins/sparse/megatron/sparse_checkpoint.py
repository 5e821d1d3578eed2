"""Ranks that write a Megatron checkpoint of a model with a selection rule or hybrid attention.

The model is saved at some sizes and loaded at others. Arguments: a folder, and the rule
or "hybrid".
"""

import sys
from pathlib import Path

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[3] / "helpers"))
import sparse_layers

if __name__ == "__main__":
    dist.init_process_group("gloo")
    folder, rule = sys.argv[1:]
    sizes = {"context_parallel_size": 2, "tensor_model_parallel_size": 2}
    others = {"context_parallel_size": 4}
    layers = sparse_layers.RULES.get(rule)
    if layers is None:
        layers, latent = sparse_layers.HYBRID, sparse_layers.LATENT
        sizes, others = latent | sizes, latent | others
    print(sparse_layers.saved_and_loaded(folder, sizes, others, layers))
