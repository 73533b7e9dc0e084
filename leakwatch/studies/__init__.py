"""Questions about a whole network, answered from scores and attacks together.

Which initialisation leaks least, whom a homogeneous noise protects worst, how much
noise is enough, and what a defense costs and buys.
"""

from __future__ import annotations

from leakwatch.studies.class_risk import ClassRisk, SampleRisk, Unfairness
from leakwatch.studies.comparison import InitializationComparison
from leakwatch.studies.initializations import compare_initializations
from leakwatch.studies.noise_check import Check
from leakwatch.studies.noise_result import NoiseRecommendation, ProbeNoise
from leakwatch.studies.points import Point
from leakwatch.studies.ranking import Ranked, Verdict
from leakwatch.studies.recommendation import recommend_noise
from leakwatch.studies.trade_off_outcomes import Attacked, Outcome
from leakwatch.studies.trade_off_result import TradeOff
from leakwatch.studies.trade_off_rows import Applied, Cell, TradeOffRow
from leakwatch.studies.trade_off_study import trade_off
from leakwatch.studies.unequal_protection import unfairness

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
