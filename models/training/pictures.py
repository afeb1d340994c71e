"""The training set on the device: pictures, their repainted versions, captions and sampling weights."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from PIL import Image

import colours
import words
from nets import SIZE


class Pictures:
    """`rgb` [N, 3, 256, 256] bytes on white, `content` [N, 1, 32, 32] where a picture has any, `captions` and `weights` [N].

    The first `originals` of them are the data set's own.
    """

    def __init__(self, data: Path, device: str, tiny: bool):
        entries = json.loads((data / "captions.json").read_text())
        rare = words.rare_words(entries)
        files = sorted(entries)[:: 60 if tiny else 1]
        with ThreadPoolExecutor() as pool:
            loaded = list(pool.map(lambda file: load(data / "pictures" / file), files))
        rgba = torch.from_numpy(np.stack(loaded)).permute(0, 3, 1, 2).contiguous()

        self.originals = len(files)
        self.captions: list[words.Caption] = [None] * len(files)
        weights = [weight(entries[file]) for file in files]
        names = {entry["name"] for entry in entries.values()}
        rgb, content = [], []
        painted: list[tuple[list[int], str, torch.Tensor]] = []
        for start in range(0, len(files), 64):
            batch = rgba[start : start + 64].to(device).float() / 255
            surface = colours.Surface(batch)
            own = surface.names()
            for row, colour in enumerate(own):
                file = files[start + row]
                named = colour if words.may_be_painted(entries[file]) else None
                self.captions[start + row] = words.Caption(entries[file], rare[file], named)
            rgb.append(on_white(batch[:, :3], batch[:, 3:]))
            content.append(torch.nn.functional.max_pool2d(batch[:, 3:], 8))
            share = surface.share.tolist()
            for paint in colours.PAINTS:
                rows = [
                    row
                    for row in range(len(batch))
                    if share[row] > colours.PAINTABLE_SHARE
                    and paintable(entries[files[start + row]], paint, own[row], names)
                ]
                if rows:
                    repainted = on_white(surface.painted(paint)[rows], batch[rows, 3:])
                    painted.append(([start + row for row in rows], paint, repainted))

        kinds: dict[int, int] = {}
        for rows, _, _ in painted:
            for row in rows:
                kinds[row] = kinds.get(row, 0) + 1
        for rows, paint, repainted in painted:
            rgb.append(repainted)
            for row in rows:
                entry = entries[files[row]]
                self.captions.append(words.PaintedCaption(entry, rare[files[row]], paint))
                weights.append((1.0 if entry["name"] in words.SYNONYMS else 0.35) / kinds[row])
                content.append(content[row // 64][row % 64 : row % 64 + 1])
        self.rgb = torch.cat(rgb)
        self.content = torch.cat(content)
        self.weights = torch.tensor(weights, device=device)

    def __len__(self) -> int:
        return len(self.rgb)

    def batch(self, rows: torch.Tensor) -> torch.Tensor:
        """[B, 3, 256, 256] in -1..1, channels-last."""
        return (self.rgb[rows].float() / 127.5 - 1).contiguous(memory_format=torch.channels_last)


def load(path: Path) -> np.ndarray:
    return np.asarray(Image.open(path).convert("RGBA").resize((SIZE, SIZE), Image.LANCZOS))


def on_white(rgb: torch.Tensor, alpha: torch.Tensor) -> torch.Tensor:
    return ((rgb * alpha + 1 - alpha) * 255).round().clamp(0, 255).byte()


def weight(entry: dict) -> float:
    """How often a picture is drawn: the five tones of a person and the flags would be half of everything otherwise."""
    if entry["tone"] or entry["group"] == "Flags":
        return 0.2
    return 1.5 if entry["name"] in words.SYNONYMS else 1.0


def paintable(entry: dict, paint: str, own: str | None, names: set[str]) -> bool:
    """Whether a repainted version helps: a thing of its own, in a colour that it has not, that no other picture shows."""
    if not words.may_be_painted(entry) or paint == own:
        return False
    name = entry["name"]
    bare = words.without_colour(name)
    return bool(bare) and paint not in name.split() and f"{paint} {bare}" not in names
