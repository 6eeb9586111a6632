"""A checkpoint's metadata is a pickle: what torch and megatron-core write is taken, and nothing else is unpickled."""

import os
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench.errors import ConfigError
from helpers import ranks

torch = pytest.importorskip("torch")

with warnings.catch_warnings(action="ignore"):  # megatron-core's imports warn
    from torch.distributed import checkpoint as distributed
    from torch.distributed.checkpoint.planner import WriteItemType

    from jobs.engines.megatron import checkpoint
    from jobs.weights import adapters, checkpoint_reader, checkpoint_writer

TENSORS = {"a": torch.ones(2, 3), "b": torch.ones(4, dtype=torch.bfloat16), "c": torch.ones(4).to(torch.float8_e4m3fn)}


def saved_by_torch(folder: Path) -> None:
    with warnings.catch_warnings(action="ignore"):
        distributed.save(TENSORS | {"step": 7}, checkpoint_id=folder, no_dist=True)


def written_by_us(folder: Path) -> None:
    folder.mkdir()
    pieces = [checkpoint_writer.Piece(key, tuple(x.shape), (0,) * x.dim(), x) for key, x in TENSORS.items()]
    checkpoint_writer.close(folder, [checkpoint_writer.write(folder / "one.distcp", pieces)])


@pytest.mark.parametrize("save", [saved_by_torch, written_by_us])
def test_metadata_of_torch_is_accepted(tmp_path: Path, save: Callable[[Path], None]) -> None:
    save(tmp_path / "saved")
    assert (tmp_path / "saved" / ".metadata").stat().st_size > 0
    checkpoint_reader.require_plain(tmp_path / "saved")
    checkpoint_reader.require_plain(tmp_path)  # without metadata the loader says what is missing


class Member:
    """A member of torch's enum, as Python 3.11.2 (Debian 12) pickles it."""

    def __reduce__(self) -> tuple[object, tuple[object, str]]:
        return getattr, (WriteItemType, "TENSOR")


def test_enums_of_python_3_11_2_are_accepted(tmp_path: Path) -> None:
    pickled = pickle.dumps(Member())
    assert b"getattr" in pickled and pickle.loads(pickled) is WriteItemType.TENSOR
    (tmp_path / ".metadata").write_bytes(pickled)
    checkpoint_reader.require_plain(tmp_path)


@pytest.mark.trains
def test_metadata_of_megatron_core_is_accepted(prepared: Path) -> None:
    (base,) = (path.parent for path in (prepared / "cache").glob("*/.metadata"))
    checkpoint_reader.require_plain(base)


class Attack:
    """Touches a file when it is unpickled."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.proof),)


class Reached:
    """Gets an attribute of a class that metadata may have."""

    def __init__(self, owner: object, name: str) -> None:
        self.words = (owner, name)

    def __reduce__(self) -> tuple[object, tuple[object, str]]:
        return getattr, self.words


def hidden_in_a_module(proof: Path) -> bytes:
    """A dotted name that reaches os through a module of torch's metadata."""
    module, name = b"torch.distributed.checkpoint.metadata", b"os.mkdir"
    words = b"".join(b"\x8c" + bytes([len(setting)]) + setting for setting in (module, name))
    path = str(proof).encode()
    return b"\x80\x04" + words + b"\x93X" + len(path).to_bytes(4, "little") + path + b"\x85R."


ATTACKS: dict[str, tuple[Callable[[Path], bytes], str]] = {
    "a function": (lambda proof: pickle.dumps(Attack(proof)), r"the pickle refers to posix\.mkdir"),
    "a dotted name": (hidden_in_a_module, r"the pickle refers to torch\.distributed\.checkpoint\.metadata\.os\.mkdir"),
    "an attribute of a class": (
        lambda proof: pickle.dumps(Reached(WriteItemType, "__init_subclass__")),
        r"the pickle calls getattr for <enum 'WriteItemType'>",
    ),
    "an attribute of another object": (
        lambda proof: pickle.dumps(Reached("", "format")),
        r"the pickle calls getattr for ''",
    ),
    "half a pickle": (lambda proof: pickle.dumps(TENSORS)[:40], ""),
    "nothing": (lambda proof: b"", "Ran out of input"),
}


@pytest.mark.parametrize("how", ATTACKS)
def test_anything_else_is_refused_by_all_readers(tmp_path: Path, how: str) -> None:
    attack, reason = ATTACKS[how]
    plan, proof = ranks.compose(tmp_path, "cluster.ranks_per_node=1"), tmp_path / "proof"
    saved_by_torch(tmp_path / "saved")
    (tmp_path / "saved" / ".metadata").write_bytes(attack(proof))
    lora = plan.config.task.training.lora
    assert lora is not None
    with pytest.raises(ConfigError, match=f"not the metadata of a checkpoint: .*{reason}"):
        checkpoint.load(SimpleNamespace(plan=plan), tmp_path / "saved", adapters=True)
    with pytest.raises(ConfigError, match=f"not the metadata of a checkpoint: .*{reason}"):
        adapters.read(tmp_path / "saved", plan.config.model, lora)
    assert not proof.exists()


@pytest.mark.parametrize("how", ["a function", "a dotted name"])
def test_torch_itself_runs_the_code(tmp_path: Path, how: str) -> None:
    """Without this, the test above could pass because the attack is wrong."""
    saved_by_torch(tmp_path / "saved")
    (tmp_path / "saved" / ".metadata").write_bytes(ATTACKS[how][0](tmp_path / "proof"))
    with pytest.raises(AttributeError):
        distributed.FileSystemReader(tmp_path / "saved").read_metadata()
    assert (tmp_path / "proof").exists()
