"""Make the plan of a run from its config, by the kind of its task."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from bench.contract.plan import Plan
from bench.contract.schema import Config
from bench.contract.task import Kind
from bench.planning import checks, generation, kernels, serving, training
from bench.planning.checks import generation as generation_checks
from bench.planning.checks import kernels as kernel_checks
from bench.planning.checks import training as training_checks


class Planner(NamedTuple):
    """What plans the tasks of one kind."""

    check: Callable[[Config], None]
    make: Callable[[Config, Config | None], Plan]


PLANNERS: Mapping[Kind, Planner] = {
    Kind.train: Planner(training_checks.check, training.make),
    Kind.generate: Planner(generation_checks.check, generation.make),
    Kind.serve: Planner(serving.check, serving.make),
    Kind.kernels: Planner(kernel_checks.check, kernels.make),
}


def make(config: Config, base: Config | None = None) -> Plan:
    """Return the plan of a run; `base` is the config of the task that makes its base checkpoint.

    Raises:
        ConfigError: the request is impossible; the message gives the legal values.
    """
    check(config)
    return PLANNERS[config.task.kind].make(config, base)


def check(config: Config) -> None:
    """Raise ConfigError when the config contradicts itself in every layout."""
    checks.check(config)
    PLANNERS[config.task.kind].check(config)
