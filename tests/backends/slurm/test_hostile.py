"""Hostile configs, variables and run folders are refused or treated as data only."""

import re
import shlex
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench import texts
from bench.backends.slurm import script
from bench.contract import plan_kinds
from bench.contract.plan import Plan
from bench.errors import ConfigError
from bench.planning import compose
from bench.planning.checks.texts import NAMES, PATHS, WORDS
from bench.preflight import host
from bench.rules.check import Subject
from helpers.hostile_configs import KEY, PAYLOADS, PLACES, hostile, placed, planned
from helpers.slurm_stubs import SITE, ScriptRun, options, run_script

SRUN_OPTIONS = {
    *("export", "mpi", "chdir", "nodes", "ntasks", "ntasks-per-node", "kill-on-bad-exit", "label", "time"),
    *("container-image", "container-name", "container-mounts", "container-workdir", "container-env"),
    *("no-container-mount-home", "container-writable"),
}
IN_SCRIPT = [KEY, *(place for place in PLACES if place.startswith(("task.summary", "cluster", "container")))]


def site_paths(root: Path, text: str) -> str:
    """Return a text with the site's variables filled in, longer names first."""
    for name in ("DATADIR", "LOGDIR", "MODEL", "CONT"):
        text = text.replace(f"${name}", str(root / SITE[name]))
    return text.replace("$HOME", str(root / "cwd"))


def split(command: str) -> list[str]:
    """Return the words of a command; a text that shlex cannot split is one word."""
    try:
        return shlex.split(command)
    except ValueError:
        return [command]


def require_planned(plan: Plan, done: ScriptRun) -> None:
    """Every command of the plan was started, once, as planned and with the planned environment; nothing else was."""
    started = done.sruns()
    for command in plan.commands:
        assert sum(argv[-len(command.argv) :] == command.argv for argv in started) == 1, command
    drops = split(plan.config.cluster.drop_caches or "")
    steps = ["open", "check", "begin", "judge", "close", "enroot", *(["caches"] if drops else [])]
    assert len(started) == len(plan.commands) + len(steps), "one trial, and the steps between commands"
    assert not drops or [argv[-len(drops) :] for argv in started if argv[-len(drops) - 1 :][:1] == ["_"]] == [drops]
    for argv, env in done.calls:
        if argv[0] == "srun":
            assert {option[2:].partition("=")[0] for option in srun_options(argv[1:])} <= SRUN_OPTIONS
            assert plan.environment.items() <= env.items()
            known = {
                "RUNSTOP_ARRAY_TASK",
                "RUNSTOP_ATTEMPT",
                "PWD",
                "OLDPWD",
                "SHLVL",
                "_",
                "PATH",
                "HOME",
                "RECORD",
                *SITE,
                *plan.environment,
            }
            assert {name for name in env if not name.startswith(("SLURM_", "PYXIS_"))} <= known
    last = plan.commands[-1].argv
    ((ranks, env),) = [(argv, env) for argv, env in done.calls if argv[-len(last) :] == last]
    (begin,) = [argv for argv in started if "begin" in argv]
    assert re.fullmatch(r"[0-9a-f]{32}", env["RUNSTOP_ATTEMPT"]) and begin[-2:] == ["--nonce", env["RUNSTOP_ATTEMPT"]]
    image = next(option for option in ranks if option.startswith("--container-image="))
    assert image == f"--container-image={site_paths(done.root, plan.config.container.image or '')}"
    assert f"--nodes={plan.world.num_nodes}" in ranks and f"--ntasks={plan.world.num_ranks}" in ranks


def srun_options(words: list[str]) -> list[str]:
    """Return the options of srun before the program that it starts."""
    return words[: next(n for n, option in enumerate(words) if not option.startswith("--"))]


NOT_NAMES = ("../../x", "a/b", ".x", "-rf", "", "a b", "größe", "a%j", "a;b", "a\n#SBATCH --nodes=99", "A" * 101)
NOT_TEXTS = ("one\ntwo", "a\tb", "a\0b", "a\x1b[2J", "\u202etxt.exe", "a\u2028b", "\udc80", "A" * 4097)


@pytest.mark.parametrize("place", PLACES)
def test_config_texts_with_newlines_or_control_characters_are_refused(place: str) -> None:
    for text in NOT_TEXTS:
        with pytest.raises(ConfigError, match="CFG-09") as refused:
            planned({place: text})
        assert refused.value.where == place and len(str(refused.value)) < 600
        assert not texts.control_character(str(refused.value).replace("\n", ""))


@pytest.mark.parametrize("place", sorted(NAMES | WORDS))
def test_invalid_names_and_options_are_refused(place: str) -> None:
    for text in NOT_NAMES:
        if place in NAMES or text != "a/b":
            with pytest.raises(ConfigError, match="CFG-09") as refused:
                planned({place: text})
            assert refused.value.where == place


@pytest.mark.parametrize(
    "key", ["A;touch pwned;B", "1A", "A B", "", "A=B", "-A", "Ä", "A\n", "RUNSTOP_ARRAY_TASK", "PYTHONSAFEPATH"]
)
def test_invalid_environment_variable_names_are_refused(key: str) -> None:
    with pytest.raises(ConfigError, match="CFG-09") as refused:
        planned({KEY: key})
    assert refused.value.where == "cluster.environment"


@pytest.mark.parametrize("path", ["${HOME}/x", "$(touch pwned)", "$run/x", "a$", "$1"])
@pytest.mark.parametrize("place", sorted(PATHS | {"container.mounts[0]"}))
def test_paths_with_other_variables_than_the_sites_are_refused(place: str, path: str) -> None:
    with pytest.raises(ConfigError, match="dollar sign") as refused:
        planned({place: path})
    assert refused.value.where == place


@pytest.mark.long
def test_config_files_of_a_site_are_checked(tmp_path: Path) -> None:
    (tmp_path / "cluster").mkdir()
    ours = (compose.CONF / "cluster/dgx1.yaml").read_text()
    (tmp_path / "cluster/mine.yaml").write_text(ours.replace("name: dgx1", "name: ../../x"))
    with pytest.raises(ConfigError, match="CFG-09") as refused:
        compose.compose(["task=lora70b", "cluster=mine"], config_dir=tmp_path)
    assert refused.value.where == "cluster.name"


ALLOWED = {
    "task.summary": 'größe – 測試, 10 % of $5 (it\'s "quoted" `so`) 👍',
    "cluster.platform": "8x H200; #SBATCH --nodes=99",
    "cluster.paths.logs": "/lustre/my runs/o'brien",
    "container.mounts[0]": "$DATADIR/a b:/c d:ro",
    "cluster.environment.SITE": "$(touch pwned) 'x' \"y\" `z` \\",
}


def test_unusual_but_valid_texts_are_unchanged() -> None:
    plan = planned(ALLOWED)
    actual = {place.removeprefix("."): text for place, _, text in texts.strings(plan.config, "")}
    assert {place: actual[place] for place in ALLOWED} == ALLOWED


def test_no_line_of_a_plan_ends_its_here_document(tmp_path: Path) -> None:
    """Not even for an unchecked plan: JSON escapes newlines."""
    plan = planned({})
    plan.config.task.summary = "x\n#SBATCH --nodes=99\ntouch pwned"
    assert options(script.script(plan))["nodes"] == str(plan.world.num_nodes)
    plan.config.cluster.org = plan.config.cluster.platform = "x\nPLAN\ntouch pwned\ncat <<'PLAN'\nPLAN"
    assert not [line for line in plan_kinds.dumps(plan).split("\n") if line.strip() in ("PLAN", "EOF")]
    function = "print_plan() {" + script.script(plan).split("print_plan() {")[1].replace('main "$@"', "print_plan")
    done = subprocess.run(["bash", "-euc", function], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert plan_kinds.loads(done.stdout) == plan and list(tmp_path.iterdir()) == []


VALUES = ("$(touch pwned)", "/a`touch pwned`", '/a"b', "/a\\b", "/a\nb", "$MODEL", "docker://$oauthtoken@nvcr.io#a")


@pytest.mark.starts
@pytest.mark.parametrize("name", [*SITE])
def test_site_variables_with_shell_characters_are_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is never reported as unset, and no srun is started."""
    plan = planned({})
    for other in SITE:
        monkeypatch.setenv(other, f"/site/{other}")
    for value in VALUES:
        done = run_script(script.script(plan), tmp_path, **{name: value})
        assert (done.code, done.calls) == (2, []) and f"CFG-06: {name} contains a quote" in done.output, value
        monkeypatch.setenv(name, value)
        (problem,) = host.paths(Subject(plan, ""))
        assert (
            problem.rule == "CFG-06" and problem.what.startswith(f"{name} contains ") and "not set" not in str(problem)
        )
        assert "\n" not in str(problem)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bin", "cwd", "slurm_script"]
    assert not list((tmp_path / "cwd").iterdir())


@pytest.mark.starts
@pytest.mark.parametrize("payload", PAYLOADS)
def test_no_part_of_a_script_runs_a_payload(payload: str, tmp_path: Path) -> None:
    """All places at once, except the folder's name, which makes the job refuse some payloads."""
    taken = {}
    for place in IN_SCRIPT:
        with suppress(ConfigError):
            text = script.script(planned({place: payload}))
            taken[place] = payload
            assert options(text)["nodes"] == "2"
    assert {"task.summary", "cluster.environment.SITE"} <= taken.keys()
    logs = {place: taken.pop(place) for place in ("cluster.paths.logs",) if place in taken}
    for changes in filter(None, (taken, logs)):
        plan = planned(changes)
        done = run_script(script.script(plan), tmp_path)
        assert not [path for path in tmp_path.rglob("*") if path.name == "pwned"], done
        if changes is taken:
            assert done.code == 0, done
        if done.code == 0:
            require_planned(plan, done)


@pytest.mark.starts
@settings(derandomize=True)
@given(
    changes=st.dictionaries(st.sampled_from([KEY, *PLACES]), hostile, min_size=1, max_size=2),
    array=st.booleans(),
    by_environment=st.booleans(),
)
def test_hostile_configs_are_refused_or_treated_as_data(
    changes: dict[str, str], array: bool, by_environment: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = tmp_path_factory.mktemp("hostile")
    changes = {place: placed(place, text, root) for place, text in changes.items()}
    try:
        plan = planned(changes, array=array, by_environment=by_environment)
    except ConfigError as refused:
        assert not texts.control_character(str(refused).replace("\n", "")), "a refusal shows no control characters"
        return
    text = script.script(plan)
    assert (
        options(text).items()
        >= {
            "nodes": str(plan.world.num_nodes),
            "ntasks-per-node": str(plan.world.ranks_per_node),
            "job-name": plan.name,
            "gres": f"gpu:{plan.config.cluster.slurm.gpu_type}:{plan.world.ranks_per_node}",  # type: ignore[union-attr]
        }.items()
    )
    assert "PLAN" not in plan_kinds.dumps(plan).splitlines()
    (root / "syntax").write_text(text)
    subprocess.run(["bash", "-n", root / "syntax"], check=True, capture_output=True)
    array_task = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "0"} if array else {}
    done = run_script(text, root, **array_task)
    assert not [path for path in root.rglob("*") if path.name == "pwned"], done
    assert not (root / "cwd" / "pwned").exists()
    if done.code:
        assert done.calls == [] and re.search(r"CFG-(06|08)|is not set", done.output), done
        return
    require_planned(plan, done)
    (run,) = [path.parent for path in root.rglob("plan.json")]
    written = plan_kinds.loads((run / "plan.json").read_text())
    assert plan_kinds.dumps(written) == site_paths(root, plan_kinds.dumps(plan)).replace(f"{root}/cwd", "$HOME")
