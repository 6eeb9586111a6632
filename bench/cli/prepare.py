"""The verb prepare: on this machine, tokenise the files of a run, count their rows, and convert its weights."""

import argparse
import json
import shlex
from pathlib import Path

from bench import hints
from bench.cli import arguments
from bench.contract import codec
from bench.contract.data import DataSource
from bench.contract.schema import Config
from bench.errors import ConfigError


def _add_prepare(verbs: arguments.Verbs) -> None:
    parser = arguments.add(
        verbs,
        _prepare,
        help="on this machine, tokenise a run's files, count their rows if data.train_rows is null, and convert the "
        "weights of a Hugging Face folder",
        example="task=finetune_chat model=hf data.files=chat.jsonl",
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="as for runstop launch")
    parser.add_argument("--config-dir", type=Path, help="folder with a site's own conf/ files")
    parser.add_argument("--dry-run", action="store_true", help="show what would be read and written, and write nothing")
    parser.add_argument(
        "--processes", type=arguments.count, metavar="N", help="tokenizer processes (default: all cores)"
    )


def _prepare(args: argparse.Namespace) -> int:
    from bench.backends.nodes import processes
    from bench.planning import compose, to_prepare

    config = compose.as_planned(compose.unplanned(args.overrides, config_dir=args.config_dir))
    _check(config)
    if config.data is None or config.data.train_rows is not None:
        compose.compose(args.overrides, config_dir=args.config_dir)  # raises the errors of the plan before the work
    if args.dry_run:
        print("\n".join([*_described_rows(config), *_described_weights(config)]))
        return 0
    request = json.dumps(codec.plain(config))
    if to_prepare.files_to_rows(config) is not None:
        more = [] if args.processes is None else ["--processes", str(args.processes)]
        if code := processes.run_program(["jobs.tasks.prepare_here", "rows", *more], request):
            return code
    compose.compose(args.overrides, config_dir=args.config_dir)
    weights = to_prepare.conversion(config)
    if weights is not None and weights.is_done:
        print(f"{weights.folder} exists already: the weights of {config.model.name}")
    elif weights is not None and (code := processes.run_program(["jobs.tasks.prepare_here", "weights"], request)):
        return code
    words = ["runstop", "launch", *args.overrides, *to_prepare.site_words(args.config_dir)]
    print(hints.in_this_shell(shlex.join(words)))
    return 0


def _check(config: Config) -> None:
    """Refuse a config for which there is nothing to prepare here, or that has invalid settings or other weights."""
    from bench.contract import data_files
    from bench.planning import model_folder, to_prepare
    from bench.planning.checks import data as data_checks

    rows, weights = to_prepare.files_to_rows(config), to_prepare.conversion(config)
    if rows is None and weights is None:
        raise _nothing_to_prepare(config)
    if rows is not None:
        data_checks.check(rows)
        data_files.checked_tokenizer(config, None)
    if (folder := to_prepare.source(config)) is not None:
        model_folder.check_weights(folder, config)
    if weights is not None and not weights.is_done:
        weights.require_writable()


def _nothing_to_prepare(config: Config) -> ConfigError:
    if config.task.training is None or config.data is None:
        what = f"there is nothing to prepare: the task {config.task.name} reads no files to tokenise, and no weights "
        what += "of a Hugging Face folder to convert"
        fix = "run `runstop launch` now, or set MODEL to a Hugging Face folder on this machine"
        return ConfigError(what, where="task, cluster.paths.model", fix=fix)
    kinds = {
        DataSource.prepared: "they are prepared by the site (docs/weights.md)",
        DataSource.random: "they are random tokens in memory",
        DataSource.megatron: "the ranks form rows from the files of Megatron-LM",
    }
    reason = kinds.get(config.data.source, "a run generates them")
    return ConfigError(
        f"there is nothing to prepare for the rows of {config.data.name}: {reason}",
        where="data",
        fix="set data=text or data=chat with data.files; other data needs no preparation before the launch",
    )


def _described_rows(config: Config) -> list[str]:
    """Return which files would be read, and where the rows would be written."""
    from bench.contract import data_files
    from bench.contract.plan_paths import expanded
    from bench.planning import to_prepare

    if (data := to_prepare.files_to_rows(config)) is None:
        return []
    root, place = expanded(config.cluster.paths.data), expanded(data_files.tokenizer_place(config, None))
    if root is None or place is None:
        variable, key = ("MODEL", "model") if root is not None else ("DATADIR", "data")
        what = f"the environment variable {variable} is not set"
        raise ConfigError(what, where=f"cluster.paths.{key}", fix=f"export {variable}=FOLDER")
    files = data_files.find(Path(root), data)
    tokenizer = data_files.find_tokenizer(Path(place))
    data_files.template_sha256(data, tokenizer)
    rows = "all rows" if data.train_rows is None else f"{data.train_rows:,} training rows"
    return [
        f"reads      {len(files)} files, {sum(path.stat().st_size for path in files) / 1e9:,.2f} GB, from {files[0]}",
        f"tokenizer  {tokenizer}",
        f"writes     {rows} of {data.seq_length:,} tokens below {root}",
    ]


def _described_weights(config: Config) -> list[str]:
    """Return which weights would be converted."""
    from bench.contract import hugging_face
    from bench.planning import to_prepare

    if (weights := to_prepare.conversion(config)) is None:
        return []
    if weights.is_done:
        return [f"weights    {weights.folder} exists already"]
    files = {one.file for one in hugging_face.tensors(weights.source).values()}
    size = sum((weights.source / file).stat().st_size for file in files)
    return [
        f"weights    {len(files)} files, {size / 1e9:,.2f} GB, from {weights.source}",
        f"writes     {weights.folder}",
    ]


VERBS = (_add_prepare,)
