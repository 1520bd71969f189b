"""How does an answer look when it is printed? As facts and tables; the terminal's library is imported only then."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclasses.dataclass(frozen=True)
class Grid:
    """A table in words."""

    columns: tuple[str, ...]
    rows: Iterable[Sequence[str]]


class Shown:
    """What prints as facts, one a line, and tables below them."""

    def facts(self) -> dict[str, str]:
        return {}

    def grids(self) -> list[Grid]:
        raise NotImplementedError

    def __rich__(self) -> RenderableType:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        facts = self.facts()
        width = max(map(len, facts), default=0)
        parts: list[RenderableType] = [Text("\n".join(f"{name:{width}}  {fact}" for name, fact in facts.items()))]
        for grid in self.grids():
            table = Table(*grid.columns)
            for row in grid.rows:
                table.add_row(*map(Text, row))
            parts.append(table)
        return Group(*parts[0 if facts else 1 :])

    def __str__(self) -> str:
        from rich.console import Console

        text = io.StringIO()
        Console(file=text, width=120, color_system=None, legacy_windows=False).print(self)
        return "\n".join(line.rstrip() for line in text.getvalue().rstrip("\n").split("\n"))

    __repr__ = __str__
