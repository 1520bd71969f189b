"""Every name that the 2018 documents print is there, as what they say it is, and takes the arguments they show."""

import inspect
import tomllib
from pathlib import Path

import pytest

from replicax.compat import tower

TABLE = tomllib.loads((Path(__file__).parents[2] / "docs" / "port" / "names.toml").read_text())
HERE = "replicax.compat.tower."
ROWS = [row for row in TABLE["name"] if row["new"].startswith(HERE)]


def find(name):
    """The object of that name as it is written down in its class, without asking an instance."""
    first, *rest = name.removeprefix(HERE).split(".")
    found = getattr(tower, first)
    for part in rest:
        found = inspect.getattr_static(found, part)
    return found


def parameters(row):
    """The names of a row's parameters, with the mark that says how they are taken."""
    return [parameter.split("=")[0] for parameter in row.get("parameters", [])]


@pytest.mark.parametrize(
    "row", ROWS, ids=lambda row: f"{row['era']}-{row['old'].removeprefix('tf.contrib.distribute.')}"
)
def test_a_name_of_2018_is_there(row):
    found = find(row["new"])

    match row["kind"]:
        case "class":
            assert inspect.isclass(found)
        case "property":
            assert isinstance(found, property)
        case "function" | "method":
            signature = inspect.signature(found)
            variadic = {p.name for p in signature.parameters.values() if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
            for name in parameters(row):
                assert name.lstrip("*") in signature.parameters
                assert name.startswith("*") == (name.lstrip("*") in variadic)


@pytest.mark.parametrize(
    "row",
    [r for r in ROWS if r["kind"] == "method" and "parameters" in r],
    ids=lambda row: f"{row['era']}-{row['old']}",
)
def test_a_method_takes_its_arguments_by_position_and_by_name(row):
    signature = inspect.signature(find(row["new"]))
    names = [name for name in parameters(row) if not name.startswith("*")]

    signature.bind("self", *range(len(names)))
    signature.bind("self", **{name: 0 for name in names})


def test_defaults_are_those_of_2018():
    reduce = inspect.signature(tower.DistributionStrategy.reduce)
    fetch = inspect.signature(tower.DistributionStrategy.fetch)

    assert reduce.parameters["destinations"].default is None
    assert fetch.parameters["destination"].default == "/device:CPU:0"
    assert inspect.signature(tower.DistributionStrategy.run_steps_on_dataset).parameters["iterations"].default == 1
    assert inspect.signature(tower.CollectiveAllReduceStrategy).parameters["num_gpus_per_worker"].default == 0
    assert list(inspect.signature(tower.DistributionStrategy.configure).parameters)[1:] == [
        "session_config", "cluster_spec", "task_type", "task_id",
    ]  # fmt: skip


def test_a_strategy_has_the_same_members_whatever_it_is():
    members = {name for name in dir(tower.DistributionStrategy) if not name.startswith("_")}

    for strategy in (tower.MirroredStrategy, tower.OneDeviceStrategy, tower.ParameterServerStrategy, tower.TPUStrategy):
        assert issubclass(strategy, tower.DistributionStrategy)
        assert members <= set(dir(strategy))
        assert all(inspect.getattr_static(strategy, name).__doc__ for name in members)


def test_every_public_name_is_documented():
    shown = [value for name, value in vars(tower).items() if not name.startswith("_") and inspect.isclass(value)]

    assert shown and all(value.__doc__ for value in shown)
