"""The verbs plan, doctor, render, cancel and resume: their output and exit codes."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from bench import backends, preflight
from bench.cli import main
from bench.console import diagnosis as check_sheets
from bench.console import plan as plan_sheets
from bench.contract import plan_kinds
from bench.contract.plan import Plan
from bench.errors import ConfigError
from bench.launch import resume as launch_resume
from bench.planning import compose
from bench.preflight import doctor
from bench.rules.check import Checked, Tier, broken
from helpers import answers

OVERRIDES = ("task=lora_tiny", "cluster=local", "model.weights=random")
Verb = Callable[..., tuple[int, str, str]]


@pytest.fixture
def verb(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Verb:
    """Run a verb; return its exit code, stdout and stderr."""
    for name in ("DATADIR", "MODEL", "LOGDIR"):
        monkeypatch.delenv(name, raising=False)

    def run(*argv: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stop:
            main([str(argument) for argument in argv])
        assert isinstance(stop.value.code, int)
        return stop.value.code, *capsys.readouterr()

    return run


def test_plan_as_table_as_json_and_with_layouts(verb: Verb, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = compose.compose(list(OVERRIDES))
    code, output, error = verb("plan", *OVERRIDES, "--json")
    shown_plan = answers.one(output)
    assert (code, error, plan_kinds.loads(output)) == (0, "", plan)
    assert shown_plan["config"]["task"]["name"] == "lora_tiny"
    batch = {"global_batch_size": 8, "micro_batch_size": 4, "gradient_accumulation_steps": 1, "tokens_per_step": 8 * 96}
    assert shown_plan["batch"] == batch
    code, output, _ = verb("plan", *OVERRIDES, "--layouts", "--json")
    worlds = [layout["world"] for layout in answers.read(output)]
    every_split_of_two_ranks = [(1, 1, 1, 2), (1, 1, 2, 1), (1, 2, 1, 1), (2, 1, 1, 1)]
    assert code == 0 and sorted((w["dp"], w["tp"], w["pp"], w["cp"]) for w in worlds) == every_split_of_two_ranks
    code, output, _ = verb("plan", *OVERRIDES, "--layouts")
    title, header, *lines, footer = output.splitlines()
    assert code == 0 and title == "lora_tiny-local, fp32" and footer.startswith("4 possible layouts, 4 fit")
    assert header.split("\t")[:5] == ["dp", "tp", "pp", "cp", "sp"] and lines[0].split("\t")[:5] == [
        "2",
        "1",
        "1",
        "1",
        "off",
    ]
    assert len(lines) == 4
    shown: list[tuple[Plan, object]] = []
    warning = preflight.broken("CFG-13", "it takes too long", "walltime", severity="warning")
    monkeypatch.setattr(preflight, "inspect", lambda plan, words: (warning,))
    monkeypatch.setattr(plan_sheets, "show_plan", lambda *arguments: shown.append(arguments))
    assert verb("plan", *OVERRIDES) == (0, "", "") and shown == [(plan, (warning,))]
    refused = preflight.broken("CFG-06", "there are no rows", "here")
    monkeypatch.setattr(preflight, "inspect", lambda plan, words: (warning, refused))
    assert verb("plan", *OVERRIDES) == (2, "", "") and verb("plan", *OVERRIDES, "launch.force=true") == (0, "", "")
    code, output, error = verb("plan", *OVERRIDES, "--json")
    assert (code, answers.one(output)["name"]) == (2, "lora_tiny-local")
    assert error.splitlines() == [str(warning), str(refused)]
    code, output, error = verb("plan", *OVERRIDES, "--memory")
    assert (code, output) == (2, "") and error.startswith("plan --memory takes no other arguments, because")


def test_a_plan_or_a_script_with_a_secret_is_not_printed(verb: Verb, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(plan: Plan) -> None:
        raise ConfigError("a secret", where="w", fix="f")

    monkeypatch.setattr(preflight, "require_no_secret", refuse)
    for words in (("plan", *OVERRIDES, "--json"), ("render", "task=lora70b", "cluster=dgx2")):
        assert verb(*words) == (2, "", "a secret\n  where: w\n  fix:   f\n")


@pytest.mark.long
def test_render_prints_the_submitted_script(verb: Verb) -> None:
    words = ("task=lora70b", "cluster=dgx2")
    plan = compose.compose(list(words))
    script = backends.for_plan(plan).render(plan)
    assert verb("render", *words) == (0, script, "")
    as_json = answers.one(verb("render", *words, "--json")[1])
    assert (as_json["plan"], as_json["backend"], as_json["text"]) == (plan.name, "slurm", script)
    code, _, error = verb("render", *OVERRIDES)
    assert code == 2 and "this cluster has no job script, because" in error


@pytest.mark.long
def test_render_refuses_what_the_api_server_would_refuse(verb: Verb) -> None:
    words = ("task=lora70b", "cluster=kubernetes", "cluster.kubernetes.image=a@sha256:" + "0" * 64)
    assert verb("render", *words)[0] == 0
    for wrong, rule in (("namespace=My_Team", "KUB-15"), ("version='1.20'", "")):
        code, output, error = verb("render", *words, f"cluster.kubernetes.{wrong}")
        assert (code, bool(output)) == ((2, False) if rule else (0, True)) and error.startswith(rule), error
    kuberay = ("task=lora70b", "cluster=kuberay", "cluster.kubernetes.image=a@sha256:" + "0" * 64)
    assert verb("render", *kuberay)[0] == 0
    assert verb("render", *kuberay, "cluster.kubernetes.results=null")[0] == 2
    assert verb("render", *kuberay, "cluster.kubernetes.results=null", "launch.force=true")[0] == 0


@pytest.mark.parametrize(("severity", "code"), [("error", 1), ("warning", 0)])
def test_doctor_prints_every_tier_and_fails_on_any_error(
    verb: Verb, monkeypatch: pytest.MonkeyPatch, severity: Any, code: int
) -> None:
    finding = broken("NCC-05", "a port is taken", "here", fix="look", severity=severity)
    tiers = [[Checked("plan", (), "laptop", (finding,))], [Checked("site", (), "login")]]
    requests: list[tuple[str, Tier]] = []

    def examine(
        plan: Plan, tier: Tier, *, say: Callable[[str], None], words: Sequence[str]
    ) -> Iterator[Sequence[Checked]]:
        assert words == list(OVERRIDES)
        requests.append((plan.name, tier))
        say("a job looks")
        yield from tiers

    monkeypatch.setattr(doctor, "tier_for", lambda plan, tier: f"{plan.name} {tier}")
    monkeypatch.setattr(doctor, "examine", examine)
    text = verb("doctor", *OVERRIDES, "--tier", "canary")
    assert (
        text[0] == code and text[2] == "a job looks\n" and requests == [("lora_tiny-local", "lora_tiny-local canary")]
    )
    titles = [sheet.title for tier in tiers for sheet in check_sheets.check_sheets(tier)]
    assert [line for line in text[1].splitlines() if line in titles] == titles != []
    as_json = verb("doctor", *OVERRIDES, "--json")
    assert as_json[0] == code and requests[1][1] == "lora_tiny-local None"
    report = answers.one(as_json[1])
    assert report["passed"] == (not code) and len(report["checks"]) == sum(map(len, tiers))


def test_cancel_and_resume_take_run_folders(verb: Verb, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resumed: list[tuple[Any, ...]] = []

    def resume(folder: Path, *, walltime_min: int | None, arguments: Sequence[str]) -> int:
        resumed.append((folder, walltime_min, list(arguments)))
        return 7

    monkeypatch.setattr(launch_resume, "cancel", lambda folder: f"of {folder.name}")
    monkeypatch.setattr(launch_resume, "resume", resume)
    a, b = tmp_path / "a", tmp_path / "b"
    for run in (a, b):
        run.mkdir()
    lines = [f"job of {run.name} is cancelled; to resume the run: runstop resume {run}\n" for run in (a, b)]
    assert verb("cancel", a, b) == (0, "".join(lines), "")
    assert verb("resume", a) == (7, "", "")
    assert verb("resume", b, "--walltime", 5, "--sbatch=--exclude=dgx-7", "--sbatch=-w x")[0] == 7
    assert resumed == [(a, None, []), (b, 5, ["--exclude=dgx-7", "-w x"])]
    assert verb("resume", b, "--walltime", 0)[0] == 2 and len(resumed) == 2
