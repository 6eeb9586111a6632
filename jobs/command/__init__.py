"""engine=command: run the user's own program, and write its log from what it prints.

`run` starts, watches and ends the program, `adapters/` read its output, `records` writes the log.
"""
