"""The rows of a run: where they come from and how they are made. `bench.contract.schema` puts them into a config."""

from dataclasses import dataclass
from enum import Enum


class DataSource(Enum):
    """Where the rows come from: our grammar, rows that the site prepared, random numbers, or files that we tokenise."""

    grammar = "grammar"
    prepared = "prepared"
    random = "random"
    fineweb_edu = "fineweb_edu"
    c4 = "c4"
    dolly = "dolly"
    pubmedqa = "pubmedqa"

    @property
    def reads_files(self) -> bool:
        """Whether the rows are tokenised from files of text."""
        return self in (DataSource.fineweb_edu, DataSource.c4, DataSource.dolly, DataSource.pubmedqa)

    @property
    def has_answers(self) -> bool:
        """Whether a record of its files is a prompt with an answer, and not text alone."""
        return self in (DataSource.dolly, DataSource.pubmedqa)

    @property
    def is_made(self) -> bool:
        """Whether the prepare command writes the rows, in a folder below DATADIR."""
        return self is DataSource.grammar or self.reads_files


class PromptType(Enum):
    """What stands around a question, its context and its answer (jobs/data/prompts.py).

    plain: blank lines alone; headings: a line `### …:` above each part; inst: Llama-2-Chat's [INST] … [/INST].
    """

    plain = "plain"
    headings = "headings"
    inst = "inst"


@dataclass(slots=True, kw_only=True)
class Data:
    """Rows of seq_length tokens with a loss mask."""

    name: str
    summary: str
    source: DataSource
    seq_length: int
    train_rows: int
    eval_rows: int
    answer_only: bool
    """Loss on answers (of reports: on summaries) only; False: on every token."""
    seed: int = 0
    version: int = 0
    """Seed and version of the grammar. For files: the seed chooses the records of test_split."""
    files: str | None = None
    """A file, a folder or a glob below DATADIR (or from the root), for sources that read files."""
    tokenizer: str | None = None
    """A tokenizer.json, or its folder; None: the one in MODEL."""
    packing: bool = False
    """Documents one after another fill every row; False: one record a row, cut at seq_length, the rest padding."""
    prompt_type: PromptType | None = None
    """For sources whose records have answers."""
    test_split: float | None = None
    """Share of the records that evaluation reads, chosen by the seed; None: the first eval_rows rows of the files."""
    sample: int | None = None
    """So many records of our own grammar are written in the source's format, with a tokenizer trained on them; for
    trying things out. None: the user brings the files."""
    lengths: list[int] | None = None
    """For random rows: the real tokens of each row are drawn from these, each as likely; None: every row is full."""

    @property
    def needs_model_folder(self) -> bool:
        """Whether the rows need the tokenizer in MODEL."""
        return self.source.reads_files and self.tokenizer is None and self.sample is None
