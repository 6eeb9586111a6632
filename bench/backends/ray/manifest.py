"""STUB"""

from bench.contract.plan import Plan
from bench.errors import ConfigError


def text(plan: Plan) -> str:
    raise ConfigError(
        "a run on a Ray cluster that is there has no script: its driver is sent to it",
        where=f"cluster={plan.config.cluster.name}",
        fix="choose cluster=kuberay for a manifest; `python -m bench plan --json` prints the plan",
    )


def differences(rendered: str, plan_json: str):
    yield ""
