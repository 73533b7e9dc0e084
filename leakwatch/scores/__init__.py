"""Scores: how exposed a sample is, without attacking it."""

from leakwatch.scores import bayes, i2f, lavp, norms  # noqa: F401  (they register)
from leakwatch.scores.api import Scoring, score
from leakwatch.scores.measure.inputs import ScoreInputs
from leakwatch.scores.measure.sample_spectrum import SampleSpectrum
from leakwatch.scores.registry import Score, available, get, groups, register, resolve
from leakwatch.scores.result import ScoreResult, Value
from leakwatch.scores.settings import Settings
from leakwatch.scores.updates.api import score_update
from leakwatch.scores.updates.evaluate import evaluate_update
from leakwatch.scores.updates.result import UpdateScores
from leakwatch.status import STATUS_WORDS, Status

__all__ = [
    "STATUS_WORDS",
    "SampleSpectrum",
    "Score",
    "ScoreInputs",
    "ScoreResult",
    "Scoring",
    "Settings",
    "Status",
    "UpdateScores",
    "Value",
    "available",
    "evaluate_update",
    "get",
    "groups",
    "register",
    "resolve",
    "score",
    "score_update",
]
