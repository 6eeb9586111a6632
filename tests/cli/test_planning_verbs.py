"""The verbs that plan, check, render, end and resume a run: what they print, and what their exit codes say."""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from bench import backends, preflight
from bench.cli import main
from bench.console import diagnosis as check_sheets
from bench.console import plan as layout_sheets
from bench.console import plan as plan_sheets
from bench.contract import plan_kinds
from bench.contract.plan import Plan
from bench.errors import ConfigError
from bench.launch import resume as launch_resume
from bench.planning import compose
from bench.preflight import doctor
from bench.rules.check import Checked, Tier, broken

WORDS = ("task=lora_tiny", "cluster=local", "model.weights=random")
Verb = Callable[..., tuple[int, str, str]]


@pytest.fixture
def verb(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Verb:
    """Run a verb; return its exit code, and what it printed and said."""
    for name in ("DATADIR", "MODEL", "LOGDIR"):
        monkeypatch.delenv(name, raising=False)

    def run(*words: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stop:
            main([str(word) for word in words])
        assert isinstance(stop.value.code, int)
        return stop.value.code, *capsys.readouterr()

    return run


def test_a_plan_is_shown_as_a_table_as_its_file_and_with_its_layouts(
    verb: Verb, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = compose.compose(list(WORDS))
    assert verb("plan", *WORDS, "--json") == (0, plan_kinds.dumps(plan), "")
    code, said, _ = verb("plan", *WORDS, "--layouts", "--json")
    assert code == 0 and json.loads(said) == json.loads(json.dumps(layout_sheets.to_json(plan)))
    code, said, _ = verb("plan", *WORDS, "--layouts")
    sheet = layout_sheets.sheet(plan)
    assert code == 0 and said.splitlines()[0] == sheet.title and len(said.splitlines()) > len(sheet.rows)
    shown: list[tuple[Plan, object]] = []
    monkeypatch.setattr(preflight, "inspect", lambda plan: ("found", plan.name))
    monkeypatch.setattr(plan_sheets, "show_plan", lambda *words: shown.append(words))
    assert verb("plan", *WORDS) == (0, "", "") and shown == [(plan, ("found", plan.name))]
    code, said, error = verb("plan", *WORDS, "--memory")
    assert (code, said) == (2, "") and error.startswith("the tables of memory are of fixed models, and text only\n")


def test_a_plan_or_a_script_with_a_secret_is_not_printed(verb: Verb, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(plan: Plan) -> None:
        raise ConfigError("a secret", where="w", fix="f")

    monkeypatch.setattr(preflight, "require_no_secret", refuse)
    for words in (("plan", *WORDS, "--json"), ("render", "task=lora70b", "cluster=dgx2")):
        assert verb(*words) == (2, "", "a secret\n  where: w\n  fix:   f\n")


def test_a_script_is_printed_as_it_would_be_submitted(verb: Verb) -> None:
    words = ("task=lora70b", "cluster=dgx2")
    plan = compose.compose(list(words))
    assert verb("render", *words) == (0, backends.of(plan).render(plan), "")
    code, _, error = verb("render", *WORDS)
    assert code == 2 and "has no script" in error


@pytest.mark.parametrize(("severity", "code"), [("error", 1), ("warning", 0)])
def test_the_doctor_tells_each_tier_when_it_is_there_and_fails_for_an_error_in_any(
    verb: Verb, monkeypatch: pytest.MonkeyPatch, severity: Any, code: int
) -> None:
    found = broken("NCC-05", "a port is taken", "here", fix="look", severity=severity)
    tiers = [[Checked("plan", (), "laptop", (found,))], [Checked("site", (), "login")]]
    asked: list[tuple[str, Tier]] = []

    def examine(plan: Plan, tier: Tier, *, say: Callable[[str], None]) -> Iterator[Sequence[Checked]]:
        asked.append((plan.name, tier))
        say("a job looks")
        yield from tiers

    monkeypatch.setattr(doctor, "tier_for", lambda plan, asked: f"{plan.name} {asked}")
    monkeypatch.setattr(doctor, "examine", examine)
    text = verb("doctor", *WORDS, "--tier", "canary")
    assert text[0] == code and text[2] == "a job looks\n" and asked == [("lora_tiny-local", "lora_tiny-local canary")]
    titles = [sheet.title for tier in tiers for sheet in check_sheets.check_sheets(tier)]
    assert [line for line in text[1].splitlines() if line in titles] == titles != []
    as_json = verb("doctor", *WORDS, "--json")
    assert as_json[0] == code and asked[1][1] == "lora_tiny-local None"
    assert json.loads(as_json[1]) == json.loads(json.dumps(doctor.to_json(compose.compose(list(WORDS)), tiers)))


def test_runs_are_ended_and_gone_on_with_by_their_folders(
    verb: Verb, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resumed: list[tuple[Any, ...]] = []

    def resume(folder: Path, *, walltime_min: int | None, arguments: Sequence[str]) -> int:
        resumed.append((folder, walltime_min, list(arguments)))
        return 7

    monkeypatch.setattr(launch_resume, "cancel", lambda folder: f"of {folder.name}")
    monkeypatch.setattr(launch_resume, "resume", resume)
    a, b = tmp_path / "a", tmp_path / "b"
    said = [f"job of {run.name} is cancelled; python -m bench resume {run} goes on with it\n" for run in (a, b)]
    assert verb("cancel", a, b) == (0, "".join(said), "")
    assert verb("resume", a) == (7, "", "")
    assert verb("resume", b, "--walltime", 5, "--sbatch=--exclude=dgx-7", "--sbatch=-w x")[0] == 7
    assert resumed == [(a, None, []), (b, 5, ["--exclude=dgx-7", "-w x"])]
    assert verb("resume", b, "--walltime", 0)[0] == 2 and len(resumed) == 2
