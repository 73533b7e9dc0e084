"""Scores: how exposed a sample is, without attacking it.

A score is a number computed from what was measured about one sample, its
:class:`SampleSpectrum`, and from what is assumed about noise and pixels, the
:class:`Settings`. It states what it needs; the cheapest way to measure what all scores
of a call need is chosen by itself, and measured once.

- ``lavp``, ``i2f``, ``bayes``, ``in_range``, ``norms``: the scores, a file per family;
- ``registry``: scores by name; ``result``: values with their status;
- ``measure``: from samples at a network to the spectrum of each;
- ``batches``, ``api``: from spectra to the scores of a batch, ``leakwatch.score``;
- ``updates``: the same for weight updates, ``leakwatch.score_update``.

A new score is one file with one call. It has a status whenever its parts had one, and
from then on ``leakwatch.score``, every callback, command and report knows it:

>>> import torch
>>> def lavp_condition(spectrum: SampleSpectrum, settings: Settings) -> Value:
...     top, bottom = spectrum.lambda_max, spectrum.lambda_min
...     for part in (top, bottom):
...         if not part.status.usable:
...             return Value.without(*part.status)
...     if bottom.number <= 0:
...         return Value.without("undefined", "infinite: λ_min is zero")
...     return Value(top.number / bottom.number, bottom.status)
>>> _ = register(
...     Score(
...         name="lavp_condition",
...         compute=lavp_condition,
...         needs=frozenset({"lambda_max", "lambda_min"}),
...         unit="1",
...         direction="higher = less exposed",
...         meaning="How ill-conditioned it is to match this sample's gradient.",
...         source="LAVP, Hong et al., AAAI 2024, Theorem 3: λ_1/λ_min",
...     ),
...     "condition",
... )
>>> net = torch.nn.Sequential(
...     torch.nn.Linear(4, 6), torch.nn.Sigmoid(), torch.nn.Linear(6, 3)
... ).double()
>>> result = score(
...     net,
...     torch.rand(2, 4, dtype=torch.float64),
...     torch.tensor([0, 2]),
...     ["lavp_condition", "loss"],
...     dtype=torch.float64,
... )
>>> bool((result["lavp_condition"] >= 1).all()), str(result.status["loss"][0])
(True, 'ok')

The scores of this package do the same with the decorator :func:`scored`, on the formula
itself. What no solver measures yet is one more field of :class:`SampleSpectrum`, and
the line that computes it in ``measure`` (``dense``, ``matrix_free`` or
``power_iteration``).
"""

from leakwatch.scores import (  # noqa: F401  (they register)
    bayes,
    i2f,
    in_range,
    lavp,
    norms,
)
from leakwatch.scores.api import Scoring, score
from leakwatch.scores.measure.inputs import ScoreInputs
from leakwatch.scores.measure.sample_spectrum import SampleSpectrum
from leakwatch.scores.registry import (
    Score,
    available,
    get,
    groups,
    register,
    resolve,
    scored,
)
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
    "scored",
]
