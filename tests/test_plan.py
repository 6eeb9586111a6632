"""Plans: the arithmetic, what is refused, and that JSON gives back what was planned."""

import json
import shlex
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench import launch, plan
from bench.errors import ConfigError
from bench.plan import Plan

CONF = Path(launch.CONF)
TASKS = sorted(path.stem for path in (CONF / "task").glob("*.yaml"))
CLUSTERS = sorted(path.stem for path in (CONF / "cluster").glob("*.yaml"))
MODELS = sorted(path.stem for path in (CONF / "model").glob("*.yaml"))
LAPTOP = "parallel={tp: 1, pp: 1, cp: 1, sp: false}"


def made(*overrides: str) -> Plan:
    return launch.compose(overrides)


@pytest.mark.parametrize(("task", "cluster"), list(product(TASKS, CLUSTERS)))
def test_json_gives_back_every_shipped_plan(task: str, cluster: str) -> None:
    fitting = [LAPTOP] if "70b" in task and cluster == "local" else []
    # Eight nodes are more than tiny's batch has samples.
    small = ["walltime=60", "cluster.num_nodes=1"] if "tiny" in task else []
    original = made(f"task={task}", f"cluster={cluster}", *fitting, *small)
    assert plan.loads(plan.dumps(original)) == original
    w = original.world
    assert w.dp * w.tp * w.pp * w.cp == w.num_ranks == w.num_nodes * w.ranks_per_node


@given(
    nodes=st.integers(1, 4),
    per_node=st.sampled_from([1, 2, 4, 8]),
    tp=st.sampled_from([1, 2, 4, 8]),
    pp=st.sampled_from([1, 2, 4, 5]),
    cp=st.sampled_from([1, 2, 4]),
    gbs=st.integers(1, 256),
    mbs=st.integers(1, 4),
)
@settings(max_examples=150, deadline=None)
def test_a_request_is_either_split_exactly_or_refused(
    seventy_b: Plan, nodes: int, per_node: int, tp: int, pp: int, cp: int, gbs: int, mbs: int
) -> None:
    config = seventy_b.config
    config.cluster.num_nodes, config.cluster.ranks_per_node = nodes, per_node
    config.parallel.tp, config.parallel.pp, config.parallel.cp, config.parallel.sp = tp, pp, cp, False
    config.recipe.global_batch_size, config.recipe.micro_batch_size = gbs, mbs
    config.recipe.max_steps = 100_000
    legal = tp <= per_node and nodes * per_node % (tp * pp * cp) == 0
    dp = nodes * per_node // (tp * pp * cp) if legal else 0
    if not legal or gbs % (dp * mbs):
        with pytest.raises(ConfigError):
            plan.make(config)
        return
    try:
        split = plan.make(config)
    except ConfigError as refused:
        assert "GiB per GPU needed" in str(refused)
        return
    assert split.world.dp == dp
    assert split.batch.gradient_accumulation_steps * split.batch.micro_batch_size * dp == gbs


@pytest.fixture(scope="module")
def seventy_b() -> Plan:
    return made("task=lora70b", "cluster=dgx8")


OFFICIAL_SCHEDULE = {8: (1536, 384), 9: (1548, 387), 16: (1920, 384), 32: (2688, 384), 64: (4224, 384), 72: (5184, 432)}
"""First evaluation and distance in samples, by GBS. Source: MLPerf training rules, and logs of rounds v4.0 to v5.1."""


@pytest.mark.parametrize("gbs", OFFICIAL_SCHEDULE)
def test_evaluation_follows_the_official_schedule(seventy_b: Plan, gbs: int) -> None:
    seventy_b.config.recipe.global_batch_size = gbs
    seventy_b.config.recipe.max_steps = 1024
    schedule = plan.evaluations(seventy_b.config)
    assert (schedule.first_step * gbs, schedule.every_steps * gbs) == OFFICIAL_SCHEDULE[gbs]
    assert schedule.at_steps[:2] == [schedule.first_step, schedule.first_step + schedule.every_steps]


def test_learning_rate_is_a_cosine_from_lr_to_zero() -> None:
    recipe = made("task=lora70b", "cluster=dgx1", "recipe.lr_warmup_steps=4").config.recipe
    rates = [plan.learning_rate(recipe, step) for step in range(1, recipe.max_steps + 2)]
    assert rates[:5] == [recipe.lr * k / 4 for k in (1, 2, 3, 4)] + [recipe.lr]
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert rates[-1] == pytest.approx(0, abs=1e-12)


def test_trials_have_seeds_of_their_own_and_walltime_covers_them() -> None:
    ten = made("task=lora70b", "cluster=dgx2", "trials=10", "seed_base=7", "walltime=40")
    assert [trial.seed for trial in ten.trials] == list(range(7, 17))
    assert ten.walltime_min == 5 + 10 * (40 + 5)
    assert [step.argv[-1] for step in ten.steps[1:]] == [str(k) for k in range(10)]


def test_only_the_benchmark_by_the_book_is_closed() -> None:
    assert made("task=lora70b", "cluster=dgx2").submission.division == "closed"
    for change in ("task.lora.alpha=16", "recipe.clip_grad=1", "model=llama2_13b", "recipe.eval_skip=0"):
        changed = made("task=lora70b", "cluster=dgx2", change, "parallel.tp=4").submission
        assert changed.division == "open" and len(changed.deviations) == 1
    for task in ("lora70b_quick", "lora_tiny"):
        marked = made(f"task={task}", "cluster=dgx1", "walltime=9").submission
        assert marked.division == "open" and "not a submission" in marked.org and "not a submission" in marked.platform


REFUSED = {
    "task=lora70b cluster=dgx1 parallel.tp=3": "tp 3 does not divide 64 heads.*\n.*\n.*use one of 1, 2, 4, 8",
    "task=lora70b cluster=dgx2 parallel.tp=16 model.num_query_groups=16": "tp 16 is above the 8 GPUs of a node",
    "task=lora70b cluster=dgx1 parallel.pp=3": "80 layers cannot be split evenly over pp 3 x vpp 1",
    "task=lora70b cluster=dgx1 parallel.vpp=2": "vpp 2 without a pipeline",
    "task=lora70b cluster=dgx1 parallel.cp=4": "8 ranks cannot be split into replicas of tp 4 x pp 1 x cp 4 = 16",
    "task=lora70b cluster=dgx1 recipe.global_batch_size=9 recipe.micro_batch_size=2": "global batch size 9 cannot be split",
    "parallel.pp=2 parallel.vpp=2 recipe.micro_batch_size=8": "interleaved schedule needs micro-batches per step \\(1\\)",
    "task=lora70b cluster=dgx1 recipe.eval_every_samples=4000": "longer than the data's 3901 rows",
    "task=lora70b cluster=dgx1 recipe.max_steps=100": "first evaluation is at step 192, after max_steps 100",
    "task=lora70b cluster=dgx1 'parallel={tp: 1, cp: 1, sp: false}'": "GiB per GPU needed, and a .* has 79.6",
    "task=lora70b cluster=dgx1 walltime=null": "Slurm needs a time limit",
    "walltime=0": "0 minutes",
    "cluster=dgx1 walltime=60 trials=10 cluster.slurm.max_walltime_min=240": "the job would take 655 min.*allows 240",
    "data.seq_length=2048 model.position=learned": "learned positions for 1024",
    "data.seq_length=90 parallel.cp=2 ": "cannot be cut into the 2 x cp = 4 chunks",
    "parallel.sp=true": "sequence parallelism needs tp above 1",
    "cluster.num_nodes=2": "2 nodes without a scheduler",
    "cluster=dgx1 walltime=9 cluster.gpu=null": "the GPU type is not said",
    "task.lora.target_modules=[linear_fc1]": "no adapter can be put on linear_fc1",
    "task.lora.rank=0": "LoRA of rank 0.*trains nothing",
    "recipe.lr=0": "0.0 is not above 0",
    "trials=0": "0 is not above 0",
    "seed_base=-1": "-1 is below 0",
    "recipe.lr_warmup_steps=2000": "2000 warm-up steps leave nothing",
}


@pytest.mark.parametrize("request_", REFUSED)
def test_the_impossible_is_refused_with_where_and_fix(request_: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){REFUSED[request_]}") as refused:
        made(*shlex.split(request_))
    assert refused.value.exit_code == 2 and refused.value.where and refused.value.fix


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "JSONDecodeError"), ('{"version": 99}', "version 99"), ('{"version": 1, "nmae": 2}', "unknown field")],
)
def test_what_is_not_a_plan_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan.loads(text)
    document = json.loads(plan.dumps(made()))
    document["trials"][0]["seed"] = "seven"
    with pytest.raises(ConfigError, match="'seven' where int was expected"):
        plan.loads(json.dumps(document))


def test_a_missing_plan_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the plan cannot be read: No such file"):
        plan.load(tmp_path / "plan.json")


@pytest.mark.parametrize("model", MODELS)
def test_every_model_has_a_legal_split_on_eight_gpus(model: str) -> None:
    split = ("cluster=dgxh200", "parallel={tp: 2, sp: true}", "data.seq_length=2048")
    assert made("task=lora70b", f"model={model}", *split).memory.fits


def test_a_site_adds_its_own_cluster(tmp_path: Path) -> None:
    (tmp_path / "cluster").mkdir()
    mine = (CONF / "cluster" / "dgx1.yaml").read_text().replace("name: dgx1", "name: mine")
    (tmp_path / "cluster" / "mine.yaml").write_text(mine)
    assert launch.compose(["task=lora70b", "cluster=mine"], config_dir=tmp_path).name == "lora70b-mine"
