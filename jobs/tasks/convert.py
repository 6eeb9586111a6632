"""Convert weights or rows before a run, and adapters or a whole trained model after it.

`python -m jobs.tasks.convert weights|rows|adapters PLAN …` takes a plan: the output of `runstop plan task=…
cluster=… --json`, or the plan.json of a run folder. `… convert export CHECKPOINT OUT` takes a checkpoint that a trial
saved. No GPU is needed.
"""

import argparse
import logging
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.contract import plan_kinds, plan_paths, run_files
from bench.contract.checkpoint import FOLDERS, Stored
from bench.contract.plan import Plan
from bench.contract.plan_kinds import TrainingPlan
from bench.errors import BenchError, ConfigError, Stopped, stopped_by_signals


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    verb: Callable[..., str] = args.verb
    try:
        with stopped_by_signals():
            print(verb(plan_kinds.load(args.plan), args) if "plan" in args else verb(args))
    except (OSError, ModuleNotFoundError) as error:
        return _failed(_explained(error))
    except BenchError as error:
        return _failed(error)
    except Stopped as stop:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        print("stopped; run the same command again to continue", file=sys.stderr)
        return stop.exit_code
    return 0


def _failed(error: BenchError) -> int:
    print(error, file=sys.stderr)
    return error.exit_code


def _explained(error: OSError | ModuleNotFoundError) -> BenchError:
    """Return the error of a full disk or a missing package, with its fix."""
    if isinstance(error, ModuleNotFoundError):
        return ConfigError(f"{error.name} is not installed", where=sys.executable, fix="pip install 'runstop[weights]'")
    where = str(error.filename or "the output folder")
    return BenchError(
        f"a file cannot be read or written: {error.strerror}",
        where=where,
        fix="free disk space, then run the command again",
    )


def weights(plan: Plan, args: argparse.Namespace) -> str:
    """Convert *.safetensors of a Llama; return a line with the checkpoint's folder."""
    from jobs.weights import conversion

    prepared = conversion.prepare(args.source, plan.config.model, args.folder, stored=args.stored)
    outcome = "is complete" if conversion.convert(prepared, workers=args.workers) else "exists already"
    return f"{prepared.folder} {outcome}; export MODEL={prepared.folder}"


def rows(plan: Plan, args: argparse.Namespace) -> str:
    """Prepare the rows of a plan; return lines with their folder and contents.

    Raises:
        ConfigError: the arguments are wrong for the plan's source, or its files do not match the plan.
    """
    if plan.config.training_data.source.reads_files:
        return _rows_of_files(plan_kinds.required(plan, TrainingPlan), args)
    if args.folder is None:
        fix = "set SOURCE to the folder of the published rows, and FOLDER to a new folder for the result"
        raise ConfigError(
            f"the data {plan.config.training_data.name} needs the arguments SOURCE and FOLDER",
            where="command line",
            fix=fix,
        )
    return _published_rows(plan, args)


def _rows_of_files(plan: TrainingPlan, args: argparse.Namespace) -> str:
    """Tokenise data.files into the folder from which the plan's runs read the rows."""
    from jobs.data import prepare_rows
    from jobs.data.prepare_rows import locked_folder

    if args.source is not None:
        fix = "remove SOURCE and FOLDER from the command"
        raise ConfigError(
            "SOURCE and FOLDER are given, but this plan already sets the input (data.files) and the output (DATADIR)",
            where="command line",
            fix=fix,
        )
    folder = plan_paths.expanded(plan.data_dir)
    if folder is None:
        raise ConfigError("DATADIR is not set", where=str(plan.data_dir), fix="export DATADIR=FOLDER")
    with locked_folder(Path(folder).parent):
        manifest = prepare_rows.prepare(plan, processes=args.processes)
    return "\n".join([*prepare_rows.described(manifest), f"{folder} is complete"])


def _published_rows(plan: Plan, args: argparse.Namespace) -> str:
    """Convert GovReport's published rows."""
    from jobs.data import gov_report

    config = plan.config
    manifest = gov_report.convert(
        args.source, args.folder, data=config.training_data, vocab_size=config.model.vocab_size
    )
    counted = [
        f"{name}: {split['rows']:,} rows of {config.training_data.seq_length:,} tokens, "
        f"{split['counted_tokens'] / split['tokens']:.1%} count"
        for name, split in manifest["splits"].items()
    ]
    sizes = [
        f"{file['path']}: {file['bytes']:,} bytes{_published(file, gov_report.PUBLISHED_BYTES)}"
        for file in manifest["source"]["files"]
    ]
    return "\n".join([*sizes, *counted, f"export DATADIR={args.folder.absolute()}"])


def _published(file: dict[str, Any], published: dict[str, int]) -> str:
    expected = published.get(file["path"])
    return (
        ""
        if expected is None
        else ", as published"
        if file["bytes"] == expected
        else f" (the published file has {expected:,})"
    )


def adapters(plan: Plan, args: argparse.Namespace) -> str:
    """Write a trial's adapters as a PEFT folder; return a line with its path.

    Raises:
        ConfigError: the plan trains no adapters.
    """
    from jobs.weights import adapters

    if (lora := plan.config.training.lora) is None:
        raise ConfigError(
            f"the plan {plan.name} trains no adapters",
            where="task.training.lora",
            fix="give the plan of a run that trains adapters (LoRA)",
        )
    trained = args.plan.absolute().parent / run_files.adapters(args.trial)
    adapters.export(trained, args.folder, model=plan.config.model, lora=lora, base=args.base)
    return f"{args.folder}: PEFT adapters of rank {lora.rank}, from {trained}"


def export(args: argparse.Namespace) -> str:
    """Write a trained model as a Hugging Face folder; return a line with its path."""
    from jobs.weights import export

    return export.export(args.checkpoint, args.out, tokenizer=args.tokenizer, keep_fp32=args.fp32)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jobs.tasks.convert",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = parser.add_subparsers(metavar="weights|rows|adapters|export", required=True)
    _add_weights(verbs)
    _add_rows(verbs)
    _add_adapters(verbs)
    _add_export(verbs)
    return parser


def _add_verb(
    verbs: Any, verb: Callable[[Plan, argparse.Namespace], str], summary: str, *, example: str
) -> argparse.ArgumentParser:
    """Return the parser of a new verb whose first argument is a plan."""
    parser = _new_verb(verbs, verb, summary, example=example)
    parser.add_argument("plan", type=Path, metavar="PLAN", help="the plan, as JSON")
    return parser


def _new_verb(verbs: Any, verb: Callable[..., str], summary: str, *, example: str) -> argparse.ArgumentParser:
    lines = argparse.RawDescriptionHelpFormatter
    parser: argparse.ArgumentParser = verbs.add_parser(
        verb.__name__, help=summary, description=summary, epilog=example, formatter_class=lines
    )
    parser.set_defaults(verb=verb)
    return parser


def _add_weights(verbs: Any) -> None:
    summary = "Convert a Hugging Face Llama to a megatron-core checkpoint for any parallel layout."
    example = "python -m jobs.tasks.convert weights plan.json /models/Llama-2-70b-hf /models/llama2_70b --workers 4"
    parser = _add_verb(verbs, weights, summary, example=example)
    parser.add_argument("source", type=Path, metavar="SOURCE", help="config.json and *.safetensors")
    default = f"default: {', '.join(FOLDERS.values())} in SOURCE"
    parser.add_argument("folder", type=Path, nargs="?", metavar="FOLDER", help=default)
    parser.set_defaults(stored=Stored.plain)
    fp8 = "store frozen linears in FP8 (half the size); only for task.training.trains=lora with precision=fp8"
    nf4 = "store frozen linears in 4 bits (a quarter of the size); only for task.training.trains=qlora"
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--fp8", dest="stored", action="store_const", const=Stored.fp8, help=fp8)
    kinds.add_argument("--nf4", dest="stored", action="store_const", const=Stored.nf4, help=nf4)
    workers = "number of layers converted in parallel (default 1)"
    parser.add_argument("--workers", type=int, choices=range(1, 65), metavar="N", default=1, help=workers)


def _add_rows(verbs: Any) -> None:
    summary = "Prepare training rows from data.files, or from GovReport's published rows (parquet, NVIDIA's npy)."
    example = """python -m jobs.tasks.convert rows plan.json
python -m jobs.tasks.convert rows plan.json /data/scrolls_gov_report /data/gov_report"""
    parser = _add_verb(verbs, rows, summary, example=example)
    source = "only for GovReport: {train,validation}-*.parquet or {train,validation}.npy"
    parser.add_argument("source", type=Path, nargs="?", metavar="SOURCE", help=source)
    folder = "only for GovReport: the new folder, to which DATADIR must then be set"
    parser.add_argument("folder", type=Path, nargs="?", metavar="FOLDER", help=folder)
    processes = "number of tokenizer processes (default: one per core)"
    parser.add_argument("--processes", type=int, choices=range(1, 1025), metavar="N", help=processes)


def _add_adapters(verbs: Any) -> None:
    summary = "Convert the adapters of a trial to a PEFT folder."
    example = "python -m jobs.tasks.convert adapters plan.json adapters_peft --trial 0 --base meta-llama/Llama-2-70b-hf"
    parser = _add_verb(verbs, adapters, summary, example=example)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="a new folder")
    parser.add_argument("--trial", type=int, default=0, help="index of the trial (default 0)")
    parser.add_argument("--base", help="name or folder of the base model, for PEFT")


def _add_export(verbs: Any) -> None:
    summary = "Convert the trained model of a trial to a Hugging Face folder of its family."
    example = (
        "python -m jobs.tasks.convert export RUN/checkpoints/trial_0/step_320 out --tokenizer /models/Llama-2-7b-hf"
    )
    parser = _new_verb(verbs, export, summary, example=example)
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="RUN/checkpoints/trial_K/step_N")
    parser.add_argument("out", type=Path, metavar="OUT", help="a new folder")
    parser.add_argument("--tokenizer", type=Path, metavar="DIR", help="folder from which the tokenizer is copied")
    fp32 = "write the FP32 master weights (default: the precision of the trial)"
    parser.add_argument("--fp32", action="store_true", help=fp32)


if __name__ == "__main__":
    sys.exit(main())
