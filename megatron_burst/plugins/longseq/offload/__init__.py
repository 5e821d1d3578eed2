# SPDX-License-Identifier: Apache-2.0
"""`--burst-offload` in Megatron: saved tensors of layers are in host memory until backward."""
