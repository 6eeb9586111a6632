"""Run a plan over nodes without srun: `python -m bench.runner RUN --node K --lead HOST:PORT`, once on each node.

Node 0 leads. The others join it, in any order, and find in RUNSTOP_TOKEN the same text as node 0 does. RUN is a run
folder with a plan.json, or gets one from --plan. It may be shared by the nodes, or be each node's own: the lead's has
the results then. Exit codes: those of the run, 75 for one that was cut short and is to be started again, and 128 and
more for a signal.
"""

import argparse
import io
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import TextIO

from bench.backends.nodes import channel, member
from bench.backends.nodes import lead as nodes_lead
from bench.backends.nodes.interruption import START_AGAIN, CutShortError, Ending, NodeLostError
from bench.backends.nodes.lead import Nodes
from bench.contract import plan as plans
from bench.errors import BenchError
from bench.runner import folder


class Tee(io.TextIOBase):
    """What a runner prints, also kept in the run folder, where `why` looks for it."""

    def __init__(self, screen: TextIO, file: TextIO) -> None:
        self._screen, self._file = screen, file

    def write(self, text: str) -> int:
        self._file.write(text)
        written = self._screen.write(text)
        self.flush()
        return written

    def flush(self) -> None:
        self._file.flush()
        self._screen.flush()

    def isatty(self) -> bool:
        return False


def main() -> None:
    args = _parser().parse_args()
    try:
        sys.exit(_lead(args) if args.node == 0 and not args.stdio else _member(args))
    except BenchError as error:
        print(error, file=sys.stderr, flush=True)
        sys.exit(error.exit_code)


def _lead(args: argparse.Namespace) -> int:
    from bench.runner import lead as leads

    run: Path = args.run.absolute()
    ending = Ending(limit_s=None if args.limit_min is None else time.monotonic() + 60 * args.limit_min)
    ending.listen()
    with folder.opened(run, args.plan) as planned, folder.output(run) as file:
        plan = planned if args.trial_min is None else plans.within(planned, args.trial_min)
        token = channel.token() if plan.world.num_nodes > 1 else ""
        nodes = Nodes(plan, run, args.lead[0], own=plan.environment)
        job = args.job or str(run)
        trials = [trial.index for trial in plan.trials]
        lead = leads.Lead(run, plan, nodes, ending, job=job, restarts=args.restarts, trials=trials)

        def join() -> None:
            nodes.join(args.lead[1], token=token, within_s=args.join_s, check=ending.check)
            nodes.send_plan(check=ending.check)
            nodes_lead.require_shared(nodes)

        with redirect_stdout(Tee(sys.stdout, file)), redirect_stderr(Tee(sys.stderr, file)):
            print(f"job {job}, attempt {args.attempt}, {plan.name} on {plan.world.num_nodes} nodes", flush=True)
            code = leads.drive(lead, join)
            nodes.bye(code)
            return code


def _member(args: argparse.Namespace) -> int:
    ending = Ending()
    ending.listen()
    run: Path = args.run.absolute()
    try:
        if args.stdio:
            joined = member.by_streams(args.node)
        else:
            joined = member.join(args.lead, args.node, token=channel.token(), within_s=args.join_s, check=ending.check)
        return member.obey(joined, args.node, run, check=ending.check)
    except CutShortError as error:
        print(error, file=sys.stderr, flush=True)
        return 128 + ending.signum
    except NodeLostError as error:
        print(error, file=sys.stderr, flush=True)
        return START_AGAIN if args.restarts else 1


def _number(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not 0, 1, 2, …")
    return int(text)


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT")
    return host.strip("[]"), int(port)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.runner", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="the run folder")
    parser.add_argument("--node", type=_number, required=True, metavar="K", help="which node this is, from 0")
    parser.add_argument("--lead", type=_address, default=("127.0.0.1", 0), metavar="HOST:PORT", help="of node 0")
    parser.add_argument("--plan", type=Path, metavar="FILE", help="a plan.json for a folder that has none yet (node 0)")
    parser.add_argument("--job", metavar="ID", help="what the backend calls this job; without it, RUN")
    parser.add_argument("--attempt", type=int, default=0, metavar="N", help="which start of the job this is, from 0")
    parser.add_argument("--restarts", action="store_true", help="exit code 75 gets this command started again")
    parser.add_argument("--limit-min", type=float, metavar="MIN", help="end in order after so long")
    parser.add_argument("--trial-min", type=_number, metavar="MIN", help="of each trial, in place of its plan's limit")
    parser.add_argument("--stdio", action="store_true", help="obey who speaks on standard input, and join nobody")
    parser.add_argument(
        "--join-s", type=float, default=member.JOIN_S, metavar="S", help="how long nodes may take to join"
    )
    return parser


if __name__ == "__main__":
    main()
