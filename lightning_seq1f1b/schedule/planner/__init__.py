"""The planner: which schedule, virtual stages, chunks and layers are fastest for a model, its rows and its devices."""

from lightning_seq1f1b.schedule.planner.choice import Choice, choose
from lightning_seq1f1b.schedule.planner.problem import Knobs, Problem

__all__ = ["Choice", "Knobs", "Problem", "choose"]
