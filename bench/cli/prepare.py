"""The verb prepare: tokenise the files of a run on this machine, and count their rows."""

import argparse
import json
import shlex
from pathlib import Path

from bench.cli import arguments
from bench.contract import codec
from bench.contract.data import DataSource
from bench.contract.schema import Config
from bench.errors import ConfigError


def _add_prepare(verbs: arguments.Verbs) -> None:
    parser = arguments.add(
        verbs,
        _prepare,
        help="tokenise a run's files on this machine, and count the rows if data.train_rows is null",
        example="task=finetune_7b_dolly data=chat data.files=chat.jsonl",
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="as for runstop launch")
    parser.add_argument("--config-dir", type=Path, help="folder with a site's own conf/ files")
    parser.add_argument("--dry-run", action="store_true", help="show what would be read and written, and write nothing")
    parser.add_argument(
        "--processes", type=arguments.count, metavar="N", help="tokenizer processes (default: all cores)"
    )


def _prepare(args: argparse.Namespace) -> int:
    from bench.backends.nodes import processes
    from bench.planning import compose

    config = compose.as_planned(compose.unplanned(args.overrides, config_dir=args.config_dir))
    _check(config)
    if config.training_data.train_rows is not None:
        compose.compose(args.overrides, config_dir=args.config_dir)  # raises the errors of the plan before the work
    if args.dry_run:
        print("\n".join(_described(config)))
        return 0
    more = [] if args.processes is None else ["--processes", str(args.processes)]
    request = json.dumps(codec.plain(config))
    if code := processes.run_program(["jobs.tasks.tokenize_files", *more], request):
        return code
    compose.compose(args.overrides, config_dir=args.config_dir)
    site = [] if args.config_dir is None else ["--config-dir", str(args.config_dir)]
    print(shlex.join(["runstop", "launch", *args.overrides, *site]))
    return 0


def _check(config: Config) -> None:
    """Refuse a config whose rows do not come from the user's files, or that has invalid data settings."""
    from bench.planning.checks import data as data_checks

    data = config.training_data
    if not data.source.reads_files or data.sample is not None:
        kinds = {
            DataSource.prepared: "they are prepared by the site (docs/weights.md)",
            DataSource.random: "they are random tokens in memory",
        }
        raise ConfigError(
            f"the rows of {data.name} are not made from files: {kinds.get(data.source, 'a run generates them')}",
            where="data",
            fix="set data=text or data=chat with data.files; other data needs no runstop prepare before runstop launch",
        )
    data_checks.check(data)


def _described(config: Config) -> list[str]:
    """Return what would be read and written."""
    from bench.contract import data_files
    from bench.contract.plan_paths import expanded

    data, root = config.training_data, expanded(config.cluster.paths.data)
    place = expanded(data_files.tokenizer_place(config, None))
    if root is None or place is None:
        name, key = ("MODEL", "model") if root is not None else ("DATADIR", "data")
        raise ConfigError(f"{name} is not set", where=f"cluster.paths.{key}", fix=f"export {name}=FOLDER")
    files = data_files.find(Path(root), data)
    tokenizer = data_files.find_tokenizer(Path(place))
    data_files.template_sha256(data, tokenizer)
    rows = "all rows" if data.train_rows is None else f"{data.train_rows:,} training rows"
    return [
        f"reads      {len(files)} files, {sum(path.stat().st_size for path in files) / 1e9:,.2f} GB, from {files[0]}",
        f"tokenizer  {tokenizer}",
        f"writes     {rows} of {data.seq_length:,} tokens below {root}",
    ]


VERBS = (_add_prepare,)
