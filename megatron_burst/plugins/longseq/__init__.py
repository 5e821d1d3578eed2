# SPDX-License-Identifier: Apache-2.0
"""Very long sequences: activations in host memory, and layers that run in row chunks.

`host/` moves tensors to host memory (`mb.HostMemory`). `tiles` runs row-wise functions in tiles of
rows (`mb.tiled`). `offload/` and `layer/` apply both to the layers of Megatron. Sources: MEMO
(arXiv 2407.12117), FPDT (arXiv 2408.16978), ALST (arXiv 2506.13996).
"""
