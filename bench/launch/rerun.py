"""Launch a run anew: with its own arguments, and those that replace or add to them."""

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path

from bench.contract import codec
from bench.contract.plan import Plan
from bench.errors import BenchError
from bench.history.avoid import bad_nodes
from bench.launch import start
from bench.mlperf import result as results
from bench.planning import compose, to_prepare
from bench.runs import command_line, names
from bench.runs.command_line import CommandLine
from bench.runs.folder import plan_in, require_ours

_ROOT = Path(__file__).parents[2]
_OF_ONE_RUN = ("launch.folder", "launch.dry_run")
"""Keys that a new run does not take over, and that are not compared."""
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rerun:
    """A planned run, and how it differs from an earlier one."""

    plan: Plan
    config_yaml: str
    overrides: tuple[str, ...]
    config_dir: Path | None
    differences: tuple[tuple[str, str, str], ...]
    """Setting or version, its value in the earlier run, and its value now."""

    @property
    def words(self) -> list[str]:
        """The arguments of `runstop launch` that start the same run."""
        return [*self.overrides, *to_prepare.site_words(self.config_dir)]


def plan(folder: Path, overrides: Sequence[str]) -> Rerun:
    """Plan a run again; nothing is started.

    Raises:
        ConfigError: the folder is not a run folder of this user, has no record of its arguments, or they can no longer
            be planned.
    """
    if not names.is_run(folder):
        raise names.not_a_run(folder)
    require_ours(folder.resolve())  # the arguments can name programs
    recorded = command_line.read(folder)
    merged = replaced(recorded.overrides, overrides)
    new, config_yaml = compose.for_run(merged, config_dir=recorded.config_dir, bad_nodes=bad_nodes)
    return Rerun(
        plan=new,
        config_yaml=command_line.with_overrides(config_yaml, merged, recorded.config_dir),
        overrides=tuple(merged),
        config_dir=recorded.config_dir,
        differences=tuple(_differences(folder, recorded, new)),
    )


def replaced(old: Sequence[str], new: Sequence[str]) -> list[str]:
    """Return overrides with the new ones in place of those of the same key, or at the end."""
    changed = {compose.override_key(one): one for one in new}
    kept = [one for one in old if compose.override_key(one) not in _OF_ONE_RUN]
    merged = [changed.pop(compose.override_key(one), one) for one in kept]
    return [*merged, *changed.values()]


def run(repeated: Rerun) -> int:
    """Start the run and return its exit code; a dry run only shows the plan, as that of `runstop launch`.

    Raises:
        BenchError: as `start.run`.
    """
    if repeated.plan.config.launch.dry_run:
        return start.dry_run(repeated.plan, repeated.words)
    return start.run(repeated.plan, repeated.config_yaml, [], repeated.words)


def _differences(folder: Path, recorded: CommandLine, new: Plan) -> Iterator[tuple[str, str, str]]:
    """Yield the settings and the versions of runstop that differ from those of the earlier run."""
    old = plan_in(folder)
    if old is None:
        yield "settings", "unknown: this version of runstop cannot read plan.json", ""
    else:
        before, now = _settings(old), _settings(new)
        for name in dict.fromkeys((*before, *now)):
            if before.get(name) != now.get(name):
                yield name, before.get(name, "not set"), now.get(name, "not set")
        if old.world != new.world:
            yield "parallelism", _world(old), _world(new)
    installed = command_line.installed()
    if recorded.runstop != installed:
        yield "runstop", recorded.runstop or "unknown", installed or "unknown: not installed"
    old_commit, commit = _logged_commit(folder, old), _commit(_ROOT)
    if old_commit and commit and old_commit != commit:
        yield "commit", old_commit, commit


def _settings(plan: Plan) -> dict[str, str]:
    values = ((name, value) for name, value in codec.flat(codec.plain(plan.config)) if name not in _OF_ONE_RUN)
    return {name: "null" if value is None else str(value) for name, value in values}


def _world(plan: Plan) -> str:
    return " ".join(f"{one.name} {getattr(plan.world, one.name)}" for one in fields(plan.world))


def _logged_commit(folder: Path, plan: Plan | None) -> str:
    """Return the commit in the first log of a run that has one; empty if none has."""
    for trial in plan.trials if plan else ():
        with suppress(BenchError):
            if commit := results.parse(folder / trial.log).hyperparameters.get("commit"):
                return str(commit)
    return ""


def _commit(root: Path) -> str:
    """Return the commit of a checkout, without whether it has changes; empty if this is no checkout."""
    with suppress(OSError, UnicodeDecodeError):
        git = root / ".git"
        if git.is_file():  # a worktree
            git = root / git.read_text().removeprefix("gitdir: ").strip()
        head = (git / "HEAD").read_text().strip()
        if _COMMIT.fullmatch(head):
            return head
        name = head.removeprefix("ref: ")
        common = git / "commondir"
        shared = git / common.read_text().strip() if common.exists() else git
        if (shared / name).exists():
            return (shared / name).read_text().strip()
        packed = (line.partition(" ") for line in (shared / "packed-refs").read_text().splitlines())
        return next((commit for commit, _, ref in packed if ref == name), "")
    return ""
