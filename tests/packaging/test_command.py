"""The installed command as a user has it: `runstop`, its version, its verbs and its completion in a real bash."""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import bench
from helpers.ranks import ROOT

pytestmark = pytest.mark.starts

VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


@pytest.fixture(scope="module")
def prefix(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that pip installed the wheel into, with its scripts in bin/."""
    folder = tmp_path_factory.mktemp("prefix")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--ignore-installed"]
    subprocess.run([*pip, "--prefix", str(folder), str(wheel)], check=True)
    return folder


def environment(prefix: Path) -> dict[str, str]:
    site = next(prefix.glob("lib/python*/site-packages"))
    path = os.pathsep.join([str(prefix / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]])
    return os.environ | {"PYTHONPATH": str(site), "PATH": path}


def run(prefix: Path, cwd: Path, *argv: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(argv, cwd=cwd, env=environment(prefix), capture_output=True, text=True)


def test_every_entry_point_prints_the_version(prefix: Path, tmp_path: Path) -> None:
    for argv in (("runstop",), ("runstop", "launch"), *((sys.executable, "-m", m) for m in ("bench", "bench.launch"))):
        done = run(prefix, tmp_path, *argv, "--version")
        assert (done.returncode, done.stdout, done.stderr) == (0, f"runstop {VERSION}\n", "")
    assert (next(prefix.glob("lib/python*/site-packages")) / "bench" / "py.typed").exists()


def test_launch_is_a_command_with_hydra_overrides(prefix: Path, tmp_path: Path) -> None:
    """Exit codes, overrides and Hydra's own flags are those of python -m bench.launch."""
    planned = run(prefix, tmp_path, "runstop", "launch", "launch.dry_run=true", "parallel.tp=2")
    assert planned.returncode == 0 and "2 = dp 1 x tp 2 x pp 1 x cp 1" in planned.stdout
    shown = run(prefix, tmp_path, "runstop", "launch", "seed_base=7", "--cfg", "job")
    assert shown.returncode == 0 and "seed_base: 7\n" in shown.stdout
    refused = run(prefix, tmp_path, "runstop", "launch", "launch.dry_ran=true")
    assert refused.returncode == 2 and "did you mean launch.dry_run=true?" in refused.stderr
    assert "usage: runstop plan" in run(prefix, tmp_path, "runstop", "plan", "--help").stdout


COMPLETE = """
eval "$(register-python-argcomplete runstop)"
COMP_LINE=$1 COMP_POINT=${#1} COMP_TYPE=9 COMP_WORDS=($1) COMPREPLY=()
COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
_python_argcomplete runstop "${COMP_WORDS[-1]}" ""
printf '%s\\n' "${COMPREPLY[@]}"
"""
"""What bash does at a press of TAB, by the function that the documented line registers."""


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_commands_flags_choices_and_overrides(prefix: Path, tmp_path: Path) -> None:
    def completed(line: str) -> set[str]:
        done = run(prefix, tmp_path, "bash", "-c", COMPLETE, "bash", line)
        assert (done.returncode, done.stderr) == (0, "")
        return {line.strip() for line in done.stdout.splitlines()}

    assert completed("runstop re") == {"render", "rerun", "resume", "report"}
    assert completed("runstop doctor --tier ca") == {"canary"}
    tasks = {path.stem for path in (ROOT / "conf" / "task").glob("*.yaml")}
    assert completed("runstop launch task=") == completed("runstop plan task=") == tasks
    assert completed("runstop launch task=lora70b cluster=dgx2 cluster.num_") == {"cluster.num_nodes="}
    assert completed("runstop launch task=nothing cluster.nu") == {""}
    site = tmp_path / "site" / "cluster"
    site.mkdir(parents=True)
    shutil.copy(ROOT / "conf" / "cluster" / "dgx1.yaml", site / "mine.yaml")
    assert completed("runstop launch --config-dir site cluster=mi") == {"mine"}


def test_public_names_are_real_and_importing_them_costs_nothing() -> None:
    """Ranks import the package for its contract: nothing heavy may come along, and no name may be missing."""
    assert sorted(bench._PUBLIC) == sorted(bench.__all__)
    code = """
import sys, typing, bench
for name in bench.__all__:
    for module in [m for m in sys.modules if m.startswith("bench.")]:
        del sys.modules[module]  # each name may be the first that a user takes
    bench.__dict__.pop(name, None)
    found = getattr(bench, name)
    for part in typing.get_args(found) or (found,):  # of a union
        assert part.__module__.startswith("bench."), name
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
    heavy = "sorted({'hydra', 'msgspec', 'matplotlib', 'numpy', 'rich', 'importlib.metadata'} & {*sys.modules})"
    for module in ("bench", "bench.contract.plan", "bench.contract.mllog"):
        done = subprocess.run(
            [sys.executable, "-c", f"import sys, {module}; print({heavy})"], cwd=ROOT, capture_output=True, text=True
        )
        assert done.stdout == "[]\n", done.stderr
    with pytest.raises(AttributeError, match="'bench' has no attribute 'nothing'"):
        _ = bench.nothing


def test_a_verb_imports_what_it_needs_only_when_it_runs() -> None:
    """All verbs are defined at every start, so an import in a definition slows down each of them."""
    command = [sys.executable, "-X", "importtime", "-m", "bench", "parse", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "bench.cli.judge" in imported
    heavy = ("bench.mlperf", "bench.planning.compose", "bench.rules", "hydra", "matplotlib", "msgspec", "numpy", "rich")
    assert imported.isdisjoint(heavy)
