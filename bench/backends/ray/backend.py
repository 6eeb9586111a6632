"""Ray as a backend: its checks, its requests and manifests, its jobs."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from bench.backends.protocol import Job
from bench.backends.ray import checks, client, group, jobs, manifest
from bench.contract.plan import Plan
from bench.rules.check import Check, Finding, Subject, Tier


class RayBackend:
    """Jobs are drivers on a Ray cluster; ranks are children of runners, which actors start."""

    tiers: tuple[Tier, ...] = ("laptop", "login", "canary", "nodes")
    files_tier: Tier = "login"

    def is_here(self) -> bool:
        return client.is_here()

    def checks(self, plan: Plan) -> Mapping[Tier, tuple[Check, ...]]:
        return {"laptop": checks.LAPTOP, "login": checks.LOGIN}

    def subject(self, plan: Plan, tier: Tier) -> Subject:
        return checks.subject(plan, tier)

    def render(self, plan: Plan) -> str:
        return manifest.text(plan)

    def differences(self, rendered: str, plan_json: str) -> Iterable[str]:
        return manifest.differences(rendered, plan_json)

    def rank_environment(self, plan: Plan) -> dict[str, str]:
        return dict(plan.environment)

    def states(self, ids: Sequence[str]) -> dict[str, Job]:
        return client.states(ids)

    def cancel(self, job: str) -> None:
        client.stop(job)

    def submit(self, plan: Plan, folder: Path, *, forced: Sequence[Finding] = ()) -> str:
        return jobs.submit(plan, folder, forced=forced)

    def submitted(self, folder: Path) -> Sequence[str]:
        return jobs.submitted(folder)

    def resume(
        self, folder: Path, *, trials_left: int, walltime_min: int | None = None, arguments: Sequence[str] = ()
    ) -> str:
        return jobs.resume(folder, trials_left=trials_left, walltime_min=walltime_min, arguments=arguments)

    def shares_nodes(self, plans: Sequence[Plan]) -> bool:
        first = plans[0]
        return all((group.bundle(p), p.world.num_nodes) == (group.bundle(first), first.world.num_nodes) for p in plans)

    def prepare_shared(self, plan: Plan, folder: Path, *, forced: Sequence[Finding] = ()) -> None:
        jobs.note(plan, folder, forced=forced)

    def submit_shared(self, runs: Sequence[tuple[Plan, Path]], folder: Path, *, name: str) -> str:
        return jobs.submit_shared(runs, folder)

    def note_shared(self, folder: Path) -> None:
        jobs.note_shared(folder)

    def without(self, plan: Plan, nodes: Sequence[str]) -> str:
        return f"a Ray cluster without {', '.join(nodes)}: drain them with `ray drain-node`"
