"""Convert between Hugging Face and megatron-core, once, before any run: `python -m jobs.tasks.convert weights|rows|adapters PLAN …`.

PLAN is what `python -m bench plan task=… cluster=… --json` prints, or the plan.json of a run folder. Needs no GPU.
"""

import argparse
import logging
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from bench.contract import plan as plans
from bench.contract import run_files
from bench.contract.checkpoint import CONVERTED, CONVERTED_FP8
from bench.contract.plan import Plan
from bench.errors import BenchError, ConfigError, interrupt_exit_code, stopped_by_sigterm


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    do: Callable[[Plan, argparse.Namespace], str] = args.do
    try:
        with stopped_by_sigterm():
            print(do(plans.load(args.plan), args))
    except (OSError, ModuleNotFoundError) as error:
        return _said(_explained(error))
    except BenchError as error:
        return _said(error)
    except KeyboardInterrupt as stop:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        print("stopped; run the same command again to go on", file=sys.stderr)
        return interrupt_exit_code(stop)
    return 0


def _said(error: BenchError) -> int:
    print(error, file=sys.stderr)
    return error.exit_code


def _explained(error: OSError | ModuleNotFoundError) -> BenchError:
    """Return what a full disk or a missing package means for the user."""
    if isinstance(error, ModuleNotFoundError):
        return ConfigError(f"{error.name} is not installed", where=sys.executable, fix="pip install 'runstop[weights]'")
    where = str(error.filename or "the folder that is written")
    return BenchError(f"cannot read or write: {error.strerror}", where=where, fix="make room, and run it again")


def weights(plan: Plan, args: argparse.Namespace) -> str:
    """Convert *.safetensors of a Llama; return where the checkpoint is."""
    from jobs.weights import conversion

    prepared = conversion.prepare(args.source, plan.config.model, args.folder, is_fp8=args.fp8)
    said = "is made" if conversion.convert(prepared, workers=args.workers) else "was there already"
    return f"{prepared.folder} {said}; export MODEL={prepared.folder}"


def rows(plan: Plan, args: argparse.Namespace) -> str:
    """Convert GovReport's published rows; return where they are and how many of their tokens count."""
    from jobs.data import gov_report

    config = plan.config
    said = gov_report.convert(args.source, args.folder, data=config.data, vocab_size=config.model.vocab_size)
    counted = [
        f"{name}: {split['rows']:,} rows of {config.data.seq_length:,} tokens, {split['counted_tokens'] / split['tokens']:.1%} count"
        for name, split in said["splits"].items()
    ]
    sizes = [
        f"{file['path']}: {file['bytes']:,} bytes{_published(file, gov_report.PUBLISHED_BYTES)}"
        for file in said["source"]["files"]
    ]
    return "\n".join([*sizes, *counted, f"export DATADIR={args.folder.absolute()}"])


def _published(file: dict, published: dict[str, int]) -> str:
    want = published.get(file["path"])
    return "" if want is None else ", as published" if file["bytes"] == want else f" (the published one has {want:,})"


def adapters(plan: Plan, args: argparse.Namespace) -> str:
    """Write a trial's adapters as a PEFT folder; return where it is.

    Raises:
        ConfigError: the plan trains no adapters.
    """
    from jobs.weights import adapters

    if (lora := plan.config.task.training.lora) is None:
        raise ConfigError(
            f"{plan.name} trains no adapters", where="task.training.lora", fix="name the plan of a LoRA run"
        )
    trained = args.plan.absolute().parent / run_files.adapters(args.trial)
    adapters.export(trained, args.folder, model=plan.config.model, lora=lora, base=args.base)
    return f"{args.folder}: PEFT adapters of rank {lora.rank}, of {trained}"


def _parser() -> argparse.ArgumentParser:
    lines = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m jobs.tasks.convert", description=__doc__, formatter_class=lines)
    verbs = parser.add_subparsers(metavar="weights|rows|adapters", required=True)

    def verb(do: Callable[[Plan, argparse.Namespace], str], summary: str, example: str) -> argparse.ArgumentParser:
        made = verbs.add_parser(do.__name__, help=summary, description=summary, epilog=example, formatter_class=lines)
        made.set_defaults(do=do)
        made.add_argument("plan", type=Path, metavar="PLAN", help="the plan, as JSON")
        return made

    made = verb(
        weights,
        "A Hugging Face Llama → a megatron-core checkpoint that any layout loads.",
        "python -m jobs.tasks.convert weights plan.json /models/Llama-2-70b-hf /models/llama2_70b --workers 4",
    )
    made.add_argument("source", type=Path, metavar="SOURCE", help="config.json and *.safetensors")
    made.add_argument(
        "folder",
        type=Path,
        nargs="?",
        metavar="FOLDER",
        help=f"default: {CONVERTED} or {CONVERTED_FP8} inside of SOURCE",
    )
    made.add_argument(
        "--fp8", action="store_true", help="frozen linears in FP8, for precision=fp8 only: half the bytes"
    )
    made.add_argument(
        "--workers",
        type=int,
        choices=range(1, 65),
        metavar="N",
        default=1,
        help="units converted at the same time (default 1)",
    )
    made = verb(
        rows,
        "GovReport's published rows (parquet, or NVIDIA's npy) → rows of the loop.",
        "python -m jobs.tasks.convert rows plan.json /data/scrolls_gov_report /data/gov_report",
    )
    made.add_argument(
        "source", type=Path, metavar="SOURCE", help="{train,validation}-*.parquet or {train,validation}.npy"
    )
    made.add_argument("folder", type=Path, metavar="FOLDER", help="where DATADIR will point")
    made = verb(
        adapters,
        "Adapters that a run trained → a PEFT folder.",
        "python -m jobs.tasks.convert adapters runs/…/plan.json adapters_peft --trial 0 --base meta-llama/Llama-2-70b-hf",
    )
    made.add_argument("folder", type=Path, metavar="FOLDER", help="a new one")
    made.add_argument("--trial", type=int, default=0, help="whose adapters (default 0)")
    made.add_argument("--base", help="the model's name or folder, which PEFT finds it by")
    return parser


if __name__ == "__main__":
    sys.exit(main())
