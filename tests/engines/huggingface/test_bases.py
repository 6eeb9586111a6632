"""Both engines train from the same Hugging Face folder, with the same losses: Llama and GPT-2."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.contract.plan import Plan
from helpers import ranks
from helpers.huggingface_runs import BLOCK, FSDP2, STEPS, ZERO, composed, held, losses, needed, trained
from jobs.tasks import convert

needed()
pytestmark = [pytest.mark.trains, pytest.mark.slow, pytest.mark.skipif(ranks.DEVICE != "cpu", reason="gloo ranks")]

WHOLE = ("task.training.trains=all", "task.training.lora=null", "task.benchmark=null")
GIVEN = (*WHOLE, "task.training.starts_from=checkpoint", "task.training.base=null")
"""The weights are a checkpoint of the user."""
GPT = (
    *("model=gpt3_126m", "model.num_layers=2", "model.hidden_size=64", "model.ffn_hidden_size=256"),
    *("model.num_attention_heads=4", "model.num_query_groups=4", "model.vocab_size=1024", "model.max_seq_length=1024"),
)


@pytest.fixture(scope="module")
def llama(runs: Path) -> Path:
    """A Llama with transformers' initial weights."""
    import torch
    import transformers

    from helpers.llama_config import llama_config

    m = composed(runs, *GIVEN).config.model
    torch.manual_seed(1)
    config = llama_config(m, max_position_embeddings=m.max_seq_length, rope_theta=float(m.rope_base))
    folder = runs / "hf_llama"
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def from_folder(runs: Path, folder: Path, *overrides: str, **engine: Any) -> Plan:
    return composed(runs, *GIVEN, *overrides, f"cluster.paths.model={folder}", **engine)


def test_both_engines_train_from_a_folder_of_transformers(llama: Path, runs: Path) -> None:
    ours = from_folder(runs, llama, huggingface=False)
    run = ranks.write(ours, runs / "ours_of_llama")
    assert convert.main(["weights", str(run / "plan.json"), str(llama)]) == 0
    ranks.run(ours, run, "jobs.tasks.train", "plan.json", "--trial", "0")
    trained({"peer_of_llama": from_folder(runs, llama)}, runs)
    expected, got = losses(run), losses(runs / "peer_of_llama")
    assert len(got) == STEPS and expected[-1] < expected[0] - 0.1
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-4)


STRATEGIES = {
    "ddp": (),
    "fsdp2": (FSDP2,),
    "zero2": (ZERO, f"{BLOCK}.zero_stage=2"),
    "zero3": (ZERO, f"{BLOCK}.zero_stage=3"),
    "eager": (f"{BLOCK}.attention=eager", "recipe.recompute=full"),
    "compiled": (f"{BLOCK}.compile=true", "recipe.warmup_iterations=2"),
}


@pytest.fixture(scope="module")
def gpt(runs: Path) -> Path:
    """Runs from a base that engine=megatron has initialised and trained for some steps."""
    first = composed(runs, *WHOLE, *GPT, "cluster.ranks_per_node=1", huggingface=False)
    ranks.run(first, ranks.write(first, runs / "prepare_gpt"), "jobs.tasks.prepare", "plan.json")
    ours = composed(runs, *WHOLE, *GPT, huggingface=False)
    ranks.run(ours, ranks.write(ours, runs / "ours_of_gpt"), "jobs.tasks.train", "plan.json", "--trial", "0")
    trained({f"gpt_{name}": composed(runs, *WHOLE, *GPT, *words) for name, words in STRATEGIES.items()}, runs)
    return runs


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gpt_2_has_the_losses_of_megatron_s_gpt_3(gpt: Path, strategy: str) -> None:
    """Head and embedding are tied: an untied head would have other losses and count as more parameters."""
    expected, got = losses(gpt / "ours_of_gpt"), losses(gpt / f"gpt_{strategy}")
    assert len(got) == STEPS and expected[-1] < expected[0] - 0.1
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-4)
    assert not [name for name in held(gpt / f"gpt_{strategy}", "held")[0] if "lm_head" in name]
