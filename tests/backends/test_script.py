"""Scripts: whole files compared with those in sbatch/, what is and is not in them, and that bash and shellcheck accept them."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from bench.backends.slurm import script
from bench.contract import plan as plans
from bench.contract.plan import Plan
from bench.errors import ConfigError
from bench.planning import compose
from helpers.paths import ROOT

CLUSTERS = sorted(
    path.stem
    for path in (ROOT / "conf/cluster").glob("*.yaml")
    if re.search(r"^ *scheduler: slurm", path.read_text(), re.M)
)
TASKS = sorted(path.stem for path in (ROOT / "conf/task").glob("*.yaml"))


def shipped() -> Iterator[tuple[str, Plan]]:
    """Yield each task that each Slurm cluster can run, under the name of its script; some need more ranks or fewer, or GPUs."""
    for cluster in CLUSTERS:
        for task in TASKS:
            with suppress(ConfigError):
                plan = compose.compose([f"task={task}", f"cluster={cluster}"])
                if plan.memory.fits or "tiny" in task:
                    yield f"{task}_{cluster}.sbatch", plan


SCRIPTS = dict(shipped())


def test_the_scripts_in_sbatch_are_those_of_the_shipped_tasks() -> None:
    """To write them anew: WRITE_SBATCH=1 pytest tests/test_render.py"""
    if os.environ.get("WRITE_SBATCH"):
        for path in (ROOT / "sbatch").glob("*.sbatch"):
            path.unlink()
        for name, plan in SCRIPTS.items():
            (ROOT / "sbatch" / name).write_text(script.script(plan))
    written = {path.name: path.read_text() for path in (ROOT / "sbatch").glob("*.sbatch")}
    assert sorted(written) == sorted(SCRIPTS)
    for name, plan in SCRIPTS.items():
        assert written[name] == script.script(plan), f"{name} is not what render writes"


@pytest.mark.parametrize("name", SCRIPTS)
def test_shellcheck_and_bash_have_nothing_to_say(name: str) -> None:
    script = ROOT / "sbatch" / name
    subprocess.run(["bash", "-n", script], check=True)
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed (apt-get install shellcheck)")
    done = subprocess.run(["shellcheck", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_what_is_one_users_stays_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths and image stand in the script by the names of their variables; account, QOS and tokens not at all."""
    mine = {
        "DATADIR": "/lustre/me/data",
        "MODEL": "/lustre/me/model",
        "LOGDIR": "/lustre/me/runs",
        "CONT": "/lustre/me/a.sqsh",
    }
    for name, value in (mine | {"HF_TOKEN": "hf_abcdefgh", "HOME": "/home/me"}).items():
        monkeypatch.setenv(name, value)
    own = ["cluster.slurm.account=acme", "cluster.slurm.qos=high", "cluster.slurm.arguments=['--exclude=dgx-7']"]
    text = script.script(compose.compose(["task=lora70b", "cluster=dgx2", *own]))
    header = text.split("the_plan() {")[0]
    assert not re.search("/lustre|/home/me|hf_abc", text)
    assert not re.search("acme|qos|dgx-7", header)


@pytest.mark.parametrize(
    ("request_", "line"),
    [
        ("gpus_per_node", "#SBATCH --gpus-per-node=8"),
        ("gres", "#SBATCH --gres=gpu:8"),
        ("gres_typed", "#SBATCH --gres=gpu:h200:8"),
        ("none", None),
    ],
)
def test_gpus_are_asked_for_once_in_the_sites_dialect(request_: str, line: str | None) -> None:
    dialect = [f"cluster.slurm.gpu_request={request_}", "cluster.slurm.gpu_type=h200"]
    header = script.header(compose.compose(["task=lora70b", "cluster=dgx1", *dialect]))
    assert [text for text in header if "gpu" in text.lower() and "GPU" not in text] == ([line] if line else [])


def test_arguments_without_a_value_can_come_from_the_environment() -> None:
    text = script.script(compose.compose(["task=lora70b", "cluster=dgx2", "container.flags=environment"]))
    assert "PYXIS_CONTAINER_WRITABLE=1" in text and "PYXIS_CONTAINER_MOUNT_HOME=0" in text
    assert "--container-writable" not in text and "--no-container-mount-home" not in text


def test_container_flags_stand_on_steps_only_and_end_as_bash_reads_them(tmp_path: Path) -> None:
    """Data and model read-only, only the run's own folder writable, the container named by job and life."""
    plan = compose.compose(["task=lora70b", "cluster=dgx2", "container.mounts=[/etc/hosts:/etc/hosts:ro]"])
    assert not any("container" in line for line in script.header(plan) if line.startswith("#SBATCH"))
    flags = next(line for line in script.script(plan).split("container_flags() {")[1].split("\n}\n")[:1])
    env = {"SLURM_JOB_ID": "7", "run": "/r n", "DATADIR": "/d a", "MODEL": "/m", "CONT": "nvcr.io#nvidia/pytorch:1"}
    text = f"flags() {{{flags}\n}}\nflags\nprintf '%s\\n' \"${{container[@]}}\"\n"
    done = subprocess.run(["bash", "-euc", text], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "--container-image=nvcr.io#nvidia/pytorch:1",
        "--container-name=runstop-7-0",
        "--container-mounts=/d a:/d a:ro,/m:/m:ro,/r n:/r n,/etc/hosts:/etc/hosts:ro",
        "--container-workdir=/r n",
        "--container-env=OMP_NUM_THREADS,CUDA_DEVICE_MAX_CONNECTIONS,PYTHONUNBUFFERED,PYTORCH_CUDA_ALLOC_CONF",
        "--no-container-mount-home",
        "--container-writable",
    ]


def test_the_plan_in_a_script_is_the_plan() -> None:
    """Whatever it holds: quotes, dollars, backslashes and a here-document's end mark are no bash."""
    odd = 'it\'s $HOME \\ "quoted" `date` PLAN'
    plan = compose.compose(["task=lora70b", "cluster=dgx2", "cluster.org='x'"])
    plan.config.cluster.org = odd
    function = "the_plan() {" + script.script(plan).split("the_plan() {")[1].replace('main "$@"', "the_plan")
    done = subprocess.run(["bash", "-euc", function], capture_output=True, text=True, check=True)
    assert plans.loads(done.stdout) == plan


def test_an_array_asks_for_the_time_of_one_trial() -> None:
    header = script.header(compose.compose(["task=lora70b", "cluster=dgx2", "trials=10", "launch.array=true"]))
    assert "#SBATCH --array=0-9" in header and "#SBATCH --time=70" in header
