"""The architectures of ``zoo.py``: what there is, and each at its smallest input.

All have ten classes and weights in general position: as initialised, except that what
starts as zero (last layers, biases, scales of residual branches) is moved, and that
BatchNorm has seen images, so that no derivative is zero or out of range by accident.
Of those images there are enough that others come out alike: statistics of a few don't
hold for the next one, which in a deep network grows from layer to layer until nothing
but rounding is left of it.
"""

from __future__ import annotations

from typing import Any

import torch
import torchvision
from torch import Tensor, nn

CLASSES = 10
# Heads of classification networks with a stride of 32 need at least one position.
SIZES = (32, 64, 80, 96, 128, 160, 192, 224, 240, 256, 384)

_TORCHVISION_ARGS: dict[str, dict[str, Any]] = {
    "googlenet": {"aux_logits": False, "init_weights": False},
    "inception_v3": {"aux_logits": False, "init_weights": False},
}
_TORCHVISION_SIZED = ("vit_", "maxvit")

# Logits of new images may be this many times as large as those of the images that
# BatchNorm has seen; of these there are at most so many pixels.
_ALIKE = 10.0
_MOST_PIXELS = 2**20

# One of the smallest of each family; where a family has none, a narrow one is made.
_NARROW = {"embed_dim": 192, "depth": 3, "num_heads": 3}
TIMM: dict[str, dict[str, Any]] = {
    "bat_resnext26ts": {},
    "beit_base_patch16_224": _NARROW,
    "botnet26t_256": {},
    "caformer_s18": {},
    "cait_xxs24_224": {},
    "coat_lite_tiny": {},
    "coat_tiny": {},
    "coatnet_nano_rw_224": {},
    "convit_tiny": {},
    "convmixer_768_32": {},
    "convnext_atto": {},
    "convnextv2_atto": {},
    "crossvit_tiny_240": {},
    "cs3darknet_focus_s": {},
    "cspnext_tiny": {},
    "csatv2": {},
    "davit_tiny": {},
    "deit_tiny_distilled_patch16_224": {},
    "deit3_small_patch16_224": {},
    "densenetblur121d": {},
    "dla46_c": {},
    "dpn48b": {},
    "eca_nfnet_l0": {},
    "ecaresnet26t": {},
    "edgenext_xx_small": {},
    "efficientformer_l1": {},
    "efficientformerv2_s0": {},
    "efficientnet_b0_g16_evos": {},
    "efficientnet_cc_b0_4e": {},
    "efficientvim_m1": {},
    "efficientvit_b0": {},
    "efficientvit_m0": {},
    "ese_vovnet19b_slim": {},
    "eva02_tiny_patch14_224": {},
    "fasternet_t0": {},
    "fastvit_t8": {},
    "fbnetv3_b": {},
    "flexivit_small": {},
    "focalnet_tiny_srf": {},
    "gcresnext26ts": {},
    "gcvit_xxtiny": {},
    "gernet_s": {},
    "ghostnet_050": {},
    "ghostnetv3_050": {},
    "gmlp_ti16_224": {},
    "halonet26t": {},
    "hardcorenas_a": {},
    "hgnetv2_b0": {},
    "hiera_tiny_224": {},
    "hieradet_small": {},
    "hrnet_w18_small": {},
    "iformer_t": {},
    "inception_next_atto": {},
    "lambda_resnet26t": {},
    "lcnetv2_small": {},
    "legacy_seresnet18": {},
    "levit_128s": {},
    "lowformer_b0": {},
    "mambaout_femto": {},
    "maxvit_pico_rw_256": {},
    "mixer_s32_224": {},
    "mixnet_s": {},
    "mobilenetv3_small_050": {},
    "mobilenetv4_conv_small_035": {},
    "mobilenetv4_hybrid_medium": {},
    "mobileone_s0": {},
    "mobilevit_xxs": {},
    "mobilevitv2_050": {},
    "mvitv2_tiny": {},
    "naflexvit_base_patch16_gap": _NARROW,
    "nest_tiny": {},
    "nextvit_small": {},
    "nf_resnet26": {},
    "pit_ti_224": {},
    "poolformer_s12": {},
    "pvt_v2_b0": {},
    "rdnet_tiny": {},
    "regnetz_005": {},
    "repghostnet_050": {},
    "repvgg_a0": {},
    "repvit_m0_9": {},
    "res2net50_26w_4s": {},
    "resmlp_12_224": {},
    "resnest14d": {},
    "resnet10t": {},
    "resnet50_gn": {},
    "resnetv2_50d_frn": {},
    "resnetv2_50x1_bit": {},
    "rexnet_100": {},
    "selecsls42": {},
    "sequencer2d_s": {},
    "shvit_s1": {},
    "skresnet18": {},
    "starnet_s050": {},
    "swiftformer_xs": {},
    "swin_tiny_patch4_window7_224": {},
    "swinv2_cr_tiny_ns_224": {},
    "swinv2_tiny_window8_256": {},
    "tiny_vit_5m_224": {},
    "tnt_s_patch16_224": {},
    "tresnet_m": {},
    "twins_pcpvt_small": {},
    "twins_svt_small": {},
    "visformer_tiny": {},
    "vit_relpos_small_patch16_224": {},
    "vit_small_patch16_rope_mixed_224": {},
    "vit_tiny_patch16_224": {},
    "vit_tiny_r_s16_p8_224": {},
    "vitamin_small_224": {},
    "volo_d1_224": {},
    "xception41": {},
    "xcit_nano_12_p16_224": {},
}


def catalogue() -> list[str]:
    """``torchvision/<name>`` of all classifiers, then ``timm/<name>`` if installed."""
    names = torchvision.models.list_models(module=torchvision.models)
    found = [f"torchvision/{name}" for name in names]
    try:
        import timm  # noqa: F401
    except ImportError:
        return found
    return found + [f"timm/{name}" for name in TIMM]


def build(name: str, smallest: int = SIZES[0]) -> tuple[nn.Module, int]:
    """A network and the smallest of :data:`SIZES` at which it classifies.

    Args:
        name: one of :func:`catalogue`.
        smallest: no size below this is tried.

    Returns:
        The network in eval mode, float32, and height and width of its input.

    Raises:
        RuntimeError: if it runs at no size, with what it said at each.
    """
    said = []
    net: nn.Module | None = None
    for size in (s for s in SIZES if s >= smallest):
        sized = _made(name, size) if net is None or _sized(name) else net
        if isinstance(sized, Exception):
            said.append(f"{size}: {sized}")
            continue
        net = sized.eval()
        try:
            with torch.no_grad():
                out = net(torch.rand(2, 3, size, size))
        except Exception as error:
            said.append(f"{size}: {error or type(error).__name__}")
            continue
        if not isinstance(out, Tensor) or out.shape != (2, CLASSES):
            raise RuntimeError(f"{name} returns no logits of shape (2, {CLASSES})")
        _move(net)
        _calibrate(net, size)
        return net, size
    raise RuntimeError(f"{name} runs at no size; " + "; ".join(said))


def freeze_largest(net: nn.Module, most: int) -> None:
    """Freezes the largest tensors until at most ``most`` elements are trained."""
    total = sum(p.numel() for p in net.parameters())
    for p in sorted(net.parameters(), key=Tensor.numel, reverse=True):
        if total <= most:
            return
        p.requires_grad_(False)
        total -= p.numel()


def _sized(name: str) -> bool:
    library, name = name.split("/")
    return library == "timm" or name.startswith(_TORCHVISION_SIZED)


def _made(name: str, size: int) -> nn.Module | Exception:
    library, name = name.split("/")
    if library == "torchvision":
        args = dict(_TORCHVISION_ARGS.get(name, {}))
        if name.startswith("vit_"):
            args["image_size"] = size
        if name.startswith("maxvit"):
            args["input_size"] = (size, size)
        try:
            made: nn.Module = torchvision.models.get_model(
                name, weights=None, num_classes=CLASSES, **args
            )
        except Exception as error:
            return error
        return made
    import timm

    args = TIMM[name] | {"num_classes": CLASSES}
    try:
        made = timm.create_model(name, img_size=size, **args)
    except TypeError:
        made = timm.create_model(name, **args)
    except Exception as error:
        return error
    return made


def _move(net: nn.Module) -> None:
    for p in net.parameters():
        if p.is_floating_point() and not bool(p.detach().any()):
            nn.init.normal_(p, std=0.02)


def _calibrate(net: nn.Module, size: int) -> None:
    norms = [
        m
        for m in net.modules()
        if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.track_running_stats
    ]
    if not norms:
        return
    x = torch.randn(16, 3, size, size)
    # A stream of its own: what is drawn later must not depend on what is needed here.
    generator = torch.Generator().manual_seed(0)
    while True:
        seen = _observed(net, norms, x)
        with torch.no_grad():
            others = net(torch.randn(16, 3, size, size, generator=generator))
        if bool(others.norm() <= _ALIKE * seen.norm() * (16 / len(x)) ** 0.5):
            return
        if 4 * len(x) * size**2 > _MOST_PIXELS:
            return
        x = torch.randn(4 * len(x), 3, size, size, generator=generator)


def _observed(net: nn.Module, norms: list[Any], x: Tensor) -> Tensor:
    """Logits of images whose own statistics BatchNorm uses, and keeps."""
    momenta = [m.momentum for m in norms]
    for m in norms:
        m.train().momentum = 1.0
    with torch.no_grad():
        seen: Tensor = net(x)
    for m, momentum in zip(norms, momenta, strict=True):
        m.eval().momentum = momentum
    return seen
