"""The data settings: where the rows of a run come from, and how they are prepared."""

from dataclasses import dataclass, field
from enum import Enum

from bench.contract.codec import OMIT_DEFAULT


class DataSource(Enum):
    """The source of the rows: a built-in grammar, rows prepared by the site, random tokens, or files to tokenise.

    program: engine=command, whose program reads its own data; rows and tokens are 0 if they are unknown.
    """

    grammar = "grammar"
    prepared = "prepared"
    random = "random"
    fineweb_edu = "fineweb_edu"
    c4 = "c4"
    dolly = "dolly"
    pubmedqa = "pubmedqa"
    program = "program"

    @property
    def reads_files(self) -> bool:
        """Whether the rows are tokenised from text files."""
        return self in (DataSource.fineweb_edu, DataSource.c4, DataSource.dolly, DataSource.pubmedqa)

    @property
    def has_answers(self) -> bool:
        """Whether a record is a prompt with an answer, not only text."""
        return self in (DataSource.dolly, DataSource.pubmedqa)

    @property
    def needs_preparation(self) -> bool:
        """Whether the prepare command creates the rows, in a folder below DATADIR."""
        return self is DataSource.grammar or self.reads_files


class PromptType(Enum):
    """The prompt template: the text around a question, its context and its answer (jobs/data/prompts.py).

    plain: blank lines only; headings: a line `### …:` above each part; inst: Llama-2-Chat's [INST] … [/INST].
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
    """True: loss on answers (summaries, for reports) only; False: on every token."""
    seed: int = 0
    version: int = 0
    """Seed and version of the grammar. For files, the seed chooses the records of test_split."""
    files: str | None = None
    """A file, a folder or a glob below DATADIR (or from the root), for sources that read files."""
    tokenizer: str | None = None
    """A tokenizer.json, or its folder; None: the one in MODEL."""
    packing: bool = False
    """True: documents fill every row one after another. False: one record per row, truncated or padded."""
    document_mask: bool = field(default=False, metadata=OMIT_DEFAULT)
    """With packing. True: a token attends only to its own document, positions start at 0 in each document, and no token
    predicts the next document. False: attention covers the whole row."""
    prompt_type: PromptType | None = None
    """For sources whose records have answers."""
    test_split: float | None = None
    """Share of the records for evaluation, chosen by the seed; None: the first eval_rows rows of the files."""
    sample: int | None = None
    """For tests: generate so many records in the source's format from the built-in grammar, and a tokenizer for them.
    None: the user provides the files."""
    lengths: list[int] | None = None
    """For random rows: the number of real tokens per row, sampled uniformly from this list; None: all rows are full.
    With document_mask: the lengths of the documents, which fill every row."""

    @property
    def needs_model_folder(self) -> bool:
        """Whether the tokenizer in MODEL is needed."""
        return self.source.reads_files and self.tokenizer is None and self.sample is None
