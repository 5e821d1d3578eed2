"""What a run on a cluster needs and takes, from plain numbers: no torch, no Megatron."""
