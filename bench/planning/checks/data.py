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
            f"the rows of {data.name} are generated, but train_rows is null",
            where="data.train_rows",
            fix="set data.train_rows to a number; rows can be counted only in files",
        )
    _check_document_mask(data)
    _check_lengths(data)


def _check_megatron(data: Data) -> None:
    unset = [key for key in ("files", "eval_files", "train_rows") if getattr(data, key) is None]
    if unset:
        raise ConfigError(
            f"the data {data.name} is in files of Megatron-LM, but data.{unset[0]} is not set",
            where=f"data.{unset[0]}",
            fix="set data.train_rows to a number; set data.files and data.eval_files to names below DATADIR, without "
            ".bin and .idx",
        )
    if data.document_mask or data.answer_only:
        key = "document_mask" if data.document_mask else "answer_only"
        raise ConfigError(
            f"{key} is true, but rows of Megatron-LM have neither document boundaries nor answers",
            where=f"data.{key}, data.source",
            fix=f"set data.{key}=false",
        )


def _check_document_mask(data: Data) -> None:
    if not data.document_mask:
        return
    if not data.packing:
        raise ConfigError(
            "document_mask is true, but without packing each row has only one document",
            where="data.document_mask, data.packing",
            fix="set data.packing=true, or data.document_mask=false",
        )
    if data.source is DataSource.grammar:
        raise ConfigError(
            "document_mask is true, but the generated reports have no document boundaries",
            where="data.document_mask, data.source",
            fix="choose data=tiny_dolly or other data from files, or set data.document_mask=false",
        )
    if data.source is DataSource.random and data.lengths is None:
        raise ConfigError(
            "document_mask is true, but random rows have no documents, because data.lengths is null",
            where="data.document_mask, data.lengths",
            fix="set data.lengths to the lengths of documents, such as [200,500,1500], or data.document_mask=false",
        )


def _check_files(data: Data) -> None:
    if data.files is None and data.sample is None:
        raise ConfigError(
            f"the data {data.name} comes from files, but data.files is not set",
            where="data.files",
            fix="set data.files to a file, folder or glob below DATADIR, or set data.sample=1000 for generated records",
        )
    if data.files is not None and data.sample is not None and data.source in SAMPLED:
        raise ConfigError(
            f"data.files is {data.files}, but has no effect: data.sample={data.sample} generates the records",
            where="data.files, data.sample",
            fix=f"to read the files, set data.sample=null and data.tokenizer; otherwise remove data.files={data.files}",
        )
    if data.source.has_prompts != (data.prompt_type is not None):
        has, fix = ("answers", "plain, headings or inst") if data.source.has_prompts else ("text only", "null")
        if data.source is DataSource.chat:
            has = "prompts of a chat template"
        given = data.prompt_type.name if data.prompt_type else "null"
        raise ConfigError(
            f"records of {data.source.name} have {has}, but prompt_type is {given}",
            where="data.prompt_type",
            fix=f"set data.prompt_type={fix}",
        )
    if data.answer_only and not data.source.has_answers:
        raise ConfigError(
            f"answer_only is true, but records of {data.source.name} have no answers",
            where="data.answer_only",
            fix="set data.answer_only=false",
        )
    if data.test_split is not None and not 0 < data.test_split < 1:
        what = f"test_split is {data.test_split:g}, but must be a share of the records between 0 and 1"
        raise ConfigError(what, where="data.test_split", fix="set data.test_split to a share such as 0.2, or to null")
    if data.seq_length < 2:
        raise ConfigError(
            f"seq_length is {data.seq_length} tokens, but must be 2 tokens or more",
            where="data.seq_length",
            fix="set data.seq_length to 2 or more",
        )


def _check_columns(data: Data) -> None:
    for key, is_set, sources in (
        ("columns", data.columns is not None, (DataSource.text, DataSource.chat)),
        ("chat_template", data.chat_template is not None, (DataSource.chat,)),
    ):
        if is_set and data.source not in sources:
            names = " or ".join(source.name for source in sources)
            raise ConfigError(
                f"data.{key} is set, but data.source={data.source.name} does not use this key",
                where=f"data.{key}, data.source",
                fix=f"set data.{key}=null, or data={names}",
            )
    if data.sample is not None and (data.train_rows is None or data.source not in SAMPLED):
        what = "data.train_rows is null" if data.train_rows is None else f"data.source is {data.source.name}"
        raise ConfigError(
            f"data.sample is set, but {what}",
            where="data.sample",
            fix="set data.train_rows to a number and data.source to one of "
            f"{', '.join(source.name for source in SAMPLED)}; "
            "or set data.sample=null and data.files to your files",
        )


def _check_lengths(data: Data) -> None:
    if data.lengths is None or data.source is not DataSource.random:
        return
    if data.document_mask:
        if not data.lengths or not all(length >= 1 for length in data.lengths):
            raise ConfigError(
                f"data.lengths is {data.lengths}, but the lengths of documents must be 1 or more",
                where="data.lengths",
                fix="list the lengths of documents in tokens, such as [200,500,1500]",
            )
        return
    if not data.lengths or not all(2 <= length <= data.seq_length for length in data.lengths):
        raise ConfigError(
            f"data.lengths is {data.lengths}, but the lengths must be between 2 and data.seq_length={data.seq_length}",
            where="data.lengths",
            fix=f"list lengths from 2 to {data.seq_length}, or set data.lengths=null",
        )
