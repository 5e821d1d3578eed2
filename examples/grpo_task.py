"""The game that `grpo.py` learns: sort digits in two turns, with a checker between them.

    4 1 7 7 0 2 =  0 1 2 4 4 7   + + + + - +  ?  0 1 2 4 7 7
    question       first answer  marks           second answer

Every sample begins with the same instructions, a game as it is played. First answers of a question
branch: each has several second answers. The reward is the share of right digits in both answers.
Owns the tokens, the rules and how samples are written.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

SORT, ASK, RIGHT, WRONG, AGAIN = range(10, 15)  # 0 to 9 are digits
VOCABULARY = 16
BRANCHES = 2  # second answers per first answer
SPELLED = [*"0123456789", "sort", "=", "+", "-", "?", "_"]


@dataclass
class Sample:
    """One trajectory. tokens: of instructions, question and both turns. written: which of its
    predictions (entry i predicts token i + 1) the policy made, and with which log-probability.
    rights: right digits of both answers."""

    question: int
    tokens: list[int]
    written: list[int]
    logprobs: list[float]
    rights: list[int]

    @property
    def reward(self) -> float:
        return sum(self.rights) / len(self.written)

    @property
    def returns(self) -> list[int]:
        """The right digits from each turn on, for each token that was written: a second answer
        is not rewarded for the first."""
        size = len(self.written) // 2
        return [sum(self.rights)] * size + [self.rights[1]] * size

    @property
    def solved(self) -> bool:
        """Is the second answer right?"""
        return 2 * self.rights[1] == len(self.written)


def question(digits: list[int]) -> list[int]:
    """What a first answer is written after."""
    return [*_INSTRUCTIONS[len(digits)], SORT, *digits, ASK]


def feedback(digits: list[int], answer: list[int]) -> list[int]:
    """A mark for each digit of an answer, and the request for another."""
    marks = (RIGHT if a == b else WRONG for a, b in zip(answer, sorted(digits), strict=True))
    return [*marks, AGAIN]


def demonstration(digits: list[int], draw: torch.Generator) -> list[int]:
    """A game that was written as it should be, but half of its digits are wrong."""

    def answer() -> list[int]:
        wrong = torch.rand(len(digits), generator=draw) < 0.5
        other = torch.randint(10, (len(digits),), generator=draw)
        return torch.where(wrong, other, torch.tensor(sorted(digits))).tolist()

    first = answer()
    return [*question(digits), *first, *feedback(digits, first), *answer()]


def turns(size: int) -> list[int]:
    """Where the two answers of so many digits begin in a sample."""
    first = len(_INSTRUCTIONS[size]) + 2 + size
    return [first, first + 2 * size + 1]


def _instructions(size: int) -> list[int]:
    digits, first = [(7 * i + 3) % 10 for i in range(size)], list(range(size))
    return [SORT, *digits, ASK, *first, *feedback(digits, first), *sorted(digits)]


_INSTRUCTIONS = {size: _instructions(size) for size in range(2, 11)}


def spelled(tokens: list[int]) -> str:
    return " ".join(SPELLED[each] for each in tokens)


def play(
    model: Any, questions: list[list[int]], samples: int, draw: torch.Generator
) -> list[Sample]:
    """`samples` samples of each question, those of this rank; with everybody else's returned.

    model: a GPTModel that holds whole sequences. A collective: ranks take questions in turn.
    """
    mine = range(dist.get_rank(), len(questions), dist.get_world_size())
    prompts = [question(questions[i]) for i in mine for _ in range(samples // BRANCHES)]
    asked = [i for i in mine for _ in range(samples // BRANCHES)]
    size = len(questions[0])
    first, first_logs = write(model, prompts, size, draw)
    marked = [
        [*prompt, *answer, *feedback(questions[i], answer)]
        for i, prompt, answer in zip(asked, prompts, first, strict=True)
        for _ in range(BRANCHES)
    ]
    second, second_logs = write(model, marked, size, draw)
    found = []
    for place, (tokens, answer) in enumerate(zip(marked, second, strict=True)):
        parent, i = place // BRANCHES, asked[place // BRANCHES]
        rights = [sum(map(int.__eq__, x, sorted(questions[i]))) for x in (first[parent], answer)]
        written = [begin + k - 1 for begin in turns(size) for k in range(size)]
        logs = [*first_logs[parent], *second_logs[place]]
        found.append(Sample(i, [*tokens, *answer], written, logs, rights))
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, found)
    return sorted((each for part in everybody for each in part), key=lambda each: each.question)


@torch.no_grad()
def write(
    model: Any, prompts: list[list[int]], count: int, draw: torch.Generator
) -> tuple[list[list[int]], list[list[float]]]:
    """`count` tokens after each prompt, all of one length, and their log-probabilities.

    A whole forward pass per token: a rollout engine would keep keys and values.
    """
    if not prompts:
        return [], []
    tokens, chosen = torch.tensor(prompts), []
    for _ in range(count):
        at = torch.arange(tokens.shape[1])
        hidden = (at[:, None] < at)[None, None]
        logs = model(tokens, at.expand_as(tokens), hidden)[:, -1].log_softmax(-1)
        new = torch.multinomial(logs.exp(), 1, generator=draw)
        chosen.append(logs.gather(1, new))
        tokens = torch.cat([tokens, new], 1)
    return tokens[:, -count:].tolist(), torch.cat(chosen, 1).tolist()


def add_flags(parser: ArgumentParser) -> None:
    """Of the ranks, and of `grpo.py` which starts them."""
    add = parser.add_argument
    add("--steps", type=int, default=150, help="steps of reinforcement learning")
    add("--warm-up", type=int, default=150, help="supervised steps before")
    add("--prompts", type=int, default=16, help="questions per step")
    add("--samples", type=int, default=8, help="samples of each, two per first answer")
    add("--digits", type=int, default=4, help="to sort, 2 to 10")
    add("--ranks", type=int, default=4, help="processes, of all data-parallel replicas")
    add("--context-parallel-size", type=int, default=2)
    add("--num-layers", type=int, default=2)
    add("--hidden-size", type=int, default=64, help="a multiple of 8, for 4 heads")
    add("--lr", type=float, default=2e-3)
    add("--kl", type=float, default=0.0, help="weight of the divergence from the warmed-up policy")
    add("--entropy", type=float, default=0.01, help="weight of the entropy of what is written")
    add("--seed", type=int, default=1234)


def check(args: Namespace) -> None:
    """Raise ValueError for what cannot run."""
    for name in ("steps", "prompts", "num_layers"):
        flag = name.replace("_", "-")
        if getattr(args, name) < 1:
            raise ValueError(f"--{flag} must be at least 1, got {getattr(args, name)}")
    if args.hidden_size < 8 or args.hidden_size % 8:
        raise ValueError(f"--hidden-size must be a multiple of 8, got {args.hidden_size}")
    if args.warm_up < 0:
        raise ValueError(f"--warm-up must be at least 0, got {args.warm_up}")
    if args.samples < 2 or args.samples % BRANCHES:
        raise ValueError(
            f"--samples must be a multiple of {BRANCHES}, the second answers per first "
            f"answer, got {args.samples}"
        )
    if args.context_parallel_size < 1 or args.ranks < 1 or args.ranks % args.context_parallel_size:
        raise ValueError(
            f"--ranks must be a multiple of --context-parallel-size {args.context_parallel_size}, "
            f"got {args.ranks}"
        )
    if not 2 <= args.digits <= 10:
        raise ValueError(f"--digits must be 2 to 10, got {args.digits}")


def described(args: Namespace) -> str:
    """One line: what runs."""
    return (
        f"CP {args.context_parallel_size} x DP {args.ranks // args.context_parallel_size}, "
        f"{args.steps} steps of {args.prompts} questions x {args.samples} samples, {args.digits} "
        "digits to sort"
    )
