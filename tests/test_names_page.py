"""The page of old and new names is made from the table, and the table is well formed."""

import importlib.util
import tomllib
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
TABLE = tomllib.loads((DOCS / "port" / "names.toml").read_text())
ROWS = TABLE["name"]
KINDS = {"module", "class", "function", "method", "property", "member"}


@pytest.fixture(scope="module")
def make_names():
    spec = importlib.util.spec_from_file_location("make_names", DOCS / "make_names.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_up_to_date(make_names):
    assert make_names.PAGE.read_text() == make_names.render(TABLE), "run `python docs/make_names.py`"


def test_every_row_is_on_the_page(make_names):
    page, later = (part.splitlines() for part in make_names.render(TABLE).split(make_names.LATER))

    assert len([line for line in page if line.startswith("| `")]) == len(ROWS)
    assert len([line for line in later if line.startswith("| `")]) == len(
        {row["old"] for row in ROWS if "later" in row}
    )


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"kind": "class"}, ""),
        ({"kind": "property"}, ""),
        ({"kind": "function"}, "(...)"),
        ({"kind": "method", "parameters": []}, "()"),
        ({"kind": "method", "parameters": ["fn", "**kwargs"], "keywords": ["now=True"]}, "(fn, now=True, **kwargs)"),
        ({"kind": "method", "keywords": ["cluster_spec=None"]}, "(..., cluster_spec=None)"),
    ],
)
def test_parameters_are_shown_as_one_would_write_them(make_names, row, text):
    assert make_names.signature(row) == text


def test_no_era_names_a_thing_twice():
    names = [(row["era"], row["old"]) for row in ROWS]

    assert sorted(names) == sorted(set(names))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['era']}-{row['old']}")
def test_a_row_is_well_formed(row):
    assert row["era"] in TABLE["eras"]
    assert row["kind"] in KINDS
    assert row["new"].split(".")[0] == "replicax"
    assert "parameters" not in row or row["kind"] in ("function", "method")
    assert row.keys() - {"parameters", "keywords", "later"} == {"era", "kind", "old", "new", "test"}
