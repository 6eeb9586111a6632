"""The train task by NeMo's own recipes: a second program beside `jobs.tasks.train`, with the same plan and log.

NeMo runs on Lightning, which owns the training loop, so it cannot stand behind the protocol of `jobs.engines`. Nothing
else imports this folder: a plan with engine=nemo names `jobs.nemo.train` in its commands. It runs with an interpreter
of its own, since what NeMo 2.7.3 requires does not go with the rest (docs/nemo.md).
"""
