"""Find the settings in which several sets differ."""

from collections.abc import Mapping, Sequence
from typing import Any

from bench.contract.codec import plain
from bench.report.sets import TrialSet

_NOT_SETTINGS = ("launch.", "cluster.paths.", "cluster.org", "cluster.environment.", "seed_base")
"""Beginnings of keys that do not change what is measured."""
_TEXTS = ("summary", "source", "description")


def differences(sets: Sequence[TrialSet]) -> list[tuple[str, list[str]]]:
    """Return each setting that is not the same in all sets, with its value in each.

    The plans are compared where every set has one, else what the logs say of themselves.
    """
    by_plan = all(trials.plan is not None for trials in sets)
    settings = [_planned(trials) if by_plan else _logged(trials) for trials in sets]
    names = dict.fromkeys(name for of_one_set in settings for name in of_one_set)
    rows = [(name, [of_one_set.get(name, "") for of_one_set in settings]) for name in names]
    return [(name, values) for name, values in rows if len(set(values)) > 1]


def _planned(trials: TrialSet) -> dict[str, str]:
    """Return the config, and how the ranks were split where the config leaves that open."""
    assert trials.plan is not None
    config = dict(_flat(plain(trials.plan.config)))
    world = trials.plan.world
    config |= {f"parallel.{name}": str(getattr(world, name)) for name in ("tp", "pp", "cp", "sp")}
    measured = {name: value for name, value in config.items() if not name.startswith(_NOT_SETTINGS)}
    return {name: value for name, value in measured.items() if name.rsplit(".", 1)[-1] not in _TEXTS}


def _flat(values: Mapping[str, Any], prefix: str = "") -> "list[tuple[str, str]]":
    found: list[tuple[str, str]] = []
    for name, value in values.items():
        inner = isinstance(value, Mapping)
        found += _flat(value, f"{prefix}{name}.") if inner else [(f"{prefix}{name}", str(value))]
    return found


def _logged(trials: TrialSet) -> dict[str, str]:
    """Return the settings in the logs; one that differs between the trials of a set has all its values."""
    names = dict.fromkeys(name for r in trials.results for name in r.hyperparameters)
    values = {name: dict.fromkeys(str(r.hyperparameters.get(name, "")) for r in trials.results) for name in names}
    return {name: " | ".join(found) for name, found in values.items()}
