"""Which names does the API page show? Those that a module lists, so that no page has to repeat a list.

A page says `[[names of replicax.host]]`, and when the site is built this becomes one entry for each name that
`replicax/host.py` exports by writing `import x as x`, in the order of the file.
"""

import ast
import re
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).parents[1] / "src"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by mkdocs for each page."""
    return re.sub(r"^\[\[names of ([\w.]+)\]\]$", lambda match: entries(match[1]), markdown, flags=re.MULTILINE)


def entries(module: str) -> str:
    names = listed(module)
    if not names:
        raise ValueError(f"{module} lists no name")
    return "\n\n".join(f"::: {module}.{name}" for name in names)


def listed(module: str) -> list[str]:
    path = SOURCE.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    imports = [node for node in ast.parse(file.read_text()).body if isinstance(node, ast.ImportFrom)]
    named = [alias for node in imports if node.module != module for alias in node.names]  # without doors to submodules
    return [alias.name for alias in named if alias.asname == alias.name]
