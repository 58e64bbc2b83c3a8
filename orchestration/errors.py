"""Errors of a run that has started. Bad input before that is a ValueError."""

from __future__ import annotations


class RunError(RuntimeError):
    """The run cannot go on; the message is meant for people and says what to look at."""


class WorkerError(RunError):
    """An actor failed, died or hung; the message names it."""


class NoUsableSamplesError(RunError):
    """Several steps in a row had no sample to train on."""
