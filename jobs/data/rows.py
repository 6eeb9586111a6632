"""Rows of tokens on disk, and the order in which training and evaluation read them.

A data folder holds, for `train` and `eval`:

- NAME_tokens.npy, int32 [rows, S];
- NAME_counts.npy, bool [rows, S]: the tokens that count in the loss;
- NAME_lengths.npy, int32 [rows]: the number of real tokens in each row; the rest is padding. Without this file, as in
  rows that a site converted from GovReport, every token is real;
- NAME_starts.npy, bool [rows, S]: the first token of each document in a row, for data.document_mask (version
  STARTS_VERSION of this array). Rows without a document mask have no such file;
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

from bench.contract import atomic_files, checksums
from bench.contract.atomic_files import Content
from bench.contract.data import Data
from bench.contract.plan_kinds import TrainingPlan
from bench.contract.schema import DataSource
from bench.errors import ConfigError
from jobs.data.megatron_rows import MegatronTokens
from jobs.data.packing import with_row_starts

STARTS_VERSION = 1
"""The version of NAME_starts.npy, `starts_version` in manifest.json; another version has another meaning."""
_DOCUMENTS_AT_ONCE = 2**16


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


def random_starts(num_rows: int, seq_length: int, *, seed: int, lengths: list[int]) -> np.ndarray:
    """Return the starts of documents [num_rows, seq_length] with lengths sampled from a list, packed into rows."""
    rng, starts, end = np.random.default_rng([seed, STARTS_VERSION]), np.zeros(num_rows * seq_length, dtype=bool), 0
    while end < len(starts):
        ends = end + np.cumsum(rng.choice(np.asarray(lengths, dtype=np.int64), size=_DOCUMENTS_AT_ONCE))
        starts[ends[ends < len(starts)]] = True
        end = int(ends[-1])
    return with_row_starts(starts.reshape(num_rows, seq_length))


@dataclass(frozen=True, slots=True)
class Rows:
    """A split of the data: tokens and counts [rows, S], memory-mapped if they are in files."""

    tokens: np.ndarray | MegatronTokens
    counts: np.ndarray
    lengths: np.ndarray | None = None
    """Real tokens of each row [rows]; None: all of them are."""
    sha256_rows: np.ndarray | None = None
    """The checksum of each row, uint8 [rows, 32]; None: these rows were generated, and are not in files."""
    where: str = ""
    """Folder and split, for errors."""
    starts: np.ndarray | None = None
    """The first token of each document in a row, bool [rows, S]; None: the rows have no document boundaries."""
    document_mask: bool = False
    """Whether training and evaluation use `starts` (data.document_mask)."""
    has_next: bool = False
    """Whether each row has S + 1 tokens: the last one is only predicted, as in the rows of Megatron-LM."""

    @property
    def sha256(self) -> str | None:
        """One checksum for all rows; None if these rows are not in files."""
        if isinstance(self.tokens, MegatronTokens):
            return self.tokens.sha256
        if self.sha256_rows is None:
            return None
        parts = [self.sha256_rows] if self.lengths is None else [self.sha256_rows, self.lengths]
        return hashlib.sha256(b"".join(part.tobytes() for part in parts)).hexdigest()

    def read(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Return copies of tokens, counts and starts [indices, S] after comparing them with their checksums.

        Index -1 is an empty row and has the content of any row.

        Raises:
            ConfigError: a row was changed since it was prepared, or since this process opened the rows.
        """
        tokens, counts = self.tokens[indices], self.counts[indices]
        starts = None if self.starts is None else self.starts[indices]
        if self.sha256_rows is not None:
            for place, index in enumerate(indices.tolist()):
                row = tokens[place], counts[place], None if starts is None else starts[place]
                if index >= 0 and row_sha256(*row) != self.sha256_rows[index].tobytes():
                    parts = "tokens or counts" if starts is None else "tokens, counts or document boundaries"
                    raise _changed(
                        f"the {parts} of row {index} were changed: their SHA-256 differs from the recorded SHA-256",
                        self.where,
                    )
        return tokens, counts, starts


def row_sha256(tokens: np.ndarray, counts: np.ndarray, starts: np.ndarray | None = None) -> bytes:
    """Return the SHA-256 of a row: of its tokens, counts and, if it has them, starts [S], as they are in the files."""
    digest = hashlib.sha256(np.ascontiguousarray(tokens).data)
    digest.update(np.ascontiguousarray(counts).data)
    if starts is not None:
        digest.update(np.ascontiguousarray(starts).data)
    return digest.digest()


def sha256_rows(tokens: np.ndarray, counts: np.ndarray, starts: np.ndarray | None = None) -> np.ndarray:
    """Return the checksum of each row, uint8 [rows, 32]."""
    arrays = (tokens, counts) if starts is None else (tokens, counts, starts)
    digests = b"".join(row_sha256(*row) for row in zip(*arrays, strict=True))
    return np.frombuffer(digests, dtype=np.uint8).reshape(-1, hashlib.sha256().digest_size)


def save(folder: Path, name: str, tokens: np.ndarray, counts: np.ndarray, *, starts: np.ndarray | None = None) -> None:
    """Write one split, with document boundaries if `starts` is given. The last real token of each row must count."""
    np.save(folder / f"{name}_tokens.npy", tokens)
    np.save(folder / f"{name}_counts.npy", counts)
    np.save(folder / f"{name}_sha256.npy", sha256_rows(tokens, counts, starts))
    if starts is not None:
        np.save(folder / f"{name}_starts.npy", starts)
    is_counted_behind = np.logical_or.accumulate(counts[:, ::-1], axis=1)
    np.save(folder / f"{name}_lengths.npy", is_counted_behind.sum(axis=1, dtype=np.int32))


def real_tokens(rows: Rows, indices: np.ndarray) -> int:
    """Return how many tokens of these rows are not padding; index -1 is an empty row.

    `indices.size * S` is the number with padding.
    """
    chosen = indices[indices >= 0]
    if rows.lengths is None:
        width: int = rows.tokens.shape[1] - rows.has_next
        return int(chosen.size) * width
    return int(rows.lengths[chosen].sum())


def load(plan: TrainingPlan, name: str, *, seed: int = 0) -> Rows:
    """Return a split, checked against the plan's row count and length; random rows are generated here.

    seed: of the trial, by which GPTDataset orders the training rows in Megatron's files; other rows do not use it. The
    small files are compared with the manifest now, and each row with its checksum when it is read.

    Raises:
        ConfigError: a file is missing or its shape is not the plan's, or a file was changed since it was written.
    """
    folder, data = Path(str(plan.data_dir)), plan.config.training_data
    num_rows = data.num_train_rows if name == "train" else data.eval_rows
    if data.source is DataSource.random:
        return _random(num_rows, data, vocab_size=plan.config.model.vocab_size)
    if data.source is DataSource.megatron:
        return _megatron(folder, data, name, num_rows, seed=seed, vocab_size=plan.config.model.vocab_size)
    try:
        tokens = np.load(folder / f"{name}_tokens.npy", mmap_mode="r")
        counts = np.load(folder / f"{name}_counts.npy", mmap_mode="r")
        files = checksums.listed(folder)
        lengths = _whole(folder / f"{name}_lengths.npy", files)
        starts = _starts(folder, name, data)
        sha256 = _whole(folder / f"{name}_sha256.npy", files)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the {name} rows of {data.name} cannot be read: {error}",
            where=str(folder),
            fix="run `python -m jobs.tasks.prepare RUN/plan.json` (RUN: the run folder), or set DATADIR to a folder "
            "with prepared rows",
            rule="CFG-06",
        ) from error
    if tokens.shape != (num_rows, data.seq_length) or counts.shape != tokens.shape:
        raise ConfigError(
            f"{name}_tokens.npy has the shape {tokens.shape} and {name}_counts.npy has the shape {counts.shape}, but "
            f"the plan needs the shape {(num_rows, data.seq_length)} for these files",
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
        names = [f"{name}_{part}.npy" for part in ("tokens", "counts", *(() if starts is None else ("starts",)))]
        names = [each for each in names if each in files]
        if differing := checksums.differing(checksums.of_files(folder, names), files):
            raise _changed(differing, folder)
        sha256 = sha256_rows(tokens, counts, starts)
    if sha256.shape != (num_rows, hashlib.sha256().digest_size):
        raise _changed(
            f"{name}_sha256.npy has checksums of {len(sha256)} rows, but the plan has {num_rows} rows", folder
        )
    return Rows(tokens, counts, lengths, sha256, f"{folder}, {name}", starts, data.document_mask)


def _megatron(folder: Path, data: Data, name: str, num_rows: int, *, seed: int, vocab_size: int) -> Rows:
    """Return the rows in Megatron's files: those for training as GPTDataset for the seed, the others as in the file."""
    is_train = name == "train"
    tokens = MegatronTokens(
        folder,
        str(data.files if is_train else data.eval_files),
        num_rows=num_rows,
        seq_length=data.seq_length,
        seed=seed if is_train else None,
        vocab_size=vocab_size,
    )
    return Rows(tokens, np.broadcast_to(np.True_, tokens.shape), where=f"{folder}, {name}", has_next=True)


def _random(num_rows: int, data: Data, *, vocab_size: int) -> Rows:
    """Return random rows; with a document mask they are full of documents of the configured lengths."""
    shape, mask = (num_rows, data.seq_length), data.document_mask
    generated = rows(*shape, vocab_size=vocab_size, seed=data.seed, lengths=None if mask else data.lengths)
    starts = random_starts(*shape, seed=data.seed, lengths=data.lengths) if mask and data.lengths else None
    return Rows(*generated, starts=starts, document_mask=mask)


def _starts(folder: Path, name: str, data: Data) -> np.ndarray | None:
    """Return the document boundaries of a split; None if the folder has none and the plan needs none.

    Raises:
        ConfigError: the plan has a document mask, but the folder has no boundaries, or those of another version.
    """
    path = folder / f"{name}_starts.npy"
    if path.exists():
        starts: np.ndarray = np.load(path, mmap_mode="r")
        version = atomic_files.read_object(folder / checksums.MANIFEST).get("starts_version", STARTS_VERSION)
        num_rows = data.train_rows if name == "train" else data.eval_rows
        if version == STARTS_VERSION and starts.dtype == bool and starts.shape == (num_rows, data.seq_length):
            return starts
        fix = "delete this folder, and prepare the rows again"
        what = (
            f"the document boundaries have the version {version}, the type {starts.dtype} and the shape "
            f"{starts.shape}, but the plan needs version {STARTS_VERSION}, bool and {(num_rows, data.seq_length)}"
        )
    elif data.document_mask:
        fix = "prepare the rows with data.document_mask=true, or set data.document_mask=false"
        what = "data.document_mask is true, but these rows have no document boundaries"
    else:
        return None
    raise ConfigError(what, where=str(path), fix=fix, rule="CFG-06")


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
    """Yield the row numbers of each step, [GBS]: a new seeded shuffle each epoch, the incomplete last batch dropped.

    The rows of Megatron's files are in the order of the seed already.
    """
    rng, size = np.random.default_rng(seed), plan.batch.global_batch_size
    data = plan.config.training_data
    while True:
        is_ordered = data.source is DataSource.megatron
        order = np.arange(data.num_train_rows) if is_ordered else rng.permutation(data.num_train_rows)
        yield from order[: len(order) // size * size].reshape(-1, size)


def eval_order(plan: TrainingPlan) -> np.ndarray:
    """Return the row numbers of one evaluation, [batches, GBS], the last batch filled with -1."""
    size = plan.batch.global_batch_size
    order = np.arange(plan.config.training_data.eval_rows)
    filled = np.pad(order, (0, -len(order) % size), constant_values=-1)
    return filled.reshape(-1, size)


def synthetic(plan: TrainingPlan) -> Rows:
    """Return the rows of one step for the warm-up: ascending tokens, which all count.

    With a document mask the documents have the configured lengths; without these, each row is one document.
    """
    data = plan.config.training_data
    shape = (plan.batch.global_batch_size, data.seq_length)
    tokens = np.arange(shape[0] * shape[1], dtype=np.int32).reshape(shape) % plan.config.model.vocab_size
    counts = np.ones(shape, dtype=bool)
    if not data.document_mask:
        return Rows(tokens, counts)
    starts = random_starts(*shape, seed=data.seed, lengths=data.lengths or [data.seq_length])
    return Rows(tokens, counts, starts=starts, document_mask=True)
