"""Kubernetes as a backend: its checks, its manifest, its jobs."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from bench.backends.kubernetes import client, config_checks, jobs, manifest, names, site_checks, states
from bench.backends.protocol import Job
from bench.contract.plan import Plan
from bench.errors import ConfigError
from bench.rules.check import TIERS, Check, Finding, Subject, Tier


class KubernetesBackend:
    """Jobs are objects of the cluster; each node is a pod, whose ranks are started by `bench.runner`."""

    tiers: tuple[Tier, ...] = TIERS
    files_tier: Tier = "nodes"
    """Data, checkpoint and results lie in volumes, which only pods see."""

    def is_here(self) -> bool:
        return client.is_here()

    def checks(self, plan: Plan) -> Mapping[Tier, tuple[Check, ...]]:
        return {"laptop": config_checks.CHECKS, "login": site_checks.CHECKS}

    def subject(self, plan: Plan, tier: Tier) -> Subject:
        text = manifest.text(plan)
        return Subject(plan, text) if tier == "laptop" else site_checks.ask_all(plan, text)

    def render(self, plan: Plan) -> str:
        return manifest.text(plan)

    def differences(self, rendered: str, plan_json: str) -> Iterable[str]:
        if manifest.held_plan(rendered) != plan_json:
            yield "the manifest holds another plan"

    def rank_environment(self, plan: Plan) -> dict[str, str]:
        return plan.environment

    def states(self, ids: Sequence[str]) -> dict[str, Job]:
        return states.states(ids)

    def submitted(self, folder: Path) -> list[str]:
        return jobs.submitted(folder)

    def cancel(self, job: str) -> None:
        jobs.cancel(names.read_id(job))

    def printed(self, job: str) -> Mapping[str, str]:
        return jobs.printed(names.read_id(job))

    def submit(self, plan: Plan, folder: Path, *, forced: Sequence[Finding] = ()) -> str:
        return jobs.submit(plan, folder, forced=forced)

    def resume(
        self, folder: Path, *, trials_left: int, walltime_min: int | None = None, arguments: Sequence[str] = ()
    ) -> str:
        return jobs.resume(folder, trials_left=trials_left, walltime_min=walltime_min, arguments=arguments)

    def shares_nodes(self, plans: Sequence[Plan]) -> bool:
        return False

    def prepare_shared(self, plan: Plan, folder: Path, *, forced: Sequence[Finding] = ()) -> None:
        raise _not_shared()

    def submit_shared(self, runs: Sequence[tuple[Plan, Path]], folder: Path, *, name: str) -> str:
        raise _not_shared()

    def note_shared(self, folder: Path) -> None:
        """Do nothing: no job here is shared."""

    def without(self, plan: Plan, nodes: Sequence[str]) -> str:
        left_out = [*names.settings(plan).exclude_nodes, *nodes]
        return f"cluster.kubernetes.exclude_nodes=[{','.join(left_out)}]"


def _not_shared() -> ConfigError:
    return ConfigError(
        "runs on Kubernetes have a job each", where="cluster.backend=kubernetes", fix="submit them one by one"
    )
