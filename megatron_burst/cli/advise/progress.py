"""How far a search is, on the standard error, so that the standard output is the advice alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


@contextmanager
def shown() -> Iterator[Callable[[int, int], None]]:
    """A bar while the context lasts; gone when it ends, and none where there is no terminal."""
    console = Console(stderr=True)
    columns = (
        TextColumn("trying ways to share the GPUs out"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("search", total=None)

        def tell(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        yield tell
