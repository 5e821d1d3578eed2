# SPDX-License-Identifier: Apache-2.0
"""Problems, tables of rules that yield problems, and one error for all problems of a run.

A problem is a setting that is not supported. The error message ends in the flags to add and to
remove, which the user can paste into a command.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from ... import registry
from ...config import FIELDS, BurstConfig


@dataclass(frozen=True)
class Problem:
    """A setting that is not supported, the reason, and the flags that fix it.

    Attributes:
        reason: One line; it also contains the fix if no flag fixes the problem.
        add: Flags with values, to add or to replace the present values.
        remove: Names of flags to remove.
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
    """The attributes of a `TransformerConfig`, of parsed arguments, or of a `BurstConfig`.

    An attribute that does not exist is None, for example an option of a plugin that is not
    installed.
    """

    def __init__(self, config: Any) -> None:
        self._config = config

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name, None)

    def has(self, name: str) -> bool:
        """Return whether the setting exists, even if its value is None."""
        return hasattr(self._config, name)


class Rule(NamedTuple):
    """A row of a table of rules: a condition, and the problem if the condition is true.

    Texts of a rule may contain {flag} (the `flag` argument of `broken`), {value} (the result of
    `when`), {c.NAME} (a setting) and {b.NAME} (an option).

    Attributes:
        when: The condition: the name of a setting, or a function of the settings and the options.
        reason: See `Problem`.
        add: See `Problem`.
        remove: See `Problem`.
    """

    when: str | Callable[[ConfigView, Any], Any]
    reason: str
    add: tuple[str, ...] = ()
    remove: tuple[str, ...] = ()


# Flags whose names do not follow from the names of their settings.
_FLAGS = {
    "fp8": "--fp8-format",
    "fp4": "--fp4-format",
    "cpu_offloading": "--cpu-offloading-num-layers",
    "gtp_weight_remat_size": "--tensor-parallel-num-weight-shards",
    "is_hybrid_model": "--hybrid-layer-pattern",
}
_WITHOUT_FLAG = (
    "fp8_dot_product_attention",
    "fp8_multi_head_attention",
    "fused_single_qkv_rope",
    "num_microbatches_with_partial_activation_checkpoints",
)


def flag_of_setting(name: str) -> str:
    """Return the flag of Megatron-LM that sets the setting `name`, or `name` if it has no flag."""
    if name in _WITHOUT_FLAG:
        return name
    return _FLAGS.get(name) or f"--{name.replace('_', '-')}"


def excluded(text: str, remove: tuple[str, ...] = (), **reasons: str) -> tuple[Rule, ...]:
    """Return a table of rules: each of the settings `reasons` must be off or unset.

    Args:
        text: the reason; {other} stands for the setting's flag, {why} for its entry in `reasons`.
        remove: the flags to remove; default: the setting's own flag.
        reasons: the text for {why}, by name of the setting. It may contain {other} too.
    """
    flags = {name: flag_of_setting(name) for name in reasons}
    return tuple(
        Rule(
            name,
            text.replace("{why}", why).replace("{other}", flags[name]),
            remove=remove or (flags[name],),
        )
        for name, why in reasons.items()
    )


def broken(
    rules: Iterable[Rule], config: Any, burst: BurstConfig | None = None, flag: str = ""
) -> Iterator[Problem]:
    """Yield the problems of all rules whose condition is true, in the order of the table.

    Args:
        rules: the table.
        config: a `TransformerConfig`, or parsed arguments with the same names.
        burst: the options of the run, if the rules read them.
        flag: the text for {flag}.

    Yields:
        The problems.
    """
    c: Any = ConfigView(config)
    options: Any = ConfigView(burst)
    for when, reason, add, remove in rules:
        value = getattr(c, when) if isinstance(when, str) else when(c, options)
        if value:
            fields = {"c": c, "b": burst, "flag": flag, "value": value}
            yield Problem(
                reason.format(**fields),
                add=tuple(text.format(**fields) for text in add),
                remove=tuple(text.format(**fields) for text in remove),
            )


def excluded_options(
    name: str, flag: str, burst: BurstConfig, remove: tuple[str, ...] = ()
) -> Iterator[Problem]:
    """Yield a problem for each option in use that was not tested together with option `name`.

    Args:
        name: the field of the option in `BurstConfig`.
        flag: the flag of the option `name`, with its value.
        burst: the options of the run.
        remove: the flags to remove; default: the flag of the other option.

    Yields:
        The problems.
    """
    for field in FIELDS.values():
        value = getattr(burst, field.name)
        if name in field.option.excludes and value != field.default:
            yield Problem(
                f"{flag} was not tested with {field.flag} {value}",
                remove=remove or (field.flag,),
            )


def plugin_problems(
    hook: str, user: str, *, add: tuple[str, ...] = (), remove: tuple[str, ...] = ()
) -> Iterator[Problem]:
    """Yield a problem if the plugin that provides a hook is not installed.

    Args:
        hook: a name in `registry.HOOKS`.
        user: the setting that requires the plugin.
        add: flags to use instead.
        remove: flags to remove.

    Yields:
        The problem.
    """
    reason = registry.missing(hook, user)
    if reason is not None:
        yield Problem(reason, add=add, remove=remove)


class SettingsError(ValueError):
    """The error that reports all problems of a run.

    Megatron catches an error of a layer's constructor and raises a new error of the same class,
    with the message and the layer's name. Therefore this constructor also accepts a text, which
    becomes one problem.

    Args:
        problems: the problems, or a text.
    """

    def __init__(self, problems: Iterable[Problem] | str) -> None:
        problems = [Problem(problems)] if isinstance(problems, str) else problems
        self.problems = tuple(dict.fromkeys(problems))
        super().__init__(report(self.problems))


def refuse(problems: Iterable[Problem]) -> None:
    """Raise `SettingsError` if there are problems.

    Args:
        problems: the problems; none for supported settings.

    Raises:
        SettingsError: There is at least one problem.
    """
    problems = list(problems)
    if problems:
        raise SettingsError(problems)


def report(problems: tuple[Problem, ...]) -> str:
    """Return the message of a `SettingsError`.

    A single problem is one line. Several problems are a list, then the flags to add and to remove.
    """
    if len(problems) == 1:
        return str(problems[0])
    lines = [f"{len(problems)} settings are not supported:"]
    lines += [f"  - {problem.reason}" for problem in problems]
    for word, flags in (
        ("add:   ", [flag for problem in problems for flag in problem.add]),
        ("remove:", [flag for problem in problems for flag in problem.remove]),
    ):
        if flags:
            lines.append(f"  {word} {' '.join(dict.fromkeys(flags))}")
    return "\n".join(lines)
