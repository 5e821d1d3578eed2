"""One rank of `grpo.py`: GRPO with Megatron-Core's model, data parallelism and optimizer.

    torchrun --nproc-per-node 4 examples/grpo_train.py --context-parallel-size 2 --metrics FILE

A step samples (`grpo_task`), computes old log-probabilities (`mb.rl.logprobs`), and updates weights
by the clipped ratio (`mb.rl.logprobs` with `loss`). Prefixes that samples share are computed once.
Global rank 0 prints some of the rows and writes all rows to FILE. The module contains the algorithm
and the comparison with separate trajectories.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import arguments
import grpo_task
import torch
import torch.distributed as dist
from grpo_task import Sample
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from model import build_gpt, build_model, build_optimizer, model_config
from pretrain_gpt import join_processes, make_groups

import megatron_burst as mb
from megatron_burst.plugins.testing import cpu

MODEL = (
    "--data-path none --num-attention-heads 4 --num-query-groups 2 "
    "--make-vocab-size-divisible-by 1 --weight-decay 0 --clip-grad 0 --min-lr 0"
)  # Megatron clips gradients in fp32 only
UPDATES = 2  # weight updates per step; in the second update, ratios differ from 1
CLIP = 0.2
REPEATS = 7  # timings; the median is reported
LINES = 20  # printed rows of the table


class Policy:
    """The trained model over all ranks, and on each rank a sampler with the same weights."""

    def __init__(self, args: Namespace):
        last = max(grpo_task.turns(args.digits)) + args.digits
        words = [*MODEL.split(), "--vocab-size", str(grpo_task.VOCABULARY)]
        words += ["--seq-length", str(-(-last // 16) * 16), "--seed", str(args.seed)]
        words += ["--context-parallel-size", str(args.context_parallel_size)]
        words += ["--num-layers", str(args.num_layers), "--hidden-size", str(args.hidden_size)]
        words += ["--ffn-hidden-size", str(3 * args.hidden_size)]
        words += ["--init-method-std", str(args.hidden_size**-0.5)]
        words += ["--train-iters", str(args.warm_up + UPDATES * args.steps), "--lr", str(args.lr)]
        self.args = arguments.parse_args(words)
        mb.megatron.install()
        make_groups(self.args)
        config = self._burst_config()
        self.stages = build_model(self.args, config)
        self.optimizer, self.schedule = build_optimizer(self.args, config, self.stages)
        single: Any = dist.new_subgroups(1)[0]
        groups = ProcessGroupCollection.use_mpu_process_groups()
        groups.cp = single
        # Megatron's own attention, so that log-probabilities of both attentions are compared.
        self.sampler = build_gpt(self.args, self._config(1), pg_collection=groups)

    def _config(self, cp_size: int) -> Any:
        config = model_config(Namespace(**vars(self.args) | {"context_parallel_size": cp_size}))
        config.params_dtype = torch.float64  # so that rounding hides no error
        return config

    def _burst_config(self) -> Any:
        config = self._config(self.args.context_parallel_size)
        mb.megatron.configure(config, mb.BurstConfig(pack="trees"))
        return config

    def sync(self) -> None:
        """Copy the weights to the sampler, as to a rollout engine."""
        self.sampler.load_state_dict(self.stages[0].module.state_dict())

    def copy(self) -> Any:
        """Return a copy of the model that is not trained."""
        stages = build_model(self.args, self._burst_config())
        stages[0].load_state_dict(self.stages[0].state_dict())
        return stages

    def gradients(self, trajectories: list[list[int]], loss: Any, **options: Any) -> Any:
        """Compute the gradients of `loss` for the optimizer, and return the log-probabilities."""
        for stage in self.stages:
            stage.zero_grad_buffer()
        self.optimizer.zero_grad()
        return mb.rl.logprobs(self.stages, trajectories, loss=loss, **options)

    def update(self, trajectories: list[list[int]], loss: Any, **options: Any) -> Any:
        logprobs = self.gradients(trajectories, loss, **options)
        self.optimizer.step()
        self.schedule.step(increment=self.args.global_batch_size)
        return logprobs


def advantages(samples: list[Sample]) -> list[torch.Tensor]:
    """Return the advantages of the sampled tokens of each sample.

    An advantage is the token's return minus the mean return over all samples of the question,
    divided by the standard deviation.
    """
    normalized = []
    for sample in samples:
        group = [peer.returns for peer in samples if peer.question == sample.question]
        returns = torch.tensor(group, dtype=torch.float64)
        own = torch.tensor(sample.returns, dtype=torch.float64)
        normalized.append((own - returns.mean(0)) / (returns.std(0, correction=0) + 1e-4))
    return normalized


@dataclass
class Grpo:
    """The loss of GRPO: the clipped ratio of new and old probabilities, times the advantage.

    Attributes:
        samples: Samples of the step.
        advantages: Advantages of the sampled tokens, by sample.
        before: Old log-probabilities of the trajectories of this rank.
        reference: Log-probabilities of the reference policy; None without a KL term.
        kl: Weight of the divergence from the reference policy.
        entropy: Weight of the entropy.
    """

    samples: list[Sample]
    advantages: list[torch.Tensor]
    before: dict[int, torch.Tensor]
    reference: dict[int, torch.Tensor] | None = None
    kl: float = 0.0
    entropy: float = 0.0

    def __call__(self, part: mb.rl.TrajectoryLogProbs) -> torch.Tensor:
        """Return the contribution of a micro-batch to the mean loss over all sampled tokens."""
        gain: Any = 0.0
        for place, i in enumerate(part.index):
            written, advantage = self.samples[i].written, self.advantages[i]
            new = part.logprobs[place][written]
            ratio = (new - self.before[i][written]).exp()
            limited = ratio.clamp(1 - CLIP, 1 + CLIP)
            gain = gain + torch.minimum(ratio * advantage, limited * advantage).sum()
            if self.reference is not None:
                log_ratio = self.reference[i][written] - new
                gain = gain - self.kl * (log_ratio.exp() - log_ratio - 1).sum()
            if part.entropies is not None:
                gain = gain + self.entropy * part.entropies[place][written].sum()
        return -gain / sum(len(sample.written) for sample in self.samples)


def by_trajectory(part: mb.rl.TrajectoryLogProbs) -> dict[int, torch.Tensor]:
    return dict(zip(part.index, part.logprobs, strict=True))


def over_ranks(value: float, operation: Any = dist.ReduceOp.SUM, group: Any = None) -> float:
    """Reduce a number over ranks. Collective."""
    reduced = torch.tensor(float(value), dtype=torch.float64)
    dist.all_reduce(reduced, operation, group=group)
    return float(reduced)


def warm_up(policy: Policy, args: Namespace, draw: torch.Generator) -> None:
    """Train on demonstrations with many wrong digits."""
    begins = grpo_task.turns(args.digits)
    places = [begin + k - 1 for begin in begins for k in range(args.digits)]
    count = 4 * args.prompts * len(places)

    def loss(part: mb.rl.TrajectoryLogProbs) -> torch.Tensor:
        return -torch.stack([logs[places].sum() for logs in part.logprobs]).sum() / count

    for _ in range(args.warm_up):
        games = [
            grpo_task.demonstration(_digits(args, draw), draw) for _ in range(4 * args.prompts)
        ]
        policy.update(games, loss, entropy=False)


def _digits(args: Namespace, draw: torch.Generator) -> list[int]:
    return torch.randint(10, (args.digits,), generator=draw).tolist()


def step(
    policy: Policy,
    args: Namespace,
    questions: list[list[int]],
    draw: torch.Generator,
    reference: Any = None,
) -> tuple[dict[str, float], list[Sample], Grpo]:
    """Sample, and update the weights.

    Args:
        policy: The policy.
        args: Flags of `grpo_task.add_flags`.
        questions: Digits of each question.
        draw: Generator of this rank.
        reference: Stages of the reference policy; None without a KL term.

    Returns:
        The metrics of the step, the samples, and their loss.
    """
    start = time.perf_counter()
    policy.sync()
    samples = grpo_task.play(policy.sampler, questions, args.samples, draw)
    trajectories = [sample.tokens for sample in samples]
    before = by_trajectory(mb.rl.logprobs(policy.stages, trajectories, entropy=False))
    loss = Grpo(samples, advantages(samples), before, kl=args.kl, entropy=args.entropy)
    if reference is not None:
        loss.reference = by_trajectory(mb.rl.logprobs(reference, trajectories, entropy=False))
    updates = [policy.update(trajectories, loss, entropy=args.entropy > 0) for _ in range(UPDATES)]
    seconds, group = time.perf_counter() - start, parallel_state.get_data_parallel_group()
    row = {
        "reward": statistics.mean(sample.reward for sample in samples),
        "solved": statistics.mean(sample.solved for sample in samples),
        "tokens": over_ranks(updates[-1].tokens, group=group),
        "rows": over_ranks(updates[-1].rows, group=group),
        "seconds": seconds,
        "sampler": over_ranks(sampler_difference(samples, before), dist.ReduceOp.MAX),
    }
    return row, samples, loss


def sampler_difference(samples: list[Sample], before: dict[int, torch.Tensor]) -> float:
    """Return the largest difference between log-probabilities of the policy and the sampler."""
    sampled = {i: torch.tensor(samples[i].logprobs, dtype=torch.float64) for i in before}
    gaps = [(before[i][samples[i].written] - sampled[i]).abs().max() for i in before]
    return float(max(gaps, default=torch.zeros(())))


def compare(policy: Policy, loss: Grpo, repeats: int = REPEATS) -> dict[str, float]:
    """Compare forward and backward of a step with merged prefixes and separate trajectories.

    Args:
        policy: The policy.
        loss: The loss of a step.
        repeats: Number of timings.

    Returns:
        The largest difference of gradients, the largest gradient, and for both variants the rows,
        the seconds and the processor seconds of all ranks.
    """
    trajectories = [sample.tokens for sample in loss.samples]
    grads, logprobs = {}, {}
    times: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for _ in range(repeats):
        for tree in times:
            dist.barrier()
            start = time.perf_counter(), time.process_time()
            logprobs[tree] = policy.gradients(
                trajectories, loss, entropy=loss.entropy > 0, tree=tree
            )
            busy = over_ranks(time.process_time() - start[1])
            times[tree].append((time.perf_counter() - start[0], busy))
            parameters: Any = policy.stages[0].parameters()
            grads[tree] = torch.cat([parameter.main_grad.flatten() for parameter in parameters])
    counted = {
        "difference": over_ranks((grads[True] - grads[False]).abs().max(), dist.ReduceOp.MAX),
        "gradient": over_ranks(grads[False].abs().max(), dist.ReduceOp.MAX),
    }
    for tree, name in ((True, "merged"), (False, "separate")):
        group = parallel_state.get_data_parallel_group()
        seconds, processor = map(statistics.median, zip(*times[tree], strict=True))
        counted |= {
            f"rows_{name}": over_ranks(logprobs[tree].rows, group=group),
            f"seconds_{name}": seconds,
            f"processor_{name}": processor,
        }
    return counted


class Screen:
    """The table and the files of global rank 0; does nothing on other ranks."""

    def __init__(self, metrics: Path, steps: int):
        self._show, self._every = dist.get_rank() == 0, max(1, steps // LINES)
        self._metrics, self._rows = metrics, []

    def print(self, text: str) -> None:
        if self._show:
            print(text, flush=True)

    def row(self, number: int, row: dict[str, float]) -> None:
        """Write the row of a step; print the means of the last few."""
        self._rows.append(row)
        if not self._show:
            return
        with self._metrics.open("w" if number == 1 else "a") as file:
            file.write(json.dumps({"step": number} | row) + "\n")
        if number == 1:
            self.print("  step    reward   solved   tokens     rows   s/step")
        if number == 1 or number % self._every == 0:
            last = self._rows[-self._every :]
            mean = {name: statistics.mean(metrics[name] for metrics in last) for name in row}
            self.print(
                f"{number:6}  {mean['reward']:8.3f}  {mean['solved']:7.1%}  {mean['tokens']:7,.0f}"
                f"  {mean['rows']:7,.0f}  {mean['seconds']:7.2f}"
            )

    def write(self, name: str, text: str) -> None:
        if self._show:
            self._metrics.with_name(name).write_text(text)


def run(args: Namespace) -> None:
    """Warm up, train, and compare the first step with separate trajectories."""
    policy, screen = Policy(args), Screen(args.metrics, args.steps)
    questions = torch.Generator().manual_seed(args.seed)  # the same on all ranks
    draw = torch.Generator().manual_seed(args.seed + 1 + dist.get_rank())
    start = time.perf_counter()
    warm_up(policy, args, questions)
    screen.print(f"  {args.warm_up} supervised steps, {time.perf_counter() - start:.0f} seconds\n")
    reference = policy.copy() if args.kl else None
    for number in range(1, args.steps + 1):
        digits = [_digits(args, questions) for _ in range(args.prompts)]
        row, samples, loss = step(policy, args, digits, draw, reference)
        screen.row(number, row)
        if number == 1:
            screen.write("comparison.json", json.dumps(compare(policy, loss)))
            first = [sample.tokens for sample in samples if sample.question == 0]
            screen.write("trajectories.jsonl", "".join(f"{tokens}\n" for tokens in first))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    grpo_task.add_flags(parser)
    parser.add_argument("--metrics", type=Path, required=True)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        cpu.enable()
    join_processes(Namespace(distributed_timeout_minutes=10))
    run(args)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
