"""Questions about a whole network, answered from scores and attacks together.

Which initialisation leaks least, whom a homogeneous noise protects worst, how much
noise is enough, and what a defense costs and buys.
"""

from __future__ import annotations

from leakwatch.studies.initializations.points import Point
from leakwatch.studies.initializations.ranking import Ranked, Verdict
from leakwatch.studies.initializations.result import InitializationComparison
from leakwatch.studies.initializations.study import compare_initializations
from leakwatch.studies.noise.check import Check
from leakwatch.studies.noise.recommendation import (
    NoiseRecommendation,
    ProbeNoise,
    recommend_noise,
)
from leakwatch.studies.noise.unequal_protection import (
    ClassRisk,
    SampleRisk,
    Unfairness,
    unfairness,
)
from leakwatch.studies.trade_offs.outcomes import Attacked, Outcome
from leakwatch.studies.trade_offs.result import TradeOff
from leakwatch.studies.trade_offs.rows import Applied, Cell, TradeOffRow
from leakwatch.studies.trade_offs.study import trade_off

__all__ = [
    "Applied",
    "Attacked",
    "Cell",
    "Check",
    "ClassRisk",
    "InitializationComparison",
    "NoiseRecommendation",
    "Outcome",
    "Point",
    "ProbeNoise",
    "Ranked",
    "SampleRisk",
    "TradeOff",
    "TradeOffRow",
    "Unfairness",
    "Verdict",
    "compare_initializations",
    "recommend_noise",
    "trade_off",
    "unfairness",
]
