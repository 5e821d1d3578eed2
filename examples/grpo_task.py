"""Task that `grpo.py` learns: sort digits in two turns, with feedback between them.

    4 1 7 7 0 2 =  0 1 2 4 4 7   + + + + - +  ?  0 1 2 4 7 7
    question       first answer  marks           second answer

Every sample begins with the same instructions, which are one example game. Each first answer to a
question has several second answers, so samples form a tree. The reward is the share of correct
digits in both answers. The module defines the tokens and the rules, and generates samples.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

SORT, EQUALS, RIGHT, WRONG, RETRY = range(10, 15)  # 0 to 9 are digits
VOCABULARY = 16
BRANCHES = 2  # second answers per first answer
SPELLED = [*"0123456789", "sort", "=", "+", "-", "?", "_"]


@dataclass
class Sample:
    """One trajectory.

    Attributes:
        question: Number of the question.
        tokens: Tokens of instructions, question, both answers and feedback.
        written: Indices of the predictions that the policy sampled; entry i predicts token i + 1.
        logprobs: Log-probabilities of these predictions in the sampler.
        correct: Number of correct digits in each of the two answers.
    """

    question: int
    tokens: list[int]
    written: list[int]
    logprobs: list[float]
    correct: list[int]

    @property
    def reward(self) -> float:
        return sum(self.correct) / len(self.written)

    @property
    def returns(self) -> list[int]:
        """Correct digits from a token's turn to the end, for each sampled token.

        So a second answer is not rewarded for the first.
        """
        size = len(self.written) // 2
        return [sum(self.correct)] * size + [self.correct[1]] * size

    @property
    def solved(self) -> bool:
        """True if the second answer is correct."""
        return 2 * self.correct[1] == len(self.written)


def question(digits: list[int]) -> list[int]:
    """Return the prompt of a first answer."""
    return [*_INSTRUCTIONS[len(digits)], SORT, *digits, EQUALS]


def feedback(digits: list[int], predicted: list[int]) -> list[int]:
    """Return a mark for each predicted digit, and the request for a second answer."""
    marks = (RIGHT if a == b else WRONG for a, b in zip(predicted, sorted(digits), strict=True))
    return [*marks, RETRY]


def demonstration(digits: list[int], draw: torch.Generator) -> list[int]:
    """Return a game in the correct format, with random digits in half of the places."""

    def noisy_answer() -> list[int]:
        wrong = torch.rand(len(digits), generator=draw) < 0.5
        random_digits = torch.randint(10, (len(digits),), generator=draw)
        return torch.where(wrong, random_digits, torch.tensor(sorted(digits))).tolist()

    first = noisy_answer()
    return [*question(digits), *first, *feedback(digits, first), *noisy_answer()]


def turns(size: int) -> list[int]:
    """Return the positions in a sample at which the two answers of `size` digits begin."""
    first = len(_INSTRUCTIONS[size]) + 2 + size
    return [first, first + 2 * size + 1]


def _instructions(size: int) -> list[int]:
    digits, first = [(7 * i + 3) % 10 for i in range(size)], list(range(size))
    return [SORT, *digits, EQUALS, *first, *feedback(digits, first), *sorted(digits)]


_INSTRUCTIONS = {size: _instructions(size) for size in range(2, 11)}


def spelled(tokens: list[int]) -> str:
    return " ".join(SPELLED[token] for token in tokens)


def play(
    model: Any, questions: list[list[int]], samples: int, draw: torch.Generator
) -> list[Sample]:
    """Sample answers to the questions. Collective: each rank answers some of the questions.

    Args:
        model: A `GPTModel` for whole sequences.
        questions: Digits of each question.
        samples: Number of samples per question.
        draw: Generator of this rank.

    Returns:
        The samples of all ranks, in the order of their questions.
    """
    own_questions = range(dist.get_rank(), len(questions), dist.get_world_size())
    question_of = [i for i in own_questions for _ in range(samples // BRANCHES)]
    prompts = [question(questions[i]) for i in question_of]
    size = len(questions[0])
    first_answers, first_logs = write(model, prompts, size, draw)
    second_prompts = [
        [*prompt, *digits, *feedback(questions[i], digits)]
        for i, prompt, digits in zip(question_of, prompts, first_answers, strict=True)
        for _ in range(BRANCHES)
    ]
    second_answers, second_logs = write(model, second_prompts, size, draw)
    written = [begin + k - 1 for begin in turns(size) for k in range(size)]
    own_samples = []
    for place, (prompt, digits) in enumerate(zip(second_prompts, second_answers, strict=True)):
        parent = place // BRANCHES
        i = question_of[parent]
        target = sorted(questions[i])
        correct = [sum(map(int.__eq__, x, target)) for x in (first_answers[parent], digits)]
        logs = [*first_logs[parent], *second_logs[place]]
        own_samples.append(Sample(i, [*prompt, *digits], written, logs, correct))
    all_samples: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(all_samples, own_samples)
    return sorted((s for part in all_samples for s in part), key=lambda sample: sample.question)


@torch.no_grad()
def write(
    model: Any, prompts: list[list[int]], count: int, draw: torch.Generator
) -> tuple[list[list[int]], list[list[float]]]:
    """Return `count` sampled tokens after each prompt, and their log-probabilities.

    All prompts must have equal lengths. Each token costs a full forward pass; a rollout engine
    would keep keys and values.
    """
    if not prompts:
        return [], []
    tokens, chosen = torch.tensor(prompts), []
    for _ in range(count):
        positions = torch.arange(tokens.shape[1])
        masked = (positions[:, None] < positions)[None, None]
        logs = model(tokens, positions.expand_as(tokens), masked)[:, -1].log_softmax(-1)
        new = torch.multinomial(logs.exp(), 1, generator=draw)
        chosen.append(logs.gather(1, new))
        tokens = torch.cat([tokens, new], 1)
    return tokens[:, -count:].tolist(), torch.cat(chosen, 1).tolist()


def add_flags(parser: ArgumentParser) -> None:
    """Add the flags of the ranks and of `grpo.py`, which starts them."""
    add = parser.add_argument
    add("--steps", type=int, default=150, help="steps of reinforcement learning")
    add("--warm-up", type=int, default=150, help="supervised steps before reinforcement learning")
    add("--prompts", type=int, default=16, help="questions per step")
    add("--samples", type=int, default=8, help="samples per question, two per first answer")
    add("--digits", type=int, default=4, help="digits to sort, 2 to 10")
    add("--ranks", type=int, default=4, help="processes of all data-parallel replicas")
    add("--context-parallel-size", type=int, default=2)
    add("--num-layers", type=int, default=2)
    add("--hidden-size", type=int, default=64, help="multiple of 8, because there are 4 heads")
    add("--lr", type=float, default=2e-3)
    add(
        "--kl",
        type=float,
        default=0.0,
        help="weight of the divergence from the policy after warm-up",
    )
    add("--entropy", type=float, default=0.01, help="weight of the entropy of sampled tokens")
    add("--seed", type=int, default=1234)


def check(args: Namespace) -> None:
    """Raise ValueError if a flag is invalid."""
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


def description(args: Namespace) -> str:
    """Return the settings in one line."""
    return (
        f"CP {args.context_parallel_size} x DP {args.ranks // args.context_parallel_size}, "
        f"{args.steps} steps of {args.prompts} questions x {args.samples} samples, {args.digits} "
        "digits to sort"
    )
