"""Plans: the arithmetic, what is refused, and that JSON gives back what was planned."""

import copy
import json
import shlex
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.contract import plan as plans
from bench.contract import plan_kinds
from bench.contract.plan import Plan
from bench.errors import ConfigError
from bench.planning import compose, make_plan
from bench.planning import training as training_plans
from helpers.examples import in_proportion

CONF = Path(compose.CONF)
TASKS = ["lora70b", "lora70b_quick", "lora_tiny", "pretrain_tiny"]
"""What every cluster can plan; test_tasks.py has the others."""
CLUSTERS = sorted(path.stem for path in (CONF / "cluster").glob("*.yaml"))
MODELS = sorted(
    {path.stem for path in (CONF / "model").glob("*.yaml")}
    - {"hf", "gpt_oss_20b", "gpt_oss_120b", "unknown", "llama31_405b", "gpt3_175b"}
)
"""Those with sizes that engine=megatron trains on eight GPUs."""
LAPTOP = "parallel={tp: 1, pp: 1, cp: 1, sp: false}"


def planned(*overrides: str) -> Plan:
    return compose.compose(overrides)


@pytest.mark.parametrize(("task", "cluster"), list(product(TASKS, CLUSTERS)))
def test_every_shipped_plan_round_trips_through_json(task: str, cluster: str) -> None:
    fitting = [LAPTOP] if "70b" in task and cluster in ("local", "slurm_test") else []
    fitting += ["precision=bf16"] if "70b" in task and cluster == "kubernetes_mi300x" else []  # it has no FP8 of ours
    # Eight nodes are more than tiny's batch has samples.
    small = ["walltime=60", "cluster.num_nodes=1"] if "tiny" in task else []
    small += ["cluster.hosts=[rig0]"] if small and cluster == "hosts" else []
    original = planned(f"task={task}", f"cluster={cluster}", *fitting, *small)
    assert plan_kinds.loads(plan_kinds.dumps(original)) == original
    w = original.world
    assert w.dp * w.tp * w.pp * w.cp == w.num_ranks == w.num_nodes * w.ranks_per_node


@pytest.mark.parametrize(
    ("overrides", "seen"),
    [
        (["cluster=local"], "-1"),
        (["cluster=local", "+cluster.environment.CUDA_VISIBLE_DEVICES='3'"], "3"),
        (["cluster=local", "cluster.device=cuda"], None),
    ],
)
def test_ranks_on_cpus_see_no_gpu_unless_the_site_says_so(overrides: list[str], seen: str | None) -> None:
    """Half of the engine would take a GPU that it sees, the first one on every rank, and call the run one on a GPU."""
    plan = planned("task=lora_tiny", *overrides)
    assert plan.base is not None
    assert [each.environment.get("CUDA_VISIBLE_DEVICES") for each in (plan, plan.base)] == [seen, seen]


@pytest.mark.long
@given(
    nodes=st.integers(1, 4),
    per_node=st.sampled_from([1, 2, 4, 8]),
    tp=st.sampled_from([1, 2, 4, 8]),
    pp=st.sampled_from([1, 2, 4, 5]),
    cp=st.sampled_from([1, 2, 4]),
    gbs=st.integers(1, 256),
    mbs=st.integers(1, 4),
)
@settings(max_examples=in_proportion(150), deadline=None)
def test_a_layout_is_either_an_exact_split_or_refused(
    seventy_b: Plan, nodes: int, per_node: int, tp: int, pp: int, cp: int, gbs: int, mbs: int
) -> None:
    config = copy.deepcopy(seventy_b.config)
    config.cluster.num_nodes, config.cluster.ranks_per_node = nodes, per_node
    config.parallel.tp, config.parallel.pp, config.parallel.cp, config.parallel.sp = tp, pp, cp, False
    config.recipe.global_batch_size, config.recipe.micro_batch_size = gbs, mbs
    config.task.training.max_steps = 100_000
    legal = tp <= per_node and nodes * per_node % (tp * pp * cp) == 0
    dp = nodes * per_node // (tp * pp * cp) if legal else 0
    if not legal or gbs % (dp * mbs):
        with pytest.raises(ConfigError):
            make_plan.make(config)
        return
    try:
        split = make_plan.make(config)
    except ConfigError as refused:
        assert "GiB per GPU" in str(refused)
        return
    assert split.world.dp == dp
    assert split.batch.gradient_accumulation_steps * split.batch.micro_batch_size * dp == gbs


@pytest.fixture(scope="module")
def seventy_b() -> Plan:
    return planned("task=lora70b", "cluster=dgx8")


OFFICIAL_SCHEDULE = {8: (1536, 384), 9: (1548, 387), 16: (1920, 384), 32: (2688, 384), 64: (4224, 384), 72: (5184, 432)}
"""First evaluation and distance in samples, by GBS. Source: MLPerf training rules, and logs of rounds v4.0 to v5.1."""


@pytest.mark.parametrize("gbs", OFFICIAL_SCHEDULE)
def test_evaluation_follows_the_official_schedule(seventy_b: Plan, gbs: int) -> None:
    config = copy.deepcopy(seventy_b.config)
    config.recipe.global_batch_size, config.task.training.max_steps = gbs, 1024
    schedule = training_plans.evaluations(config)
    assert (schedule.first_step * gbs, schedule.every_steps * gbs) == OFFICIAL_SCHEDULE[gbs]
    assert schedule.at_steps[:2] == [schedule.first_step, schedule.first_step + schedule.every_steps]


def test_learning_rate_is_a_cosine_from_lr_to_zero() -> None:
    plan = planned("task=lora70b", "cluster=dgx1", "recipe.lr_warmup_steps=4")
    recipe = plan.config.recipe
    rates = [plan_kinds.learning_rate(plan, step) for step in range(1, 1024 + 2)]
    assert rates[:5] == [recipe.lr * k / 4 for k in (1, 2, 3, 4)] + [recipe.lr]
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert rates[-1] == pytest.approx(0, abs=1e-12)


def test_trials_have_different_seeds_and_walltime_covers_them() -> None:
    ten = planned("task=lora70b", "cluster=dgx2", "trials=10", "seed_base=7", "walltime=40")
    assert [trial.seed for trial in ten.trials] == list(range(7, 17))
    assert ten.walltime_min == 5 + 10 * (40 + 5)
    assert [command.argv[-1] for command in plans.trial_commands(ten)] == [str(k) for k in range(10)]


FIXED_BY_THE_RULES = (
    "model.num_layers=40",
    "model.hidden_size=4096",
    "model.ffn_hidden_size=14336",
    "model.num_attention_heads=32",
    "model.num_query_groups=16",
    "model.vocab_size=64000",
    "model.norm=LayerNorm",
    "model.norm_epsilon=0.1",
    "model.activation=gelu",
    "model.rope_base=500000",
    "model.rope_scaling_factor=8",
    "model.bias=true",
    "model.tied_embeddings=true",
    "data=tiny_report",
    "data.answer_only=false",
    "data.seq_length=4096",
    "data.train_rows=4000",
    "data.eval_rows=100",
    "task.training.target_eval_loss=0.93",
    "task.training.lora.rank=8",
    "task.training.lora.alpha=16",
    "task.training.lora.dropout=0",
    "task.training.lora.target_modules=[linear_qkv]",
    "recipe.weight_decay=0",
    "recipe.clip_grad=1",
    "recipe.eval_every_samples=192",
    "recipe.eval_skip=0",
)


@pytest.mark.parametrize("change", FIXED_BY_THE_RULES)
def test_any_deviation_from_the_rules_makes_a_run_open(change: str) -> None:
    changed = planned("task=lora70b", "cluster=dgx2", "precision=bf16", change).submission
    assert changed.division == "open"
    assert any(deviation.startswith(change.split("=")[0]) for deviation in changed.deviations)


def test_the_unmodified_benchmark_is_closed_division() -> None:
    assert planned("task=lora70b", "cluster=dgx2", "recipe.lr=5e-4", "parallel.tp=8").submission.division == "closed"


@pytest.mark.long
def test_org_and_platform_mark_runs_that_are_not_submissions() -> None:
    own = ("task=lora_tiny", "task.submittable=true", "walltime=9", "cluster=dgx1")
    for overrides in (own, ("task=lora70b_quick", "cluster=dgx1"), ("task=lora70b", "cluster=dgx1", "model=llama2_7b")):
        marked = planned(*overrides).submission
        assert marked.division == "open" and "not a submission" in marked.org and "not a submission" in marked.platform


REFUSED = {
    "task=lora70b cluster=dgx1 parallel.tp=3": (
        "tp 3 does not divide the 64 attention heads.*\n.*\n.*set parallel.tp to one of 1, 2, 4, 8"
    ),
    "task=lora70b cluster=dgx2 parallel.tp=16 model.num_query_groups=16": "within a node, which has 8 GPUs",
    "task=lora70b cluster=dgx1 parallel.pp=3": "80 layers cannot be split evenly over pp 3 x vpp 1",
    "task=lora70b cluster=dgx1 parallel.pp=1 parallel.vpp=2": "vpp is 2, which needs a pipeline of two or more stages",
    "task=lora70b cluster=dgx1 parallel.tp=4 parallel.cp=4": "replicas of tp 4 x pp 1 x cp 4 = 16",
    "task=lora70b cluster=dgx1 recipe.global_batch_size=9 recipe.micro_batch_size=2": "is 9, but must be a multiple",
    "engine=huggingface parallel.overlap=true": "only engine=megatron supports parallel.overlap",
    "parallel.pp=2 parallel.vpp=2 recipe.micro_batch_size=8": "micro-batches in a step is 1, but with vpp 2 it must",
    "task=lora70b cluster=dgx1 recipe.eval_every_samples=4000": "but the training data has only 3,901 samples",
    "task=lora70b cluster=dgx1 task.training.max_steps=100": "first evaluation .step 192. is after the last step .100.",
    "task=lora70b cluster=dgx1 'parallel={tp: 1, pp: 1, cp: 1}'": "GiB per GPU, but an .* has 79.6",
    "task=lora70b cluster=dgx1 walltime=null": "a queued job needs a time limit",
    "walltime=0": "walltime is 0 minutes",
    "task.training.checkpoint_every_steps=5": "from a checkpoint, but checkpoint_every_steps is 5",
    "task=pretrain_tiny task.training.checkpoint_every_steps=0": "task.training.checkpoint_every_steps",
    "cluster=dgx1 walltime=60 trials=10 cluster.slurm.max_walltime_min=240": "the job needs 655 min.*at most 240",
    "data.seq_length=2048 model.position=learned": "position embeddings for only 1024 tokens",
    "data.seq_length=90 parallel.cp=2 ": "splits a sequence into 2 x cp = 4 equal chunks",
    "parallel.sp=true parallel.tp=1": "needs tp of 2 or more, but tp is 1",
    "cluster.scheduler=slurm": "cluster.scheduler was renamed to cluster.backend",
    "recipe.max_steps=5": "recipe.max_steps was renamed to task.training.max_steps",
    "cluster.num_nodes=2": "backend local runs only on this machine, but cluster.num_nodes is 2",
    "cluster=dgx1 walltime=9 cluster.gpu=null": "the GPU of this cluster, is not set",
    "task.training.lora.target_modules=[linear_fc1]": "linear_fc1, which can have adapters only with",
    "task.training.lora.rank=0": "task.training.lora.rank is 0",
    "recipe.lr=0": "recipe.lr is 0.0, but must be a positive number",
    "trials=0": "trials is 0, but must be a positive number",
    "seed_base=-1": "seed_base is -1, but must be a finite number of 0 or more",
    "recipe.lr=inf": "recipe.lr is inf, but must be a positive number",
    "cluster.gpu.memory_gib=inf gpu@cluster.gpu=h200": "is inf, but must be a positive number\n.*memory_gib",
    "cluster.gpu.memory_gib=0 gpu@cluster.gpu=h200": "cluster.gpu.memory_gib is 0.0, but must be a positive number",
    "model.norm_epsilon=inf": "is inf, but must be a finite number\n.*model.norm_epsilon",
    "task=finetune_tiny_dolly task.training.epochs=100000000000000000000": "most 10000000 steps are allowed\n.*epochs",
    "recipe.weight_decay=nan": "recipe.weight_decay is nan, but must be a finite number of 0 or more",
    "recipe.adam_beta1=2": "recipe.adam_beta1 is 2.0, but must be 0 or more, and below 1",
    "task.training.target_eval_loss=-1": "is -1.0, but must be a positive number",
    "trials=20000000": "trials is 20000000, but must be 1000 or less",
    "cluster.master_port=99999": "cluster.master_port is 99999, which is not a valid port",
    "launch.stall.floor_s=0": "launch.stall.floor_s is 0.0, but must be a positive number",
    "launch.stall.factor=1": "launch.stall.factor is 1, but must be above 1",
    "model.num_layers=0": "model.num_layers is 0, but must be a positive number",
    "model.num_query_groups=3": "must be a multiple of model.num_query_groups, which is 3",
    "task.training.lora=null": "trains is lora, but the block task.training.lora is null",
    "cluster.ranks_per_node=7 recipe.global_batch_size=7": "this error is in task=pretrain_tiny, which trains the base",
    "model=null": "config group to null, a number or a boolean, but a choice is a name",
    "~trials": "the required key trials was deleted",
    "task.training.trains=qlora": "trains=qlora needs precision=bf16, but precision is fp32",
    "precision=fp8 task.training.trains=qlora": "trains=qlora needs precision=bf16, but precision is fp8",
    "precision=bf16 task.training.trains=qlora model.norm=LayerNorm": "on 4-bit weights .* model.norm is LayerNorm",
    "+trials=2": "\\+ adds a new key, but trials already exists",
    "task.training.max_steps=null": "but max_steps is null and epochs is null",
    "task=pretrain_tiny task.training.trains=qlora": "trains is qlora, but the block task.training.lora is null",
    "task=lora70b cluster=dgx1 task.training.trains=all task.training.lora=null precision=bf16": (
        "GiB per GPU.*recipe.moments=bf16, recipe.offload_moments=true, or train adapters"
    ),
    "precision=fp8 model.norm=LayerNorm": "is LayerNorm\n  where: precision, model.norm\n  fix:   set precision=bf16",
    "precision=fp8 model.activation=gelu model.bias=true": "model.activation is gelu, model.bias is True",
    "precision=fp8 model.position=learned": "model.position is learned",
    "precision=fp8 model.ffn_hidden_size=200": "200 columns on each rank\n.*\n  fix:   set precision=bf16$",
    "precision=bf16 task.training.trains=qlora cluster.ranks_per_node=2 parallel.tp=2": "linear_fc2 has 96",
    "task=lora70b cluster=dgx1 parallel.tp=8 model.ffn_hidden_size=28608": "linear_fc2 has 8192 rows and 3576 columns",
    "task=lora70b cluster=dgx1 cluster.gpu.rates.layer_tflop=[1,1,2]": "but layer_tflop has 3, ",
    "task=lora70b cluster=dgx1 cluster.gpu.rates.busbw_gbs=[1]": "busbw_mib and busbw_gbs must have the same number of",
    "task=lora70b cluster=dgx1 cluster.gpu.rates.copy_gbs=0": "is zero, negative or not finite",
    "task=lora70b cluster=dgx1 cluster.gpu.rates.launch_us=-1": "is zero, negative or not finite",
    "task=lora70b cluster=dgx1 parallel.tp=0": "parallel.tp is 0, but must be a positive number",
    "recipe.offload_activations=true precision=bf16 recipe.recompute=full": "recompute=full stores no layer",
    "recipe.offload_activations=true": "offload_activations needs runstop's own layers",
    "recipe.lr_warmup_steps=2000": "lr_warmup_steps is 2000, but must be below the number of steps",
}


@pytest.mark.parametrize("request_", REFUSED)
def test_invalid_configs_are_refused_with_where_and_fix(request_: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){REFUSED[request_]}") as refused:
        planned(*shlex.split(request_))
    assert refused.value.exit_code == 2 and refused.value.where and refused.value.fix


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "JSONDecodeError"),
        ("[" * 100_000, "RecursionError"),
        ('{"version": 1}', "the plan has version 1, which this version of runstop cannot read"),
        ('{"version": 5, "config": {"task": {"kind": "train"}}, "nmae": 2}', "unknown field"),
        ('{"version": 5, "config": ["task"]}', "TypeError"),
    ],
)
def test_an_invalid_plan_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_kinds.loads(text)
    document = json.loads(plan_kinds.dumps(planned()))
    document["trials"][0]["seed"] = "seven"
    with pytest.raises(ConfigError, match="expected int, got 'seven'"):
        plan_kinds.loads(json.dumps(document))


def test_a_missing_plan_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the plan cannot be read: No such file"):
        plan_kinds.load(tmp_path / "plan.json")


@pytest.mark.long
@pytest.mark.parametrize("model", MODELS)
def test_every_model_has_a_legal_split_on_eight_gpus(model: str) -> None:
    split = ("cluster=dgxh200", "parallel={tp: 2, sp: true}", "data.seq_length=2048", "precision=bf16")
    assert planned("task=lora70b", f"model={model}", *split).memory.fits


@pytest.mark.long
def test_a_site_adds_its_own_cluster(tmp_path: Path) -> None:
    tmp_path = tmp_path / "a site, with 'odd' (letters)"
    (tmp_path / "cluster").mkdir(parents=True)
    mine = (CONF / "cluster" / "dgx1.yaml").read_text().replace("name: dgx1", "name: mine")
    (tmp_path / "cluster" / "mine.yaml").write_text(mine)
    assert compose.compose(["task=lora70b", "cluster=mine"], config_dir=tmp_path).name == "lora70b-mine"
    with_base = compose.compose(["task=lora_tiny", "cluster=mine", "cluster.num_nodes=1"], config_dir=tmp_path)
    assert with_base.base is not None and with_base.base.config.cluster.name == "mine"
    with pytest.raises(ConfigError, match="this folder does not exist"):
        compose.compose([], config_dir=tmp_path / "elsewhere")


@pytest.mark.long
def test_the_base_is_of_the_same_model() -> None:
    both = planned("++model.num_layers=8", "cluster.ranks_per_node=4")
    assert both.base is not None and both.base.config.model == both.config.model
    assert both.base.world.num_ranks == 4


def test_a_tag_in_a_config_file_is_refused_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "cluster").mkdir()
    file = tmp_path / "cluster/mine.yaml"
    file.write_text("name: mine\nnotes: !!python/object/apply:os.system [id]\n")
    with pytest.raises(
        ConfigError, match="^CFG-09: the file is not valid YAML: .*python/object/apply:os.system"
    ) as refused:
        compose.compose(["task=lora_tiny", "cluster=mine"], config_dir=tmp_path)
    assert refused.value.where == f"{file}, line 2"
