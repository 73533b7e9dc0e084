"""Questions about a whole network, answered from scores and attacks together.

Which initialisation leaks least, whom a homogeneous noise protects worst, and how much
noise is enough.
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
from leakwatch.studies.unequal_protection import unfairness

__all__ = [
    "Check",
    "ClassRisk",
    "InitializationComparison",
    "NoiseRecommendation",
    "Point",
    "ProbeNoise",
    "Ranked",
    "SampleRisk",
    "Unfairness",
    "Verdict",
    "compare_initializations",
    "recommend_noise",
    "unfairness",
]
