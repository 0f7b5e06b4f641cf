"""Seconds of a step: compute of each use, order of the uses, a lower bound, and the prediction by simulation."""

from __future__ import annotations

from offload.planner.step_time.prediction import Timing, hiding_tokens, lower_bound, predict
from offload.planner.step_time.schedule_choice import choice_of

__all__ = ["Timing", "choice_of", "hiding_tokens", "lower_bound", "predict"]
