"""What an attacker knows about images before any gradient: Gaussian priors.

``gaussian`` is what every prior can do, and the one with a whole covariance matrix;
``cosine`` the one with a power spectrum, for images of any size; ``measured`` estimates
both from samples; ``natural`` knows photographs in general.
"""

from leakwatch.priors.cosine import CosinePrior
from leakwatch.priors.gaussian import DensePrior, GaussianPrior
from leakwatch.priors.measured import MeasuredPrior, measured_prior
from leakwatch.priors.natural import natural_prior

__all__ = [
    "CosinePrior",
    "DensePrior",
    "GaussianPrior",
    "MeasuredPrior",
    "measured_prior",
    "natural_prior",
]
