# SPDX-License-Identifier: Apache-2.0
"""Masks, layouts and lengths, written as Python expressions on the command line of `show`.

    mask    causal & (window(23, 0) | prefix(4)): the classes of `megatron_burst.masks` in lower
            case with the arguments of their constructors, joined by & and |
    layout  striped, block_striped(16), zigzag([0, 16, 24, 64]): the names of
            `megatron_burst.layout.make` with its arguments; balanced takes those that it is not
            given from a mask such as documents([0, 5, 64]) & causal
    lengths 300, 20, 5 or random(SEED, MEDIAN): of packed documents
    trajectories random(SEED, PROMPTS, SAMPLES, TURNS): that share prefixes

Python's own parser reads the text. Only names, & and |, and calls with literal arguments are
evaluated, so nothing else of Python runs. An error is a ValueError that shows the text, the place
in it, and what would work.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NoReturn

import numpy as np

from ... import layout, masks
from ...layout import NAMES, Layout, integer
from ...masks import Mask

DENSITY = 0.25  # of the visible blocks in a random table, the diagonal aside
DRAWN = 1 << 24  # tokens of random trajectories, at most
LONGEST = 60  # characters of the expression in an error message
MOST_MASKS = 100  # masks nest as deeply as their text, and Python's stack is limited


def _window(left: int | None, right: int | None = 0) -> Mask:
    return masks.Window(left, right)


def _random_blocks(seq_len: int, block: int, seed: int = 0) -> Mask:
    """A random block table with a visible diagonal; the same for the same seed."""
    block, seed = integer("block", block), integer("seed", seed)
    if block < 1 or seq_len % block:
        raise ValueError(f"blocks of {block} do not divide the {seq_len} positions")
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed must be in 0..{2**32 - 1}, got {seed}")
    count = seq_len // block
    source = np.random.RandomState(seed)  # unlike default_rng, its stream never changes
    table = (source.rand(count, count) < DENSITY) | np.eye(count, dtype=bool)
    return masks.BlockSparse(table, block)


def _plain(name: str, ranks: int) -> Layout:
    return layout.make(name, cp_size=ranks)


def _zigzag(ranks: int, cu_seqlens: list[int] | None = None) -> Layout:
    return layout.make("zigzag", cp_size=ranks, cu_seqlens=cu_seqlens)


def _block_striped(ranks: int, block: int) -> Layout:
    return layout.make("block_striped", cp_size=ranks, block=block)


def _balanced(
    ranks: int,
    per_node: int | None,
    packed: Mask | None,
    cu_seqlens: list[int] | None = None,
    windows: list[tuple[int | None, int | None]] | None = None,
    padding: list[int] | None = None,
) -> Layout:
    if isinstance(packed, masks.Tree):
        if cu_seqlens is not None or padding is not None:
            raise ValueError(
                "the segments of a tree are laid out; leave out cu_seqlens and padding"
            )
        return layout.make(
            "balanced", cp_size=ranks, tree=packed, per_node=per_node, windows=windows
        )
    documents, window = _parts(packed)
    if cu_seqlens is None:
        if documents is None:
            raise ValueError("layout balanced needs documents, its own or those of --mask")
        cu_seqlens, padding = documents.bounds.tolist(), padding or list(documents.padding)
    if windows is None and window is not None:
        windows = [window]
    return layout.make(
        "balanced", cp_size=ranks, cu_seqlens=cu_seqlens, per_node=per_node, windows=windows,
        padding=padding,
    )  # fmt: skip


def _parts(mask: Any) -> tuple[masks.Documents | None, tuple[int | None, int | None] | None]:
    """The documents of a mask, and how far a token sees in them, where it is that simple."""
    if isinstance(mask, masks.Documents):
        return mask, (None, None)
    joined = getattr(mask, "symbol", None) == "&"
    for documents, rest in ((mask.a, mask.b), (mask.b, mask.a)) if joined else ():
        if isinstance(documents, masks.Documents):
            return documents, (rest.left, rest.right) if isinstance(rest, masks.Window) else None
    return None, None


def _random_lengths(
    seq_len: int, seed: int, median: float, spread: float = 1.5, longest: int | None = None
) -> list[int]:
    """Log-normal lengths that fill `seq_len` positions; the last document is cut."""
    seed, random = integer("seed", seed), np.random.RandomState(seed)
    if not (median >= 1 and spread >= 0):
        raise ValueError(f"median must be at least 1 and spread 0, got {median} and {spread}")
    if longest is not None and integer("longest", longest) < 1:
        raise ValueError(f"longest must be at least 1, got {longest}")
    found, left = [], seq_len
    while left:
        drawn = round(float(random.lognormal(np.log(median), spread)))
        found.append(min(max(1, drawn), left if longest is None else longest, left))
        left -= found[-1]
    return found


def _random_trajectories(
    seed: int = 0, prompts: int = 1, samples: int = 4, turns: int = 2, prompt: int = 64,
    turn: int = 32,
) -> list[list[int]]:  # fmt: skip
    """Random tokens: `samples` trajectories of each prompt. Each but the first shares a random
    number of its turns with one before it. prompt, turn: their mean lengths."""
    sizes = {"prompts": prompts, "samples": samples, "turns": turns, "prompt": prompt,
             "turn": turn}  # fmt: skip
    for name, size in sizes.items():
        if integer(name, size) < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")
    total = prompts * samples * (prompt + turns * turn)
    if total > DRAWN:
        raise ValueError(f"trajectories have at most {DRAWN} tokens, these have about {total}")
    random, found = np.random.RandomState(integer("seed", seed)), []

    def drawn(mean: int) -> list[int]:
        return random.randint(0, 1 << 16, random.randint(1, 2 * mean)).tolist()

    for _ in range(prompts):
        start, sampled = drawn(prompt), []
        for i in range(samples):
            shared = sampled[random.randint(i)][: random.randint(turns)] if i else []
            sampled.append(shared + [drawn(turn) for _ in range(turns - len(shared))])
        found += [sum(each, start) for each in sampled]
    return found


MASKS: dict[str, Callable[..., Mask]] = {
    "full": masks.Full,
    "causal": masks.Causal,
    "window": _window,
    "dilated": masks.Dilated,
    "prefix": masks.Prefix,
    "documents": masks.Documents,
    "same_span": masks.SameSpan,
    "block_sparse": masks.BlockSparse,
    "dense": masks.Dense,
}
LAYOUTS: dict[str, Callable[..., Layout]] = {
    name: partial(_plain, name) for name in NAMES if name != "balanced"
} | {
    "zigzag": _zigzag,
    "block_striped": _block_striped,
}


def mask(text: str, seq_len: int) -> Mask:
    """The mask that `text` describes, checked for a sequence of `seq_len` positions."""
    names = MASKS | {"random_blocks": partial(_random_blocks, seq_len)}
    return _Expression("mask", text, names, lambda made: made.check(seq_len)).value()


def make_layout(
    text: str, ranks: int, per_node: int | None = None, packed: Mask | None = None
) -> Layout:
    """The layout that `text` describes over `ranks` ranks.

    For layout balanced, `per_node` ranks on a node, and `packed`, the mask that has its documents.
    """
    names = {name: partial(function, ranks) for name, function in LAYOUTS.items()}
    names["balanced"] = partial(_balanced, ranks, per_node, packed)
    return _Expression("layout", text, names, lambda made: None).value()


def lengths(text: str, seq_len: int) -> list[int]:
    """The lengths of documents that `text` describes; random ones fill `seq_len` positions."""
    names = {"random": partial(_random_lengths, seq_len)}
    found = _Expression("lengths", text, names, lambda made: None).value()
    found = [integer("--lengths", each) for each in (found if np.iterable(found) else [found])]
    if min(found, default=0) < 1:
        raise ValueError(f"--lengths: every document has at least one token, got {text}")
    return found


def trajectories(text: str) -> list[list[int]]:
    """The random trajectories that `text` describes."""
    names = {"random": _random_trajectories}
    return _Expression("trajectories", text, names, lambda made: None).value()


class _Expression:
    """One expression: `names` make its values, and `check` raises ValueError for a bad one."""

    def __init__(
        self, kind: str, text: str, names: Mapping[str, Any], check: Callable[[Any], object]
    ):
        self.kind, self.names, self.check = kind, names, check
        self.text = " ".join(text.split())  # Python would refuse leading spaces and new lines

    def value(self) -> Any:
        try:
            tree = ast.parse(self.text, mode="eval").body
        except SyntaxError as error:
            start = error.offset - 1 if error.offset else len(self.text)  # 0: at its end
            self.fail(f"{error.msg}; {self.expected}", start)
        except (ValueError, RecursionError, MemoryError) as error:  # null bytes; deep nesting
            self.fail(f"{error or 'nested too deeply'}; {self.expected}")
        count = 1 + sum(isinstance(node, ast.BinOp) for node in ast.walk(tree))
        if count > MOST_MASKS:
            raise ValueError(f"--{self.kind}: at most {MOST_MASKS} joined, got {count}")
        return self.evaluate(tree)

    def evaluate(self, node: ast.AST) -> Any:
        match node:
            case ast.BinOp(left, ast.BitAnd(), right) if self.kind == "mask":
                return self.evaluate(left) & self.evaluate(right)
            case ast.BinOp(left, ast.BitOr(), right) if self.kind == "mask":
                return self.evaluate(left) | self.evaluate(right)
            case ast.Tuple() | ast.List() | ast.Constant() if self.kind == "lengths":
                return self.literal(node)
            case ast.Name(name):
                return self.make(node, name, [], {})
            case ast.Call(ast.Name(name), arguments, keywords):
                values = [self.literal(each) for each in arguments]
                named = {each.arg: self.literal(each.value) for each in keywords}
                return self.make(node, name, values, named)
        self.fail(self.expected, *self.place(node))

    def make(self, node: ast.AST, name: str, values: list[Any], named: dict[Any, Any]) -> Any:
        if name not in self.names:
            self.fail(f"there is no {self.kind} {name}; {self.expected}", *self.place(node))
        function = self.names[name]
        try:
            inspect.signature(function).bind(*values, **named)
            made = function(*values, **named)
            self.check(made)
        except (TypeError, ValueError) as error:
            self.fail(f"{error}; use {_usage(name, function)}", *self.place(node))
        return made

    def literal(self, node: ast.expr) -> Any:
        try:
            return ast.literal_eval(node)
        except (ValueError, TypeError):
            self.fail("expected a number, None, or a list of numbers", *self.place(node))

    @property
    def expected(self) -> str:
        usages = ", ".join(_usage(name, function) for name, function in self.names.items())
        usages = f"numbers of tokens, {usages}" if self.kind == "lengths" else usages
        joined = "; join them with & and |, and put them in ( )" if self.kind == "mask" else ""
        return f"expected one of {usages}{joined}"

    def place(self, node: ast.AST) -> list[int]:
        """First and last character; Python counts columns in bytes of UTF-8."""
        encoded = self.text.encode()
        ends = (getattr(node, name) for name in ("col_offset", "end_col_offset"))
        return [len(encoded[:end].decode()) for end in ends]

    def fail(self, problem: str, start: int = 0, stop: int | None = None) -> NoReturn:
        found = self.text[start:stop]
        found = found if len(found) <= LONGEST else found[:LONGEST] + "..."
        where = f"character {start + 1} ({found})" if found else "the end"
        raise ValueError(f"--{self.kind} {self.text!r}, at {where}: {problem}")


def _usage(name: str, function: Callable[..., Any]) -> str:
    """`name(argument, optional=0)`, without types; `name` alone where it takes no argument."""
    parameters = inspect.signature(function).parameters.values()
    plain = [each.replace(annotation=each.empty, default=each.default) for each in parameters]
    shown = ", ".join(str(each) for each in plain)
    return f"{name}({shown})" if shown else name
