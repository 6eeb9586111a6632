"""Run a plan over nodes without srun: `python -m bench.driver RUN --node K --lead HOST:PORT`, once on each node.

Node 0 is the lead node. The other nodes connect to it, in any order; RUNSTOP_TOKEN must be the same on all nodes. RUN
is a run folder with a plan.json, or --plan gives the plan. The nodes may share the folder; if each node has its own,
the folder of node 0 gets the results. Exit codes: those of the run, 75 if the run was interrupted and this command
must be started again, 128 or more for a signal.
"""

import argparse
import sys
from pathlib import Path

from bench.backends.nodes import channel, member
from bench.backends.nodes.interruption import RESTART_EXIT_CODE, CutShortError, Interruption, NodeLostError
from bench.contract import regular_files
from bench.errors import BenchError, exit_code_of


def main() -> None:
    regular_files.keep_others_from_writing()
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
            joined = member.over_stdio(args.node)
        else:
            joined = member.join(
                args.lead, args.node, token=channel.token(), within_s=args.join_s, check=interruption.check
            )
        return member.serve(joined, args.node, run, check=interruption.check)
    except CutShortError as error:
        print(error, file=sys.stderr, flush=True)
        return exit_code_of(-error.signum)
    except NodeLostError as error:
        print(error, file=sys.stderr, flush=True)
        return RESTART_EXIT_CODE if args.restarts else 1


def _number(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of 0 or more")
    return int(text)


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise argparse.ArgumentTypeError(f"{text!r} is not an address of the form HOST:PORT")
    return host.strip("[]"), int(port)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.driver", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder")
    parser.add_argument("--node", type=_number, required=True, metavar="K", help="number of this node, from 0")
    parser.add_argument(
        "--lead", type=_address, default=("127.0.0.1", 0), metavar="HOST:PORT", help="address of node 0"
    )
    parser.add_argument(
        "--plan", type=Path, metavar="FILE", help="plan.json for a run folder that has none yet (node 0)"
    )
    parser.add_argument("--job", metavar="ID", help="the backend's id of this job (default: RUN)")
    parser.add_argument("--attempt", type=int, default=0, metavar="N", help="number of this start of the job, from 0")
    parser.add_argument("--restarts", action="store_true", help="the backend restarts this command after exit code 75")
    parser.add_argument("--limit-min", type=float, metavar="MIN", help="stop cleanly after this time")
    parser.add_argument(
        "--trial-min", type=_number, metavar="MIN", help="time limit of each trial, instead of the plan's"
    )
    parser.add_argument("--stdio", action="store_true", help="take the lead node's messages from standard input")
    parser.add_argument(
        "--join-s", type=float, default=member.JOIN_S, metavar="S", help="time limit for all nodes to connect"
    )
    return parser


if __name__ == "__main__":
    main()
