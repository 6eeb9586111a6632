"""Convert weights or rows before a run, and adapters or a whole trained model after it.

`python -m jobs.tasks.convert weights|rows|adapters PLAN …` takes a plan: the output of `python -m bench plan task=…
cluster=… --json`, or the plan.json of a run folder. `… convert export CHECKPOINT OUT` takes a checkpoint that a trial
has saved. No GPU is used.
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
    """Return an error that tells the user what a full disk or a missing package means."""
    if isinstance(error, ModuleNotFoundError):
        return ConfigError(f"{error.name} is not installed", where=sys.executable, fix="pip install 'runstop[weights]'")
    where = str(error.filename or "the output folder")
    return BenchError(f"cannot read or write: {error.strerror}", where=where, fix="make room, and run it again")


def weights(plan: Plan, args: argparse.Namespace) -> str:
    """Convert *.safetensors of a Llama; return the line that says where the checkpoint is."""
    from jobs.weights import conversion

    prepared = conversion.prepare(args.source, plan.config.model, args.folder, stored=args.stored)
    outcome = "is complete" if conversion.convert(prepared, workers=args.workers) else "exists already"
    return f"{prepared.folder} {outcome}; export MODEL={prepared.folder}"


def rows(plan: Plan, args: argparse.Namespace) -> str:
    """Make the rows that a plan reads; return lines that say where and what they are.

    Raises:
        ConfigError: the arguments are not those that the plan's source takes, or its files do not fit the plan.
    """
    if plan.config.training_data.source.reads_files:
        return _rows_of_files(plan_kinds.required(plan, TrainingPlan), args)
    if args.folder is None:
        fix = "name the folder of the published rows, and a new one"
        raise ConfigError(f"{plan.config.training_data.name} needs SOURCE and FOLDER", where="command line", fix=fix)
    return _published_rows(plan, args)


def _rows_of_files(plan: TrainingPlan, args: argparse.Namespace) -> str:
    """Tokenise data.files into the folder where the plan's runs look for the rows."""
    from jobs.data import prepare_rows
    from jobs.data.prepare_rows import alone

    if args.source is not None:
        fix = "leave them out: data.files names the files, and the rows go below DATADIR, where the run looks for them"
        raise ConfigError("this plan takes no SOURCE and FOLDER", where="command line", fix=fix)
    folder = plan_paths.expanded(plan.data_dir)
    if folder is None:
        raise ConfigError("DATADIR is not set", where=str(plan.data_dir), fix="export DATADIR=…")
    with alone(Path(folder).parent):
        manifest = prepare_rows.make(plan, processes=args.processes)
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
    want = published.get(file["path"])
    return "" if want is None else ", as published" if file["bytes"] == want else f" (the published one has {want:,})"


def adapters(plan: Plan, args: argparse.Namespace) -> str:
    """Write a trial's adapters as a PEFT folder; return the line that says where it is.

    Raises:
        ConfigError: the plan trains no adapters.
    """
    from jobs.weights import adapters

    if (lora := plan.config.training.lora) is None:
        raise ConfigError(
            f"{plan.name} trains no adapters", where="task.training.lora", fix="name the plan of a LoRA run"
        )
    trained = args.plan.absolute().parent / run_files.adapters(args.trial)
    adapters.export(trained, args.folder, model=plan.config.model, lora=lora, base=args.base)
    return f"{args.folder}: PEFT adapters of rank {lora.rank}, of {trained}"


def export(args: argparse.Namespace) -> str:
    """Write a trained model as a Hugging Face folder; return the line that says where it is."""
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
    """Return the parser of a new verb, which takes a plan first."""
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
    summary = "A Hugging Face Llama → a megatron-core checkpoint that any layout loads."
    example = "python -m jobs.tasks.convert weights plan.json /models/Llama-2-70b-hf /models/llama2_70b --workers 4"
    parser = _add_verb(verbs, weights, summary, example=example)
    parser.add_argument("source", type=Path, metavar="SOURCE", help="config.json and *.safetensors")
    default = f"default: {', '.join(FOLDERS.values())} inside of SOURCE"
    parser.add_argument("folder", type=Path, nargs="?", metavar="FOLDER", help=default)
    parser.set_defaults(stored=Stored.plain)
    fp8 = "frozen linears in FP8, for task.training.trains=lora with precision=fp8 only: half the bytes"
    nf4 = "frozen linears in 4 bits, for task.training.trains=qlora only: a quarter of the bytes"
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--fp8", dest="stored", action="store_const", const=Stored.fp8, help=fp8)
    kinds.add_argument("--nf4", dest="stored", action="store_const", const=Stored.nf4, help=nf4)
    workers = "units converted at the same time (default 1)"
    parser.add_argument("--workers", type=int, choices=range(1, 65), metavar="N", default=1, help=workers)


def _add_rows(verbs: Any) -> None:
    summary = "Text that data.files names, or GovReport's published rows (parquet, NVIDIA's npy) → rows of the loop."
    example = """python -m jobs.tasks.convert rows plan.json
python -m jobs.tasks.convert rows plan.json /data/scrolls_gov_report /data/gov_report"""
    parser = _add_verb(verbs, rows, summary, example=example)
    source = "for GovReport alone: {train,validation}-*.parquet or {train,validation}.npy"
    parser.add_argument("source", type=Path, nargs="?", metavar="SOURCE", help=source)
    folder = "for GovReport alone: where DATADIR will point"
    parser.add_argument("folder", type=Path, nargs="?", metavar="FOLDER", help=folder)
    processes = "processes that tokenise at the same time (default: one for each core)"
    parser.add_argument("--processes", type=int, choices=range(1, 1025), metavar="N", help=processes)


def _add_adapters(verbs: Any) -> None:
    summary = "Adapters that a run trained → a PEFT folder."
    example = "python -m jobs.tasks.convert adapters plan.json adapters_peft --trial 0 --base meta-llama/Llama-2-70b-hf"
    parser = _add_verb(verbs, adapters, summary, example=example)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="a new folder")
    parser.add_argument("--trial", type=int, default=0, help="the trial that trained them (default 0)")
    parser.add_argument("--base", help="name or folder of the model, by which PEFT finds it")


def _add_export(verbs: Any) -> None:
    summary = "A whole model that a trial has trained and saved → a Hugging Face folder (Llama or GPT-2)."
    example = (
        "python -m jobs.tasks.convert export RUN/checkpoints/trial_0/step_320 out --tokenizer /models/Llama-2-7b-hf"
    )
    parser = _new_verb(verbs, export, summary, example=example)
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="RUN/checkpoints/trial_K/step_N")
    parser.add_argument("out", type=Path, metavar="OUT", help="a new folder")
    parser.add_argument("--tokenizer", type=Path, metavar="DIR", help="copy the tokenizer's files from there")
    fp32 = "write the FP32 master weights (default: the precision that the trial computed in)"
    parser.add_argument("--fp32", action="store_true", help=fp32)


if __name__ == "__main__":
    sys.exit(main())
