"""Contact sheets."""

from pathlib import Path

import torch
from PIL import Image


def save_sheet(x: torch.Tensor, columns: int, path: Path, edge: int = 160) -> None:
    """Writes pictures [N, 3, H, W] in -1..1 side by side, each scaled to `edge` pixels."""
    pixels = ((x.float().cpu().clamp(-1, 1) + 1) * 127.5).round().byte().permute(0, 2, 3, 1).numpy()
    rows = -(-len(pixels) // columns)
    sheet = Image.new("RGB", (columns * edge, rows * edge), "white")
    for index, picture in enumerate(pixels):
        scaled = Image.fromarray(picture).resize((edge, edge), Image.LANCZOS)
        sheet.paste(scaled, (index % columns * edge, index // columns * edge))
    sheet.save(path)
