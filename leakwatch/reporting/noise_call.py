"""The call that finds out how much noise is enough, as a run would have to make it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from leakwatch.reporting.quantities import PRIOR

__all__ = ["noise_call"]

# What priors say that attackers know, and how to get one that says so.
_PRIORS: Final = {
    "the statistics of the data set": "leakwatch.priors.measured_prior(images)",
    "the statistics of photographs": "'natural'",
}


def noise_call(metadata: Mapping[str, Any], target: float) -> str:
    """Write the call for the attacker, the pixels and the network of a run.

    Args:
        metadata: Content of ``run.json``.
        target: dB.

    Example:
        >>> noise_call({"config": {"prior": "the statistics of photographs"}}, 20.0)
        "leakwatch.recommend_noise(net, x, y, target_psnr=20, prior='natural')"
    """
    given = ", ".join(["net", "x", "y", f"target_psnr={target:g}", *_given(metadata)])
    return f"leakwatch.recommend_noise({given})"


def _given(metadata: Mapping[str, Any]) -> Iterable[str]:
    config, arguments = _part(metadata, "config"), _part(metadata, "arguments")
    probes, scoring = _part(arguments, "probes"), _part(arguments, "scoring")
    knows, span = config.get("prior", PRIOR), config.get("data_range", 1.0)
    if knows != PRIOR:
        yield f"prior={_PRIORS.get(knows, 'prior')}"
    elif "prior_std" in config:
        yield f"prior_std={_written(config['prior_std'])}"
        if probes.get("prior") is not None:
            yield "prior_mean=images.mean(0)"
    for name in ("mean", "std"):
        if probes.get(name):
            yield f"{name}={_channels(probes[name])}"
    if span != 1.0:
        yield f"data_range={_written(span)}"
    if config.get("parameters"):
        yield f"parameters={config['parameters']!r}"
    if scoring.get("criterion") is not None:
        yield "criterion=criterion"
    if scoring.get("prepare") is not None or arguments.get("prepared_as_in_training"):
        yield "prepare=prepare"


def _channels(values: Sequence[float]) -> str:
    words = [_written(value) for value in values]
    return words[0] if len(words) == 1 else f"[{', '.join(words)}]"


def _written(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else repr(value)


def _part(mapping: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = mapping.get(name)
    return part if isinstance(part, Mapping) else {}
