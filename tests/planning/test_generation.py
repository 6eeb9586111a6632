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


def test_the_document_has_7750_tokens_assigned_longest_first() -> None:
    plan = planned("task=generate_7b", *HUGGINGFACE)
    assert [one.length for one in plan.requests] == LENGTHS and sum(LENGTHS) == 7750
    assert plan_kinds.loads(plan_kinds.dumps(plan)) == plan and plan.world.dp == 8
    shares = [[one.length for one in plan.requests if one.replica == replica] for replica in range(8)]
    assert [share[-1] for share in shares] == LENGTHS[:-9:-1], "the eight longest have a replica each"
    assert max(map(sum, shares)) - min(map(sum, shares)) <= 100 and {len(share) for share in shares} <= {3, 4}
    assert plan.commands[-1].argv == ["python", "-m", "jobs.tasks.generate", "plan.json", "--trial", "0"]


@pytest.mark.long
def test_memory_is_that_of_weights_and_kv_cache() -> None:
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


@pytest.mark.long
def test_a_4_bit_base_keeps_embedding_and_head_in_bf16() -> None:
    plan = one_gpu("task=generate_70b", "task.generation.nf4=true")
    linears, others = 80 * 855_638_016, 2 * 32_000 * 8192 + 161 * 8192
    assert plan.memory.weights_gib == pytest.approx((linears * 4.12695 / 8 + others * 2) / 2**30, rel=1e-5)
    assert plan.weights.name == "nf4" and plan.config.precision.name == "bf16"


def test_the_time_of_a_token_is_that_of_reading_all_weights_but_the_embedding() -> None:
    """2 x (6,738,415,616 - 32,000 x 4,096) bytes and 13 + 100 / 2 tokens of 524,288, at 4,210 GB/s."""
    cost = one_gpu("task=generate_7b", "model.weights=random", "task.generation.lengths=[100]").cost
    assert cost is not None and cost.bytes_per_token == 13_214_687_232 + 63 * 524_288
    assert 1000 * cost.token_s == pytest.approx(3.14673, abs=1e-4)


def test_5x2_on_8_gpus_needs_share_gpu() -> None:
    config = compose.unplanned(["task=generate_7b", "cluster=dgxh200", "parallel.groups=5", "parallel.tp=2"])
    with pytest.raises(ConfigError, match="5 replicas of 2 GPUs need 10 GPUs, but the cluster has 8 GPUs") as error:
        replicas.split(config)
    assert "parallel.share_gpu=true" in error.value.fix
    config.parallel.share_gpu = True
    world = replicas.split(config)
    assert (world.num_ranks, world.ranks_per_node, world.dp, world.tp) == (10, 10, 5, 2)
    assert replicas.per_gpu(config, world) == 2


def test_replicas_that_share_a_gpu_share_its_memory_and_slurm_requests_existing_gpus() -> None:
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
def test_hosts_may_give_their_groups(hosts: str, words: list[str], replica: tuple[int, int]) -> None:
    config = compose.unplanned(["task=generate_70b", "cluster=hosts", f"cluster.hosts={hosts}", *words])
    config.cluster.num_nodes = 2
    config.cluster.device = compose.unplanned(["cluster=dgxh200"]).cluster.device
    world = replicas.split(config)
    assert (world.dp, world.tp) == replica and world.num_ranks == replica[0] * replica[1]


TINY, TRANSFORMERS = "task=generate_tiny", ("engine=huggingface",)
BALANCED = ("engine.huggingface.strategy=balanced", "cluster.ranks_per_node=1")
GENERATION = "task.generation"


@pytest.mark.parametrize(
    ("overrides", "what", "where"),
    [
        ([TINY, f"{GENERATION}.lengths=[]"], "lengths is empty", f"{GENERATION}.lengths"),
        ([TINY, f"{GENERATION}.lengths=[8,0]"], "the length of an answer is 0 tokens", f"{GENERATION}.lengths"),
        (
            [TINY, f"{GENERATION}.lengths=[8,1012]"],
            "a prompt of at least 13 tokens and an answer of 1012 tokens do not fit",
            "max_seq_length",
        ),
        (
            [TINY, f"{GENERATION}.lengths=[8]"],
            "the task has 1 request for 2 replicas, so some replicas would have no work",
            "parallel.groups",
        ),
        (
            [TINY, f"{GENERATION}.order=one_by_one", f"{GENERATION}.max_batch=2"],
            "max_batch is 2, but order=one_by_one",
            "max_batch",
        ),
        (
            [TINY, f"{GENERATION}.batching=continuous"],
            "batching=continuous needs max_batch: without it all requests",
            f"{GENERATION}.max_batch",
        ),
        (
            [TINY, f"{GENERATION}.batching=continuous", f"{GENERATION}.max_batch=2"],
            "engine=huggingface supports static batching only",
            "batching",
        ),
        (
            [TINY, f"{GENERATION}.sampling.top_k=5"],
            "top_k or top_p is set, but temperature 0 is greedy decoding and ignores them",
            "sampling",
        ),
        ([TINY, f"{GENERATION}.sampling.temperature=-1"], "temperature is -1", "sampling.temperature"),
        (
            [TINY, f"{GENERATION}.sampling.temperature=1", f"{GENERATION}.sampling.top_p=1.5"],
            r"top_p is 1\.5",
            "sampling.top_p",
        ),
        ([TINY, f"{GENERATION}.nf4=true"], "nf4 needs precision bf16, but precision is fp32", "precision"),
        (
            [
                "task=generate_70b",
                "engine=megatron",
                f"{GENERATION}.nf4=true",
                "model.ffn_hidden_size=28640",
                "cluster=dgxh200",
            ],
            "nf4 needs ffn_hidden_size / tp to be a multiple of 64, but ffn_hidden_size / tp is 28640",
            f"{GENERATION}.nf4",
        ),
        (
            [TINY, "parallel.groups=3"],
            "3 replicas of 1 rank need 3 ranks, but the cluster has 2 ranks",
            "parallel.groups",
        ),
        ([TINY, "parallel.tp=2"], "tp is 2, but engine=huggingface does not support tensor", "parallel.tp"),
        ([TINY, "parallel.pp=2"], "pp is set, but generation supports only tensor parallelism", "parallel.pp"),
        ([TINY, "parallel.share_gpu=true"], r"share_gpu is true, but cluster\.device is cpu", "parallel.share_gpu"),
        (
            ["task=lora_tiny", "parallel.share_gpu=true"],
            "only a task of kind generate can share GPUs, but task lora_tiny is of",
            "share_gpu",
        ),
        ([TINY, "precision=fp8"], "engine=huggingface generates in FP32, BF16 or 4 bits, not in", "precision"),
        ([TINY, "engine.huggingface.strategy=fsdp2"], "strategy fsdp2 is for training", "strategy"),
        ([TINY, *BALANCED, "engine.huggingface.num_gpus=2"], r"num_gpus is 2, but cluster\.device is cpu", "num_gpus"),
        (
            [TINY, "launch.profile=kernels"],
            "launch.profile=kernels needs training steps, but this task does not",
            "launch.profile",
        ),
        (["task=generate_70b", *HUGGINGFACE, "gpu@cluster.gpu=h100"], "weights 128.5, KV cache", "parallel.tp"),
        ([TINY, "task.kind=train"], r"is of kind train, but the block task\.training is missing", "task.kind"),
    ],
)
def test_invalid_generation_settings_are_refused(overrides: list[str], what: str, where: str) -> None:
    with pytest.raises(ConfigError, match=what) as error:
        compose.compose([*TRANSFORMERS, *(override for override in overrides if override not in TRANSFORMERS)])
    assert where in error.value.where and error.value.fix


def from_file(tmp_path: Path, text: str | bytes) -> list[generation_plan.PromptLine]:
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    generation = compose.unplanned(
        [TINY, f"{GENERATION}.prompts={file}", f"{GENERATION}.lengths=[7,9]"]
    ).task.generation
    assert generation is not None
    return generation_plan.prompt_lines(generation, has_text=True)


def test_prompts_of_a_file_have_their_own_length_or_the_tasks(tmp_path: Path) -> None:
    lines = [{"prompt": "Why?\nBecause."}, {"prompt": "Wo?", "length": 5}, {"prompt": "When?"}]
    requested = from_file(tmp_path, "\n".join(map(json.dumps, lines)) + "\n\n")
    assert [(one.prompt, one.length) for one in requested] == [("Why?\nBecause.", 7), ("Wo?", 5), ("When?", 7)]


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "the file of prompts is empty"),
        ('{"prompt": "a"}\n{"prompt": ', "not JSON"),
        (
            '{"prompt": "a", "lenght": 3}',
            "the line must be a JSON object with only the keys prompt and length, but has",
        ),
        ('["a"]', "the line must be a JSON object with only the keys prompt and length, but has a list"),
        ('{"prompt": " "}', "the prompt is ' '"),
        ('{"prompt": "a", "length": "3"}', "the length is '3', but must be a number of tokens"),
        ('{"prompt": "a", "length": true}', "the length is True"),
        (b'{"prompt": "\xff"}', "not UTF-8 text"),
        ('{"prompt": "a\\ud800b", "length": 10}', r"the prompt contains '\\ud800', which is not a valid character"),
    ],
)
def test_an_invalid_file_of_prompts_is_refused_with_the_line(tmp_path: Path, text: str | bytes, what: str) -> None:
    with pytest.raises(ConfigError, match=what) as error:
        from_file(tmp_path, text)
    assert "prompts.jsonl" in error.value.where


def test_the_number_of_an_invalid_line_counts_blank_lines(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        from_file(tmp_path, '\n\n{"prompt": 1}')
    assert error.value.where.endswith("prompts.jsonl, line 3")


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the file of prompts cannot be read: No such file or directory"):
        compose.compose([TINY, "model.weights=checkpoint", f"{GENERATION}.prompts={tmp_path}/none.jsonl"])
