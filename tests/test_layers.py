"""A file uses only what stands above it in the table of docs/design/001-engine.md.

Every import counts, also one inside a function. Only imports for annotations (`if TYPE_CHECKING:`) are free, since they
are never carried out. To add a file, give it a row in the table; if that is hard, the file answers two questions.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
PACKAGE = REPOSITORY / "src" / "replicax"
TABLE = REPOSITORY / "docs" / "design" / "001-engine.md"

# Imports against the order that we could not do without, each with its reason: {("file", "imported"): "why"}.
ALLOWED: dict[tuple[str, str], str] = {}


def _layer(name: str) -> str:
    return name.removesuffix(".py").split("/")[0]


def read_table(text: str) -> tuple[list[str], dict[str, set[str]]]:
    """The layers from the top down, and what those that stand beside the others may use.

    A layer that "stands beside, uses only `a`, `b`" is as high as these allow: everything below them may use it.
    """
    layers: list[str] = []
    beside: dict[str, set[str]] = {}
    for cells in re.findall(r"^\| (`.*?) \| (.*) \|$", text, flags=re.MULTILINE):
        names = [_layer(name) for name in re.findall(r"`([^`]+)`", cells[0].split("(door:")[0])]
        uses = re.search(r"stands beside, uses only ((?:`\w+`(?:, | and )?)+)", cells[1])
        if uses:
            only = set(re.findall(r"`(\w+)`", uses[1]))
            beside |= dict.fromkeys(names, only)
            below = max(map(layers.index, only)) + 1
            layers[below:below] = names
        else:
            layers += names
    return layers, beside


def read_doors(text: str) -> dict[str, str]:
    """Public modules that only open what lies in a private one: {"data": "_input"}."""
    return {door: _layer(behind) for behind, door in re.findall(r"^\| `([^`]+)` \(door: `(\w+)`\)", text, re.MULTILINE)}


LAYERS, BESIDE = read_table(TABLE.read_text())
DOORS = read_doors(TABLE.read_text())
FILES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))


def _home(name: str) -> str:
    """The layer that a file or module belongs to; a door belongs to what it opens."""
    layer = _layer(name)
    return DOORS.get(layer, layer)


def imports(source: str, file: str) -> Iterator[tuple[int, str]]:
    """Line and layer of each import from this package that is carried out."""
    package = ["replicax", *file.split("/")[:-1]]
    for node in _carried_out(ast.parse(source)):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            start = ".".join([*base, *filter(None, [node.module])])
            modules = [f"{start}.{alias.name}" for alias in node.names]
        else:
            continue
        for module in modules:
            root, *rest = module.split(".")
            if root == "replicax":
                yield node.lineno, rest[0] if rest else ""


def _carried_out(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            continue
        yield child
        yield from _carried_out(child)


def violations(source: str, file: str) -> Iterator[str]:
    own = _home(file)
    for line, name in imports(source, file):
        other = _home(name)
        if other == own or (file, name) in ALLOWED or (not name and own == LAYERS[-1]):
            continue  # what stands at the bottom may use the public list, as a user does
        if other not in LAYERS:
            yield f"{file}:{line} imports `replicax.{name}`, which has no row in {TABLE.name}; import from its own file"
        elif own in BESIDE and other not in BESIDE[own]:
            yield f"{file}:{line} imports {name}, but {own} uses only {sorted(BESIDE[own])}"
        elif LAYERS.index(other) > LAYERS.index(own):
            yield f"{file}:{line} imports {name}, which stands below {own}"


def test_every_file_has_a_layer():
    homeless = [file for file in FILES if file != "__init__.py" and _home(file) not in LAYERS]

    assert homeless == [], f"give these a row in {TABLE.relative_to(REPOSITORY)}"


def test_the_table_names_no_layer_twice():
    assert len(set(LAYERS)) == len(LAYERS)


@pytest.mark.parametrize("file", [file for file in FILES if file != "__init__.py" and _home(file) in LAYERS])
def test_a_file_imports_only_from_above(file):
    assert list(violations((PACKAGE / file).read_text(), file)) == []


def test_exceptions_are_still_needed():
    needed = {(file, name) for file in FILES for _, name in imports((PACKAGE / file).read_text(), file)}

    assert set(ALLOWED) <= needed


@pytest.mark.parametrize(
    ("file", "source", "found"),
    [
        ("_jax.py", "from replicax._errors import message", []),
        ("_jax.py", "from replicax._host import configure", ["_jax.py:1 imports _host, which stands below _jax"]),
        ("_jax.py", "import replicax._host", ["_jax.py:1 imports _host, which stands below _jax"]),
        ("_jax.py", "from replicax import _host", ["_jax.py:1 imports _host, which stands below _jax"]),
        ("_jax.py", "from . import _host", ["_jax.py:1 imports _host, which stands below _jax"]),
        ("_jax.py", "from .host import configure", ["_jax.py:1 imports host, which stands below _jax"]),
        ("_run/eager.py", "from .. import _strategy", ["_run/eager.py:1 imports _strategy, which stands below _run"]),
        ("_run/eager.py", "from . import merge", []),
        ("_jax.py", "def f():\n    import replicax._host", ["_jax.py:2 imports _host, which stands below _jax"]),
        ("_jax.py", "if TYPE_CHECKING:\n    from replicax._host import x", []),
        ("host.py", "from replicax._host import configure", []),
        ("_context.py", "from replicax.cluster import ClusterSpec", []),
        ("cluster/_spec.py", "import replicax._devices, jax", []),
    ],
)
def test_imports_are_read_in_every_spelling(file, source, found):
    assert list(violations(source, file)) == found


@pytest.mark.parametrize("source", ["import replicax", "from replicax import Variable"])
def test_the_package_does_not_import_through_its_own_front_door(source):
    assert [found.split("; ")[1] for found in violations(source, "_jax.py")] == ["import from its own file"]


def test_a_layer_that_stands_beside_uses_nothing_else():
    assert list(violations("from replicax import _context", "cluster/_spec.py")) == [
        "cluster/_spec.py:1 imports _context, but cluster uses only ['_devices', '_errors']"
    ]
