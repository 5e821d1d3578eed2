"""What the server that forks ranks (`ranks.Ranks`) imports: Transformer Engine, on the CPU."""

import importlib

import torch_forwards

from megatron_burst.megatron import training_available
from megatron_burst.plugins.testing import cpu

cpu.enable()
torch_forwards.enable()
if training_available():
    importlib.import_module("megatron.training.training")
