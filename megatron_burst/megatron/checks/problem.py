# SPDX-License-Identifier: Apache-2.0
"""A problem (a setting that cannot be honoured), tables of rules that find problems, and one error
that reports all problems of a run.

The error ends in the flags to add and to remove, ready to be pasted into a command.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from ... import registry
from ...config import FIELDS, BurstConfig


@dataclass(frozen=True)
class Problem:
    """A setting that cannot be honoured, why, and the flags that fix it.

    reason: one line; it says what to do if no flag fixes the problem. add: flags with values, to
    add or to use instead of those given. remove: names of flags to leave out.
    """

    reason: str
    add: tuple[str, ...] = ()
    remove: tuple[str, ...] = ()

    def __str__(self) -> str:
        parts = [self.reason]
        if self.add:
            parts.append(f"add {' '.join(self.add)}")
        if self.remove:
            parts.append(f"remove {' '.join(self.remove)}")
        return "; ".join(parts)


class ConfigView:
    """The attributes of a `TransformerConfig`, of parsed arguments, or of a `BurstConfig`; None for
    one that it lacks, such as an option of a plugin that is not installed.
    """

    def __init__(self, config: Any) -> None:
        self._config = config

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name, None)

    def has(self, name: str) -> bool:
        """Whether there is such a setting, given or not."""
        return hasattr(self._config, name)


class Rule(NamedTuple):
    """A row of a table of problems: when there is one, why, and the flags that fix it.

    when: the name of a setting, or a function of the settings and choices; there is a problem where
    it is true. reason, add, remove: as `Problem` has them, with {flag} for the flag that the table
    is about, {value} for what `when` returns, {c.NAME} for a setting and {b.NAME} for a choice.
    """

    when: str | Callable[[ConfigView, Any], Any]
    reason: str
    add: tuple[str, ...] = ()
    remove: tuple[str, ...] = ()


# Flags of settings that are not named after them.
_FLAGS = {
    "fp8": "--fp8-format",
    "fp4": "--fp4-format",
    "cpu_offloading": "--cpu-offloading-num-layers",
    "gtp_weight_remat_size": "--tensor-parallel-num-weight-shards",
    "is_hybrid_model": "--hybrid-layer-pattern",
    "num_microbatches_with_partial_activation_checkpoints": (
        "num_microbatches_with_partial_activation_checkpoints"  # there is none
    ),
}


def flag_of_setting(name: str) -> str:
    """The flag of Megatron-LM that gives this setting."""
    return _FLAGS.get(name) or f"--{name.replace('_', '-')}"


def excluded(text: str, remove: tuple[str, ...] = (), **reasons: str) -> tuple[Rule, ...]:
    """A rule for each setting that must not be on.

    text: what is said, with {other} for the setting's flag and {why} for its reason. remove: the
    flags to leave out, if not the setting's.
    """
    flags = {name: flag_of_setting(name) for name in reasons}
    return tuple(
        Rule(
            name,
            text.replace("{other}", flags[name]).replace("{why}", why),
            remove=remove or (flags[name],),
        )
        for name, why in reasons.items()
    )


def broken(
    rules: Iterable[Rule], config: Any, burst: BurstConfig | None = None, flag: str = ""
) -> Iterator[Problem]:
    """The problems that a table of rules finds, in its order.

    config: a `TransformerConfig`, or parsed arguments under the same names; flag: that which the
    table is about.
    """
    c: Any = ConfigView(config)
    chosen: Any = ConfigView(burst)
    for when, reason, add, remove in rules:
        value = getattr(c, when) if isinstance(when, str) else when(c, chosen)
        if value:
            known = {"c": c, "b": burst, "flag": flag, "value": value}
            yield Problem(
                reason.format(**known),
                add=tuple(each.format(**known) for each in add),
                remove=tuple(each.format(**known) for each in remove),
            )


def excluded_options(
    name: str, flag: str, burst: BurstConfig, remove: tuple[str, ...] = ()
) -> Iterator[Problem]:
    """A problem for each option that is set and excludes the option `name`.

    Args:
        name: the field of the excluded option.
        flag: its flag with its value.
        burst: the options of the run.
        remove: the flags to leave out, if not the flag of the other option.
    """
    for field in FIELDS.values():
        value = getattr(burst, field.name)
        if name in field.option.excludes and value != field.default:
            yield Problem(
                f"{flag} with {field.flag} {value}, which was not tested",
                remove=remove or (field.flag,),
            )


def plugin_problems(
    hook: str, user: str, *, add: tuple[str, ...] = (), remove: tuple[str, ...] = ()
) -> Iterator[Problem]:
    """A problem if the plugin that has a hook is not installed.

    Args:
        hook: a name in `registry.HOOKS`.
        user: the setting that needs it.
        add: flags to use instead.
        remove: flags to leave out.
    """
    reason = registry.missing(hook, user)
    if reason is not None:
        yield Problem(reason, add=add, remove=remove)


class Refused(ValueError):
    """The error for all problems of a run; `problems` has them one by one.

    A text becomes one of them: Megatron raises what the constructor of a layer raised once more,
    with its text and the layer's name.
    """

    def __init__(self, problems: Iterable[Problem] | str) -> None:
        problems = [Problem(problems)] if isinstance(problems, str) else problems
        self.problems = tuple(dict.fromkeys(problems))
        super().__init__(report(self.problems))


def refuse(problems: Iterable[Problem]) -> None:
    """Raise `Refused`, a `ValueError`, if there are problems."""
    problems = list(problems)
    if problems:
        raise Refused(problems)


def report(problems: tuple[Problem, ...]) -> str:
    """One line for one problem; for several, a block that ends in the flags to add and remove."""
    if len(problems) == 1:
        return str(problems[0])
    lines = [f"{len(problems)} settings cannot be honoured:"]
    lines += [f"  - {problem.reason}" for problem in problems]
    for word, flags in (
        ("add:   ", [flag for problem in problems for flag in problem.add]),
        ("remove:", [flag for problem in problems for flag in problem.remove]),
    ):
        if flags:
            lines.append(f"  {word} {' '.join(dict.fromkeys(flags))}")
    return "\n".join(lines)
