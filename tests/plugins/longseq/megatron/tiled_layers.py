"""Functions that the ranks of `test_mlp_tiles` run.

They run the MLP half of one layer of Megatron, with and without tiles of rows, under Megatron's
data-parallel wrapper, in fp64.
"""

import contextlib
from collections import Counter
from types import SimpleNamespace
from unittest import mock

import session
import torch
import torch.distributed as dist

ROWS, BATCH, HIDDEN = 11, 2, 16
PARALLEL = (
    "tensor_model_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size"
)  # fmt: skip
DENSE = {"ffn_hidden_size": 24}
MOE = {
    "num_moe_experts": 4, "moe_ffn_hidden_size": 12, "moe_router_topk": 2,
    "moe_token_dispatcher_type": "alltoall", "moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 0.01,
    "add_bias_linear": False,
}  # fmt: skip


def make_config(settings):
    from megatron.core.transformer.transformer_config import TransformerConfig

    base = {
        "num_layers": 1, "hidden_size": HIDDEN, "num_attention_heads": 4, "hidden_dropout": 0.0,
        "attention_dropout": 0.0, "params_dtype": torch.float64, "use_cpu_initialization": True,
        "gradient_accumulation_fusion": False, "bias_dropout_fusion": False,
        "masked_softmax_fusion": False, "bias_activation_fusion": False,
    }  # fmt: skip
    return TransformerConfig(**base | settings)


def make_layer(config):
    """Return a layer of the local spec in which only the MLP half is trained."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_layer import TransformerLayer

    model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    torch.manual_seed(3)
    spec = get_gpt_layer_local_spec(num_experts=config.num_moe_experts, moe_grouped_gemm=False)
    layer = TransformerLayer(config, spec.submodules, layer_number=1).to(config.params_dtype)
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_("mlp" in name)
        if "norm" in name:  # not its identity
            torch.nn.init.normal_(parameter, 1.0, 0.3)
    return layer


def wrapped(config, layer, options):
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    asked = {"overlap_grad_reduce": True, "bucket_size": 200} | options
    return DistributedDataParallel(config, DistributedDataParallelConfig(**asked), layer)


def trained(config, tiles, options, given, micro_batches=2):
    """Return the results of a step by name, and the number of gradients per parameter."""
    from megatron.core.distributed import param_and_grad_buffer

    import megatron_burst as mb
    import megatron_burst.megatron as burst

    burst.configure(config, mb.BurstConfig(algorithm="megatron", mlp_tiles=tiles))
    layer = make_layer(config)
    ddp = wrapped(config, layer, options)
    arrived, ready = Counter(), Counter()
    names = {p: name for name, p in layer.named_parameters()}
    for parameter in filter(lambda p: p.requires_grad, names):
        parameter.register_post_accumulate_grad_hook(lambda p: arrived.update([names[p]]))
    group = param_and_grad_buffer._ParamAndGradBucketGroup
    register = group.register_grad_ready

    def registering(self, parameter, *others):
        ready.update([names[parameter]] * self.is_last_microbatch)
        return register(self, parameter, *others)

    ddp.zero_grad_buffer()
    found = {}
    if "padding_mask" in given:
        given["padding_mask"] = torch.arange(BATCH * ROWS).view(BATCH, ROWS) % 3 == 1
    with mock.patch.object(group, "register_grad_ready", registering):
        for number in range(micro_batches):
            draw = torch.Generator().manual_seed(7 + number + 10 * dist.get_rank())
            shape, dtype = (2, ROWS, BATCH, HIDDEN), config.params_dtype
            x, dy = torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype)
            x = x.requires_grad_()
            with ddp.no_sync() if number < micro_batches - 1 else mock.MagicMock():
                y = layer._forward_mlp(x, **given)
                assert y._base is None  # Megatron's pipeline empties what it has sent
                y.backward(dy)
            found |= {f"y{number}": y.detach(), f"dx{number}": x.grad}
        ddp.finish_grad_sync()
    found |= {name: p.main_grad.clone() for p, name in names.items() if p.requires_grad}
    found |= {name: buffer.clone() for name, buffer in layer.named_buffers()}
    return found | losses(), (dict(arrived), dict(ready))


def losses():
    """Return the logged auxiliary losses and clear them."""
    from megatron.core.transformer.moe import moe_utils

    try:
        from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
    except ImportError:
        tracker = moe_utils.get_moe_layer_wise_logging_tracker()
        found = {name: entry["values"].clone() for name, entry in tracker.items()}
        tracker.clear()
        return found
    metrics = get_moe_metrics_tracker().metrics
    found = {name: entry.values.clone() for name, entry in metrics.items()}
    metrics.clear()
    return found


def fused_weight_gradient(total_input, grad_output, main_grad):
    """Add the weight gradient to main_grad, as Apex's kernel does."""
    main_grad.add_(grad_output.t() @ total_input)


@contextlib.contextmanager
def fusion(on):
    """Let Megatron use Apex's kernel for fused weight gradients if `on`."""
    from megatron.core.tensor_parallel import layers

    kernel = SimpleNamespace(wgrad_gemm_accum_fp32=fused_weight_gradient)
    with contextlib.ExitStack() as stack:
        if on:
            enter = stack.enter_context
            enter(mock.patch.object(layers, "_grad_accum_fusion_available", True))
            enter(mock.patch.object(layers, "fused_weight_gradient_mlp_cuda", kernel, create=True))
        yield


def compare(settings, tiles, options=(), given=(), share=0.0):
    """Compare a layer with tiles and without tiles on this rank.

    Return the worst error and the size of each result, the numbers of parameter gradients of both,
    and the bytes moved to host memory. share: fraction of tiles that are moved; data that were not
    waited for are NaN.
    """
    from megatron.core.transformer.moe import moe_utils

    import megatron_burst as mb
    from megatron_burst.megatron import patching
    from megatron_burst.plugins.longseq.offload import tier

    # 0.16 reads a name that it has only with Transformer Engine.
    vars(moe_utils).setdefault("te_general_gemm", None)
    sizes = {name: settings[name] for name in PARALLEL if name in settings}
    with session.parallel(**sizes):
        with fusion(settings.get("gradient_accumulation_fusion")):
            config = make_config(settings)
            expected, stock = trained(config, 1, dict(options), dict(given))
            memory = mb.HostMemory(2**24, strict=True)
            running = SimpleNamespace(fraction=share) if share else None
            here = SimpleNamespace(
                running=running, saved=lambda fraction: memory.saved(fraction, min_bytes=0)
            )
            patching.run_state().plugins |= {tier.OPTIONS: True, tier.TIER: here}
            found, ours = trained(config, tiles, dict(options), dict(given))
        assert found.keys() == expected.keys()
        assert memory.used == 0
        errors = {k: float((found[k] - expected[k]).abs().max()) for k in expected}
        sizes = {k: float(expected[k].abs().max()) for k in expected}
        return errors, sizes, stock, ours, memory.bytes_out
