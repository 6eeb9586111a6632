"""Secrets are known by shape, name and value, masked without a trace, and never seen where there is none."""

import json
import os
from pathlib import Path

import pytest

from bench import masked_json, masking
from bench.contract import plan_kinds
from bench.errors import ConfigError
from bench.planning import compose
from helpers.paths import CORPUS, ROOT
from helpers.planted_secrets import HARMLESS, PLANTED


@pytest.mark.parametrize("kind", PLANTED)
def test_every_kind_of_secret_is_found_masked_and_refused_but_not_shown(kind: str) -> None:
    text, secret = PLANTED[kind]
    around = f"before it {text} after it"
    assert masking.first(around)
    masked = masking.masked(around)
    assert secret not in masked and masked.startswith("before it ") and masked.endswith(" after it")
    assert masking.masked(masked) == masked, "what is masked holds no secret"
    with pytest.raises(ConfigError, match="CFG-07") as refused:
        masking.refuse(["fine", around], where="here")
    assert secret not in str(refused.value) and "characters" in str(refused.value)


def test_several_secrets_in_one_text_are_all_masked() -> None:
    texts, hidden = zip(*PLANTED.values(), strict=True)
    masked = masking.masked("\n".join(texts * 2))
    assert not [secret for secret in hidden if secret in masked] and masked.count("masked") == 2 * len(texts)


@pytest.mark.parametrize("text", HARMLESS)
def test_text_that_only_looks_like_a_secret_is_kept(text: str) -> None:
    assert masking.first(text) == "" and masking.masked(text) == text


def test_the_value_of_a_secret_variable_is_a_secret_in_every_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVICE_PASSWORD", "correct horse battery")
    monkeypatch.setenv("SSH_KEY", "/home/me/.ssh/id_rsa")
    monkeypatch.setenv("OTHER_TOKEN", "true")
    text = "it is correct horse battery, true, in /home/me/.ssh/id_rsa"
    assert masking.masked(text) == "it is [masked: 21 characters], true, in /home/me/.ssh/id_rsa"


def test_nothing_that_is_shipped_holds_a_secret() -> None:
    for folder, suffix in (("conf", "yaml"), ("sbatch", "sbatch"), ("docs", "md"), ("containers", "*")):
        for path in (ROOT / folder).rglob(f"*.{suffix}"):
            assert path.suffix == ".pyc" or masking.secrets_in(path.read_text()) == [], path
    assert masking.first(plan_kinds.dumps(compose.compose(["task=lora_tiny", "cluster=local"]))) == ""


@pytest.mark.long
@pytest.mark.skipif(not CORPUS.is_dir(), reason="no published logs here")
def test_no_published_log_holds_a_secret() -> None:
    """One of each round."""
    logs = sorted({path.relative_to(CORPUS).parts[0]: path for path in CORPUS.rglob("result_0.txt")}.values())
    assert logs
    for path in logs:
        assert masking.secrets_in(path.read_text(errors="replace")) == [], path


def test_json_files_are_written_without_the_secrets_in_their_texts(tmp_path: Path) -> None:
    content = {"evidence": [text for text, _ in PLANTED.values()], "exit_code": 1, "seconds": 1.5, "none": None}
    masked_json.write(tmp_path / "status.json", content)
    written = (tmp_path / "status.json").read_text()
    assert not [secret for _, secret in PLANTED.values() if secret in written]
    assert {name: json.loads(written)[name] for name in ("exit_code", "seconds", "none")} == {
        "exit_code": 1, "seconds": 1.5, "none": None,
    }  # fmt: skip


def test_a_json_file_is_not_written_through_a_link(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    for name in ("a.json", f"a.part{os.getpid()}"):
        (tmp_path / name).symlink_to(victim)
    masked_json.write(tmp_path / "a.json", {"b": 1})
    assert victim.read_text() == "precious" and json.loads((tmp_path / "a.json").read_text()) == {"b": 1}


HEAVY = {
    "a key's name without an end": "A_" * 100_000,
    "tokens without an end": "-eyJ" * 30_000,
    "addresses": "a://b:" * 40_000,
    "private keys": "-----BEGIN PRIVATE KEY-----" * 8_000,
    "auth": "auth=" * 50_000,
}


@pytest.mark.parametrize("kind", HEAVY)
@pytest.mark.timeout(60)
def test_the_search_is_fast_on_any_text(kind: str) -> None:
    """Each takes well under a second; one that backtracks over all of it would take hours."""
    masking.masked(HEAVY[kind])
