"""`--burst-offload` in Megatron: what layers leave for backward waits in host memory."""
