"""The train task with NeMo's own recipes: an alternative to `jobs.tasks.train` with the same plan and log.

NeMo runs on Lightning, which owns the training loop, so it cannot implement the protocol of `jobs.engines`. Nothing
else imports this folder: a plan with engine=nemo runs `jobs.nemo.train` in its commands, with a separate interpreter,
since the requirements of NeMo 2.7.3 conflict with the rest (docs/nemo.md).
"""
