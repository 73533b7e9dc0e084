"""I²F against attacks: Section 4 and Figure 16 of its paper, with stricter questions.

    LEAKWATCH_TEST_DATA=data OMP_NUM_THREADS=1 python benchmarks/i2f_validation.py

Gaussian noise of several variances is added to the gradients of MNIST digits, and three
attacks start beside the true image (radius 0.01): DGL (L2) and GS (cosine), both by
Adam or with ``--optimizer lbfgs`` by L-BFGS, which DLG used, and Gauss-Newton with the
data's mean and variance as its prior. Their RMSE is compared with what each score
predicts for the very same noise: the exact I²F, the same damped, its lower bound
‖Jᵀδ‖/λ₁, the numerator ‖Jᵀδ‖, and the Bayesian error. Baselines know nothing of the
noise: contrast, total variation, loss, ‖g‖.

Correlations are pooled over noise levels, as in the paper, and within each level, where
the level itself explains nothing. ``--figure`` writes predicted against achieved with
the diagonal; ``--sweep`` repeats the exact I²F for dampings ε (Figure 16).
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

import numpy as np
import torch
from correlations import baselines
from networks import RECIPES, load, network

import leakwatch
from leakwatch.attacks import Attack, GaussNewton, PixelScale, SharedGradient, Start
from leakwatch.attacks.presets import get
from leakwatch.derivatives import GradientMap
from leakwatch.models import build_model, initialize
from leakwatch.reporting.statistics.correlation import spearman

SCORES = ("i2f", "i2f_lb", "i2f_nom", "i2f_bayes")
RADIUS = 0.01


def net_of(name: str) -> torch.nn.Module:
    """A trained or untrained network by name."""
    if name == "linear":
        torch.manual_seed(0)
        net = build_model("linear", in_channels=1, num_classes=10, image_size=28)
        initialize(net, "uniform")
        return net.eval()
    return network(name)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", nargs="+", default=["lenet-sigmoid-untrained"])
    parser.add_argument("--images", type=int, default=10)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument(
        "--variances", nargs="+", type=float, default=[1e-6, 1e-5, 1e-4, 1e-3, 1e-2]
    )
    parser.add_argument(
        "--attacks",
        nargs="+",
        default=["DGL", "GS", "Gauss-Newton"],
        choices=("DGL", "GS", "Gauss-Newton"),
    )
    parser.add_argument("--gn-steps", type=int, default=80)
    parser.add_argument("--optimizer", choices=("adam", "lbfgs"), default="adam")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--figure", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name in args.networks:
        validate(name, args)


def validate(name: str, args: argparse.Namespace) -> None:
    """All noise levels and attacks for one network."""
    data = load("MNIST", args.images, RECIPES[name].size if name in RECIPES else 28)
    net = net_of(name)
    pixels = PixelScale([data.mean], [data.std])
    gradients = GradientMap(net, dtype=torch.float64)
    scale: dict[str, object] = {
        "mean": [data.mean],
        "std": [data.std],
        "prior_std": data.prior_std,
        "prior_mean": data.prior_mean,
        "dtype": torch.float64,
        "max_memory": 16384,
    }
    first_order = {
        "steps": args.steps,
        "lr": 0.01 if args.optimizer == "adam" else 1.0,
        "optimizer": args.optimizer,
        "tv": 0.0,
        "box": False,
    }
    attacks: dict[str, Attack] = {
        "DGL": get("lavp-l2").attack.changed(name="dgl", **first_order),
        "GS": get("lavp-cosine").attack.changed(name="gs", **first_order),
        "Gauss-Newton": GaussNewton(
            steps=args.gn_steps,
            box=False,
            prior_std=data.prior_std,
            prior_mean=data.prior_mean,
        ),
    }
    attacks = {name: attacks[name] for name in args.attacks}
    x = data.x.double()
    d_x = x[0].numel()
    known = baselines(data.x, data.mean, data.std)
    plain = leakwatch.score(
        net, x, data.y, ["loss", "grad_norm"], noise_std=1.0, **scale
    )
    known |= {k: plain[k].numpy() for k in ("loss", "grad_norm")}
    levels, achieved, predicted = [], {a: [] for a in attacks}, {s: [] for s in SCORES}
    sweep: dict[float, list[np.ndarray]] = {}
    for variance in args.variances:
        s = math.sqrt(variance)
        noise = torch.Generator().manual_seed(round(-1000 * math.log10(variance)))
        clean = gradients(x, data.y)
        delta = s * torch.randn(clean.shape, generator=noise, dtype=torch.float64)
        shared = SharedGradient(
            clean + delta, data.y[:, None], tuple(x.shape[1:]), noise_std=s
        )
        found = leakwatch.score(
            net, x, data.y, list(SCORES), noise_std=s, delta=delta, **scale
        )
        for score in SCORES:
            predicted[score].append(found[score].numpy() / math.sqrt(d_x))
        if args.sweep:
            top = leakwatch.score(net, x, data.y, "lavp_l2_max", **scale)
            mean = float(top["lavp_l2_max"].median())
            for power in range(-12, 1, 2):
                damped = leakwatch.score(
                    net,
                    x,
                    data.y,
                    "i2f",
                    delta=delta,
                    epsilon=mean * 10.0**power,
                    **scale,
                )
                sweep.setdefault(10.0**power, []).append(
                    damped["i2f"].numpy() / math.sqrt(d_x)
                )
        levels.append(np.full(len(x), variance))
        for kind, attack in attacks.items():
            began = time.perf_counter()
            rec = attack.run(
                gradients,
                shared,
                pixels=pixels,
                start=Start.near(x, RADIUS),
                seed=0,
                restarts=1,
            )
            apart = (pixels.to_pixels(rec.images) - pixels.to_pixels(x)).flatten(1)
            rmse = apart.square().mean(1).sqrt().numpy()
            achieved[kind].append(rmse)
            off = [
                f"{score} {np.median(_decibels(predicted[score][-1], rmse)):.2f}"
                for score in SCORES
                if score != "i2f_nom"
            ]
            print(
                f"{name}, variance {variance:.0e}, {kind}: RMSE {np.median(rmse):.4f}; "
                f"median |difference| in dB: {', '.join(off)}; "
                f"{time.perf_counter() - began:.0f} s",
                flush=True,
            )
    print(f"\n{name}: Spearman with the RMSE of each attack\n")
    print("| attack | which | " + " | ".join([*SCORES, *known]) + " |")
    print("|" + "---|" * (len(SCORES) + len(known) + 2))
    for kind in attacks:
        rmse = np.concatenate(achieved[kind])
        cells = [_rho(np.concatenate(predicted[s]), rmse) for s in SCORES]
        cells += [_rho(np.tile(v, len(levels)), rmse) for v in known.values()]
        print(f"| {kind} | pooled | " + " | ".join(cells) + " |")
        for i, variance in enumerate(args.variances):
            cells = [_rho(predicted[s][i], achieved[kind][i]) for s in SCORES]
            cells += [_rho(v, achieved[kind][i]) for v in known.values()]
            print(f"| {kind} | {variance:.0e} | " + " | ".join(cells) + " |")
    if args.sweep:
        print("\n| ε/λ₁ | " + " | ".join(f"|dB|, {k}" for k in attacks) + " |")
        print("|" + "---|" * (len(attacks) + 1))
        for epsilon, values in sweep.items():
            found = np.concatenate(values)
            off = [_decibels(found, np.concatenate(a)) for a in achieved.values()]
            cells = [f"{np.nanmedian(d):.2f}" for d in off]
            print(f"| {epsilon:.0e} | " + " | ".join(cells) + " |")
    if args.figure:
        _draw(name, predicted, achieved, levels, args.figure)


def _decibels(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.abs(20 * np.log10(a / b))


def _rho(a: np.ndarray, b: np.ndarray) -> str:
    found = spearman(a, b, bootstrap=0)
    return f"{found.rho:+.2f}" if found.status.usable else "undefined"


def _draw(
    name: str,
    predicted: dict[str, list[np.ndarray]],
    achieved: dict[str, list[np.ndarray]],
    levels: list[np.ndarray],
    path: Path,
) -> None:
    from plotly.subplots import make_subplots

    scores = ("i2f", "i2f_lb", "i2f_bayes")
    figure = make_subplots(1, len(scores), subplot_titles=scores, shared_yaxes=True)
    colours = {"DGL": "#E69F00", "GS": "#009E73", "Gauss-Newton": "#0072B2"}
    for place, score in enumerate(scores, 1):
        x = np.concatenate(predicted[score])
        for kind, values in achieved.items():
            figure.add_scatter(
                x=x,
                y=np.concatenate(values),
                mode="markers",
                name=kind,
                marker={"color": colours[kind], "size": 6},
                text=[f"variance {v:.0e}" for v in np.concatenate(levels)],
                showlegend=place == 1,
                row=1,
                col=place,
            )
        ends = [float(np.nanmin(x)), float(np.nanmax(x))]
        figure.add_scatter(
            x=ends,
            y=ends,
            mode="lines",
            line={"color": "#7A8088", "dash": "dash"},
            name="achieved = predicted",
            showlegend=place == 1,
            row=1,
            col=place,
        )
    figure.update_xaxes(type="log", title_text="predicted RMSE [pixel]")
    figure.update_yaxes(type="log")
    figure.update_yaxes(title_text="achieved RMSE [pixel]", col=1)
    figure.update_layout(title=f"{name}: predicted and achieved", template="none")
    figure.write_html(path.with_name(f"{path.stem}-{name}{path.suffix}"))


if __name__ == "__main__":
    main()
