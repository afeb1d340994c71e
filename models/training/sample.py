"""Draws a sheet with diffusers from a model folder, on the CPU in float32: what users should see.

    python sample.py MODEL SHEET.png [--seeds 0 1 2] [--steps 20] [--guidance 4] [--prompts "a red heart" pizza]

One row for each seed with `--seeds`, one column for each prompt; with one seed, eight columns.
"""

import argparse
import time
from pathlib import Path

import torch
from diffusers import StableDiffusionPipeline

from sheets import save_sheet
from train import PROMPTS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("sheet", type=Path)
    parser.add_argument("--prompts", nargs="+", default=PROMPTS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--guidance", type=float, default=4.0)
    parser.add_argument("--edge", type=int, default=160)
    a = parser.parse_args()

    pipeline = StableDiffusionPipeline.from_pretrained(a.model, torch_dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    pictures, began = [], time.time()
    for seed in a.seeds:
        for prompt in a.prompts:
            # Each picture has its own generator: it does not depend on what else is on the sheet.
            picture = pipeline(
                prompt,
                num_inference_steps=a.steps,
                guidance_scale=a.guidance,
                generator=torch.Generator().manual_seed(seed),
                output_type="pt",
            ).images
            pictures.append(picture * 2 - 1)
    print(round((time.time() - began) / len(pictures), 2), "s a picture")
    columns = 8 if len(a.seeds) == 1 else len(a.prompts)
    save_sheet(torch.cat(pictures), columns, a.sheet, a.edge)


if __name__ == "__main__":
    main()
