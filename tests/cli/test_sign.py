"""`sign` and `verify --signed`: only a run that is as it ended, signed by a known key, is accepted."""

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.cli import main
from bench.planning import compose
from bench.runs import ledger, manifest
from helpers import answers, planted_runs

pytestmark = pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="needs OpenSSH's ssh-keygen")


def run(*argv: object) -> int:
    with pytest.raises(SystemExit) as stop:
        main([str(argument) for argument in argv])
    assert isinstance(stop.value.code, int)
    return stop.value.code


class Keys:
    """Keys of alice, who may sign, and of mallory, who may not."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.alice, self.mallory, self.allowed = folder / "alice", folder / "mallory", folder / "allowed_signers"
        for key in (self.alice, self.mallory):
            words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", key.name, "-f", str(key)]
            subprocess.run(words, check=True)
        self.allowed.write_text(f"alice@lab {self.public(self.alice).read_text()}")

    def public(self, key: Path) -> Path:
        return key.with_suffix(".pub")


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return Keys(tmp_path_factory.mktemp("keys") / "keys")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run whose only trial was aborted before it had a log, with the facts of one rank."""
    plan, folder = compose.compose(["task=lora_tiny", "cluster=local"]), tmp_path / "run"
    (folder / "facts").mkdir(parents=True)
    (folder / "facts/rank_0000.json").write_text("{}")
    return planted_runs.abort(folder, plan)


def checked(folder: Path, keys: Keys, capsys: pytest.CaptureFixture[str], *more: object) -> tuple[int, dict[str, str]]:
    """Return the exit code of `verify --signed`, and what it found by what it compared, for what it did not accept."""
    capsys.readouterr()
    code = run("verify", "--signed", "--allowed-signers", keys.allowed, "--json", *more, folder)
    compared = answers.one(capsys.readouterr().out)["checks"]
    return code, {each["what"]: each["actual"] for each in compared if each["passed"] is False}


@pytest.mark.long
def test_a_signed_run_is_accepted_also_as_a_copy(
    folder: Path, keys: Keys, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("sign", folder, "--key", keys.alice) == 0
    assert capsys.readouterr().out == f"{folder}/manifest.json.sig\n"
    copy = shutil.copytree(folder, tmp_path / "copy")
    for one in (folder, copy):
        assert run("verify", "--signed", "--allowed-signers", keys.allowed, one) == 0
        rows = capsys.readouterr().out.splitlines()
        assert rows[0] == f"{one}: verified"
        assert any(row.startswith('signed by\t\talice@lab: Good "runstop" signature for alice@lab') for row in rows)
    assert run("verify", folder) == 0, "a signature is no change"


def edit(folder: Path, keys: Keys) -> None:
    (folder / "facts/rank_0000.json").write_text("[]")


def edit_and_list(folder: Path, keys: Keys) -> None:
    """As a forger does, who can compute checksums, but has no key."""
    edit(folder, keys)
    manifest.write(folder)


def sign_as_mallory(folder: Path, keys: Keys) -> None:
    edit_and_list(folder, keys)
    (folder / "manifest.json.sig").unlink()
    assert run("sign", folder, "--key", keys.mallory) == 0


def sign_for_another_purpose(folder: Path, keys: Keys) -> None:
    (folder / "manifest.json.sig").unlink()
    words = ["ssh-keygen", "-Y", "sign", "-f", str(keys.alice), "-n", "file", str(folder / "manifest.json")]
    subprocess.run(words, check=True, capture_output=True)


def write_rubbish(folder: Path, keys: Keys) -> None:
    (folder / "manifest.json.sig").write_text("\x1b[2Jrubbish\n")


def unlink(folder: Path, keys: Keys) -> None:
    (folder / "manifest.json.sig").unlink()


FORGERIES: dict[Callable[[Path, Keys], None], dict[str, str]] = {
    edit: {"facts/rank_0000.json": "2 bytes, sha256 4f53"},
    edit_and_list: {"manifest.json.sig": "not accepted: "},
    sign_as_mallory: {"manifest.json.sig": "allowed_signers does not have the signer's key"},
    sign_for_another_purpose: {"manifest.json.sig": "not accepted: "},
    write_rubbish: {
        "manifest.json.sig": "allowed_signers does not have the signer's key, or manifest.json.sig is not a signature"
    },
    unlink: {"manifest.json.sig": "missing: the run is not signed"},
}


@pytest.mark.parametrize("forge", FORGERIES, ids=lambda forge: forge.__name__)
def test_a_run_that_was_changed_or_signed_by_another_is_not_accepted(
    forge: Callable[[Path, Keys], None], folder: Path, keys: Keys, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("sign", folder, "--key", keys.alice) == 0
    forge(folder, keys)
    code, wrong = checked(folder, keys, capsys)
    expected = FORGERIES[forge]
    assert code == 1 and wrong.keys() == expected.keys(), wrong
    assert all(wrong[what].startswith(text) for what, text in expected.items()), wrong


@pytest.mark.long
def test_a_revoked_key_is_not_accepted(
    folder: Path, keys: Keys, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("sign", folder, "--key", keys.alice) == 0
    revoked = tmp_path / "revoked"
    revoked.write_text(keys.public(keys.mallory).read_text())
    assert checked(folder, keys, capsys, "--revoked", revoked) == (0, {})
    krl = tmp_path / "krl"
    subprocess.run(["ssh-keygen", "-q", "-k", "-f", str(krl), str(keys.public(keys.alice))], check=True)
    for listed in (keys.public(keys.alice), krl):
        code, wrong = checked(folder, keys, capsys, "--revoked", listed)
        assert code == 1 and wrong["manifest.json.sig"].startswith("not accepted: "), wrong


def test_only_a_run_that_is_as_it_ended_is_signed_and_only_once(
    folder: Path, keys: Keys, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = (folder / "facts/rank_0000.json").read_text()
    edit(folder, keys)
    assert run("sign", folder, "--key", keys.alice) == 2 and not (folder / "manifest.json.sig").exists()
    assert "the run cannot be signed: files differ from the manifest" in capsys.readouterr().err
    (folder / "facts/rank_0000.json").write_text(kept)
    assert run("sign", folder, "--key", keys.public(keys.alice).with_suffix(".txt")) == 2
    assert "this key file does not exist" in capsys.readouterr().err
    assert run("sign", folder, "--key", keys.allowed) == 2
    assert "the key cannot be used: " in capsys.readouterr().err
    assert run("sign", folder, "--key", keys.alice) == 0
    assert run("sign", folder, "--key", keys.mallory) == 2
    assert "the run is already signed" in capsys.readouterr().err


def test_a_resumed_run_keeps_the_signature_of_its_earlier_manifest(folder: Path, keys: Keys) -> None:
    assert run("sign", folder, "--key", keys.alice) == 0
    ledger.reopen(folder)
    assert sorted(path.name for path in (folder / "attempts/run.1").iterdir()) == [
        "manifest.json",
        "manifest.json.sig",
        "status.json",
    ]


@pytest.mark.parametrize("words", [["--signed"], ["--allowed-signers", "x"], ["--revoked", "x"]], ids=" ".join)
def test_incomplete_options_are_refused(words: list[str], folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("verify", *words, folder) == 2
    assert "--signed --allowed-signers FILE" in capsys.readouterr().err
