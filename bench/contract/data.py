"""The data settings: where the rows of a run come from, and how they are prepared."""

from dataclasses import dataclass, field
from enum import Enum

from bench.contract.codec import OMIT_DEFAULT
from bench.errors import ConfigError


class DataSource(Enum):
    """The source of the rows: a built-in grammar, rows prepared by the site, random tokens, or files to tokenise.

    megatron: tokens in the .bin and .idx files of Megatron-LM, from which the ranks form rows themselves.
    program: engine=command, whose program reads its own data; rows and tokens are 0 if they are unknown.
    """

    grammar = "grammar"
    prepared = "prepared"
    random = "random"
    megatron = "megatron"
    fineweb_edu = "fineweb_edu"
    c4 = "c4"
    dolly = "dolly"
    pubmedqa = "pubmedqa"
    text = "text"
    chat = "chat"
    program = "program"

    @property
    def reads_files(self) -> bool:
        """Whether the rows are tokenised from text files."""
        others = (DataSource.grammar, DataSource.prepared, DataSource.random, DataSource.megatron, DataSource.program)
        return self not in others

    @property
    def has_prompts(self) -> bool:
        """Whether a record is a question with an answer, to which `prompt_type` adds the text around them."""
        return self in (DataSource.dolly, DataSource.pubmedqa)

    @property
    def has_answers(self) -> bool:
        """Whether a record has answers, not only text."""
        return self.has_prompts or self is DataSource.chat

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
class Columns:
    """The names of the columns in the user's files, for the sources text and chat."""

    text: str = "text"
    messages: str | None = None
    """A list of turns. None: messages, or else conversations."""
    tools: str = "tools"
    """The functions that an assistant may call, for the chat template. A file need not have this column."""
    instruction: str = "instruction"
    input: str = "input"
    """May be missing or empty."""
    output: str = "output"


@dataclass(slots=True, kw_only=True)
class Data:
    """Rows of seq_length tokens with a loss mask."""

    name: str
    summary: str
    source: DataSource
    seq_length: int
    train_rows: int | None
    """None: all rows of the files, counted by `runstop prepare`. A plan has the number."""
    eval_rows: int
    answer_only: bool
    """True: loss on answers (summaries, for reports) only; False: on every token."""
    seed: int = 0
    version: int = 0
    """Seed and version of the grammar. For files, the seed chooses the records of test_split."""
    files: str | None = None
    """A file, a folder or a glob below DATADIR (or from the root), for sources that read files."""
    eval_files: str | None = field(default=None, metadata=OMIT_DEFAULT)
    """For the source megatron: the files of the evaluation rows. `files` has the training rows. Both are names below
    DATADIR without .bin and .idx."""
    tokenizer: str | None = None
    """A tokenizer.json, or its folder; None: the one in MODEL."""
    packing: bool = False
    """True: documents fill every row one after another. False: one record per row, truncated or padded."""
    columns: Columns | None = field(default=None, metadata=OMIT_DEFAULT)
    """For the sources text and chat."""
    chat_template: str | None = field(default=None, metadata=OMIT_DEFAULT)
    """For the source chat: a file with a Jinja template. None: the template of the tokenizer."""
    document_mask: bool = field(default=False, metadata=OMIT_DEFAULT)
    """With packing. True: a token attends only to its own document, positions start at 0 in each document, and no token
    predicts the next document. False: attention covers the whole row."""
    prompt_type: PromptType | None = None
    """For sources whose records are questions with answers."""
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

    @property
    def named_columns(self) -> Columns:
        """The names of the columns in the user's files."""
        return self.columns or Columns()

    @property
    def num_train_rows(self) -> int:
        """The number of training rows.

        Raises:
            ConfigError: it was not counted.
        """
        if self.train_rows is None:
            raise ConfigError(
                f"the number of training rows of {self.name} is unknown, because the rows were not counted",
                where="data.train_rows",
                fix="run `runstop prepare` with the same settings, or set data.train_rows to a number",
                rule="CFG-06",
            )
        return self.train_rows
