"""Which colour a picture mainly has, and the same picture in another colour.

Colour words bind to objects only if objects come in several colours. Most emoji come in one, so pictures whose surface is
mostly of one hue (or mostly without hue) are repainted: hue moved, saturation and brightness brought to the target's by
a power, which keeps shading and highlights. What has another hue (a leaf, a window, eyes) stays as it is.
"""

import math

import torch

# hue in degrees, mean saturation, mean brightness of the painted surface
PAINTS = {
    "red": (354, 0.82, 0.90),
    "orange": (25, 0.85, 0.97),
    "yellow": (46, 0.78, 0.98),
    "green": (125, 0.66, 0.70),
    "turquoise": (178, 0.66, 0.80),
    "blue": (212, 0.80, 0.92),
    "purple": (268, 0.62, 0.78),
    "pink": (333, 0.50, 0.97),
    "brown": (22, 0.58, 0.50),
    "black": (255, 0.18, 0.24),
    "white": (250, 0.05, 0.95),
    "grey": (250, 0.05, 0.64),
}
# How prompts may call them.
ALIASES = {
    "yellow": ["yellow", "yellow", "yellow", "golden"],
    "turquoise": ["turquoise", "cyan", "teal"],
    "purple": ["purple", "purple", "purple", "violet"],
    "grey": ["grey", "gray", "grey", "gray", "silver"],
}
WORDS = {*PAINTS, "golden", "gold", "cyan", "teal", "violet", "gray", "silver", "dark", "light"}
CHROMATIC = ["red", "orange", "yellow", "green", "turquoise", "blue", "purple", "pink"]


def to_hsv(rgb: torch.Tensor) -> torch.Tensor:
    """[B, 3, H, W] in 0..1 -> hue in degrees, saturation and value in 0..1, same shape."""
    top, which = rgb.max(1)
    low = rgb.min(1).values
    spread = top - low
    safe = spread.clamp_min(1e-6)
    r, g, b = rgb.unbind(1)
    hue = torch.where(which == 0, (g - b) / safe, torch.where(which == 1, 2 + (b - r) / safe, 4 + (r - g) / safe))
    return torch.stack([(hue * 60) % 360, spread / top.clamp_min(1e-6), top], 1)


def to_rgb(hsv: torch.Tensor) -> torch.Tensor:
    """The inverse of `to_hsv`."""
    h, s, v = hsv.unbind(1)
    channels = []
    for offset in (5.0, 3.0, 1.0):
        k = (offset + h / 60) % 6
        channels.append(v - v * s * torch.minimum(k, 4 - k).clamp(0, 1))
    return torch.stack(channels, 1)


def ramp(x: torch.Tensor, start: float, end: float) -> torch.Tensor:
    """0 at `start`, 1 at `end`, smooth between; `start` may lie above `end`."""
    x = ((x - start) / (end - start)).clamp(0, 1)
    return x * x * (3 - 2 * x)


def turn(a: torch.Tensor, b: torch.Tensor | float) -> torch.Tensor:
    """The signed angle from b to a, in -180..180."""
    return (a - b + 180) % 360 - 180


def toned(x: torch.Tensor, mean: torch.Tensor, goal: float) -> torch.Tensor:
    """x [B, 1, H, W] with its `mean` [B] taken to `goal` by a power, which keeps 0 and 1 where they are. Steep powers would
    turn smooth shading into blotches: beyond a bound, a factor does the rest."""
    power = (math.log(goal) / mean.log()).clamp(0.3, 2.5)
    factor = goal / mean**power
    return (x.clamp(1e-3, 1) ** power.view(-1, 1, 1, 1) * factor.view(-1, 1, 1, 1)).clamp(0, 1)


class Surface:
    """The paintable part of a batch of pictures.

    `mask` [B, 1, H, W], `hue`, `saturation`, `value` [B] are its means, `share` [B] its part of the opaque area, `neutral` [B]
    whether it has no hue of its own.
    """

    def __init__(self, rgba: torch.Tensor):
        alpha = rgba[:, 3:4]
        self.hsv = to_hsv(rgba[:, :3])
        h, s, v = (c.unsqueeze(1) for c in self.hsv.unbind(1))
        area = alpha.sum((1, 2, 3)).clamp_min(1)

        weight = (alpha * ramp(s, 0.15, 0.4) * ramp(v, 0.15, 0.35)).flatten(1)
        bins = (h.flatten(1) / 5).long() % 72
        histogram = torch.zeros(len(rgba), 72, device=rgba.device).scatter_add_(1, bins, weight)
        smooth = sum(histogram.roll(shift, 1) for shift in range(-4, 5))
        peak = smooth.argmax(1) * 5.0 + 2.5
        away = turn(h, peak.view(-1, 1, 1, 1))
        hued = alpha * ramp(away.abs(), 62, 40) * ramp(s, 0.12, 0.3) * ramp(v, 0.08, 0.2)
        plain = alpha * ramp(s, 0.34, 0.2) * ramp(v, 0.3, 0.42)

        hued_share, plain_share = hued.sum((1, 2, 3)) / area, plain.sum((1, 2, 3)) / area
        self.neutral = plain_share > hued_share
        pick = self.neutral.view(-1, 1, 1, 1)
        self.mask = torch.where(pick, plain, hued)
        self.share = torch.where(self.neutral, plain_share, hued_share)
        total = self.mask.sum((1, 2, 3)).clamp_min(1)
        mean = lambda x: (x * self.mask).sum((1, 2, 3)) / total
        self.hue = (peak + mean(away)) % 360
        self.saturation = mean(s).clamp(0.02, 0.98)
        self.value = mean(v).clamp(0.05, 0.98)

    def painted(self, colour: str) -> torch.Tensor:
        """The pictures with their surfaces in `colour`: [B, 3, H, W] in 0..1, not yet on a background."""
        hue, saturation, value = PAINTS[colour]
        h, s, v = (c.unsqueeze(1) for c in self.hsv.unbind(1))
        column = lambda x: x.view(-1, 1, 1, 1)
        # Gradients run over wide ranges of hue; a third of them keeps the look without leaving the colour's name.
        new_h = (hue + 0.35 * turn(h, column(self.hue)) * (~column(self.neutral))) % 360
        new_s = torch.where(column(self.neutral), torch.full_like(s, saturation), toned(s, self.saturation, saturation))
        new_v = toned(v, self.value, value)
        new = to_rgb(torch.cat([new_h, new_s, new_v], 1))
        return to_rgb(self.hsv) * (1 - self.mask) + new * self.mask

    def names(self) -> list[str | None]:
        """Each surface's own colour, or None where it is too small or lies between two names."""
        found = []
        for h, s, v, share, neutral in zip(
            *(x.tolist() for x in (self.hue, self.saturation, self.value, self.share, self.neutral)), strict=True
        ):
            near, distance = nearest(h)
            if share < 0.45:
                found.append(None)
            elif neutral:
                found.append("white" if v > 0.85 else "grey" if v < 0.75 else None)
            elif v < 0.72 and (h < 40 or h > 350):
                found.append("brown" if s < 0.8 else None)
            elif (h < 12 or h > 340) and s < 0.55:
                found.append("pink")
            else:
                found.append(near if distance < 13 else None)
        return found


def nearest(hue: float) -> tuple[str, float]:
    """The colour whose paint has the nearest hue, and how far away it is. The golden faces count as yellow."""
    hues = {c: PAINTS[c][0] for c in CHROMATIC} | {"orange": 20, "yellow": 44}
    return min(((c, abs((hue - h + 180) % 360 - 180)) for c, h in hues.items()), key=lambda pair: pair[1])


# The least share of the opaque area that a repainted surface must cover.
PAINTABLE_SHARE = 0.55
