"""Lengths that differ from request to request: what is sampled, planned, sent and refused."""

import hashlib
import json
import math
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.contract import plan_kinds
from bench.contract.plan_kinds import ServingPlan
from bench.contract.serving import Lengths, LogNormal, RequestLengths, SampledLengths
from bench.errors import ConfigError
from bench.planning import request_lengths
from bench.planning.estimates import serving_memory
from bench.report import serving as report
from helpers import serving

PAIRS = ((20, 4), (60, 9), (33, 12))
STATED = tuple(
    f"task.serving.lengths.{which}={{mean:{mean},sigma:1,min:2,max:{most}}}"
    for which, mean, most in (("prompt", 100, 600), ("answer", 30, 300))
)


def file_of(folder: Path, kind: str) -> Path:
    """Write the pairs."""
    lines = {
        "csv": ["prompt_tokens,answer_tokens", *(f"{prompt},{answer}" for prompt, answer in PAIRS)],
        "jsonl": [json.dumps({"prompt_tokens": prompt, "answer_tokens": answer}) for prompt, answer in PAIRS],
    }
    path = folder / f"pairs.{kind}"
    path.write_text("\n".join(lines[kind]) + "\n")
    return path


def sampled(plan: ServingPlan) -> SampledLengths:
    assert plan.lengths is not None
    return plan.lengths


def pairs(lengths: RequestLengths) -> list[tuple[int, int]]:
    return list(zip(lengths.tokens_in, lengths.tokens_out, strict=True))


CONFIG = serving.planned().config


@pytest.mark.long
@given(mean=st.integers(50, 2000), sigma=st.floats(0, 0.8), seed=st.integers(0, 2**32))
def test_the_mean_of_sampled_lengths_is_near_the_stated_one(mean: int, sigma: float, seed: int) -> None:
    assert CONFIG.task.serving is not None
    count = 1000
    one = LogNormal(mean=mean, sigma=sigma, min=1, max=10**9)
    block = replace(CONFIG.task.serving, lengths=Lengths(prompt=one, answer=one), requests=count)
    actual = request_lengths.sampled(replace(CONFIG, task=replace(CONFIG.task, serving=block)), [seed])
    assert actual is not None
    error = mean * math.sqrt(math.expm1(sigma**2) / count)  # the standard error of the mean of a lognormal
    for tokens in (actual.trials[0].tokens_in, actual.trials[0].tokens_out):
        assert abs(statistics.fmean(tokens) - mean) < 8 * error + 0.51


@pytest.mark.long
def test_the_lengths_depend_on_the_seed_and_on_no_other_setting(tmp_path: Path) -> None:
    source = f"task.serving.lengths.file={file_of(tmp_path, 'csv')}"
    for words in ((source,), STATED):
        first = serving.planned(*words, "trials=2")
        other = serving.planned(*words, "server=vllm", "task.serving.arrivals=[burst]", "task.serving.rates=[]")
        fewer = serving.planned(*words, "task.serving.requests=50", "seed_base=2")
        assert sampled(other).trials[0] == sampled(first).trials[0] != sampled(first).trials[1]
        assert pairs(sampled(fewer).trials[0]) == pairs(sampled(first).trials[1])[:50]
        assert plan_kinds.loads(plan_kinds.dumps(first)) == first
        assert serving.planned().work != first.work


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_a_file_of_pairs_is_sampled_from_and_bound_by_its_checksum(tmp_path: Path, kind: str) -> None:
    path = file_of(tmp_path, kind)
    actual = sampled(serving.planned(f"task.serving.lengths.file={path}"))
    assert set(pairs(actual.trials[0])) == set(PAIRS) and len(pairs(actual.trials[0])) == 200
    assert actual.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_the_plan_shows_what_was_sampled(tmp_path: Path) -> None:
    plan = serving.planned(f"task.serving.lengths.file={file_of(tmp_path, 'csv')}")
    prompts = [*range(1, 100), 1000]
    shown = replace(
        plan, lengths=SampledLengths(sha256="a" * 64, trials=[RequestLengths(tokens_in=prompts, tokens_out=[2] * 100)])
    )
    rows = dict(report.plan_rows(shown))
    assert rows["input tokens"] == "mean 59.5, p50 50, p99 99, maximum 1,000"
    assert rows["output tokens"] == "mean 2.0, p50 2, p99 2, maximum 2"
    assert rows["input + output"] == "mean 61.5, p50 52, p99 101, maximum 1,002"
    assert "pairs.csv (sha256 aaaaaaaaaaaa…)" in rows["lengths"]
    assert (
        "lognormal, mean 30 before the limits, sigma 1, limits 2 to 300"
        in dict(report.plan_rows(serving.planned(*STATED)))["lengths"]
    )


def test_the_kv_cache_is_that_of_the_longest_requests_of_the_worst_trial() -> None:
    plan = serving.planned(
        "cluster=dgxh200",
        "task.serving.arrivals=[concurrent]",
        "task.serving.rates=[]",
        "task.serving.concurrency=[3]",
        "precision=bf16",
        "cluster.num_nodes=1",
    )
    lengths = SampledLengths(
        sha256=None,
        trials=[
            RequestLengths(tokens_in=[1, 90, 2, 50, 3], tokens_out=[1, 10, 1, 10, 1]),
            RequestLengths(tokens_in=[70, 60, 3, 3, 50], tokens_out=[9, 9, 1, 1, 9]),
        ],
    )
    assert plan.config.task.serving is not None
    token_gib = serving_memory.token_bytes(plan.config.model, tp=1, element_bytes=2) / serving_memory.GIB
    needed = serving_memory.estimate(plan.config, plan.config.task.serving, plan.loads, lengths)
    assert needed.fitting == 3 and needed.request_gib == 100 * token_gib
    assert needed.kv_cache_gib == needed.all_gib == (79 + 69 + 59) * token_gib


REFUSED = {
    ("csv", "prompt_tokens,answer\n1,2\n"): "answer_tokens is missing",
    ("csv", "prompt_tokens,answer_tokens\n1\n"): "answer_tokens is None",
    ("csv", "prompt_tokens,answer_tokens\n1,2.5\n"): "answer_tokens is '2.5'",
    ("csv", "prompt_tokens,answer_tokens\n0,2\n"): "prompt_tokens is 0",
    ("csv", "prompt_tokens,answer_tokens\n"): "the file contains no lengths of prompts and answers",
    (
        "csv",
        "prompt_tokens,answer_tokens\n9,9\n1000,25\n",
    ): "pair 2 of .* has 1,025 tokens, but tiny supports only 1,024",
    ("jsonl", '{"prompt_tokens": true, "answer_tokens": 4}'): "prompt_tokens is True",
    ("jsonl", "[1, 2]"): "the line must be a JSON object",
    ("jsonl", "{"): "the line is not JSON",
    ("json", "[]"): "must end in .jsonl or .csv",
}


@pytest.mark.parametrize(("kind", "text"), REFUSED)
def test_a_wrong_file_is_refused(tmp_path: Path, kind: str, text: str) -> None:
    path = tmp_path / f"pairs.{kind}"
    path.write_text(text)
    with pytest.raises(ConfigError, match=REFUSED[kind, text]) as refused:
        serving.planned(f"task.serving.lengths.file={path}")
    assert refused.value.fix


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (STATED[:1], "lengths.answer needs mean, sigma, min and max"),
        (
            (*STATED, "task.serving.lengths.file=/nowhere/pairs.csv"),
            "a file of lengths and a distribution of lengths are set",
        ),
        (("task.serving.lengths.file=/nowhere/pairs.csv",), "cannot be read: No such file"),
        ((*STATED, "task.serving.lengths.prompt.max=900"), "the longest possible request has 1,200 tokens"),
        (
            (*STATED, "task.serving.lengths.prompt.mean=700"),
            "mean is 700, but must be from min to max, which is 2 to 600",
        ),
        ((*STATED, "task.serving.lengths.prompt.min=0"), "min is 0 and max is 600"),
        ((*STATED, "task.serving.lengths.answer.sigma=-1"), "sigma is -1"),
        (
            (*STATED, "task.serving.requests=20000", "trials=3"),
            "but a plan can contain the lengths of at most 50,000 requests",
        ),
    ],
)
def test_wrong_lengths_are_refused(words: tuple[str, ...], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        serving.planned(*words)


def test_a_request_may_fill_the_context_and_a_file_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert serving.planned(*STATED, "task.serving.lengths.prompt.max=724").lengths is not None, "1,024 with the answer"
    path = file_of(tmp_path, "csv")
    small = replace(request_lengths.FILE, max_bytes=path.stat().st_size - 1)
    monkeypatch.setattr(request_lengths, "FILE", small)
    with pytest.raises(ConfigError, match="the file of lengths has [0-9]+ bytes, but at most"):
        serving.planned(f"task.serving.lengths.file={path}")
