"""The bar that shows how far the child process is."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn


class ProgressBar:
    """A bar on standard error; silent where that is no terminal.

    Standard output stays free for the report, so that it can be piped.
    """

    def __init__(self, console: Console | None = None) -> None:
        """Prepare the bar.

        Args:
            console: Where to draw; by default standard error.
        """
        self._console = console or Console(stderr=True)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._task: TaskID | None = None

    def __enter__(self) -> ProgressBar:
        self._bar.start()
        self._task = self._bar.add_task("starting your program", total=None)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def update(self, done: int, total: int, text: str) -> None:
        """Move the bar.

        Args:
            done: Steps that are done.
            total: Steps there are in all.
            text: A few words on what runs now.
        """
        if self._task is None:
            raise RuntimeError("the progress bar is used outside its with block")
        self._bar.update(self._task, completed=done, total=total, description=text)
