"""Checks of the data settings."""

from bench.contract.data import Data, DataSource
from bench.errors import ConfigError

SAMPLED = (DataSource.fineweb_edu, DataSource.c4, DataSource.dolly, DataSource.pubmedqa)
"""The sources in whose formats records can be generated."""


def check(data: Data) -> None:
    """Raise ConfigError if rows cannot be prepared with these settings."""
    if data.source.reads_files:
        _check_files(data)
        _check_columns(data)
    elif data.source is DataSource.megatron:
        _check_megatron(data)
    elif data.train_rows is None and data.source is not DataSource.prepared:
        raise ConfigError(
            f"data.source={data.source.name} generates rows, but the number of rows (data.train_rows) is null",
            where="data.train_rows",
            fix="set data.train_rows to the number of rows to generate",
        )
    _check_document_mask(data)
    _check_lengths(data)


def _check_megatron(data: Data) -> None:
    unset = [key for key in ("files", "eval_files", "train_rows") if getattr(data, key) is None]
    if unset:
        raise ConfigError(
            f"data.source is {data.source.name}, but data.{unset[0]} is not set",
            where=f"data.{unset[0]}",
            fix="set data.train_rows to a number, and set data.files and data.eval_files to file names in DATADIR "
            "without .bin and .idx",
        )
    if data.document_mask:
        raise ConfigError(
            "data.document_mask is true, but rows of Megatron-LM contain no document boundaries",
            where="data.document_mask, data.source",
            fix="set data.document_mask=false",
        )
    if data.answer_only:
        raise ConfigError(
            "data.answer_only is true, but rows of Megatron-LM contain no answers",
            where="data.answer_only, data.source",
            fix="set data.answer_only=false",
        )


def _check_document_mask(data: Data) -> None:
    if not data.document_mask:
        return
    if not data.packing:
        raise ConfigError(
            "data.document_mask is true, but without packing each row has only one document",
            where="data.document_mask, data.packing",
            fix="set data.packing=true, or data.document_mask=false",
        )
    if data.source is DataSource.grammar:
        raise ConfigError(
            f"data.document_mask is true, but data.source={data.source.name} generates no document boundaries",
            where="data.document_mask, data.source",
            fix="choose data=tiny_dolly or other data from files, or set data.document_mask=false",
        )
    if data.source is DataSource.random and data.lengths is None:
        raise ConfigError(
            "data.document_mask is true, but random rows have no documents, because data.lengths is null",
            where="data.document_mask, data.lengths",
            fix="set data.lengths to the lengths of documents, such as [200,500,1500], or data.document_mask=false",
        )


def _check_files(data: Data) -> None:
    if data.files is None and data.sample is None:
        raise ConfigError(
            f"data.source={data.source.name} reads files, but data.files is not set",
            where="data.files",
            fix="set data.files to a file, folder or glob in DATADIR, or set data.sample=1000 to generate 1000 records",
        )
    if data.files is not None and data.sample is not None and data.source in SAMPLED:
        raise ConfigError(
            f"data.files={data.files} has no effect, because data.sample={data.sample} generates the records",
            where="data.files, data.sample",
            fix=f"to read the files, set data.sample=null and data.tokenizer; otherwise remove data.files={data.files}",
        )
    if data.source.has_prompts and data.prompt_type is None:
        raise ConfigError(
            f"records of data.source={data.source.name} have prompts and answers, but data.prompt_type is null",
            where="data.prompt_type",
            fix="set data.prompt_type=plain, headings or inst",
        )
    if not data.source.has_prompts and data.prompt_type is not None:
        raise ConfigError(
            f"data.prompt_type is {data.prompt_type.name}, but the chat template already formats the prompts"
            if data.source is DataSource.chat
            else f"data.prompt_type is {data.prompt_type.name}, but records of data.source={data.source.name} have no "
            "prompts",
            where="data.prompt_type",
            fix="set data.prompt_type=null",
        )
    if data.answer_only and not data.source.has_answers:
        raise ConfigError(
            f"data.answer_only is true, but records of data.source={data.source.name} have no answers",
            where="data.answer_only",
            fix="set data.answer_only=false",
        )
    if data.test_split is not None and not 0 < data.test_split < 1:
        raise ConfigError(
            f"data.test_split is {data.test_split:g}, but must be a share of the records between 0 and 1",
            where="data.test_split",
            fix="set data.test_split to a share such as 0.2, or to null",
        )
    if data.seq_length < 2:
        raise ConfigError(
            f"data.seq_length is {data.seq_length} tokens, but must be 2 tokens or more",
            where="data.seq_length",
            fix="set data.seq_length to 2 or more",
        )


def _check_columns(data: Data) -> None:
    for key, is_set, sources in (
        ("columns", data.columns is not None, (DataSource.text, DataSource.chat)),
        ("chat_template", data.chat_template is not None, (DataSource.chat,)),
    ):
        if is_set and data.source not in sources:
            data_choices = " or ".join(source.name for source in sources)
            raise ConfigError(
                f"data.{key} is set, but data.source={data.source.name} does not use this key",
                where=f"data.{key}, data.source",
                fix=f"set data.{key}=null, or choose data={data_choices}",
            )
    if data.sample is not None and data.train_rows is None:
        raise ConfigError(
            "data.sample needs a number of training rows, but data.train_rows is null",
            where="data.sample",
            fix="set data.train_rows to the number of training rows; or set data.sample=null and "
            "data.files to your files",
        )
    if data.sample is not None and data.source not in SAMPLED:
        raise ConfigError(
            f"data.sample is set, but runstop cannot generate records for data.source={data.source.name}",
            where="data.sample",
            fix=f"set data.source to one of {', '.join(source.name for source in SAMPLED)}; "
            "or set data.sample=null and data.files to your files",
        )


def _check_lengths(data: Data) -> None:
    if data.lengths is None or data.source is not DataSource.random:
        return
    if data.document_mask:
        if not data.lengths or not all(length >= 1 for length in data.lengths):
            raise ConfigError(
                f"data.lengths is {data.lengths}, but must list lengths of documents, each 1 token or more",
                where="data.lengths",
                fix="list the lengths of documents in tokens, such as [200,500,1500]",
            )
        return
    if not data.lengths or not all(2 <= length <= data.seq_length for length in data.lengths):
        raise ConfigError(
            f"data.lengths is {data.lengths}, but must list lengths from 2 to data.seq_length={data.seq_length}",
            where="data.lengths",
            fix=f"list lengths from 2 to {data.seq_length}, or set data.lengths=null",
        )
