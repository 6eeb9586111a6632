"""Predict the step time of a training run at any scale, and grade the predictions on published runs.

network.py: seconds of collectives and sends.  stacks.py: software whose steps are predicted, with its constants.
step.py: the terms of one step.  published.py: the published rows.  grade.py: predicted against published.
scale.py: the table of `runstop plan --scale`.  failures.py: time lost to failing nodes.
"""
