"""The texts of a submission: how to repeat its runs, missing values, and the output of the checkers."""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from bench.mlperf import log as logs
from bench.mlperf.package.checkers import Checked
from bench.mlperf.package.entry import Entry, Run
from bench.mlperf.reader import printable
from bench.mlperf.result import UNVERIFIED
from bench.rules.finding import Finding

IMPLEMENTATION = "runstop"
UNKNOWN_IMPLEMENTATION = "implementation"
"""For runs of other tools."""


def folder(entry: Entry) -> str:
    """Return the folder with the description of an entry's runs.

    Source: MLCommons' submission rules, section "Directory structure", Training.
    """
    return f"benchmarks/{entry.benchmark}/implementations/{entry.system}"


def implementation(entry: Entry) -> str:
    return IMPLEMENTATION if all(run.plan for run in entry.runs) else UNKNOWN_IMPLEMENTATION


def metadata_name(entry: Entry) -> str:
    return f"{entry.system}_{implementation(entry)}.json"


def metadata(entry: Entry) -> dict[str, str]:
    """Return the metadata that the submission rules require of an implementation; empty if not recorded."""
    plan = entry.runs[0].plan
    return {
        "starting_weights_filename": "",
        "weight_transformations": "",
        "weight_data_types": plan.config.precision.name if plan else "",
        "input_data_types": "",
        "retraining": "",
    }


def missing(entry: Entry) -> dict[str, list[str]]:
    """Return what the user must add for an entry, by file."""
    here = folder(entry)
    unplanned = any(run.plan is None for run in entry.runs)
    return {
        f"{here}/{metadata_name(entry)}": [field for field, value in metadata(entry).items() if not value],
        f"{here}/README.md": ["how to repeat the runs"] if unplanned else [],
        f"{here}/": ["setup.sh", "init_datasets.sh", "run_and_time.sh"],
        f"benchmarks/{entry.benchmark}/implementations/{implementation(entry)}/": ["the source code, or where it is"],
    }


def readme(entry: Entry, forced: Sequence[Finding]) -> str:
    """Return README.md: the commands, settings and versions of an entry's runs."""
    lines = [
        f"# {entry.benchmark} on {entry.system}",
        "",
        f"{UNVERIFIED} n = {len(entry.results)} runs.",
        *_warning(forced),
    ]
    first = 0
    for number, run in enumerate(entry.runs):
        last = first + len(run.results) - 1
        lines += ["", f"## run_{number}: result_{first}.txt to result_{last}.txt", "", *_how(run, f"run_{number}")]
        first = last + 1
    return "\n".join(lines) + "\n"


def _warning(forced: Sequence[Finding]) -> list[str]:
    if not forced:
        return []
    return ["", "**Not for submission:**", "", *(f"- {printable(f.titled)}" for f in forced)]


def _how(run: Run, name: str) -> list[str]:
    versions = _versions(run)
    if run.plan is None:
        return [*versions, "The commands of these runs were not recorded."]
    plan, world = run.plan, run.plan.world
    environment = " ".join(f"{key}={shlex.quote(value)}" for key, value in sorted(plan.environment.items()))
    image = plan.config.container.image
    return [
        *versions,
        *([f"Container image: {image}", ""] if image else []),
        f"`{name}/config.yaml` is the requested config; `{name}/plan.json` is the plan that every rank reads.",
        f"{world.num_ranks} ranks on {world.num_nodes} node{'s' * (world.num_nodes > 1)}: "
        f"dp {world.dp} x tp {world.tp} x pp {world.pp} x cp {world.cp}{f', ep {world.ep}' if world.ep > 1 else ''}.",
        f"On each rank, in a folder with that plan.json, with `{environment}`:",
        "",
        *(f"    {shlex.join(command.argv)}" for command in plan.commands),
    ]


def _versions(run: Run) -> list[str]:
    """Return the line with the software versions of a log."""
    software: Any = logs.read(run.results[0].file).value("software")
    if not isinstance(software, dict):
        return []
    return ["Software: " + ", ".join(printable(f"{name} {version}") for name, version in software.items()), ""]


def todo(items: Mapping[str, Sequence[str]], checked: Checked, *, forced: Sequence[Finding]) -> str:
    """Return TODO.md, which is next to the submission and not part of it."""
    failed = [name for name, check in checked.checks.items() if not check.passed]
    verdict = f"Fails the official checkers: {', '.join(failed)}." if failed else "Passes the official checkers."
    lines = [
        *("# Before submission", "", verdict, "Their output is in checkers.txt.", *_warning(forced), ""),
        *("Fill in these values, which were not recorded:", ""),
        *(f"- [ ] {file}: {', '.join(fields)}" for file, fields in items.items()),
        "",
        "To pack again with the new values, run `runstop pack … --describe` with the files of `systems/`.",
        "",
        "If you run the official tools by hand: the package checker exits with 0 even if it finds errors, and it "
        "rewrites",
        "scaling.json. The result summarizer reads scaling.json before its own check writes it, so it needs the "
        "existing",
        "file.",
    ]
    return "\n".join(lines) + "\n"


def transcript(checked: Checked, *, ruleset: str) -> str:
    """Return the complete output of the checkers."""
    lines = [f"The official checkers of mlperf-logging, ruleset {ruleset}, on a copy of this submission"]
    for name, check in checked.checks.items():
        lines += ["", f"== {name}: {'passed' if check.passed else 'failed'}", *check.transcript]
    return "\n".join(lines) + "\n"
