"""Run a plan over nodes without srun: `python -m bench.driver RUN --node K --lead HOST:PORT`, once on each node.

Node 0 leads. The others join it, in any order, and find in RUNSTOP_TOKEN the same text as node 0 does. RUN is a run
folder with a plan.json, or gets one from --plan. It may be shared by the nodes, or be each node's own: the lead's has
the results then. Exit codes: those of the run, 75 for one that was cut short and is to be started again, and 128 and
more for a signal.
"""

import argparse
import sys
from pathlib import Path

from bench.backends.nodes import channel, member
from bench.backends.nodes.interruption import START_AGAIN, CutShortError, Interruption, NodeLostError
from bench.errors import BenchError, exit_code_of


def main() -> None:
    args = _parser().parse_args()
    try:
        if args.node == 0 and not args.stdio:
            from bench.driver import lead

            sys.exit(lead.run(args))
        sys.exit(_member(args))
    except BenchError as error:
        print(error, file=sys.stderr, flush=True)
        sys.exit(error.exit_code)


def _member(args: argparse.Namespace) -> int:
    interruption = Interruption()
    interruption.listen()
    run: Path = args.run.absolute()
    try:
        if args.stdio:
            joined = member.by_streams(args.node)
        else:
            joined = member.join(
                args.lead, args.node, token=channel.token(), within_s=args.join_s, check=interruption.check
            )
        return member.obey(joined, args.node, run, check=interruption.check)
    except CutShortError as error:
        print(error, file=sys.stderr, flush=True)
        return exit_code_of(-error.signum)
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
        prog="python -m bench.driver", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
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
