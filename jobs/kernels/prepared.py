"""What is about to be measured."""

from dataclasses import dataclass

from jobs.kernels.timing import Call


@dataclass(frozen=True, slots=True)
class Prepared:
    """A call with its operands, and what computes it, for the log."""

    call: Call
    ran: str = ""
