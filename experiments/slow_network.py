"""Train over a link that tc slows down: one group, synchronous, and local SGD. Needs root, ip and tc.

    python experiments/slow_network.py --mbit 10 100 --delay-ms 20 --folder /tmp/slow

Two network namespaces of this machine are joined by a veth pair, each end limited by tbf, with half of the round trip's
delay by netem. One rank runs in each. The measured efficiency is compared with the plan's prediction, which takes the
inner step's time from the same run; so how busy the machine is hardly matters, as long as the link is the bottleneck.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from bench.contract import plan_kinds, plan_paths
from bench.contract.local_sgd import Prediction
from bench.contract.plan_kinds import TrainingPlan
from bench.mlperf.result import Result, parse
from bench.planning import compose

ROOT = Path(__file__).parents[1]
NAMES, PORT = (f"runstop{os.getpid()}a", f"runstop{os.getpid()}b"), 61999
TINY = (
    *("launch.telemetry=false", "recipe.eval_every_samples=16384", "recipe.log_every_steps=5", "walltime=null"),
    *("model.num_layers=4", "model.hidden_size=192", "model.ffn_hidden_size=512"),
)
"""A Llama of 2 million weights, whose gradients in FP32 (8 MB) take several steps' time at 10 Mbit/s."""


def main() -> None:
    args = _parser().parse_args()
    names = ("step s", "inner s", "waited s", "averaging s", "predicted", "MB each", "efficiency", "predicted")
    print(f"{'link':<14}{'method':<13}" + "".join(f"{name:>11}" for name in (*names, "of synchr.", "of one")))
    for mbit in args.mbit:
        speeds = {}
        with link(mbit, args.delay_ms):
            chosen = {name: words for name, words in methods(args.steps).items() if name in (args.only or [name])}
            for name, words in chosen.items():
                result = trained(args.folder / f"{mbit}_mbit_{name}", words)
                speeds[name] = result
                print(line(mbit, name, result, speeds, words), flush=True)


def methods(steps: int) -> dict[str, Sequence[str]]:
    """Return the overrides of each way to train on batches of 16."""
    few = (f"task.training.max_steps={min(steps, 6)}", "recipe.lr_warmup_steps=2")
    many = (f"task.training.max_steps={steps}", "recipe.lr_warmup_steps=2")
    every = "recipe.local_sgd.every_steps"
    return {
        "one": ("task=pretrain_tiny", "cluster.ranks_per_node=1", *many),
        "synchronous": ("task=pretrain_tiny", "parallel.distributed_optimizer=false", *few),
        "H10": ("task=pretrain_tiny_local_sgd", f"{every}=10", *many),
        "all": ("task=pretrain_tiny_local_sgd", f"{every}={steps}", *many),
        "H10_int8": ("task=pretrain_tiny_local_sgd", f"{every}=10", "recipe.local_sgd.compress=int8", *many),
    }


def trained(folder: Path, words: Sequence[str]) -> Result:
    """Return what a run proves whose ranks are in the two namespaces; rows come from the cache of the plan."""
    plan = plan_kinds.required(
        compose.compose([*TINY, *words, "cluster.paths.data=" + str(folder.parent)]), plan_kinds.TrainingPlan
    )
    folder.mkdir(parents=True)
    (folder / "plan.json").write_text(plan_kinds.dumps(plan))
    if not plan_paths.is_prepared(plan):
        _run(plan, folder, "jobs.tasks.prepare", "plan.json")
    _run(plan, folder, "jobs.tasks.train", "plan.json", "--trial", "0")
    return parse(folder / plan.trials[0].log)


def _run(plan: TrainingPlan, folder: Path, *words: str) -> None:
    """Run a command on each rank, in its namespace."""
    size = plan.world.num_ranks
    processes = []
    for rank, name in zip(range(size), NAMES, strict=False):
        environment = os.environ | plan.environment | {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "veth"}
        environment |= {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": str(PORT), "OMP_NUM_THREADS": "1"}
        environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
        command = ["ip", "netns", "exec", name, sys.executable, "-m", *words]
        with (folder / f"rank_{rank}.out").open("a") as out:
            processes.append(subprocess.Popen(command, cwd=folder, env=environment, stdout=out, stderr=out))
    codes = [process.wait() for process in processes]
    if any(codes):
        raise SystemExit(f"{words[0]} ended with {codes}: see {folder}/rank_*.out")


@contextmanager
def link(mbit: float, delay_ms: float) -> Iterator[None]:
    """Join two namespaces by a link of this rate each way, and of this round trip, for as long as the block."""
    _remove()
    try:
        for name in NAMES:
            _call("ip", "netns", "add", name)
        _call(*f"ip link add veth netns {NAMES[0]} type veth peer name veth netns {NAMES[1]}".split())
        for number, name in enumerate(NAMES):
            _call("ip", "-n", name, "address", "add", f"10.77.0.{number + 1}/24", "dev", "veth")
            _call("ip", "-n", name, "link", "set", "lo", "up")
            _call("ip", "-n", name, "link", "set", "veth", "up")
            qdisc = f"ip netns exec {name} tc qdisc add dev veth".split()
            _call(*qdisc, *f"root handle 1: tbf rate {mbit}mbit burst 32kb latency 400ms".split())
            if delay_ms:
                _call(*qdisc, *f"parent 1:1 handle 10: netem delay {delay_ms / 2}ms limit 100000".split())
        yield
    finally:
        _remove()


def _remove() -> None:
    for name in NAMES:
        with suppress(subprocess.CalledProcessError):
            _call("ip", "netns", "delete", name, stderr=subprocess.DEVNULL)


def _call(*words: str, stderr: int | None = None) -> None:
    subprocess.run(words, check=True, stderr=stderr)


def predicted(mbit: float, words: Sequence[str], inner_s: float) -> Prediction:
    """Return what the plan predicts with the inner step time of this run."""
    known = (f"cluster.network_gbs={mbit / 8000}", f"recipe.local_sgd.step_time_s={inner_s}")
    plan = plan_kinds.required(compose.compose([*TINY, *words, *known]), plan_kinds.TrainingPlan)
    assert plan.local_sgd is not None
    return plan.local_sgd


def line(mbit: float, name: str, result: Result, speeds: dict[str, Result], words: Sequence[str]) -> str:
    """Return one row: measured, predicted, and how many times as fast as synchronous training and as one group."""
    start = f"{mbit:>5g} Mbit/s  {name:<12} {step_s(result):>9.3f}"
    if result.local_sgd is None or result.steps_time_s is None:
        return start
    local_sgd, num_steps = result.local_sgd, len(result.step_times_ms)
    inner_s = (result.steps_time_s - local_sgd.stopped_s) / num_steps
    measured, planned = local_sgd.efficiency(result.steps_time_s) or 0, predicted(mbit, words, inner_s)
    sent_mb = (local_sgd.rank_bytes or 0) / 1e6
    times = (local_sgd.waited_s or 0, local_sgd.exchange_s or 0, planned.exchange_s or 0, sent_mb)
    others = [speeds.get(other) for other in ("synchronous", "one")]
    ratios = "".join(f"{step_s(other) / step_s(result):>9.2f} x" if other else f"{'':>11}" for other in others)
    return (
        f"{start} {inner_s:>10.3f}{''.join(f'{time:>11.2f}' for time in times)}"
        f"{100 * measured:>10.1f}%{100 * (planned.efficiency or 0):>10.1f}%{ratios}"
    )


def step_s(result: Result) -> float:
    """Return the mean time of a step, weight averaging included."""
    assert result.steps_time_s is not None
    return result.steps_time_s / len(result.step_times_ms)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=float, nargs="+", default=[10, 100])
    parser.add_argument("--delay-ms", type=float, default=20, help="round-trip delay; 0 without netem")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--only", nargs="+", help="methods: one, synchronous, H10, all, H10_int8")
    parser.add_argument("--folder", type=Path, required=True, help="a new folder for runs and rows")
    return parser


if __name__ == "__main__":
    main()
