"""Which names does the API page show? Those that a module lists, so that no page has to repeat a list.

A page says `[[names of replicax.host]]`, and when the site is built this becomes one entry for each name that
`replicax/host.py` exports by writing `import x as x`, in the order of the file. `[[errors of replicax._errors]]` becomes one
for each class of errors.
"""

import ast
import re
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).parents[1] / "src"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by mkdocs for each page."""
    find = {"names": listed, "errors": errors}
    return re.sub(
        r"^\[\[(names|errors) of ([\w.]+)\]\]$",
        lambda match: entries(match[2], find[match[1]](match[2])),
        markdown,
        flags=re.MULTILINE,
    )


def entries(module: str, names: list[str]) -> str:
    if not names:
        raise ValueError(f"{module} lists no name")
    return "\n\n".join(f"::: {module}.{name}" for name in names)


def statements(module: str) -> list[ast.stmt]:
    path = SOURCE.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text()).body


def errors(module: str) -> list[str]:
    return [node.name for node in statements(module) if isinstance(node, ast.ClassDef) and node.name.endswith("Error")]


def listed(module: str) -> list[str]:
    imports = [node for node in statements(module) if isinstance(node, ast.ImportFrom)]
    named = [alias for node in imports if node.module != module for alias in node.names]  # without doors to submodules
    return [alias.name for alias in named if alias.asname == alias.name]
