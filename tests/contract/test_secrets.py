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

NAMES = """
PGPASSWORD MYSQL_PWD SSHPASS GITHUB_PAT DB_PASS SMTP_PASS JWT HF_TOKEN_2 DATABASE_URL MONGODB_URI SENTRY_DSN
AZURE_STORAGE_CONNECTION_STRING SLACK_WEBHOOK_URL ROOT_PW REDISCLI_AUTH DOCKER_AUTH_CONFIG OPENAI_APIKEY
WANDB_API_KEY_OLD AWS_SECRET_ACCESS_KEY_PROD NPM_TOKENS KEYSTORE_PASSCODE LDAP_BINDPW SESSION_COOKIE CI_JOB_JWT_V2
ENCRYPTION_KEY_BASE64 SIGNING_KEY_PEM SNOWFLAKE_CREDS ADMIN_PASSWORDS BEARER_TOKEN_VALUE DJANGO_SECRETKEY
"""
"""Variables whose values are secrets, whatever the values look like."""
VALUE = "hunter-and-gatherer"
"""A value without the form of a secret."""
RANDOM = "q7Zp3Wd9Xk2Lm5Nb8Vc4"
SHAPES = {
    "Authorization: Bearer": (f"Authorization: Bearer {RANDOM}", RANDOM),
    "Authorization: Basic": ("curl -H 'Authorization: Basic bWU6aHVudGVyMg=='", "bWU6aHVudGVyMg"),
    "Google, API key": ("AIza" + f"Sy{RANDOM}-_x2Lm5Nb8Vc4"[:35], RANDOM),
    "Google, OAuth": ("ya29." + f"a0{RANDOM}-{RANDOM}", RANDOM),
    "Google, client secret": ("GOCSPX-" + f"{RANDOM}_x2Lm5N", RANDOM),
    "Stripe": ("sk_" + f"live_{RANDOM}", RANDOM),
    "npm": ("npm_" + f"{RANDOM}{RANDOM}"[:36], RANDOM),
    "PyPI": ("pypi-" + f"AgEIcHlwaS5vcmcC{RANDOM}-{RANDOM}", RANDOM),
    "SendGrid": ("SG." + f"{RANDOM}_x.{RANDOM}{RANDOM}", RANDOM),
    "Vault": ("hvs." + f"CAES{RANDOM}", RANDOM),
    "Grafana": ("glsa_" + f"{RANDOM}{RANDOM}_1a2b3c4d", RANDOM),
    "Databricks": ("dapi" + "0123456789abcdef" * 2, "0123456789abcdef"),
    "Azure, account key": (f"AccountName=me;AccountKey={RANDOM * 4}x2Lm5N==;EndpointSuffix=core.windows.net", RANDOM),
    "Azure, signature": (f"https://me.blob.core.windows.net/c?sv=2024-11-04&sig={RANDOM}%2Fx2Lm5N%3D&sp=r", RANDOM),
    "Slack, webhook": ("https://hooks.slack.com/" + f"services/T0123ABCD/B0123ABCD/{RANDOM}", RANDOM),
    "PGP, private key": (f"-----BEGIN PGP PRIVATE KEY BLOCK----- {RANDOM} -----END PGP PRIVATE KEY BLOCK-----", RANDOM),
    "an option": (f"login --user me --password {VALUE} --verbose", VALUE),
    "random characters without a name": (f"it needs {RANDOM}x2Lm and more", RANDOM),
}
"""Text, and the part of it that is secret."""
HARMLESS_TEXTS = (Path(__file__).parent / "harmless_texts.txt").read_text().splitlines()


@pytest.mark.parametrize("kind", PLANTED | SHAPES)
def test_every_kind_of_secret_is_found_masked_and_refused_but_not_shown(kind: str) -> None:
    text, secret = (PLANTED | SHAPES)[kind]
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


@pytest.mark.parametrize("name", NAMES.split())
def test_a_value_is_a_secret_by_the_name_of_its_variable(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a script, in JSON, as a key of the config, and where the value of this environment's variable is copied."""
    for text in (f"export {name}={VALUE}", f"{name}='{VALUE}'", f'{{"{name}": "{VALUE}"}}', f"{name.lower()}: {VALUE}"):
        masked = masking.masked(text)
        assert VALUE not in masked and masking.masked(masked) == masked, text
    assert masking.named(name, VALUE) and masking.named(name, f"${name}") == ""
    monkeypatch.setenv(name, "words to keep private")
    assert masking.masked("a summary with words to keep private") == "a summary with [masked: 21 characters]"


@pytest.mark.parametrize("text", [*HARMLESS, *HARMLESS_TEXTS])
def test_text_that_only_looks_like_a_secret_is_kept(text: str) -> None:
    assert masking.first(text) == "" and masking.masked(text) == text


def test_the_value_of_a_secret_variable_is_a_secret_in_every_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVICE_PASSWORD", "correct horse battery")
    monkeypatch.setenv("SSH_KEY", "/home/me/.ssh/id_rsa")
    monkeypatch.setenv("OTHER_TOKEN", "true")
    text = "it is correct horse battery, true, in /home/me/.ssh/id_rsa"
    assert masking.masked(text) == "it is [masked: 21 characters], true, in /home/me/.ssh/id_rsa"


@pytest.mark.long
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


@pytest.mark.long
@pytest.mark.parametrize("kind", HEAVY)
@pytest.mark.timeout(60)
def test_the_search_is_fast_on_any_text(kind: str) -> None:
    """Each takes well under a second; one that backtracks over all of it would take hours."""
    masking.masked(HEAVY[kind])
