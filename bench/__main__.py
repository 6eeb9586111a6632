"""`python -m bench VERB`."""

from bench import installed

installed.require()

from bench.cli import main  # noqa: E402

main()
