"""Prediction of a run before it starts: bytes in every tier, seconds of a step, and the changes that help most.

options           the options of `offload plan`
request           these options, turned into a plan; rates scaled to a timed pass of the model
hardware          a machine in numbers, probed or described
model_shape       a model in numbers: units, work of each, bytes saved for the backward
memory            bytes per tier, from the functions that a run uses
activations       bytes of activations per tier, and what fits beside the budgets
step_time         seconds of a step, played by `simulation`, and a lower bound of them
recommend         tiers and host budget if the user names none, and the changes that help most
ranks             a step on several GPUs and machines, by formulas: bytes of each collective, seconds of each resource
reach             the longest sequence and the largest micro-batch of each way to keep activations
output            a plan as text and as JSON
predict_run       the plan of a run that is about to start on the probed machine

Functions raise `ConfigError` for options, a config, a model or a machine that are wrong, and `BudgetError` for a run
that does not fit: a budget is too small, or activations or units in use have no room.
"""
