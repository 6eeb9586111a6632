"""Create the plan of a run from its config, by the kind of its task."""

from collections.abc import Callable, Mapping

from bench.contract.plan import Plan
from bench.contract.schema import Config
from bench.contract.task import Kind
from bench.planning import checks, generation, kernels, serving, training
from bench.planning.checks import generation as generation_checks
from bench.planning.checks import kernels as kernel_checks
from bench.planning.checks import training as training_checks

PLANNERS: "Mapping[Kind, tuple[Check, Make]]" = {
    Kind.train: (training_checks.check, training.make),
    Kind.generate: (generation_checks.check, generation.make),
    Kind.serve: (serving.check, serving.make),
    Kind.kernels: (kernel_checks.check, kernels.make),
}
Check = Callable[[Config], None]
"""Refuses a config of this kind that is invalid in every layout."""
Make = Callable[[Config, Config | None], Plan]
"""Creates the plan; the second config is that of the task that trains the base checkpoint."""


def make(config: Config, base: Config | None = None) -> Plan:
    """Return the plan of a run; `base` is the config of the task that trains its base checkpoint.

    Raises:
        ConfigError: the config is impossible; the message gives the legal values.
    """
    check(config)
    _, plan_of_kind = PLANNERS[config.task.kind]
    return plan_of_kind(config, base)


def check(config: Config) -> None:
    """Raise ConfigError if the config is invalid in every layout."""
    checks.check(config)
    check_kind, _ = PLANNERS[config.task.kind]
    check_kind(config)
