"""In which order the rooms of tests run, and which of them CI runs once or not at all.

Paths below `tests/`; `conftest.py` orders and marks by them, CONTRIBUTING has them in a table.
"""

# Rooms whose tests train whole models, the longest first; then those with ranks. All others follow
# in the order of their names.
FIRST = (
    "megatron_lm", "kernels", "parity", "examples", "megatron", "plugins/longseq",
    "linear_cross_entropy", "execution", "linear_attention", "comm", "cli",
)  # fmt: skip
# What another Megatron, Python or torch could break; all other tests are marked `once`.
AGAIN = (
    "megatron/", "megatron_lm/", "parity/", "examples/", "cli/", "kernels/",
    "linear_cross_entropy/", "linear_attention/test_linear_gloo", "execution/test_attention_",
    "execution/test_store", "execution/test_doors", "execution/test_live_tensors",
    "plugins/longseq/", "plugins/rl/megatron/", "plugins/sparse/megatron/", "plugins/vision/",
    "execution/test_in_flight", "comm/test_process_groups", "house/test_flags",
    "house/test_options", "house/test_docs_blocks", "plugins/tools/test_memory_measured",
)  # fmt: skip
# Of these, files of which each interpreter has half of the cases of a function: every case runs on
# one, every function on both, and what differs between the two shows in half of the cases.
HALVED = (
    "cli/test_doctor", "comm/test_process_groups", "execution/test_attention_gloo",
    "execution/test_doors", "execution/test_in_flight", "execution/test_store",
    "house/test_docs_blocks", "kernels/test_csrc", "kernels/test_flash", "kernels/test_flex",
    "kernels/test_kernels", "kernels/test_rounded", "linear_attention/test_linear_gloo",
    "linear_cross_entropy/test_divergence", "linear_cross_entropy/test_linear_cross_entropy",
    "linear_cross_entropy/test_logprobs", "megatron/test_attention_layout",
    "megatron/test_bad_input", "megatron/test_balanced_batches", "megatron/test_batch_entries",
    "megatron/test_burst_pack", "megatron/test_captured_layer", "megatron/test_cluster_rates",
    "megatron/test_fsdp", "megatron/test_groups", "megatron/test_lm_head", "megatron/test_mask",
    "megatron/test_micro_batches", "megatron/test_mtp", "megatron/test_no_sync",
    "megatron/test_packed", "megatron/test_parity", "megatron/test_plans", "megatron/test_qk_clip",
    "megatron/test_rope",
    "plugins/longseq/megatron/test_layer_chunks", "plugins/longseq/megatron/test_mlp_tiles",
    "plugins/longseq/megatron/test_offload", "plugins/longseq/test_host_memory",
    "plugins/longseq/test_row_tiles", "plugins/rl/megatron/",
    "plugins/sparse/megatron/test_hybrid_layers", "plugins/sparse/megatron/test_sparse_layers",
    "plugins/vision/megatron/test_vision",
)  # fmt: skip
# Of the long tail, what CI leaves to `make test-slow`; most have short tests in the same file.
RARE = (
    "benchmarks/", "examples/test_million", "execution/test_attention.py",
    "execution/test_attention_gloo", "execution/test_large",
    "kernels/test_triton_attention.py::test_the_kernels_compile", "kernels/test_csrc_use",
    "layout/", "linear_attention/", "megatron/test_attention_layout",
    "megatron/test_balanced_batches", "megatron/test_checkpoint", "megatron/test_lm_head",
    "megatron/test_micro_batches", "megatron/test_mtp", "megatron/test_parity",
    "megatron_lm/test_documents", "megatron_lm/test_hybrid", "megatron_lm/test_layer_chunks",
    "megatron_lm/test_offload", "megatron_lm/test_sft", "megatron_lm/test_slurm",
    "megatron_lm/test_tiles", "megatron_lm/test_training", "schedule/",
    "plugins/longseq/megatron/test_layer_chunks", "plugins/longseq/megatron/test_offload",
    "plugins/vision/megatron/test_vision", "plugins/tools/",
)  # fmt: skip


def room(path):
    """The room of a file of tests, given its path below `tests/`: its first folder; for tests of a
    plugin `plugins/NAME`, or `megatron` if they use the ranks of `tests/megatron`."""
    parts = path.parts
    if parts[0] != "plugins":
        return parts[0]
    return "megatron" if parts[2] == "megatron" else "/".join(parts[:2])
