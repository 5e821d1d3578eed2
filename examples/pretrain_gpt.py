"""Training script of a Llama-style GPT on Megatron-Core with BurstAttention.

    torchrun --nproc-per-node 4 examples/pretrain_gpt.py --data-path data/text \
        --seq-length 4096 --context-parallel-size 4 --hierarchical-context-parallel-sizes 2 2

All parts are Megatron-Core's own (GPTModel, GPTDataset, DistributedDataParallel, optimizer,
pipeline schedules, distributed checkpoints) except two calls in `run`. `install` adds the attention
to Megatron-Core, and `configure` selects it for one model. The script runs with any number of
processes; without a GPU it uses gloo on the CPU.
"""

from __future__ import annotations

import os
import time
from argparse import Namespace
from collections.abc import Iterator
from datetime import timedelta
from functools import partial

import arguments
import checkpoint
import dataset
import torch
from live import Reporter
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from model import build_model, build_optimizer, model_config

import megatron_burst.megatron as burst
from megatron_burst import flags
from megatron_burst.plugins.testing import cpu


def main() -> None:
    args = arguments.parse_args()
    if not torch.cuda.is_available():
        cpu.enable()
    join_processes(args)
    run(args)
    torch.distributed.destroy_process_group()


def run(args: Namespace) -> list[dict[str, float]]:
    """Build the model of the flags and train it.

    Returns:
        The metrics of each step.
    """
    burst.install(layout=args.burst_layout)
    config = model_config(args)
    choice = flags.burst_config(args)
    burst.configure(config, choice, seq_length=args.seq_length)

    make_groups(args)
    stages = build_model(args, config)
    optimizer, schedule = build_optimizer(args, config, stages)
    iteration, consumed = 0, 0
    if args.load:
        iteration, consumed = checkpoint.load(
            args.load, args.ckpt_step, stages, optimizer, schedule
        )
    return train(args, stages, optimizer, schedule, iteration, consumed)


def join_processes(args: Namespace) -> None:
    """Join the process group of torchrun; a single process requires no launcher."""
    for name, default in {"MASTER_ADDR": "localhost", "MASTER_PORT": "0", "RANK": "0",
                        "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():  # fmt: skip
        os.environ.setdefault(name, default)
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group(
        "nccl" if torch.cuda.is_available() else "gloo",
        timeout=timedelta(minutes=args.distributed_timeout_minutes),
    )


def make_groups(args: Namespace) -> None:
    """Create Megatron's process groups, and seed the generators of the weights."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=args.num_virtual_stages_per_pipeline_rank,
        context_parallel_size=args.context_parallel_size,
        hierarchical_context_parallel_sizes=args.hierarchical_context_parallel_sizes,
        distributed_timeout_minutes=args.distributed_timeout_minutes,
    )
    # One seed per pipeline stage, as in Megatron: stages draw different weights.
    seed = args.seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)


def forward_step(batches: Iterator[dataset.Batch], model: torch.nn.Module):
    """Run one micro-batch in the form that Megatron's pipeline schedules require."""
    batch = next(batches)
    losses = model(
        batch["tokens"],
        batch["position_ids"],
        attention_mask=batch.get("attention_mask"),
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],  # multi-token prediction and the fused loss need it
        packed_seq_params=dataset.packed_seq_params(batch),
    )
    return losses, partial(sum_of_losses, batch["loss_mask"])


def sum_of_losses(loss_mask: torch.Tensor, losses: torch.Tensor):
    """Return the loss sum of this rank, its number of tokens, and both for the report."""
    total = (losses.float() * loss_mask).sum()
    tokens = loss_mask.sum()
    return total, tokens.to(torch.int), torch.stack([total.detach(), tokens])


def mean_over_all_tokens(reports: list[torch.Tensor]) -> float:
    """Return the loss per token of the global batch, on every rank. Collective.

    Args:
        reports: Reports of `sum_of_losses`; empty on all pipeline stages but the last.
    """
    pair = torch.stack(reports).sum(dim=0) if reports else torch.zeros(2).cuda()
    for group in (
        parallel_state.get_data_parallel_group(with_context_parallel=True),
        parallel_state.get_pipeline_model_parallel_group(),
    ):
        torch.distributed.all_reduce(pair, group=group)
    return (pair[0] / pair[1]).item()


def train(args, stages, optimizer, schedule, iteration: int, consumed: int):
    """Train until --exit-interval, and return the metrics of each step on rank 0. Collective."""
    samples = dataset.build(args)
    run_schedule = get_forward_backward_func()
    rank = torch.distributed.get_rank()
    with Reporter(rank == 0, args.metrics, args.log_interval, args.exit_interval) as reporter:
        for step in range(iteration + 1, args.exit_interval + 1):
            start = time.perf_counter()
            for stage in stages:
                stage.zero_grad_buffer()
            optimizer.zero_grad()
            reports = run_schedule(
                forward_step_func=forward_step,
                # each stage reads the batches independently
                data_iterator=[dataset.micro_batches(samples, args, consumed) for _ in stages],
                model=stages,
                num_microbatches=args.global_batch_size
                // (args.micro_batch_size * args.data_parallel_size),
                seq_length=args.seq_length,
                micro_batch_size=args.micro_batch_size,
            )
            _, grad_norm, _ = optimizer.step()
            consumed += args.global_batch_size
            lr = optimizer.param_groups[0]["lr"]
            schedule.step(increment=args.global_batch_size)

            loss = mean_over_all_tokens(reports)
            if step == iteration + 1:
                lines = (burst.startup_line() or one_rank_line(args), burst.lm_head_line())
                reporter.run(vars(args), " | ".join(filter(None, lines)))
            seconds = time.perf_counter() - start
            speed = args.global_batch_size * args.seq_length / seconds
            reporter.step(step, loss, float(grad_norm), lr, speed)
            due = args.save_interval and step % args.save_interval == 0
            if args.save and (due or step == args.exit_interval):
                checkpoint.save(args.save, step, consumed, stages, optimizer, schedule)
    return reporter.history


def one_rank_line(args: Namespace) -> str:
    return (
        f"megatron | context-parallel size {args.context_parallel_size} | "
        f"{args.transformer_impl} attention of Megatron-Core"
    )


if __name__ == "__main__":
    main()
