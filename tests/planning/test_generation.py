"""Tasks that generate: who answers what, memory by hand arithmetic, and what cannot be generated is refused."""

import json
from pathlib import Path

import pytest

from bench.backends.slurm import script
from bench.contract import plan_kinds
from bench.contract.plan_kinds import GenerationPlan
from bench.errors import ConfigError
from bench.planning import compose, replicas
from bench.planning import generation as generation_plan
from jobs.ranks import process_group

HUGGINGFACE = ("engine=huggingface", "cluster=dgxh200")
LENGTHS = list(range(100, 401, 10))
"""Of the document: 31 of them, although it says 30."""


def planned(*overrides: str) -> GenerationPlan:
    plan = compose.compose(overrides)
    assert isinstance(plan, GenerationPlan)
    return plan


def one_gpu(*overrides: str) -> GenerationPlan:
    return planned(*HUGGINGFACE, "cluster.ranks_per_node=1", *overrides)


def test_the_documents_lengths_come_to_its_7750_tokens_and_are_shared_the_longest_first() -> None:
    plan = planned("task=generate_7b", *HUGGINGFACE)
    assert [one.length for one in plan.asked] == LENGTHS and sum(LENGTHS) == 7750
    assert plan_kinds.loads(plan_kinds.dumps(plan)) == plan and plan.world.dp == 8
    shares = [[one.length for one in plan.asked if one.replica == replica] for replica in range(8)]
    assert [share[-1] for share in shares] == LENGTHS[:-9:-1], "the eight longest have a replica each"
    assert max(map(sum, shares)) - min(map(sum, shares)) <= 100 and {len(share) for share in shares} <= {3, 4}
    assert plan.commands[-1].argv == ["python", "-m", "jobs.tasks.generate", "plan.json", "--trial", "0"]


def test_memory_is_that_of_weights_and_of_keys_and_values_with_few_heads() -> None:
    """Llama-2-7B has 6,738,415,616 weights, Llama-3.1-8B 8,030,261,248; keys and values of a token, in BF16, take
    2 x 32 layers x 32 heads x 128 x 2 bytes = 524,288, and 131,072 with the 8 heads of 8B."""
    lengths = ("task.generation.lengths=[243,115]", "model.weights=random")
    of_7b, of_8b = one_gpu("task=generate_7b", *lengths), one_gpu("task=generate_8b", *lengths)
    assert of_7b.memory.weights_gib == pytest.approx(2 * 6_738_415_616 / 2**30)
    assert of_8b.memory.weights_gib == pytest.approx(2 * 8_030_261_248 / 2**30)
    assert of_7b.memory.kv_cache_gib == pytest.approx(2 * 256 * 524_288 / 2**30), "13 + 243 tokens, two answers"
    assert of_8b.memory.kv_cache_gib == pytest.approx(of_7b.memory.kv_cache_gib / 4)
    alone = one_gpu("task=generate_7b", *lengths, "task.generation.order=one_by_one")
    assert alone.memory.kv_cache_gib == pytest.approx(256 * 524_288 / 2**30)


def test_4_bits_leave_embedding_and_head_in_bf16() -> None:
    plan = one_gpu("task=generate_70b", "task.generation.nf4=true")
    linears, beside = 80 * 855_638_016, 2 * 32_000 * 8192 + 161 * 8192
    assert plan.memory.weights_gib == pytest.approx((linears * 4.12695 / 8 + beside * 2) / 2**30, rel=1e-5)
    assert plan.weights.name == "nf4" and plan.config.precision.name == "bf16"


def test_a_tokens_time_is_that_of_reading_all_but_the_embedding() -> None:
    """2 x (6,738,415,616 - 32,000 x 4,096) bytes and 13 + 100 / 2 tokens of 524,288, at 4,210 GB/s."""
    cost = one_gpu("task=generate_7b", "model.weights=random", "task.generation.lengths=[100]").cost
    assert cost is not None and cost.bytes_per_token == 13_214_687_232 + 63 * 524_288
    assert 1000 * cost.token_s == pytest.approx(3.14673, abs=1e-4)


def test_the_documents_5x2_of_8_gpus_is_refused_unless_replicas_may_share_a_gpu() -> None:
    config = compose.unplanned(["task=generate_7b", "cluster=dgxh200", "parallel.groups=5", "parallel.tp=2"])
    with pytest.raises(ConfigError, match="5 replicas of 2 come to 10 GPUs, and the cluster has 8") as error:
        replicas.split(config)
    assert "parallel.share_gpu=true" in error.value.fix
    config.parallel.share_gpu = True
    world = replicas.split(config)
    assert (world.num_ranks, world.ranks_per_node, world.dp, world.tp) == (10, 10, 5, 2)
    assert replicas.per_gpu(config, world) == 2


def test_replicas_on_one_gpu_take_its_memory_together_and_slurm_is_asked_for_the_gpus_that_are_there() -> None:
    words = ("task=generate_7b", *HUGGINGFACE, "task.generation.order=one_by_one")
    shared = planned(*words, "parallel.groups=16", "parallel.share_gpu=true")
    assert shared.memory.total_gib == pytest.approx(2 * planned(*words).memory.total_gib)
    assert [process_group.gpu_of(shared, local_rank) for local_rank in (0, 7, 8, 15)] == [0, 7, 0, 7]
    lines = script.script(shared).splitlines()
    assert "#SBATCH --ntasks-per-node=16" in lines and "#SBATCH --gpus-per-node=8" in lines


@pytest.mark.parametrize(
    ("hosts", "words", "replica"),
    [
        ("[rig0:4x2,rig1:4x2]", ["cluster.ranks_per_node=8"], (8, 2)),
        ("[rig0:5x2,rig1:5x2]", ["cluster.ranks_per_node=8", "parallel.share_gpu=true"], (10, 2)),
        ("[rig0:1x8,rig1:1x8]", ["cluster.ranks_per_node=8"], (2, 8)),
    ],
)
def test_hosts_may_name_their_groups(hosts: str, words: list[str], replica: tuple[int, int]) -> None:
    config = compose.unplanned(["task=generate_70b", "cluster=hosts", f"cluster.hosts={hosts}", *words])
    config.cluster.num_nodes = 2
    config.cluster.device = compose.unplanned(["cluster=dgxh200"]).cluster.device
    world = replicas.split(config)
    assert (world.dp, world.tp) == replica and world.num_ranks == replica[0] * replica[1]


TINY, TRANSFORMERS = "task=generate_tiny", ("engine=huggingface",)
BALANCED = ("engine.huggingface.strategy=balanced", "cluster.ranks_per_node=1")
ASKED = "task.generation"


@pytest.mark.parametrize(
    ("overrides", "what", "where"),
    [
        ([TINY, f"{ASKED}.lengths=[]"], "no answer is asked for", f"{ASKED}.lengths"),
        ([TINY, f"{ASKED}.lengths=[8,0]"], "an answer of 0 tokens", f"{ASKED}.lengths"),
        (
            [TINY, f"{ASKED}.lengths=[8,1012]"],
            "an answer of 1012 tokens behind a prompt of 13 or more",
            "max_seq_length",
        ),
        ([TINY, f"{ASKED}.lengths=[8]"], "1 answers for 2 replicas", "parallel.groups"),
        ([TINY, f"{ASKED}.order=one_by_one", f"{ASKED}.max_batch=2"], "one by one, and batches of 2", "max_batch"),
        ([TINY, f"{ASKED}.batching=continuous"], "without an upper limit is a static one", f"{ASKED}.max_batch"),
        ([TINY, f"{ASKED}.batching=continuous", f"{ASKED}.max_batch=2"], "answers in static batches", "batching"),
        ([TINY, f"{ASKED}.sampling.top_k=5"], "with temperature 0 the most probable token", "sampling"),
        ([TINY, f"{ASKED}.sampling.temperature=-1"], "temperature -1", "sampling.temperature"),
        ([TINY, f"{ASKED}.sampling.temperature=1", f"{ASKED}.sampling.top_p=1.5"], "top_p 1.5", "sampling.top_p"),
        ([TINY, f"{ASKED}.nf4=true"], "precision is fp32: weights in 4 bits", "precision"),
        ([TINY, "parallel.groups=3"], "3 replicas of 1 come to 3 ranks, and the cluster has 2", "parallel.groups"),
        ([TINY, "parallel.tp=2"], "engine=huggingface splits no layer", "parallel.tp"),
        ([TINY, "parallel.pp=2"], "split by tensor parallelism alone", "parallel.pp"),
        ([TINY, "parallel.share_gpu=true"], "there is no GPU that replicas could share", "parallel.share_gpu"),
        (["task=lora_tiny", "parallel.share_gpu=true"], "ranks share GPUs in tasks of kind generate", "share_gpu"),
        ([TINY, "precision=fp8"], "generates in FP32, BF16 and 4 bits, not in FP8", "precision"),
        ([TINY, "engine.huggingface.strategy=fsdp2"], "strategy fsdp2 is for training", "strategy"),
        ([TINY, *BALANCED, "engine.huggingface.num_gpus=2"], "there are no GPUs to lay layers over", "num_gpus"),
        ([TINY, "launch.profile=kernels"], "profile kernels is of a training step", "launch.profile"),
        (["task=generate_70b", *HUGGINGFACE, "gpu@cluster.gpu=h100"], "weights 128.5, keys", "parallel.tp"),
        ([TINY, "task.kind=train"], "is of kind train, and task.training is missing", "task.kind"),
    ],
)
def test_what_cannot_be_generated_is_refused(overrides: list[str], what: str, where: str) -> None:
    with pytest.raises(ConfigError, match=what) as error:
        compose.compose([*TRANSFORMERS, *(word for word in overrides if word not in TRANSFORMERS)])
    assert where in error.value.where and error.value.fix


def from_file(tmp_path: Path, text: str | bytes) -> list[generation_plan.Wanted]:
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    generation = compose.unplanned([TINY, f"{ASKED}.prompts={file}", f"{ASKED}.lengths=[7,9]"]).task.generation
    assert generation is not None
    return generation_plan.wanted(generation, has_text=True)


def test_prompts_of_a_file_have_their_own_length_or_the_tasks_in_turn(tmp_path: Path) -> None:
    lines = [{"prompt": "Why?\nBecause."}, {"prompt": "Wo?", "length": 5}, {"prompt": "When?"}]
    found = from_file(tmp_path, "\n".join(map(json.dumps, lines)) + "\n\n")
    assert [(one.prompt, one.length) for one in found] == [("Why?\nBecause.", 7), ("Wo?", 5), ("When?", 7)]


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "no prompt in this file"),
        ('{"prompt": "a"}\n{"prompt": ', "not JSON"),
        ('{"prompt": "a", "lenght": 3}', "not an object of prompt and length, but lenght, prompt"),
        ('["a"]', "not an object of prompt and length, but list"),
        ('{"prompt": " "}', "the prompt is ' '"),
        ('{"prompt": "a", "length": "3"}', "the length is '3', not a number of tokens"),
        ('{"prompt": "a", "length": true}', "the length is True"),
        (b'{"prompt": "\xff"}', "not UTF-8 text"),
        ('{"prompt": "a\\ud800b", "length": 10}', r"the prompt holds '\\ud800', which is no character"),
    ],
)
def test_a_file_that_holds_no_prompts_is_refused_with_its_line(tmp_path: Path, text: str | bytes, what: str) -> None:
    with pytest.raises(ConfigError, match=what) as error:
        from_file(tmp_path, text)
    assert "prompts.jsonl" in error.value.where


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no prompts can be read: No such file or directory"):
        compose.compose([TINY, "model.weights=checkpoint", f"{ASKED}.prompts={tmp_path}/none.jsonl"])
