"""One rank of `grpo.py`: GRPO with Megatron-Core's model, data parallelism and optimizer.

    torchrun --nproc-per-node 4 examples/grpo_train.py --context-parallel-size 2 --metrics FILE

A step: sample (`grpo_task`), old log-probabilities (`mb.rl.logprobs`), and updates by the clipped
ratio (`mb.rl.logprobs` with `loss`). Prefixes that samples share are computed once. Global rank 0
prints a row now and then and leaves in FILE what it found. Owns the algorithm and what is compared.
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
UPDATES = 2  # of the weights per step: the second has ratios other than 1
CLIP = 0.2
REPEATS = 7  # timings, of which the median is taken
LINES = 20  # of the table


class Policy:
    """The model that is trained, over all ranks, and a sampler with its weights on each."""

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
        config = self._configured()
        self.stages = build_model(self.args, config)
        self.optimizer, self.schedule = build_optimizer(self.args, config, self.stages)
        alone: Any = dist.new_subgroups(1)[0]
        groups = ProcessGroupCollection.use_mpu_process_groups()
        groups.cp = alone
        # Megatron's own attention: what it samples with is compared with what is trained.
        self.sampler = build_gpt(self.args, self._config(1), pg_collection=groups)

    def _config(self, cp_size: int) -> Any:
        config = model_config(Namespace(**vars(self.args) | {"context_parallel_size": cp_size}))
        config.params_dtype = torch.float64  # so that differences are those of the mathematics
        return config

    def _configured(self) -> Any:
        config = self._config(self.args.context_parallel_size)
        mb.megatron.configure(config, mb.BurstConfig(pack="trees"))
        return config

    def sync(self) -> None:
        """Hand the weights to the sampler, as to a rollout engine."""
        self.sampler.load_state_dict(self.stages[0].module.state_dict())

    def copy(self) -> Any:
        """The model as it is now, which nobody trains."""
        kept = build_model(self.args, self._configured())
        kept[0].load_state_dict(self.stages[0].state_dict())
        return kept

    def gradients(self, trajectories: list[list[int]], loss: Any, **options: Any) -> Any:
        """Leave the gradients of `loss` where the optimizer takes them."""
        for stage in self.stages:
            stage.zero_grad_buffer()
        self.optimizer.zero_grad()
        return mb.rl.logprobs(self.stages, trajectories, loss=loss, **options)

    def update(self, trajectories: list[list[int]], loss: Any, **options: Any) -> Any:
        found = self.gradients(trajectories, loss, **options)
        self.optimizer.step()
        self.schedule.step(increment=self.args.global_batch_size)
        return found


def advantages(samples: list[Sample]) -> list[torch.Tensor]:
    """For each token that was written, how much more is right from its turn on than in the other
    samples of the question, in standard deviations."""
    found = []
    for sample in samples:
        group = [each.returns for each in samples if each.question == sample.question]
        returns = torch.tensor(group, dtype=torch.float64)
        own = torch.tensor(sample.returns, dtype=torch.float64)
        found.append((own - returns.mean(0)) / (returns.std(0, correction=0) + 1e-4))
    return found


@dataclass
class Grpo:
    """The loss of samples: the clipped ratio of new and old probabilities, times the advantage.

    before, reference: log-probabilities by trajectory, of those that this rank has.
    """

    samples: list[Sample]
    advantages: list[torch.Tensor]
    before: dict[int, torch.Tensor]
    reference: dict[int, torch.Tensor] | None = None
    kl: float = 0.0
    entropy: float = 0.0

    def __call__(self, part: mb.rl.TrajectoryLogProbs) -> torch.Tensor:
        """A share of the mean over all tokens that were written, in all micro-batches."""
        gain: Any = 0.0
        for place, i in enumerate(part.index):
            written, advantage = self.samples[i].written, self.advantages[i]
            new = part.logprobs[place][written]
            ratio = (new - self.before[i][written]).exp()
            limited = ratio.clamp(1 - CLIP, 1 + CLIP)
            gain = gain + torch.minimum(ratio * advantage, limited * advantage).sum()
            if self.reference is not None:
                apart = self.reference[i][written] - new
                gain = gain - self.kl * (apart.exp() - apart - 1).sum()
            if part.entropies is not None:
                gain = gain + self.entropy * part.entropies[place][written].sum()
        return -gain / sum(len(each.written) for each in self.samples)


def by_trajectory(found: mb.rl.TrajectoryLogProbs) -> dict[int, torch.Tensor]:
    return dict(zip(found.index, found.logprobs, strict=True))


def over_ranks(value: float, how: Any = dist.ReduceOp.SUM, group: Any = None) -> float:
    found = torch.tensor(float(value), dtype=torch.float64)
    dist.all_reduce(found, how, group=group)
    return float(found)


def warm_up(policy: Policy, args: Namespace, draw: torch.Generator) -> None:
    """Supervised steps on demonstrations, whose answers are half right."""
    begins = grpo_task.turns(args.digits)
    places = [begin + k - 1 for begin in begins for k in range(args.digits)]
    count = 4 * args.prompts * len(places)

    def loss(part: mb.rl.TrajectoryLogProbs) -> torch.Tensor:
        return -torch.stack([each[places].sum() for each in part.logprobs]).sum() / count

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
    """Sample and update the weights; what was counted, the samples and their loss."""
    start = time.perf_counter()
    policy.sync()
    samples = grpo_task.play(policy.sampler, questions, args.samples, draw)
    trajectories = [each.tokens for each in samples]
    before = by_trajectory(mb.rl.logprobs(policy.stages, trajectories, entropy=False))
    loss = Grpo(samples, advantages(samples), before, kl=args.kl, entropy=args.entropy)
    if reference is not None:
        loss.reference = by_trajectory(mb.rl.logprobs(reference, trajectories, entropy=False))
    found = [policy.update(trajectories, loss, entropy=args.entropy > 0) for _ in range(UPDATES)]
    seconds, group = time.perf_counter() - start, parallel_state.get_data_parallel_group()
    row = {
        "reward": statistics.mean(each.reward for each in samples),
        "solved": statistics.mean(each.solved for each in samples),
        "tokens": over_ranks(found[-1].tokens, group=group),
        "rows": over_ranks(found[-1].rows, group=group),
        "seconds": seconds,
        "sampler": over_ranks(from_sampler(samples, before), dist.ReduceOp.MAX),
    }
    return row, samples, loss


def from_sampler(samples: list[Sample], before: dict[int, torch.Tensor]) -> float:
    """How far log-probabilities are from those of the sampler, at most."""
    told = {i: torch.tensor(samples[i].logprobs, dtype=torch.float64) for i in before}
    gaps = [(before[i][samples[i].written] - told[i]).abs().max() for i in before]
    return float(max(gaps, default=torch.zeros(())))


def compare(policy: Policy, loss: Grpo, repeats: int = REPEATS) -> dict[str, float]:
    """Forward and backward of a step, prefixes merged and each trajectory by itself: the largest
    difference of gradients, and of both the rows, the seconds and the processor seconds of all
    ranks."""
    trajectories = [each.tokens for each in loss.samples]
    grads, found = {}, {}
    times: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for _ in range(repeats):
        for tree in times:
            dist.barrier()
            start = time.perf_counter(), time.process_time()
            found[tree] = policy.gradients(trajectories, loss, entropy=loss.entropy > 0, tree=tree)
            busy = over_ranks(time.process_time() - start[1])
            times[tree].append((time.perf_counter() - start[0], busy))
            parameters: Any = policy.stages[0].parameters()
            grads[tree] = torch.cat([each.main_grad.flatten() for each in parameters])
    counted = {
        "difference": over_ranks((grads[True] - grads[False]).abs().max(), dist.ReduceOp.MAX),
        "gradient": over_ranks(grads[False].abs().max(), dist.ReduceOp.MAX),
    }
    for tree, name in ((True, "merged"), (False, "separate")):
        group = parallel_state.get_data_parallel_group()
        seconds, processor = map(statistics.median, zip(*times[tree], strict=True))
        counted |= {
            f"rows_{name}": over_ranks(found[tree].rows, group=group),
            f"seconds_{name}": seconds,
            f"processor_{name}": processor,
        }
    return counted


class Screen:
    """The table and the files of global rank 0; mute on other ranks."""

    def __init__(self, metrics: Path, steps: int):
        self._show, self._every = dist.get_rank() == 0, max(1, steps // LINES)
        self._metrics, self._rows = metrics, []

    def say(self, text: str) -> None:
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
            self.say("  step    reward   solved   tokens     rows   s/step")
        if number == 1 or number % self._every == 0:
            last = self._rows[-self._every :]
            mean = {name: statistics.mean(each[name] for each in last) for name in row}
            self.say(
                f"{number:6}  {mean['reward']:8.3f}  {mean['solved']:7.1%}  {mean['tokens']:7,.0f}"
                f"  {mean['rows']:7,.0f}  {mean['seconds']:7.2f}"
            )

    def keep(self, name: str, text: str) -> None:
        if self._show:
            self._metrics.with_name(name).write_text(text)


def run(args: Namespace) -> None:
    """Warm up, learn, and compare a step with separate trajectories."""
    policy, screen = Policy(args), Screen(args.metrics, args.steps)
    questions = torch.Generator().manual_seed(args.seed)  # the same on all ranks
    draw = torch.Generator().manual_seed(args.seed + 1 + dist.get_rank())
    start = time.perf_counter()
    warm_up(policy, args, questions)
    screen.say(f"  {args.warm_up} supervised steps, {time.perf_counter() - start:.0f} seconds\n")
    reference = policy.copy() if args.kl else None
    for number in range(1, args.steps + 1):
        asked = [_digits(args, questions) for _ in range(args.prompts)]
        row, samples, loss = step(policy, args, asked, draw, reference)
        screen.row(number, row)
        if number == 1:
            screen.keep("comparison.json", json.dumps(compare(policy, loss)))
            one = [each.tokens for each in samples if each.question == 0]
            screen.keep("trajectories.jsonl", "".join(f"{each}\n" for each in one))


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
