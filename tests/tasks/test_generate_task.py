"""Real ranks generate with transformers: their tokens are those of transformers' own model, and the log proves it."""

import csv
from pathlib import Path

import pytest

from bench.contract.plan_kinds import GenerationPlan
from bench.mlperf import result as results
from bench.planning import compose
from bench.runs import trial as trials
from helpers import ranks, text_data

torch = pytest.importorskip("torch")
for name in ("transformers", "accelerate", "tokenizers"):
    pytest.importorskip(name, reason="pip install 'runstop[huggingface,data]'")

pytestmark = [pytest.mark.trains]
QUESTION = "Are oak trees a tree?"
SMALL = ("model.num_layers=2", "model.hidden_size=64", "model.ffn_hidden_size=96")
LENGTHS = (9, 4, 7, 12, 5)
REQUESTED_LENGTHS = f"task.generation.lengths=[{','.join(map(str, LENGTHS))}]"


def planned(*overrides: str) -> GenerationPlan:
    plan = compose.compose(
        [
            "task=generate_tiny",
            "engine=huggingface",
            f"cluster.device={ranks.DEVICE}",
            *SMALL,
            REQUESTED_LENGTHS,
            *overrides,
        ]
    )
    assert isinstance(plan, GenerationPlan)
    return plan


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder of a tiny Llama, whose first token of </s> would end an answer, with its tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    created = tmp_path_factory.mktemp("model") / "tiny"
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        rms_norm_eps=1e-5,
        max_position_embeddings=1024,
        eos_token_id=2,
        initializer_range=0.5,
    )
    LlamaForCausalLM(config).save_pretrained(created)
    words = (*text_data.WORDS, *(f"w{number}" for number in range(128 - len(text_data.WORDS))))
    text_data.write_tokenizer(created, words=words)
    return created


def greedy(folder: Path, prompt: list[int], length: int) -> list[int]:
    """Return the tokens of transformers' own model, computed from the whole text for each token."""
    from transformers import AutoModelForCausalLM

    model, tokens = AutoModelForCausalLM.from_pretrained(folder).eval(), list(prompt)
    with torch.inference_mode():
        for _ in range(length):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def answers(run: Path) -> list[dict[str, str]]:
    with (run / "rank_logs/trial_0.answers.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_two_replicas_answer_with_the_tokens_of_transformers_own_model(folder: Path, tmp_path: Path) -> None:
    """Prompts from a file, with different lengths, are padded; an answer continues after </s>."""
    file = tmp_path / "prompts.jsonl"
    file.write_text(f'{{"prompt": "{QUESTION}"}}\n' * 3 + '{"prompt": "a tree ."}\n{"prompt": "Oaks", "length": 3}\n')
    words = (f"task.generation.prompts={file}", "task.generation.order=side_by_side")
    plan = planned(*words, "model.weights=checkpoint", f"cluster.paths.model={folder}")
    run = ranks.write(plan, tmp_path / "run")
    ranks.run(plan, run, "jobs.tasks.generate", "plan.json", "--trial", "0")

    judged = trials.judge(run / "result_0.txt", plan, plan.trials[0])
    assert judged.valid, (list(judged.differences), judged.of_kind, judged.result.findings)
    rows = answers(run)
    assert [int(row["tokens"]) for row in rows] == [9, 4, 7, 12, 3]
    assert {row["replica"] for row in rows} == {"0", "1"}
    are, tree, a, oaks = (text_data.WORDS.index(setting) for setting in ("Oaks", "tree", "a", "Oaks"))
    prompts = {"3": [1, a, tree, text_data.WORDS.index(".")], "4": [1, oaks]}
    for index, prompt in prompts.items():
        row = rows[int(index)]
        assert int(row["prompt_tokens"]) == len(prompt)
        assert [int(token) for token in row["token_ids"].split()] == greedy(folder, prompt, int(row["length"]))
    assert rows[0]["token_ids"].split()[:7] == rows[2]["token_ids"].split(), "the same question, longer and shorter"
    assert all(row["text"] for row in rows)


def test_a_missing_token_is_reported(tmp_path: Path) -> None:
    plan = planned("task.generation.order=one_by_one")
    run = ranks.write(plan, tmp_path / "run")
    ranks.run(plan, run, "tests.helpers.short_answers", "plan.json", "--trial", "0")
    judged = trials.judge(run / "result_0.txt", plan, plan.trials[0])
    assert judged.of_kind is not None and not judged.valid
    short = [index for index, one in enumerate(plan.requests) if one.replica == 1]
    assert list(judged.of_kind.problems) == [
        f"answer {index} has {LENGTHS[index] - 1} tokens, but {LENGTHS[index]} were requested" for index in short
    ]
    assert results.parse(run / "result_0.txt").status == "success", "the ranks report success, but the log is invalid"


def test_a_prompt_that_is_too_long_ends_the_trial_before_it_starts(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "' + "a " * 1020 + '"}\n{"prompt": "a"}\n')
    words = (f"task.generation.prompts={file}", "model.weights=checkpoint", f"cluster.paths.model={folder}")
    plan = planned(*words)
    run = ranks.write(plan, tmp_path / "run")
    (run / "rank_logs").mkdir()
    ended = ranks.ended(plan, run, "jobs.tasks.generate", "plan.json", "--trial", "0")
    assert [code for code, _ in ended] == [2, 2]
    assert (
        "prompt 0 has 1021 tokens and the requested answer 9 tokens, but tiny supports 1024 tokens in total"
        in ended[0][1]
    )
