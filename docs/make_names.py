"""Which old name is which new one? Makes `port/names.md` out of `port/names.toml`.

``python docs/make_names.py`` writes the page; `tests/test_names_page.py` says when that was forgotten.
"""

import tomllib
from pathlib import Path
from typing import Any

TABLE = Path(__file__).parent / "port" / "names.toml"
PAGE = TABLE.with_suffix(".md")

HEAD = """\
# Old names and new ones

Every name in the documents of four releases, and its name here. The page is made from `docs/port/names.toml`.
"""

LATER = """\
## What needs several processes

These names are there and do what one process can do: describe a cluster and check it, or work on the devices of this machine.
Given a cluster of several processes they raise `rx.NotAvailableError`, which says what is missing.
"""


def render(table: dict[str, Any]) -> str:
    """The page for a table, one section for each era."""
    lines = [HEAD]
    for era, title in table["eras"].items():
        lines += [f"## {title}\n", "| then | | now |", "|---|---|---|"]
        lines += [
            f"| `{row['old']}{signature(row)}` | {row['kind']} | `{row['new']}` |"
            for row in table["name"]
            if row["era"] == era
        ]
        lines.append("")
    lines += [LATER, "| then | will come with |", "|---|---|"]
    lines += dict.fromkeys(f"| `{row['old']}` | `{row['later']}` |" for row in table["name"] if "later" in row)
    lines.append("")
    return "\n".join(lines)


def signature(row: dict[str, Any]) -> str:
    """The parameters in brackets; dots where a document names a function without them."""
    if row["kind"] not in ("function", "method"):
        return ""
    parameters = row.get("parameters", ["..."]) + row.get("keywords", [])
    return f"({', '.join(sorted(parameters, key=lambda parameter: parameter.startswith('**')))})"


if __name__ == "__main__":
    PAGE.write_text(render(tomllib.loads(TABLE.read_text())))
