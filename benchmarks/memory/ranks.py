"""One training step of a real Megatron-Core GPT on CPU ranks, with its live tensors counted.

Every rank counts its own tensors. The first step is not counted, because it makes plans, buffers
and gradients.
"""

from __future__ import annotations

import gc
import warnings
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

from benchmarks.ranks import on_ranks
from megatron_burst.plugins.longseq.host.mover import HostMemory

from .live import Block, LiveTensors


@dataclass(frozen=True)
class Cell:
    """One measurement: shapes in Llama's ratios, and settings of `BurstConfig`."""

    tokens: int = 8192
    layers: int = 8
    hidden: int = 256
    heads: int = 8
    kv_heads: int = 2
    ffn: int = 896
    vocabulary: int = 512
    tp: int = 1
    cp: int = 4
    recompute: bool = True
    choices: dict[str, Any] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        return self.tp * self.cp


@dataclass(frozen=True)
class RankMemory:
    """Results of one rank.

    The results are device bytes of states, the peak of each phase, the storages of the highest
    peak, bytes that stayed after the step, and the maximum on the host.
    """

    states: int
    peaks: dict[str, int]
    blocks: tuple[Block, ...]
    left: int
    host: int
    report: str

    @property
    def peak(self) -> int:
        return max(self.peaks.values())


def measure(cell: Cell) -> list[RankMemory]:
    """Return the results of each rank, which runs in its own process."""
    return [RankMemory(**report) for report in on_ranks(cell.ranks, _counted, cell)]


def _counted(cell: Cell) -> dict[str, Any]:
    """Count on a rank, with the replacements of Megatron's CUDA calls for a CPU."""
    warnings.filterwarnings("ignore")
    from megatron_burst.plugins.testing import cpu

    cpu.enable()
    return asdict(_step(cell))


def _step(cell: Cell) -> RankMemory:
    """Run two steps on this rank and count the second one."""
    model = build(cell)
    layers = model.module.decoder.layers
    batch = _batch(cell)
    _run(model, batch)
    states = [t for p in model.parameters() for t in (p, p.main_grad)]
    hosts = [candidate for candidate in gc.get_objects() if isinstance(candidate, HostMemory)]
    live = LiveTensors(
        states=[*states, *model.module.buffers()],
        host=lambda tensor: any(memory.owns(tensor) for memory in hosts),
    )
    phases = Phases(live)
    for index, layer in enumerate(layers):
        phases.follow(layer, index)
    norm = model.module.decoder.final_layernorm
    norm.register_forward_pre_hook(lambda *_: live.begin("LM head and loss"))
    model.zero_grad_buffer()
    with live:
        _run(model, batch, live, phases)
        del batch
        live.begin("end")
    peaks = {name: peak.bytes for name, peak in live.peaks.items()}
    return RankMemory(
        states=live.bytes["state"],
        peaks=peaks,
        blocks=live.peak.blocks,
        left=live.bytes["device"],
        host=live.host_peak,
        report=live.report(30),
    )


class Phases:
    """Reporter of the running phase to the counter, with the phase names of the account."""

    def __init__(self, live: LiveTensors):
        self.live, self.way = live, "forward"

    def follow(self, layer: nn.Module, index: int) -> None:
        """Report forward, recompute, and each half's backward of this layer."""
        begin, half = self.live.begin, layer._forward_mlp
        named = {"forward": "forward of layer", "backward": "recompute of layer"}
        layer.register_forward_pre_hook(lambda *_: begin(f"{named[self.way]} {index}"))

        def mlp(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            out = half(hidden, *args, **kwargs)
            for tensor, name in ((out, "MLP half"), (hidden, "attention half")):
                if tensor.requires_grad:
                    phase = f"backward of layer {index}: {name}"
                    tensor.register_hook(lambda grad, phase=phase: begin(phase))
            return out

        layer._forward_mlp = mlp


def _run(
    model: nn.Module,
    batch: dict[str, torch.Tensor | None],
    live: LiveTensors | None = None,
    phases: Phases | None = None,
) -> None:
    """Run forward and backward of one micro-batch."""
    if live is not None:
        live.begin("batch and embedding")
    loss = model(**batch)
    total = loss.float().mean()
    del loss
    if live is not None and phases is not None:
        phases.way = "backward"
        live.begin("backward of the LM head")
    total.backward()


def build(cell: Cell) -> Any:
    """Return the model of a cell on this rank, in bf16, in Megatron's data parallelism."""
    import torch.nn.functional as F
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    import megatron_burst as mb
    import megatron_burst.megatron as burst

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=cell.tp, context_parallel_size=cell.cp
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    again = {"recompute_granularity": "full", "recompute_method": "uniform"}
    config = TransformerConfig(
        num_layers=cell.layers,
        hidden_size=cell.hidden,
        ffn_hidden_size=cell.ffn,
        num_attention_heads=cell.heads,
        num_query_groups=cell.kv_heads,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=cell.tp,
        sequence_parallel=cell.tp > 1,
        context_parallel_size=cell.cp,
        **(again | {"recompute_num_layers": 1} if cell.recompute else {}),
        calculate_per_token_loss=True,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
    )
    choices = mb.BurstConfig(**cell.choices)
    burst.install(layout=choices.layout)
    burst.configure(config, choices)
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=cell.vocabulary,
        max_sequence_length=cell.tokens,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
    ).to(torch.bfloat16)
    return DistributedDataParallel(
        config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model
    )


def _batch(cell: Cell) -> dict[str, torch.Tensor | None]:
    """Return this rank's part of a batch of one sequence, as `GPTModel.forward` takes it."""
    rows = cell.tokens // cell.cp
    tokens = torch.arange(rows).remainder_(cell.vocabulary)[None]
    return {
        "input_ids": tokens,
        "position_ids": torch.arange(rows)[None],
        "attention_mask": None,
        "labels": tokens.clone(),
    }
