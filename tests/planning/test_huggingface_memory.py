"""The memory estimate of engine=huggingface: against what autograd stores, hand arithmetic and published peaks."""

import warnings
from typing import Any

import pytest
import yaml

from bench.contract import plan_kinds
from bench.contract.plan import Memory
from bench.planning import compose, make_plan
from bench.planning.conf_folder import CONF
from bench.planning.estimates.huggingface_memory import layer_bytes
from tests.helpers.cached_configs import cached

BLOCK = "engine.huggingface"
config_of = cached(lambda words: compose.unplanned(["engine=huggingface", *words]))
LLAMA = ["hidden_size=64", "num_attention_heads=4", "num_query_groups=2", "ffn_hidden_size=176", "vocab_size=512"]
GPT = [
    *LLAMA[:2],
    "num_query_groups=4",
    *LLAMA[3:],
    "norm=LayerNorm",
    "activation=gelu",
    "position=learned",
    "bias=true",
]
ROW = 48
"""Unlike every size of the models, so that no activation has the shape of a weight."""
ALL = [
    "task.training.trains=all",
    "task.training.lora=null",
    "task.training.starts_from=random",
    "task.training.base=null",
]
LORA = ["task.training.lora={rank: 8, alpha: 16, dropout: 0.0, target_modules: [linear_qkv, linear_proj]}"]
SEPARATE = "task.training.lora={{rank: 8, alpha: 16, dropout: 0.0, shared_a: false, target_modules: [{}]}}".format


def model(kind: str, num_layers: int, attention: str) -> Any:
    import transformers

    sizes: dict[str, Any] = {"vocab_size": 512, "attn_implementation": attention, "use_cache": False}
    if kind != "gpt":
        kind_of_config = transformers.Qwen3Config if kind == "qwen3" else transformers.LlamaConfig
        config: Any = kind_of_config(
            hidden_size=64,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32 if kind == "qwen3" else 16,
            intermediate_size=176,
            num_hidden_layers=num_layers,
            **sizes,
        )
        return transformers.AutoModelForCausalLM.from_config(config)
    dropout: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    ends: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None}
    config = transformers.GPT2Config(
        n_embd=64, n_head=4, n_inner=176, n_layer=num_layers, activation_function="gelu", **dropout, **ends, **sizes
    )
    return transformers.GPT2LMHeadModel(config)


def stored_bytes(net: Any, *, autocast: bool) -> int:
    """What autograd saves of one row besides weights, each storage once; casts of weights are no activations."""
    import torch

    own = {x.untyped_storage().data_ptr() for x in (*net.parameters(), *net.buffers())}
    shapes = {tuple(x.shape) for x in net.parameters()} | {tuple(reversed(x.shape)) for x in net.parameters()}
    seen: dict[int, int] = {}
    kept = []

    def note(x: Any) -> Any:
        storage = x.untyped_storage()
        if storage.data_ptr() not in own and not (autocast and tuple(x.shape) in shapes):
            seen[storage.data_ptr()] = storage.nbytes()
        kept.append(x)
        return x

    rows = torch.zeros(1, ROW, dtype=torch.long)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x), torch.autocast("cpu", torch.bfloat16, autocast):
        logits = net(rows).logits
    assert logits.shape[1] == ROW
    return sum(seen.values())


CASES = {
    "qwen3 fp32": ("qwen3", "sdpa", "fp32", None),
    "qwen3 eager autocast": ("qwen3", "eager", "bf16", "autocast"),
    "qwen3 adapters bf16": ("qwen3", "sdpa", "bf16", "pure"),
    "llama fp32": ("llama", "sdpa", "fp32", None),
    "llama eager fp32": ("llama", "eager", "fp32", None),
    "llama bf16": ("llama", "sdpa", "bf16", "pure"),
    "llama eager bf16": ("llama", "eager", "bf16", "pure"),
    "llama autocast": ("llama", "sdpa", "bf16", "autocast"),
    "llama eager autocast": ("llama", "eager", "bf16", "autocast"),
    "gpt bf16": ("gpt", "sdpa", "bf16", "pure"),
    "gpt eager fp32": ("gpt", "eager", "fp32", None),
    "gpt eager autocast": ("gpt", "eager", "bf16", "autocast"),
    "adapters fp32": ("adapters", "sdpa", "fp32", None),
    "adapters bf16": ("adapters", "sdpa", "bf16", "pure"),
    "adapters autocast": ("adapters", "eager", "bf16", "autocast"),
    "adapters on q_proj, v_proj bf16": ("adapters", "sdpa", "bf16", "pure"),
    "adapters on q_proj, v_proj eager": ("adapters", "eager", "bf16", "pure"),
    "adapters on q_proj, up_proj, down_proj fp32": ("adapters", "sdpa", "fp32", None),
    "adapters on gate_proj, up_proj, down_proj autocast": ("adapters", "sdpa", "bf16", "autocast"),
}
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.mark.parametrize("name", CASES)
def test_a_layer_stores_as_much_as_autograd_saves_in_transformers(name: str) -> None:
    import torch

    kind, attention, precision, bf16 = CASES[name]
    targets, has_adapters = [module for module in MODULES if module in name], "adapters" in name
    is_autocast, dtype = bf16 == "autocast", torch.float32 if precision == "fp32" else torch.bfloat16
    stored = []
    for num_layers in (2, 3):  # the first layer stores less if no adapter reads its input
        net = model("llama" if kind == "adapters" else kind, num_layers, attention)
        net = net.to(torch.float32 if is_autocast and not has_adapters else dtype)
        if has_adapters:
            net = adapted(net, torch.float32 if is_autocast else dtype, targets or list(MODULES[:4]))
        stored.append(stored_bytes(net, autocast=is_autocast))
    sizes = {"gpt": GPT, "qwen3": [*LLAMA, "head_dim=32", "qk_norm=true"]}.get(kind, LLAMA)
    config = config_of(
        [
            *(f"model.{size}" for size in sizes),
            *([SEPARATE(",".join(targets))] if targets else LORA if has_adapters else ALL),
            f"data.seq_length={ROW}",
            f"precision={precision}",
            f"{BLOCK}.attention={attention}",
            *([f"{BLOCK}.bf16={bf16}"] if bf16 else []),
        ]
    )
    assert config.huggingface is not None
    assert (stored[1] - stored[0]) / ROW == layer_bytes(config, config.huggingface)


def adapted(net: Any, dtype: Any, targets: list[str]) -> Any:
    import peft

    lora = peft.LoraConfig(r=8, lora_alpha=16, target_modules=targets)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        net = peft.get_peft_model(net, lora, autocast_adapter_dtype=False)
    for parameter in net.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    return net


ONE_GPU = ["cluster=local", "cluster.device=cuda", "gpu@cluster.gpu=h200", "data=rows_350", "model.weights=random"]
BATCH = ["recipe.micro_batch_size=1", "data.train_rows=65536", "recipe.eval_every_samples=60000"]


def memory(*words: str, ranks: int = 8, batch: int | None = None) -> Memory:
    sizes = [f"cluster.ranks_per_node={ranks}", f"recipe.global_batch_size={batch or ranks}"]
    config = config_of([*ONE_GPU, *BATCH, *sizes, *words])
    assert config.cluster.gpu is not None
    config.cluster.gpu.memory_gib = 10_000.0
    return plan_kinds.required(make_plan.make(compose.as_planned(config)), plan_kinds.TrainingPlan).memory


def deepspeed(stage: int, *words: str) -> list[str]:
    return [f"{BLOCK}.strategy=deepspeed", f"{BLOCK}.zero_stage={stage}", *words]


T = 6_738_415_616
"""The parameters of Llama-2-7B."""
OFFLOAD_STATES, OFFLOAD_WEIGHTS = f"{BLOCK}.offload_optimizer=true", f"{BLOCK}.offload_parameters=true"
AT_REST = {  # weights, master weights with moments: bytes a parameter of one of 8 ranks
    "ZeRO 0": (deepspeed(0), 2, 12),
    "ZeRO 1": (deepspeed(1), 2, 12 / 8),
    "ZeRO 2": (deepspeed(2), 2, 12 / 8),
    "ZeRO 3": (deepspeed(3), 2 / 8, 12 / 8),
    "ZeRO 2, states offloaded": (deepspeed(2, OFFLOAD_STATES), 2, 0),
    "ZeRO 3, all offloaded": (deepspeed(3, OFFLOAD_STATES, OFFLOAD_WEIGHTS), 0, 0),
    "ZeRO 3 in FP32": (deepspeed(3, "precision=fp32"), 4 / 8, 12 / 8),
    "ZeRO 1 in pure BF16": (deepspeed(1, f"{BLOCK}.bf16=pure"), 2, 6 / 8),
    "ZeRO 2 in pure BF16": (deepspeed(2, f"{BLOCK}.bf16=pure"), 2, 6 / 8),
    "ZeRO 3 in pure BF16": (deepspeed(3, f"{BLOCK}.bf16=pure"), 2 / 8, 6 / 8),
    "DDP under autocast": ([], 4, 8),
    "DDP in pure BF16": ([f"{BLOCK}.bf16=pure"], 2, 4),
    "FSDP2": ([f"{BLOCK}.strategy=fsdp2"], 4 / 8, 8 / 8),
    "FSDP2 in pure BF16": ([f"{BLOCK}.strategy=fsdp2", f"{BLOCK}.bf16=pure"], 2 / 8, 4 / 8),
    "FSDP2, offloaded": ([f"{BLOCK}.strategy=fsdp2", OFFLOAD_WEIGHTS], 0, 0),
}


@pytest.mark.parametrize("name", AT_REST)
def test_states_need_the_bytes_of_the_zero_and_fsdp_papers(name: str) -> None:
    words, weights, optimizer = AT_REST[name]
    estimate = memory("task=pretrain_7b", *words)
    assert estimate.base_weights_gib == pytest.approx(weights * T / 2**30)
    assert estimate.optimizer_gib == pytest.approx(optimizer * T / 2**30)


def test_gradients_are_sharded_from_stage_2_on() -> None:
    """Of short rows, recomputed, whose fullest moment is the optimizer's step: bytes a weight, on one of 8 ranks."""
    estimate = [memory("task=pretrain_7b", "recipe.recompute=full", *deepspeed(stage)) for stage in range(4)]
    assert [one.activations_gib for one in estimate] == [0, 0, 0, 0]
    assert [one.gradients_gib * 2**30 / T for one in estimate] == pytest.approx([2, 2, 2 / 8, 2 / 8])


@pytest.mark.long
def test_hybrid_shards_over_the_ranks_of_a_node() -> None:
    words = ["task=pretrain_7b", "cluster=dgx2", "recipe.global_batch_size=16", f"{BLOCK}.strategy=fsdp2_hybrid"]
    config = config_of([*words, "model.weights=random", *BATCH, "data=rows_350"])
    estimate = plan_kinds.required(make_plan.make(compose.as_planned(config)), plan_kinds.TrainingPlan).memory
    assert estimate.base_weights_gib == pytest.approx(4 * T / 8 / 2**30)


def test_the_peak_is_the_optimizer_step_for_short_rows_and_the_backward_pass_for_long_ones() -> None:
    """Stage 0 in BF16 copies all gradients to FP32 when it steps: 2 + 2 + 12 + 4 bytes a weight."""
    short = memory("task=pretrain_7b", *deepspeed(0), ranks=1)
    assert (short.activations_gib, short.gradients_gib) == (0, pytest.approx(2 * T / 2**30))
    assert short.total_gib == pytest.approx(20 * T / 2**30, rel=0.05)
    long = memory(
        "task=pretrain_7b", *deepspeed(0), "data.seq_length=4096", "recipe.micro_batch_size=4", ranks=1, batch=4
    )
    assert long.activations_gib > 50 and long.gradients_gib == 0
    accumulated = memory(
        "task=pretrain_7b", *deepspeed(0), "data.seq_length=4096", "recipe.micro_batch_size=4", ranks=1, batch=8
    )
    assert accumulated.gradients_gib == pytest.approx(2 * T / 2**30)  # those of the micro-batch before


def test_gradient_accumulation_with_fsdp2_keeps_unsharded_gradients() -> None:
    words = ["task=pretrain_7b", f"{BLOCK}.strategy=fsdp2", "recipe.recompute=full", "data.seq_length=4096"]
    once, twice = memory(*words), memory(*words, batch=16)
    assert twice.total_gib - once.total_gib == pytest.approx(2 * T / 2**30, rel=0.15)


@pytest.mark.long
def test_a_4_bit_base_needs_as_much_as_in_the_qlora_paper() -> None:
    """4 + 8/64 + 32/(64 * 256) bits for each weight of a linear; embeddings, head and norms stay in BF16."""
    linears = 32 * (4 * 4096**2 + 3 * 4096 * 11008)
    estimate = memory("task=qlora_7b", ranks=1)
    assert estimate.base_weights_gib == pytest.approx((linears * 4.127 / 8 + 2 * (T - linears)) / 2**30, rel=1e-3)


SHARDED_BASES = {"FSDP2": [f"{BLOCK}.strategy=fsdp2"], "ZeRO 3": deepspeed(3)}


@pytest.mark.parametrize("name", SHARDED_BASES)
def test_scales_of_a_sharded_4_bit_base_are_on_every_rank(name: str) -> None:
    """4 bits of a weight are sharded, and 8/64 + 32/(64 * 256) bits are not; the weights in BF16 are sharded."""
    linears = 32 * (4 * 4096**2 + 3 * 4096 * 11008)
    estimate = memory("task=qlora_7b", *SHARDED_BASES[name])
    sharded, whole = linears / 2 + 2 * (T - linears), linears * (8 / 64 + 32 / (64 * 256)) / 8
    assert estimate.base_weights_gib == pytest.approx((sharded / 8 + whole) / 2**30)


@pytest.mark.long
def test_layers_in_4_bits_are_gathered_in_4_bits() -> None:
    """FSDP2 has three layers gathered. ZeRO 3 has all eight layers: a BF16 element has four of the weights."""
    layer = 4 * 4096**2 + 3 * 4096 * 11008
    fsdp2, zero_3 = (
        [
            memory(f"task={task}", "model.num_layers=8", RECOMPUTED, *words).workspace_gib * 2**30
            for task in ("lora_7b", "qlora_7b")
        ]
        for words in SHARDED_BASES.values()
    )
    assert fsdp2[0] - fsdp2[1] == pytest.approx(3 * layer * 1.5)
    stored = 2 * 4096 * 32000 + 8 * layer / 4
    assert zero_3[0] - zero_3[1] == pytest.approx(2 * (1e9 - stored), rel=0.1)


def test_unsharded_pure_bf16_needs_ten_bytes_a_weight_in_the_step_of_eight_ranks() -> None:
    """Weights, gradients and DDP's buckets of two bytes each, and moments of four, with one short row recomputed."""
    estimate = memory("task=pretrain_7b", RECOMPUTED, f"{BLOCK}.bf16=pure")
    parts = estimate.base_weights_gib + estimate.gradients_gib + estimate.optimizer_gib
    assert parts * 2**30 == pytest.approx(8 * T) and estimate.workspace_gib * 2**30 > 2 * T
    assert estimate.total_gib == pytest.approx(66.7, rel=0.05), "arXiv 2311.03687, table III"


def test_pure_bf16_at_4096_is_near_the_h200_measurement() -> None:
    """62 GiB: transformers 5.17, torch 2.11, one row of 4096, SDPA, weights and moments in BF16."""
    words = [f"{BLOCK}.bf16=pure", "recipe.recompute=none", "data.seq_length=4096"]
    estimate = memory("task=pretrain_7b", *words, ranks=1)
    assert estimate.total_gib == pytest.approx(62, rel=0.1)


RECOMPUTED, FLASH = "recipe.recompute=full", f"{BLOCK}.attention=sdpa"
METHODS = {
    "Z2+O": deepspeed(2, OFFLOAD_STATES),
    "Z3": deepspeed(3),
    "R+Z2+O": deepspeed(2, OFFLOAD_STATES, RECOMPUTED),
    "R+Z3": deepspeed(3, RECOMPUTED),
    "R+Z3+O": deepspeed(3, OFFLOAD_STATES, OFFLOAD_WEIGHTS, RECOMPUTED),
    "F+Z2+O": deepspeed(2, OFFLOAD_STATES, FLASH),
    "F+Z3": deepspeed(3, FLASH),
    "F+Z3+O": deepspeed(3, OFFLOAD_STATES, OFFLOAD_WEIGHTS, FLASH),
    "F+R+Z2+O": deepspeed(2, OFFLOAD_STATES, RECOMPUTED, FLASH),
    "F+R+Z3": deepspeed(3, RECOMPUTED, FLASH),
    "F+R+Z3+O": deepspeed(3, OFFLOAD_STATES, OFFLOAD_WEIGHTS, RECOMPUTED, FLASH),
    "Q": deepspeed(0, "task=qlora_7b"),
}


@pytest.mark.parametrize("method", METHODS)
def test_peaks_are_near_those_published_for_8_gpus_of_24_gib(method: str) -> None:
    """Table III of arXiv 2311.03687, on RTX 4090s, where no memory was left to cache blocks in; of other versions."""
    published = yaml.safe_load((CONF / "published" / "dissect_table_3_rtx4090.yaml").read_text())
    row = next(row for row in published["rows"] if row["labels"] == {"model": "7B", "method": method})
    words = METHODS[method]
    task = [] if "task=qlora_7b" in words else ["task=pretrain_7b"]
    eager = [] if FLASH in words else [f"{BLOCK}.attention=eager"]
    estimate = memory(*task, *words, *eager, *([] if RECOMPUTED in words else ["recipe.recompute=none"]))
    assert estimate.total_gib == pytest.approx(float(row["printed"][1]), rel=0.1)


def test_deepspeed_s_buckets_and_a_copy_count_in_the_backward_pass() -> None:
    """Bytes of one of 8 ranks, of weights in BF16: 5e8 numbers a bucket, 1e9 gathered, and the largest weight's.

    Weights that stage 3 gathers ahead arrive in a buffer of 5e7 numbers and the largest weight, which may be the last.
    """
    offloaded = [OFFLOAD_STATES, RECOMPUTED, FLASH]
    second = memory("task=pretrain_7b", *deepspeed(2, *offloaded)).workspace_gib
    third = memory("task=pretrain_7b", *deepspeed(3, *offloaded)).workspace_gib
    largest = 4096 * 32000
    assert (third - second) * 2**30 / 2 == pytest.approx(1e9 + 5e7 + largest - largest)


def test_a_single_rank_gathers_only_from_host_memory() -> None:
    words = ["task=pretrain_7b", RECOMPUTED, FLASH]
    alone, offloaded = (
        memory(*words, *deepspeed(3, *more), ranks=1).workspace_gib * 2**30
        for more in ([OFFLOAD_STATES], [OFFLOAD_STATES, OFFLOAD_WEIGHTS])
    )
    assert (offloaded - alone) / 2 == pytest.approx(1e9)
