"""What the server that forks ranks (`ranks.Ranks`) imports: Transformer Engine, on the CPU."""

import importlib

import torch_forwards

from megatron_burst.megatron import cpu, training

cpu.enable()
torch_forwards.enable()
if training.available():
    importlib.import_module("megatron.training.training")
