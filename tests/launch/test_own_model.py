"""A user's own model and conversations: `runstop prepare` and `runstop launch`, then generation and export.

The folder is a tiny random Qwen3 that transformers saved, with a tokenizer and its chat template.
"""

import csv
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench import cli
from bench.contract import plan_kinds
from bench.errors import ConfigError
from bench.mlperf import reader
from bench.planning import compose, to_prepare
from helpers import model_folders, ranks, text_data
from helpers.paths import ROOT
from helpers.text_data import lines
from jobs.data import samples
from jobs.tasks import convert

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

TEMPLATE = (
    "{% for m in messages %}{{ '<' + m.role + '>' + m.content + eos_token + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
    "max_position_embeddings": 512,
}
WORDS = ["task=finetune_chat", "model=hf", "data.files=chat.jsonl", "cluster=local", "data.seq_length=256"]
"""What a user types; a laptop needs no longer rows."""
TRAINED = ["precision=fp32", "recipe.global_batch_size=16", "recipe.eval_every_samples=32", "recipe.lr=1e-3"]
SAVED = ["recipe.lr_warmup_steps=1", "task.training.checkpoint_every_steps=4"]
STEPS = 6
QUESTION = "Can there be life somewhere in the Solar System outside Earth?"
ANSWERS = [8, 12]


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of transformers, and chat.jsonl next to it."""
    created = tmp_path_factory.mktemp("laptop") / "tiny_qwen3"
    created.mkdir()
    pairs = list(samples.reports(16 * (STEPS + 1), 0))
    samples.train_tokenizer(created, pairs, 512)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(created / "tokenizer.json"), eos_token="</s>", pad_token="<pad>", chat_template=TEMPLATE
    )
    tokenizer.save_pretrained(created)
    torch.manual_seed(1)
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES))
    for name, weight in model.named_parameters():
        if "norm" in name:
            weight.data.uniform_(0.5, 1.5)
    model.save_pretrained(created)
    thanks = [{"role": "user", "content": "Thanks."}, {"role": "assistant", "content": "Welcome."}]
    records = [
        {"messages": [{"role": "user", "content": report}, {"role": "assistant", "content": summary}, *thanks]}
        for report, summary in pairs
    ]
    (created.parent / "chat.jsonl").write_bytes(lines(records))
    return created


def runstop(model: Path, *words: str) -> str:
    """Run the command as a user types it, in the folder around the model's; return its stdout."""
    place = model.parent
    paths = {"DATADIR": place, "MODEL": model, "LOGDIR": place / "runs", "PYTHONPATH": ROOT}
    command = [sys.executable, "-m", "bench", *words]
    environment = os.environ | {name: str(path) for name, path in paths.items()}
    ended = subprocess.run(command, env=environment, cwd=place, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.mark.trains
@pytest.mark.skipif(ranks.DEVICE != "cpu", reason="FP32 numbers of one machine")
def test_two_commands_fine_tune_a_folder_on_a_chat_file(qwen3: Path) -> None:
    """The trained model generates, and transformers computes the same logits and tokens."""
    model, words = qwen3, [*WORDS, *TRAINED, *SAVED]
    assert runstop(model, "prepare", *words).endswith(f"runstop launch {' '.join(words)}\n")
    runstop(model, "launch", *words, "launch.folder=tuned")
    run, out = model.parent / "tuned", model.parent / "out"
    losses = [one.value for one in reader.read(run / "result_0.txt")[0] if one.key == "eval_accuracy"]
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0] - 0.1

    trained = run / f"checkpoints/trial_0/step_{STEPS}"
    assert convert.main(["export", str(trained), str(out), "--tokenizer", str(model)]) == 0
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    plan = replace(plan_kinds.load(run / "plan.json"), base_dir=str(trained))
    ranks.run(plan, ranks.write(plan, run / "own"), "tests.helpers.logits", "plan.json")
    from helpers.logits import tokens  # which imports megatron-core

    with torch.no_grad():
        expected = theirs(tokens(256, SIZES["vocab_size"])).logits
    assert expected.std() > 0.1, "equal logits would make the comparison meaningless"
    torch.testing.assert_close(torch.load(run / "own/plan.pt"), expected, rtol=0, atol=1e-4)

    generation = [
        "task=generate_8b",
        "model=hf",
        "cluster=local",
        "precision=fp32",
        f"task.generation.lengths={ANSWERS}",
    ]
    generation = [one.replace(" ", "") for one in [*generation, "cluster.ranks_per_node=1"]]
    runstop(out, "prepare", *generation)
    runstop(out, "launch", *generation, "launch.folder=generated")
    prompt = transformers.AutoTokenizer.from_pretrained(out)(QUESTION, return_tensors="pt").input_ids
    greedy = theirs.generate(prompt, max_new_tokens=max(ANSWERS), do_sample=False, eos_token_id=None, pad_token_id=0)
    new = greedy[0, prompt.shape[1] :].tolist()
    with (model.parent / "generated/rank_logs/trial_0.answers.csv").open(newline="") as file:
        answers = [[int(one) for one in row["token_ids"].split()] for row in csv.DictReader(file)]
    assert answers == [new[:length] for length in ANSWERS]


def of_config(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


WRONG: dict[str, tuple[Callable[[Path], Any], str]] = {
    "the folder contains no *.safetensors": (lambda folder: (folder / "model.safetensors").unlink(), "download"),
    "tensors have another shape": (
        lambda folder: of_config(folder, lambda config: config.update(hidden_size=32)),
        "download the weights again",
    ),
    "of 36 tensors are missing": (
        lambda folder: of_config(folder, lambda config: config.update(num_hidden_layers=3)),
        "download the weights again",
    ),
    "the weights are quantised (awq)": (
        lambda folder: of_config(folder, lambda config: config.update(quantization_config={"quant_method": "awq"})),
        "set MODEL to the folder of the unquantised model",
    ),
    "model_type in config.json is 'gemma9'": (
        lambda folder: of_config(folder, lambda config: config.update(model_type="gemma9")),
        "set engine=huggingface",
    ),
    "tokenizer.json cannot be used": (
        lambda folder: (folder / "tokenizer.json").write_text('{"a"'),
        "download tokenizer.json",
    ),
    "the tokenizer has no chat template": (
        lambda folder: (folder / "tokenizer_config.json").write_text(json.dumps(text_data.CONFIG)),
        "copy chat_template.jinja",
    ),
}


def ended(capsys: pytest.CaptureFixture[str], verb: str, *words: str) -> tuple[int, str]:
    """Return the exit code and the output, as one line, of a verb."""
    with pytest.raises(SystemExit) as stop:
        cli.main([verb, *words])
    return int(str(stop.value.code)), " ".join("".join(capsys.readouterr()).split())


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    """Return the overrides for a folder qwen3 whose weights are headers only, and a chat file."""
    from helpers import tiny_llama  # which imports torch

    folder = tmp_path / "qwen3"
    model_folders.write(folder, tiny_llama.model(family="qwen3", qk_norm=True, head_dim=64))
    text_data.write_tokenizer(folder, text_data.CONFIG | {"chat_template": TEMPLATE})
    turns = [{"role": "user", "content": "Name a tree."}, {"role": "assistant", "content": "oak"}]
    (tmp_path / "chat.jsonl").write_bytes(lines([{"messages": turns}] * 60))
    paths = {"data": tmp_path, "model": folder, "logs": tmp_path / "runs"}
    own = [f"cluster.paths.{name}={path}" for name, path in paths.items()]
    return [*WORDS, *own, "recipe.global_batch_size=4", "recipe.eval_every_samples=32", "recipe.lr_warmup_steps=0"]


@pytest.mark.long
@pytest.mark.parametrize("message", WRONG)
def test_a_wrong_folder_is_refused_by_plan_and_doctor(
    message: str, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before and after the rows were counted; without a template, the plan with known rows is shown as well."""
    spoil, fix = WRONG[message]
    spoil(tmp_path / "qwen3")
    for counted in ([], ["data.train_rows=44"]):
        codes = (2, 1, 2) if counted and "template" in message else (2, 2, 2)
        for verb, code in zip(("plan", "doctor", "prepare"), codes, strict=True):
            exit_code, shown = ended(capsys, verb, *words, *counted)
            assert exit_code == code and "Traceback" not in shown
            assert message in shown and str(tmp_path / "qwen3") in shown and fix in shown


@pytest.mark.long
def test_prepare_converts_weights_as_the_plan_stores_them(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text_data.prepared_here(monkeypatch)
    folder, site = tmp_path / "qwen3", tmp_path / "site"
    site.mkdir()
    words += ["data.train_rows=44", "--config-dir", str(site)]
    for verb, code in (("plan", 2), ("doctor", 1)):
        exit_code, shown = ended(capsys, verb, *words)
        assert exit_code == code and "the Hugging Face weights of qwen3 are not converted" in shown
        assert f"run this command first: runstop prepare {' '.join(words)}" in shown
    before = sorted(tmp_path.rglob("*"))
    assert f"writes {folder}/megatron_core" in ended(capsys, "prepare", *words, "--dry-run")[1]
    assert sorted(tmp_path.rglob("*")) == before
    exit_code, shown = ended(capsys, "prepare", *words)
    assert exit_code == 0 and f"{folder}/megatron_core is complete: the weights of qwen3" in shown
    assert shown.endswith(f"runstop launch {' '.join(words)}")
    assert ended(capsys, "doctor", *words)[0] == 0
    assert f"{folder}/megatron_core exists already" in ended(capsys, "prepare", *words)[1]
    generation = ["task=generate_8b", *(one for one in words if not one.startswith(("task=", "data.", "recipe.")))]
    assert f"{folder}/megatron_core exists already" in ended(capsys, "prepare", *generation)[1], "a run without data"
    shutil.rmtree(folder / "megatron_core")
    assert ended(capsys, "prepare", *generation, "precision=fp8")[0] == 0
    assert [path.name for path in folder.glob("megatron*")] == ["megatron_core_fp8"]


@pytest.mark.long
def test_prepare_says_what_to_do_with_a_folder_that_is_not_writable(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, words = tmp_path / "qwen3", [*words, "data.train_rows=44"]
    monkeypatch.setattr(to_prepare.os, "access", lambda path, mode: path != folder)
    exit_code, shown = ended(capsys, "prepare", *words)
    assert exit_code == 2 and "cannot write the converted weights into this folder" in shown
    (tmp_path / "own").mkdir()
    for file in folder.iterdir():
        (tmp_path / "own" / file.name).symlink_to(file)
    links = f"ln -s {folder}/* DIR/ && export MODEL=DIR"
    assert links in shown and links in ended(capsys, "doctor", *words)[1]
    text_data.prepared_here(monkeypatch)
    assert ended(capsys, "prepare", *words, f"cluster.paths.model={tmp_path}/own")[0] == 0
    assert (tmp_path / "own/megatron_core/metadata.json").is_file()


def test_prepare_refuses_a_run_that_needs_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    generation = ["task=generate_tiny", "cluster=local"]
    assert "reads no files to tokenise, and no weights" in ended(capsys, "prepare", *generation)[1]


def test_a_checkpoint_of_a_trial_is_no_model_folder(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "step_4").mkdir()
    (tmp_path / "step_4/metadata.json").touch()
    for place, fix in (
        (tmp_path / "step_4", "convert export"),
        (tmp_path / "qwen3/megatron_core", f"{tmp_path}/qwen3"),
    ):
        with pytest.raises(ConfigError, match="there is no config.json in this folder|does not exist") as refused:
            compose.compose([*words, f"cluster.paths.model={place}"])
        assert fix in refused.value.fix
