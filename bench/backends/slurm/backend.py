"""The Slurm backend: its checks, its script, its jobs."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from bench.backends.protocol import Job
from bench.backends.slurm import argument_checks, client, jobs, script
from bench.backends.slurm import checks as slurm_checks
from bench.backends.slurm.script import excluding, sbatch_arguments
from bench.contract.plan import Plan
from bench.contract.plan_paths import expanded
from bench.errors import SubmitError
from bench.rules.check import TIERS, Check, Finding, Subject, Tier

_PLAN = re.compile(r"^  cat <<'PLAN'\n(.*?\n)PLAN\n", re.DOTALL | re.MULTILINE)
_SITE_NAMES = re.compile(r'^site_names="([\w ]*)"$', re.MULTILINE)


def differences(script: str, plan: str) -> Iterator[str]:
    """Yield the lines in which a plan.json differs from the plan in a script."""
    held, names = _PLAN.search(script), _SITE_NAMES.search(script)
    if held is None or names is None:
        yield "the script contains no plan"
        return
    expected, actual = held[1].splitlines(), plan.splitlines()
    if len(expected) != len(actual):
        yield f"plan.json has {len(actual)} lines, but the plan in the script has {len(expected)}"
        return
    values: dict[str, str] = {}
    variable = re.compile("|".join(rf"\${name}" for name in names[1].split()) or r"(?!)")
    for number, (ours, theirs) in enumerate(zip(expected, actual, strict=True), 1):
        if not _fits(ours, theirs, variable, values):
            yield f"line {number} of plan.json is {theirs.strip()!r:.80}, but {ours.strip()!r:.80} in the script"


def _fits(held: str, line: str, variable: re.Pattern[str], values: dict[str, str]) -> bool:
    """Return whether a line is the script's with its variables replaced, each by the same value in all lines."""
    pattern, at, new = "", 0, []
    for match in variable.finditer(held):
        pattern += re.escape(held[at : match.start()])
        name = match[0][1:]
        if name in values:
            pattern += re.escape(values[name])
        elif name in new:
            pattern += f"(?P={name})"
        else:
            new.append(name)
            pattern += f"(?P<{name}>.*?)"
        at = match.end()
    whole = re.fullmatch(pattern + re.escape(held[at:]), line)
    if whole:
        values.update(whole.groupdict())
    return whole is not None


LAPTOP = (
    Check("image and container", ("PYX-04", "PYX-06", "HST-08"), argument_checks.container),
    Check("mounts", ("PYX-05", "PYX-12", "CFG-06"), argument_checks.mounts),
    Check("arguments for sbatch", ("CFG-09", "PYX-05", "PYX-10"), argument_checks.contradictions),
    Check("name of the run folder", ("CFG-06",), argument_checks.run_folder),
    Check("time limit", ("SLU-02",), argument_checks.walltime),
    Check("command that drops caches", ("CFG-09",), argument_checks.drop_caches),
    Check("GPU type", ("SLU-01",), argument_checks.gpu_type),
)
LOGIN = (
    Check("configuration of Slurm", ("SLU-11",), slurm_checks.configured),
    Check("partition", ("SLU-02", "SLU-09"), slurm_checks.partition),
    Check("nodes left out", ("SLU-02",), slurm_checks.left_out, slurm_checks.leaves_nodes_out),
    Check("GPUs", ("SLU-01", "SLU-02"), slurm_checks.gpus),
    Check("CPUs", ("SLU-02",), slurm_checks.cpus),
    Check("account and QOS", ("SLU-02",), slurm_checks.accounts),
    Check("sbatch --test-only", ("SLU-01", "SLU-02"), slurm_checks.accepted),
    Check("Pyxis", ("PYX-02",), slurm_checks.plugin, slurm_checks.in_container),
    Check("container flags", ("PYX-01",), slurm_checks.flags, slurm_checks.has_bare_flags),
    Check("accounting", ("SLU-04",), slurm_checks.accounting),
    Check("Apptainer", ("ENR-07", "HST-08"), slurm_checks.sif, slurm_checks.in_apptainer),
    Check("image file", ("ENR-07", "ENR-08", "ENR-11", "RUN-08"), slurm_checks.file, slurm_checks.is_file),
    Check("registry credentials", ("ENR-01",), slurm_checks.credentials, slurm_checks.is_in_registry),
)


class SlurmBackend:
    """Jobs are sbatch scripts; srun starts the ranks, in Pyxis containers if the plan has an image."""

    tiers: tuple[Tier, ...] = TIERS
    files_tier: Tier = "login"

    def is_available(self) -> bool:
        return client.is_available()

    def checks(self, plan: Plan) -> Mapping[Tier, tuple[Check, ...]]:
        return {"laptop": LAPTOP, "login": LOGIN}

    def subject(self, plan: Plan, tier: Tier) -> Subject:
        folder = Path(plan.config.launch.folder or expanded(plan.config.cluster.paths.logs) or "/")
        text, words = script.script(plan), sbatch_arguments(plan, folder)
        if tier == "laptop":
            return Subject(plan, text, tuple(words))
        probe = slurm_checks.probe(plan, text)
        return slurm_checks.run_queries(plan, text, words, probes=[probe] if probe else [])

    def render(self, plan: Plan) -> str:
        return script.script(plan)

    def differences(self, rendered: str, plan_json: str) -> Iterable[str]:
        return differences(rendered, plan_json)

    def rank_environment(self, plan: Plan) -> dict[str, str]:
        return script.rank_environment(plan)

    def states(self, ids: Sequence[str]) -> dict[str, Job]:
        return client.states(ids)

    def submitted(self, folder: Path) -> list[str]:
        return jobs.submitted(folder)

    def is_of(self, job: str, folder: Path) -> bool:
        return job in jobs.submitted(folder)

    def cancel(self, job: str) -> None:
        answer = client.run(["scancel", job])
        if answer.exit_code:
            raise SubmitError(
                answer.err.strip() or "scancel failed", where=f"job {job}", fix=f"run `scancel {job}` again"
            )

    def submit(self, plan: Plan, folder: Path, *, forced: Sequence[Finding] = ()) -> str:
        return jobs.submit(plan, folder, forced=forced)

    def resume(
        self, folder: Path, *, trials_left: int, walltime_min: int | None = None, arguments: Sequence[str] = ()
    ) -> str:
        return jobs.resume(folder, trials_left=trials_left, walltime_min=walltime_min, arguments=arguments)

    def shares_nodes(self, plans: Sequence[Plan]) -> bool:
        return all(script.resources(plan) == script.resources(plans[0]) for plan in plans)

    def prepare_shared(self, plan: Plan, folder: Path, *, forced: Sequence[Finding] = ()) -> None:
        jobs.prepare(plan, folder, forced=forced)

    def submit_shared(self, runs: Sequence[tuple[Plan, Path]], folder: Path, *, name: str) -> str:
        return jobs.submit_shared(runs, folder, name=name)

    def arrays(self, plans: Sequence[Plan]) -> list[list[int]]:
        return script.arrays(plans)

    def submit_array(self, runs: Sequence[tuple[Plan, Path]], folder: Path, *, name: str) -> str:
        return jobs.submit_array(runs, folder, name=name)

    def record_shared_jobs(self, folder: Path) -> None:
        jobs.record_shared_jobs(folder)

    def exclude_nodes(self, plan: Plan, nodes: Sequence[str]) -> str:
        return excluding(plan, nodes)
