"""Rows of tokens on disk, and the order in which training and evaluation read them.

A data folder holds, for `train` and `eval`:

- NAME_tokens.npy, int32 [rows, S];
- NAME_counts.npy, bool [rows, S]: the tokens that count in the loss;
- NAME_lengths.npy, int32 [rows]: the number of real tokens in each row; the rest is padding. Without this file, as in
  rows that a site converted from GovReport, every token is real;
- NAME_sha256.npy, uint8 [rows, 32]: the checksum of each row (`row_sha256`), which a rank compares with what it reads
  when it reads the row. Rows of earlier versions have no such file: then each rank hashes all rows when it opens them.

manifest.json has the checksums of these files. The log names one checksum for all rows of a split (`Rows.sha256`).
"""

import hashlib
import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.contract import checksums
from bench.contract.atomic_files import Content
from bench.contract.plan_kinds import TrainingPlan
from bench.contract.schema import DataSource
from bench.errors import ConfigError


def rows(
    num_rows: int, seq_length: int, *, vocab_size: int, seed: int, lengths: list[int] | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return tokens and counts [num_rows, seq_length] and the real tokens of each row, the same on every rank.

    Without lengths every token is real and counts, so the work is at least that of real rows. With lengths each row's
    length is sampled from the list, and the rest is padding of token 0.
    """
    shape, rng = (num_rows, seq_length), np.random.default_rng(seed)
    tokens = rng.integers(vocab_size, size=shape, dtype=np.int32)
    if lengths is None:
        return tokens, np.broadcast_to(np.True_, shape), np.broadcast_to(np.int32(seq_length), num_rows)
    sampled = rng.choice(np.asarray(lengths, dtype=np.int32), size=num_rows)
    counts = np.arange(seq_length) < sampled[:, None]
    return np.where(counts, tokens, 0), counts, sampled


@dataclass(frozen=True, slots=True)
class Rows:
    """A split of the data: tokens and counts [rows, S], memory-mapped if they are in files."""

    tokens: np.ndarray
    counts: np.ndarray
    lengths: np.ndarray | None = None
    """Real tokens of each row [rows]; None: all of them are."""
    sha256_rows: np.ndarray | None = None
    """The checksum of each row, uint8 [rows, 32]; None: these rows were generated, and are not in files."""
    where: str = ""
    """Folder and split, for errors."""

    @property
    def sha256(self) -> str | None:
        """One checksum for all rows; None if these rows are not in files."""
        if self.sha256_rows is None:
            return None
        parts = [self.sha256_rows] if self.lengths is None else [self.sha256_rows, self.lengths]
        return hashlib.sha256(b"".join(part.tobytes() for part in parts)).hexdigest()

    def read(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return copies of tokens and counts [indices, S] after comparing them with their checksums.

        Index -1 is an empty row and has the content of any row.

        Raises:
            ConfigError: a row was changed since it was prepared, or since this process opened the rows.
        """
        tokens, counts = self.tokens[indices], self.counts[indices]
        if self.sha256_rows is not None:
            for place, index in enumerate(indices.tolist()):
                if index >= 0 and row_sha256(tokens[place], counts[place]) != self.sha256_rows[index].tobytes():
                    raise _changed(
                        f"the tokens or counts of row {index} were changed: their SHA-256 differs from the recorded "
                        "SHA-256",
                        self.where,
                    )
        return tokens, counts


def row_sha256(tokens: np.ndarray, counts: np.ndarray) -> bytes:
    """Return the SHA-256 of a row: of its tokens and counts [S], as they are in the files."""
    digest = hashlib.sha256(np.ascontiguousarray(tokens).data)
    digest.update(np.ascontiguousarray(counts).data)
    return digest.digest()


def sha256_rows(tokens: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return the checksum of each row, uint8 [rows, 32]."""
    digests = b"".join(row_sha256(*row) for row in zip(tokens, counts, strict=True))
    return np.frombuffer(digests, dtype=np.uint8).reshape(-1, hashlib.sha256().digest_size)


def save(folder: Path, name: str, tokens: np.ndarray, counts: np.ndarray) -> None:
    """Write one split. The last real token of each row must count."""
    np.save(folder / f"{name}_tokens.npy", tokens)
    np.save(folder / f"{name}_counts.npy", counts)
    np.save(folder / f"{name}_sha256.npy", sha256_rows(tokens, counts))
    is_counted_behind = np.logical_or.accumulate(counts[:, ::-1], axis=1)
    np.save(folder / f"{name}_lengths.npy", is_counted_behind.sum(axis=1, dtype=np.int32))


def real_tokens(rows: Rows, indices: np.ndarray) -> int:
    """Return how many tokens of these rows are not padding; index -1 is an empty row.

    `indices.size * S` is the number with padding.
    """
    chosen = indices[indices >= 0]
    if rows.lengths is None:
        width: int = rows.tokens.shape[1]
        return int(chosen.size) * width
    return int(rows.lengths[chosen].sum())


def load(plan: TrainingPlan, name: str) -> Rows:
    """Return a split, checked against the plan's row count and length; random rows are generated here.

    The small files are compared with the manifest now, and each row with its checksum when it is read.

    Raises:
        ConfigError: a file is missing or its shape is not the plan's, or a file was changed since it was written.
    """
    folder, data = Path(str(plan.data_dir)), plan.config.training_data
    num_rows = data.num_train_rows if name == "train" else data.eval_rows
    if data.source is DataSource.random:
        vocab_size = plan.config.model.vocab_size
        return Rows(*rows(num_rows, data.seq_length, vocab_size=vocab_size, seed=data.seed, lengths=data.lengths))
    try:
        tokens = np.load(folder / f"{name}_tokens.npy", mmap_mode="r")
        counts = np.load(folder / f"{name}_counts.npy", mmap_mode="r")
        files = checksums.listed(folder)
        lengths = _whole(folder / f"{name}_lengths.npy", files)
        sha256 = _whole(folder / f"{name}_sha256.npy", files)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the {name} rows of {data.name} cannot be read: {error}",
            where=str(folder),
            fix="run python -m jobs.tasks.prepare, or set DATADIR to a folder with prepared rows",
            rule="CFG-06",
        ) from error
    if tokens.shape != (num_rows, data.seq_length) or counts.shape != tokens.shape:
        raise ConfigError(
            f"the {name} arrays have the shapes {tokens.shape} and {counts.shape}, but the plan needs "
            f"{(num_rows, data.seq_length)}",
            where=str(folder),
            fix="prepare the data again, or correct data.train_rows, data.eval_rows and data.seq_length",
            rule="CFG-06",
        )
    if lengths is not None and lengths.shape != (num_rows,):
        raise ConfigError(
            f"the file has the lengths of {lengths.size} rows, but the plan has {num_rows} rows",
            where=str(folder / f"{name}_lengths.npy"),
            fix="delete this folder, and prepare the rows again",
            rule="CFG-06",
        )
    if sha256 is None or f"{name}_sha256.npy" not in files:
        names = [each for each in (f"{name}_tokens.npy", f"{name}_counts.npy") if each in files]
        if differing := checksums.differing(checksums.of_files(folder, names), files):
            raise _changed(differing, folder)
        sha256 = sha256_rows(tokens, counts)
    if sha256.shape != (num_rows, hashlib.sha256().digest_size):
        raise _changed(
            f"{name}_sha256.npy has checksums of {len(sha256)} rows, but the plan has {num_rows} rows", folder
        )
    return Rows(tokens, counts, lengths, sha256, f"{folder}, {name}")


def _whole(path: Path, files: Mapping[str, Content]) -> np.ndarray | None:
    """Return the array in a small file, compared with the manifest; None if neither has it.

    Raises:
        ConfigError: the file was changed since it was written.
    """
    if not path.exists():
        if path.name in files:
            raise _changed(f"{path.name} is missing", path.parent)
        return None
    data = path.read_bytes()
    content = Content(bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
    if differing := checksums.differing({path.name: content}, files):
        raise _changed(differing, path.parent)
    array: np.ndarray = np.load(io.BytesIO(data))
    return array


def _changed(what: str, where: Path | str) -> ConfigError:
    return checksums.changed(
        what, where, fix="find out who changed the rows, then delete their folder and prepare or copy the rows again"
    )


def train_order(plan: TrainingPlan, seed: int) -> Iterator[np.ndarray]:
    """Yield the row numbers of each step, [GBS]: a new seeded shuffle each epoch, the incomplete last batch dropped."""
    rng, size = np.random.default_rng(seed), plan.batch.global_batch_size
    while True:
        order = rng.permutation(plan.config.training_data.num_train_rows)
        yield from order[: len(order) // size * size].reshape(-1, size)


def eval_order(plan: TrainingPlan) -> np.ndarray:
    """Return the row numbers of one evaluation, [batches, GBS], the last batch filled with -1."""
    size = plan.batch.global_batch_size
    order = np.arange(plan.config.training_data.eval_rows)
    filled = np.pad(order, (0, -len(order) % size), constant_values=-1)
    return filled.reshape(-1, size)


def synthetic(plan: TrainingPlan) -> Rows:
    """Return the rows of one step for the warm-up: ascending tokens, which all count."""
    shape = (plan.batch.global_batch_size, plan.config.training_data.seq_length)
    tokens = np.arange(shape[0] * shape[1], dtype=np.int32).reshape(shape) % plan.config.model.vocab_size
    return Rows(tokens, np.ones(shape, dtype=bool))
