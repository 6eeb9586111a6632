"""The sbatch scripts: those in sbatch/ are up to date, contain what they must, and pass bash and shellcheck."""

import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from bench import backends
from bench.backends import local
from bench.backends.nodes import lead
from bench.backends.slurm import script
from bench.contract import plan_kinds
from bench.contract.plan import Plan
from bench.contract.schema import Container, ContainerFlags, Runtime
from bench.errors import ConfigError
from bench.planning import compose, make_plan
from bench.runs import status
from bench.runs.status import Ending, Status
from helpers.paths import ROOT
from helpers.slurm_stubs import run_script

CLUSTERS = sorted(
    path.stem
    for path in (ROOT / "conf/cluster").glob("*.yaml")
    if re.search(r"^ *backend: slurm", path.read_text(), re.M)
)
OWN = ("lora70b", "lora70b_quick", "pretrain_7b", "finetune_70b_dolly")
TASKS = sorted(path.stem for path in (ROOT / "conf/task").glob("*.yaml") if path.stem in OWN or "tiny" in path.stem)
"""One task of each kind; scripts of the other large tasks differ only in the plan."""
SHOWN = (
    *(("lora70b", cluster) for cluster in ("dgx1", "dgx2", "dgx8", "dgxh200")),
    ("lora_tiny", "slurm_test"),
    ("pretrain_tiny", "dgx1"),
    ("attention", "dgx1"),
)
"""Task and cluster of each script in sbatch/."""


def shipped() -> Iterator[Plan]:
    """Yield each task that each Slurm cluster can run; some need more ranks or fewer, or GPUs."""
    places = [compose.unplanned([f"cluster={name}"]) for name in CLUSTERS]
    for task in TASKS:
        config = compose.as_planned(compose.unplanned([f"task={task}"]))
        training = config.task.training
        base = compose.unplanned([f"task={training.base}"]) if training and training.base else None
        for place in places:
            there = {"cluster": place.cluster, "container": place.container}
            with suppress(ConfigError):
                plan = make_plan.make(replace(config, **there), base and replace(base, **there))
                if "tiny" in task or plan.memory.fits:
                    yield plan


def in_every_way(plan: Plan) -> Iterator[Plan]:
    """Yield the plan in each container and without, as one job and as an array."""
    other = Container(name="pyxis", runtime=Runtime.pyxis, image="$CONT", mounts=["/a b:/c"])
    by_environment = replace(other, flags=ContainerFlags.environment)
    apptainer = Container(name="apptainer", runtime=Runtime.apptainer, image="$CONT", mounts=["/a b:/c"])
    for container in (replace(other, runtime=Runtime.none), other, by_environment, apptainer):
        for array in (False, True):
            launch = replace(plan.config.launch, array=array)
            yield replace(plan, config=replace(plan.config, container=container, launch=launch))


@pytest.mark.long
def test_scripts_in_sbatch_are_up_to_date() -> None:
    """To regenerate them: WRITE_SBATCH=1 pytest tests/backends/slurm/test_script.py"""
    plans_by_name = {f"{t}_{c}.sbatch": compose.compose([f"task={t}", f"cluster={c}"]) for t, c in SHOWN}
    if os.environ.get("WRITE_SBATCH"):
        for path in (ROOT / "sbatch").glob("*.sbatch"):
            path.unlink()
        for name, plan in plans_by_name.items():
            (ROOT / "sbatch" / name).write_text(script.script(plan))
    written = {path.name: path.read_text() for path in (ROOT / "sbatch").glob("*.sbatch")}
    assert sorted(written) == sorted(plans_by_name)
    for name, plan in plans_by_name.items():
        assert written[name] == script.script(plan), f"{name} differs from what render writes"


@pytest.mark.starts
def test_bash_and_shellcheck_accept_every_script(tmp_path: Path) -> None:
    """Every task on every cluster in every variant; identical parts are checked once.

    Shellcheck reads one whole script, and of the others those that have lines of their own.
    """
    shared, heads = script.BODY.read_text(), set[str]()
    boosted = compose.compose(["task=lora_tiny", "cluster=slurm_test", "cluster.slurm.vboost=1"])
    for plan in itertools.chain.from_iterable(map(in_every_way, (*shipped(), boosted))):
        text, written = script.script(plan), plan_kinds.dumps(plan)
        assert text.count(shared) == 1 and text.count(written) == 1
        heads.add(text.replace(shared, "").replace(written, ""))
    assert len(heads) >= 30
    (tmp_path / "whole.sbatch").write_text(text)
    read, lines = [tmp_path / "whole.sbatch"], set[str]()
    for number, head in enumerate(sorted(heads)):
        (tmp_path / f"{number}.sbatch").write_text(head)
        if not lines.issuperset(head.splitlines()):
            read.append(tmp_path / f"{number}.sbatch")
        lines.update(head.splitlines())
    scripts = sorted(tmp_path.iterdir())
    subprocess.run(["bash", "-c", 'for file; do bash -n "$file" || exit; done', "_", *scripts], check=True)
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed (apt-get install shellcheck)")
    done = subprocess.run(["shellcheck", *read], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def printing_plan(plan: Plan) -> Plan:
    """Return the plan with another argv for each of its commands: it prints its arguments."""
    commands = [
        replace(command, argv=["python", "-c", "import sys; print(*sys.argv[1:], sep='|')", command.name, "$HOME 'x\""])
        for command in plan.commands
    ]
    return replace(plan, commands=commands)


def function(text: str, *names: str) -> str:
    """Return the lines of a script that define functions, or arrays, of these names."""
    return "\n".join(re.search(rf"^{name}(\(\) {{.*?(^}}|}}$)|=.*?$)", text, re.M | re.S)[0] for name in names)  # type: ignore[index]


@pytest.mark.long
def test_a_script_runs_the_argv_of_its_plan() -> None:
    """Node facts, node check, prepare and trials: bash passes every argument to srun unchanged."""
    plan = printing_plan(compose.compose(["task=lora_tiny", "cluster=slurm_test", "trials=2"]))
    names = [command.name for command in plan.commands]
    assert names == ["node facts", "node check", "prepare", "trial 0", "trial 1"]
    text = script.script(plan)
    labels = [name.replace(" ", "_") for name in names]
    stub = f'python={sys.executable}\non_all_ranks() {{ "${{@:2}}"; }}\n'
    bash = stub + function(text, "run_plan_command", "before_trials", *(f"argv_{label}" for label in labels))
    bash += f"\nfor label in {' '.join(labels)}; do run_plan_command $label --label; done\necho ${{before_trials[@]}}"
    done = subprocess.run(["bash", "-euc", bash], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [*(f"{name}|$HOME 'x\"" for name in names), " ".join(labels[:3])]
    assert "jobs." not in text.split("print_plan() {")[0].replace("bench.driver.between_commands", "")


def test_the_command_that_drops_caches_runs_without_a_shell(tmp_path: Path) -> None:
    """It gets its arguments unchanged; if it fails, the node reports that it kept its cache."""
    for command, expected in (("touch 'a b' '$HOME' 'x;y'", "dgx-7 cleared"), ("false", "dgx-7 kept")):
        plan = compose.compose(["task=lora_tiny", "cluster=slurm_test"])
        plan.config.cluster.drop_caches = command
        bash = function(script.script(plan), "drop_command", "caches_file", "drop_caches")
        bash = f'on_each_node() {{ "$@"; }}\nsync() {{ :; }}\nexport -f sync\nmkdir -p rank_logs\n{bash}\ndrop_caches 3'
        env = {"SLURMD_NODENAME": "dgx-7", "PATH": os.environ["PATH"]}
        subprocess.run(["bash", "-euc", bash], cwd=tmp_path, env=env, check=True)
        assert (tmp_path / "rank_logs/trial_3.caches").read_text().strip() == expected
    assert sorted(path.name for path in tmp_path.iterdir()) == ["$HOME", "a b", "rank_logs", "x;y"]


@pytest.mark.parametrize(
    ("config", "wait_s"),
    [("SlurmctldTimeout = 120 sec\nSlurmdTimeout = 30 sec", 90), ("SlurmdTimeout = 3600 sec", 600), ("", 360)],
)
def test_the_wait_for_a_silent_node_follows_slurmd_timeout(config: str, wait_s: int) -> None:
    """SlurmdTimeout and a minute, 10 minutes at most; SlurmdTimeout is 300 s if scontrol does not show it."""
    plan = compose.compose(["task=lora_tiny", "cluster=slurm_test"])
    stub = f'scontrol() {{ echo {shlex.quote(config)}; }}\nrun_watched() {{ echo "$@"; }}\n'
    bash = stub + function(script.script(plan), "wait_for_slurm") + "\nwait_for_slurm"
    done = subprocess.run(["bash", "-euc", bash], capture_output=True, text=True, check=True)
    reason, waited = done.stdout.splitlines()
    assert waited == f"sleep {wait_s}" and f"waits {wait_s} s" in reason and "does not respond" in reason


@pytest.mark.long
def test_the_local_runner_runs_the_argv_of_its_plan(tmp_path: Path) -> None:
    plan = printing_plan(compose.compose(["task=lora_tiny", "cluster=local", f"launch.folder={tmp_path}"]))
    (tmp_path / "rank_logs").mkdir()
    here, command = local.LocalBackend(), plan.commands[-1]
    with here.nodes(plan, tmp_path) as nodes, lead.started(nodes, command, tmp_path, port=1) as ranks:
        while ranks.are_running():
            pass
    ranks.check()
    outputs = [path.read_text() for path in (tmp_path / "rank_logs").glob("*_rank_*.out")]
    assert sum("trial 0|$HOME 'x\"" in text for text in outputs) == 2


def test_the_status_that_bash_writes_is_readable(tmp_path: Path) -> None:
    """If Python cannot be started, bash writes status.json with the same keys."""
    text = script.script(compose.compose(["task=lora_tiny", "cluster=slurm_test"]))
    bash = (
        "job=7\n"
        + function(text, "status_file", "reserve_file", "write_file", "write_status")
        + '\nwrite_status interrupted 143 "SLU-08: ended" "resume"'
    )
    subprocess.run(["bash", "-euc", bash], cwd=tmp_path, env={"RUNSTOP_ARRAY_TASK": ""}, check=True)
    assert status.read(tmp_path) == Status(
        outcome=Ending.interrupted, exit_code=143, what="SLU-08: ended", fix="resume"
    )


def test_a_run_on_this_machine_has_no_script() -> None:
    plan = compose.compose(["task=lora_tiny", "cluster=local"])
    with pytest.raises(ConfigError, match="this cluster has no job script, because") as refused:
        backends.for_plan(plan).render(plan)
    assert refused.value.where == "cluster=local" and "cluster=dgx1" in refused.value.fix


def test_values_of_one_user_are_not_in_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths and image are variables in the script; account, QOS and tokens are not in it."""
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
    header = text.split("print_plan() {")[0]
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
def test_gpus_are_requested_once_in_the_sites_syntax(request_: str, line: str | None) -> None:
    dialect = [f"cluster.slurm.gpu_request={request_}", "cluster.slurm.gpu_type=h200"]
    header = script.header(compose.compose(["task=lora70b", "cluster=dgx1", *dialect]))
    assert [text for text in header if "gpu" in text.lower() and "GPU" not in text] == ([line] if line else [])


def test_arguments_without_a_value_can_come_from_the_environment() -> None:
    text = script.script(compose.compose(["task=lora70b", "cluster=dgx2", "container.flags=environment"]))
    assert "PYXIS_CONTAINER_WRITABLE=1" in text and "PYXIS_CONTAINER_MOUNT_HOME=0" in text
    assert "--container-writable" not in text and "--no-container-mount-home" not in text


def test_container_flags_are_on_srun_only_and_expand_correctly(tmp_path: Path) -> None:
    """Data and model read-only, only the run's own folder writable, the container named by job and restart."""
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
        "--container-env=OMP_NUM_THREADS,CUDA_DEVICE_MAX_CONNECTIONS,PYTHONUNBUFFERED,PYTHONSAFEPATH,PYTORCH_CUDA_ALLOC_CONF",
        "--no-container-mount-home",
        "--container-writable",
    ]


@pytest.mark.long
def test_apptainer_starts_each_rank_in_the_image() -> None:
    """srun gets no container flag; not run in Apptainer."""
    words = ("container=apptainer", "container.mounts=[/etc/hosts:/etc/hosts:ro]", "container.arguments=[--cleanenv]")
    text = script.script(compose.compose(["task=lora70b", "cluster=dgx2", *words]))
    flags = text.split("container_flags() {")[1].split("\n}\n")[0]
    env = {"run": "/r n", "DATADIR": "/d a", "MODEL": "/m", "CONT": "/i/b.sif"}
    code = f"flags() {{{flags}\n}}\nflags\nprintf '%s\\n' ${{#container[@]}} \"${{in_image[@]}}\"\n"
    done = subprocess.run(["bash", "-euc", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        *("0", "apptainer", "exec", "--nv", "--no-home", "--writable-tmpfs"),
        *("--bind=/d a:/d a:ro", "--bind=/m:/m:ro", "--bind=/r n:/r n", "--bind=/etc/hosts:/etc/hosts:ro"),
        *("--pwd=/r n", "--cleanenv", "/i/b.sif"),
    ]
    assert "python=python\n" in text and ': "${CONT:?is not set' in text


def test_the_plan_in_a_script_is_the_plan() -> None:
    """Whatever it holds: quotes, dollars, backslashes and a here-document's end mark are no bash."""
    odd = 'it\'s $HOME \\ "quoted" `date` PLAN'
    plan = compose.compose(["task=lora70b", "cluster=dgx2", "cluster.org='x'"])
    plan.config.cluster.org = odd
    function = "print_plan() {" + script.script(plan).split("print_plan() {")[1].replace('main "$@"', "print_plan")
    done = subprocess.run(["bash", "-euc", function], capture_output=True, text=True, check=True)
    assert plan_kinds.loads(done.stdout) == plan


def test_an_array_task_requests_the_time_of_one_trial() -> None:
    header = script.header(compose.compose(["task=lora70b", "cluster=dgx2", "trials=10", "launch.array=true"]))
    assert "#SBATCH --array=0-9" in header and "#SBATCH --time=70" in header


def at(verb: str, act: str) -> dict[str, str]:
    """Return what srun does when it runs the commands between two of the plan by this verb."""
    return {
        "srun": f'case " $* " in *" {verb} "*) {act};; esac\n',
        "scontrol": '[ "$1" != requeue ] || kill -TERM $PPID\n',
    }


@pytest.mark.long
@pytest.mark.parametrize(("act", "code"), [("exit 0", 0), (": >status.json; exit 1", 1)])
def test_a_job_fails_if_its_run_is_not_valid_although_every_command_succeeded(
    tmp_path: Path, act: str, code: int
) -> None:
    """Slurm calls a job that exits with 0 COMPLETED. The last step writes status.json and exits with 1."""
    plan = compose.compose(["task=lora_tiny", "cluster=slurm_test"])
    assert run_script(script.script(plan), tmp_path, acts=at("close", act)).code == code


@pytest.mark.long
@pytest.mark.parametrize("succeeds", [True, False])
def test_the_boost_slider_is_set_on_each_node_before_any_command(tmp_path: Path, succeeds: bool) -> None:
    """Once on each node, outside of the container; a node that refuses ends the job before its first rank starts."""
    plan = compose.compose(["task=lora_tiny", "cluster=slurm_test", "cluster.slurm.vboost=1"])
    acts = {} if succeeds else {"srun": 'case "$*" in *--vboost*) exit 1 ;; esac'}
    sruns = run_script(script.script(plan), tmp_path, acts=acts).sruns()
    of_plan = [
        at for at, argv in enumerate(sruns) if any(f"jobs.{name}" in argument for argument in argv for name in PROGRAMS)
    ]
    (boost,) = [at for at, argv in enumerate(sruns) if "boost-slider" in argv]
    assert sruns[boost][-6:] == ["sudo", "-n", "nvidia-smi", "boost-slider", "--vboost", "1"]
    assert f"--ntasks={plan.world.num_nodes}" in sruns[boost] and not any(
        "container" in argument for argument in sruns[boost]
    )
    assert bool(of_plan) is succeeds and all(boost < at for at in of_plan)
    without = compose.compose(["task=lora_tiny", "cluster=slurm_test"])
    assert "vboost" not in script.script(without) and "vboost" not in plan_kinds.dumps(without)


PROGRAMS = ("tasks", "node_checks")
"""The packages of the programs that ranks run."""


@pytest.mark.long
@pytest.mark.parametrize(("when", "requeues"), [("open", False), ("begin", True)])
def test_a_job_near_its_time_limit_requeues_itself_only_after_progress(
    tmp_path: Path, when: str, requeues: bool
) -> None:
    """Rows were prepared before the first trial begins. A job that never gets that far would be requeued for ever."""
    plan = compose.compose(["task=lora_tiny", "cluster=slurm_test"])
    ended = run_script(script.script(plan), tmp_path, acts=at(when, "kill -USR1 $PPID"))
    assert [argv for argv, _ in ended.calls if argv[:2] == ["scontrol", "requeue"]] == [
        ["scontrol", "requeue", "7"]
    ] * requeues
    closed = [argv for argv in ended.sruns() if "close" in argv]
    if requeues:
        assert ended.code == 143 and closed == []
    else:
        assert ended.code == 1 and "this start of the job has finished nothing" in " ".join(closed[0])
