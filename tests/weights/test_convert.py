"""Hugging Face's weights through the engine and back, in every layout: logits of others; quantised bits."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.contract import plan_kinds
from bench.contract.checkpoint import FOLDERS, Stored
from bench.contract.plan import Plan
from helpers import logits, ranks
from jobs.tasks import convert

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

TOLERANCE = 1e-5 if ranks.DEVICE == "cpu" else 1e-4
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
MODELS: dict[str, tuple[dict[str, Any], str]] = {
    "llama2": ({"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}, "model.name=tiny"),
    "llama31_tied": (
        {
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "rope_parameters": LLAMA3_ROPE,
            "tie_word_embeddings": True,
        },
        "model={num_attention_heads: 8, num_query_groups: 4, rope_base: 500000, rope_scaling_factor: 8, "
        "tied_embeddings: true}",
    ),
}
"""What differs from model=tiny: for transformers, and for us."""
TINY = {
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 256,
    "vocab_size": 128,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
}
LAYOUTS = {"tp2": ("parallel.tp=2", "parallel.sp=true"), "tp1": (), "pp2": ("parallel.pp=2",)}
"""Of two ranks each. The first one converts the weights, and draws and saves the adapters; the others load both."""
NUM_RANKS = 2
QUANTISED_MODEL = "llama2"
QUANTISED = {Stored.fp8: ("precision=fp8",), Stored.nf4: ("precision=bf16", "task.training.trains=qlora")}


def planned(tmp: Path, source: Path, *overrides: str) -> Plan:
    """Return the plan of a LoRA run whose base is in `source`; blocks of NF4 fit its MLP at tp=2."""
    return replace(ranks.compose(tmp, "model.ffn_hidden_size=256", *overrides), base=None, base_dir=str(source))


def llama(folder: Path, **changes: Any):
    """Make a random Llama with transformers and save it in several shards; return it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    model = LlamaForCausalLM(LlamaConfig(**(TINY | changes), initializer_range=0.08)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:  # all ones would not show a swap
                parameter.add_(torch.randn_like(parameter) / 10)
    model.save_pretrained(folder, max_shard_size="300KB")
    return model


def converted(*argv: str | Path) -> int:
    return convert.main([str(setting) for setting in argv])


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder per model with its logits by transformers and in every layout, without and with adapters."""
    tmp = tmp_path_factory.mktemp("convert")
    for name, (changes, _) in MODELS.items():
        model = llama(tmp / name / "hf", **changes)
        with torch.no_grad():
            torch.save(model(logits.tokens(96, 128)).logits, tmp / name / "transformers.pt")
    if ranks.have(NUM_RANKS):
        paths = []
        for layout, split in LAYOUTS.items():
            for name, (_, shape) in MODELS.items():
                created = planned(tmp, tmp / name / "hf", f"cluster.ranks_per_node={NUM_RANKS}", *split, shape)
                paths.append(tmp / name / f"{layout}.json")
                paths[-1].write_text(plan_kinds.dumps(created))
        for name in MODELS:
            assert converted("weights", tmp / name / f"{layout}.json", tmp / name / "hf") == 0
        for stored in QUANTISED:
            paths += quantised_plans(tmp, tmp / QUANTISED_MODEL / "hf", stored)
        ranks.run(created, ranks.write(created, tmp / "run"), "tests.helpers.logits", *map(str, paths))
    return tmp


def quantised_plans(tmp: Path, source: Path, stored: Stored) -> list[Path]:
    """Convert to FP8 or NF4 too, and write plans of every layout, which load either conversion; return their paths."""
    paths, folders = [], {"plain": source / FOLDERS[Stored.plain], "own": source / FOLDERS[stored]}
    for layout, split in LAYOUTS.items():
        for name, base in folders.items():
            created = planned(tmp, base, f"cluster.ranks_per_node={NUM_RANKS}", *split, *QUANTISED[stored])
            paths.append(source.parent / f"{stored.name}_{name}_{layout}.json")
            paths[-1].write_text(plan_kinds.dumps(created))
    assert converted("weights", paths[-1], source, f"--{stored.name}", "--workers", "2") == 0
    return paths


def read(measured: Path, model: str, name: str) -> Any:
    if not ranks.have(NUM_RANKS):
        pytest.skip(f"{NUM_RANKS} GPUs needed")
    return torch.load(measured / model / f"{name}.pt", map_location="cpu")


@pytest.mark.trains
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_logits_equal_those_of_transformers_in_every_layout(measured: Path, model: str, layout: str) -> None:
    expected = read(measured, model, "transformers")
    assert expected.std() > 0.3, "logits that are all alike would prove nothing"
    torch.testing.assert_close(read(measured, model, layout), expected, rtol=0, atol=TOLERANCE)


@pytest.mark.trains
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("stored", QUANTISED)
def test_converted_weights_are_those_that_loading_quantises(measured: Path, stored: Stored, layout: str) -> None:
    folder, scales = measured / QUANTISED_MODEL, {Stored.fp8: ".scale", Stored.nf4: ".absmax_scales"}[stored]
    for rank in range(NUM_RANKS):
        plain, own = (
            read(measured, QUANTISED_MODEL, f"{stored.name}_{name}_{layout}_{rank}") for name in ("plain", "own")
        )
        assert plain.keys() == own.keys() and sum(name.endswith(scales) for name in own) >= 4 * 2
        for name, expected in plain.items():
            assert torch.equal(own[name], expected), name
    what = {
        Stored.fp8: "the weights are stored in FP8, but precision=bf16 cannot use FP8 weights",
        Stored.nf4: "in NF4, but task.training.trains=lora cannot use 4-bit weights",
    }
    assert what[stored] in (folder / f"{stored.name}_own_{layout}.refused").read_text()
    assert not (folder / f"{stored.name}_plain_{layout}.refused").exists()


@pytest.mark.trains
@pytest.mark.filterwarnings(
    "ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"
)  # in transformers 5, called by peft
@pytest.mark.parametrize("model", MODELS)
def test_exported_adapters_merged_by_peft_give_the_same_logits(measured: Path, model: str) -> None:
    from peft import PeftModel
    from transformers import LlamaForCausalLM

    folder = measured / model
    assert converted("adapters", folder / "tp1.json", folder / "peft") == 0
    base = LlamaForCausalLM.from_pretrained(folder / "hf")
    merged = PeftModel.from_pretrained(base, folder / "peft").merge_and_unload().eval()
    with torch.no_grad():
        expected = merged(logits.tokens(96, 128)).logits
    assert (expected - read(measured, model, "transformers")).abs().max() > 0.1, "the adapters must change something"
    for layout in LAYOUTS:
        torch.testing.assert_close(read(measured, model, f"{layout}_adapted"), expected, rtol=0, atol=2 * TOLERANCE)
