"""`python -m bench VERB`."""

from bench.cli import main

main()
