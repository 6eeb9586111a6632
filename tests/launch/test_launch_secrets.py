"""Secrets planted in a config, in arguments and in logs: no output contains them."""

import io
import json
import shutil
from contextlib import closing, nullcontext, suppress
from pathlib import Path

import pytest
from rich.console import Console

from bench import cli, report
from bench.backends.slurm import jobs
from bench.console import sheet
from bench.contract import mllog
from bench.contract.plan import Plan
from bench.contract.run_files import JOB, SCRIPT
from bench.errors import BenchError, ConfigError
from bench.launch import resume
from bench.mlperf.reader import Event
from bench.planning import compose
from bench.report.sets import load
from bench.report.tables import TextTable
from bench.rules.check import Answer
from bench.rules.finding import broken
from bench.runs import folder as folders
from bench.runs import ledger, status
from bench.runs.status import Ending, Status
from bench.watch import sources, trackers
from bench.watch.screen import picture
from helpers.planted_secrets import PLANTED
from helpers.types import MakeLog

ALL = " and ".join(text for text, _ in PLANTED.values())
HIDDEN = [secret for _, secret in PLANTED.values()]
TAKEN = Answer(0, "4711\n", "")


@pytest.fixture
def slurm_calls(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The calls of Slurm commands, which accept every job."""
    calls: list[list[str]] = []
    monkeypatch.setattr(jobs.client, "run", lambda argv, **more: calls.append([*argv]) or TAKEN)
    monkeypatch.setattr(jobs.client, "states", lambda ids: {})
    for name in ("DATADIR", "MODEL", "LOGDIR"):
        monkeypatch.setenv(name, f"/site/{name}")
    return calls


def plan_with(text: str) -> Plan:
    """Return a plan that contains an unchecked text."""
    plan = compose.compose(["task=lora_tiny", "cluster=slurm_test"])
    plan.config.cluster.platform = text
    return plan


def require_hidden(*texts: str) -> None:
    assert not [secret for secret in HIDDEN for text in texts if secret in text]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("verb", [["render"], ["plan", "--json"]], ids=" ".join)
@pytest.mark.parametrize("kind", PLANTED)
def test_commands_that_print_a_plan_refuse_secrets(
    kind: str, verb: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = plan_with(f"box {PLANTED[kind][0]}")
    monkeypatch.setattr(compose, "compose", lambda *words, **more: plan)
    with pytest.raises(SystemExit) as stop:
        cli.main(verb)
    printed = capsys.readouterr()
    assert stop.value.code == 2 and printed.out == "" and "CFG-07" in printed.err
    require_hidden(printed.err)


@pytest.mark.parametrize("kind", PLANTED)
def test_no_run_folder_is_created_with_a_secret(kind: str, tmp_path: Path) -> None:
    """Forced or not: neither in the plan nor in the overrides, which config.yaml keeps."""
    text = PLANTED[kind][0]
    for plan, config in ((plan_with(text), "a: 1\n"), (plan_with("box"), f"# overrides: platform={text}\na: 1\n")):
        plan.config.launch.folder = str(tmp_path / "run")
        with pytest.raises(ConfigError, match="CFG-07") as refused:
            folders.make(plan, config)
        require_hidden(str(refused.value))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("place", ["script", "argument", "variable"])
@pytest.mark.parametrize("kind", PLANTED)
def test_no_job_is_submitted_with_a_secret(
    kind: str, place: str, tmp_path: Path, slurm_calls: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = PLANTED[kind][0]
    plan = plan_with(text if place == "script" else "box")
    assert plan.config.cluster.slurm
    plan.config.cluster.slurm.arguments = [f"--comment={text}"] if place == "argument" else []
    if place == "variable":
        monkeypatch.setenv("DATADIR", f"/site/{text}")
    with pytest.raises(ConfigError, match="CFG-07") as refused:
        jobs.submit(plan, tmp_path)
    require_hidden(str(refused.value))
    assert slurm_calls == [] and list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_a_short_value_of_a_secret_sounding_variable_can_be_forced(
    tmp_path: Path, slurm_calls: list[list[str]]
) -> None:
    """`true` is not a password. A value with the form or length of a secret is refused, forced or not."""
    words = ["task=lora_tiny", "cluster=slurm_test", "launch.force=true", f"launch.folder={tmp_path}/run"]
    for value, is_taken in (("abc", True), ("x9" * 8, False)):
        plan = compose.compose([*words, f"+cluster.environment.SITE_TOKEN={value}"])
        with nullcontext() if is_taken else pytest.raises(ConfigError, match="CFG-07"):
            jobs.submit(plan, folders.make(plan, "a: 1\n"))
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
    assert len(slurm_calls) == 1


@pytest.fixture
def ended(tmp_path: Path, slurm_calls: list[list[str]]) -> Path:
    """A run whose job was submitted and ended before its trial."""
    plan = plan_with("box")
    plan.config.launch.folder = str(tmp_path / "run")
    folder = folders.make(plan, "a: 1\n")
    ledger.create(folder, plan)
    jobs.submit(plan, folder)
    status.write(folder, Status(outcome=Ending.interrupted, exit_code=143))
    slurm_calls.clear()
    return folder


@pytest.mark.parametrize("kind", PLANTED)
def test_a_run_is_not_resumed_with_a_secret_and_stays_as_it_was(
    kind: str, ended: Path, slurm_calls: list[list[str]]
) -> None:
    before = contents(ended)
    for argument in (f"--comment={PLANTED[kind][0]}", PLANTED[kind][0]):
        with pytest.raises(ConfigError, match="CFG-07") as refused:
            resume.resume(ended, arguments=[argument])
        require_hidden(str(refused.value))
    assert slurm_calls == [] and {k: v for k, v in contents(ended).items() if k in before} == before
    assert resume.resume(ended, arguments=["--comment=again"]) == 0 and len(slurm_calls) == 1
    assert json.loads((ended / JOB).read_text())["arguments"][-1] == "--comment=again" and (ended / SCRIPT).exists()


def test_secrets_in_texts_from_logs_are_masked(tmp_path: Path) -> None:
    status.write(tmp_path, Status(outcome=Ending.failed, exit_code=1, what=ALL, evidence=f"rank 0: {ALL}", fix=ALL))
    finding = broken("RUN-13", ALL, ALL, fix=ALL)
    point = Event(line=1, time_ms=1, event_type="POINT_IN_TIME", key=mllog.EVAL_ACCURACY, value=0.9, metadata={
        "samples_count": 8, "metric": ALL})  # fmt: skip
    (curve,) = trackers.points(point)
    require_hidden((tmp_path / "status.json").read_text(), str(finding), curve.name)
    assert "masked" in curve.name and "rank 0" in (tmp_path / "status.json").read_text()


@pytest.mark.long
def test_a_report_shows_no_secret_of_a_log(
    written_log: MakeLog, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    for number in range(2):
        log = written_log(seed=number, submission_platform=ALL, submission_org=ALL, evals=(0.95, 0.94))
        log.rename(folder / f"result_{number}.txt")
    report.write(load([folder], num_gpus=None), tmp_path / "out", title=ALL)
    for form in ("--json", "--csv"):
        with pytest.raises(SystemExit):
            cli.main(["report", str(folder), form])
    written = [path.read_text() for path in (tmp_path / "out").iterdir() if path.suffix != ".png"]
    require_hidden(*written, capsys.readouterr().out)
    assert "masked" in "".join(written)


VERBS = (
    *("parse {log}", "parse {log} --json", "report {folder}", "logs {folder}"),
    *("watch {log} --once", "watch {log} --once --json"),
)


@pytest.mark.parametrize("verb", VERBS)
def test_no_command_prints_a_secret_of_a_log(
    verb: str, written_log: MakeLog, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither in a pipe nor on a terminal."""
    log = written_log(submission_platform=ALL, submission_org=ALL).rename(tmp_path / "result_0.txt")
    (tmp_path / "job.out").write_text(f"{ALL}\n")
    with suppress(SystemExit):
        cli.main(verb.format(log=log, folder=tmp_path).split())
    printed = capsys.readouterr().out
    require_hidden(printed)
    assert "masked" in printed or verb == "watch {log} --once"


def test_a_comparison_prints_no_secret_of_a_log(
    written_log: MakeLog, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, setting in (("before", ALL), ("after", f"another {ALL}")):
        (tmp_path / name).mkdir()
        written_log(opt_name=setting).rename(tmp_path / name / "result_0.txt")
    with suppress(SystemExit):
        cli.main(["compare", f"{tmp_path}/before", f"{tmp_path}/after", "--measurement", "time_to_train", "--json"])
    printed = capsys.readouterr().out
    require_hidden(printed)
    assert "masked" in printed


class Terminal(io.StringIO):
    """A terminal."""

    def isatty(self) -> bool:
        return True


def test_no_screen_shows_a_secret_of_a_log(written_log: MakeLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a table nor the picture of a trial."""
    monkeypatch.setenv("COLUMNS", "4000")
    log = written_log(submission_platform=ALL)
    for form in (TextTable("a", [(ALL, "b", ALL)]), TextTable(ALL, [("a", ALL)], ("a", "b"), caption=ALL)):
        screen = Terminal()
        sheet.show(form, file=screen)
        require_hidden(screen.getvalue())
        assert "masked" in screen.getvalue()
    with closing(sources.find([log])) as job:
        job.poll()
        screen = Terminal()
        Console(file=screen, width=4000).print(picture(job.views(), width=4000, height=50))
    require_hidden(screen.getvalue())
    assert "masked" in screen.getvalue()


def test_an_error_on_the_screen_shows_no_secret(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*words: object, **more: object) -> Plan:
        raise BenchError(ALL, where=ALL, fix=ALL)

    monkeypatch.setattr(compose, "compose", refuse)
    with pytest.raises(SystemExit):
        cli.main(["plan"])
    require_hidden(capsys.readouterr().err)
