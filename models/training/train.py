"""Trains the default model. Three commands, in this order (times for one H200; see ../README.md):

    python train.py --data DATA --work WORK autoencoder --seconds 270
    python train.py --data DATA --work WORK diffusion --total 850 --until 150
    python train.py --data DATA --work WORK diffusion --total 850 --until 850

DATA comes from prepare.py. `diffusion` goes on where WORK/state.pt stopped, so its schedule can be spread over any number of
runs, and writes WORK/model (the moving average in float16) and a sheet of samples each time. `warm` compiles the UNet's
kernels into the compiler's cache, which can run beside `autoencoder`.
"""

import argparse
import json
import time
from pathlib import Path

import torch

import autoencoder
import diffusion
import nets
from export import export
from sheets import save_sheet
from vocabulary import Vocabulary, learn

PROMPTS = [
    "cat face", "a red heart", "pizza", "a rocket", "dog face", "birthday cake", "sailboat", "robot",
    "green apple", "house", "crying face", "face with sunglasses", "blue heart", "purple apple", "green heart", "yellow car",
    "a blue cat", "a red house", "pink robot", "green car", "tiger", "octopus", "snowman", "sunflower",
    "a dragon", "sports car", "rainbow", "ice cream", "alien monster", "angry face", "penguin", "a tree",
]  # fmt: skip


def train_autoencoder(a: argparse.Namespace, device: str) -> None:
    from pictures import Pictures

    began = time.time()
    pictures = Pictures(a.data, device, a.tiny)
    print(len(pictures), "pictures,", pictures.originals, "original,", round(pictures.weights.sum().item()), "in effect,",
          round(time.time() - began), "s", flush=True)  # fmt: skip
    if a.vae:
        from diffusers import AutoencoderKL

        vae = AutoencoderKL.from_pretrained(a.vae, torch_dtype=torch.float32).to(device).eval()
        latents = autoencoder.encode(vae, pictures, device)
    else:
        vae = autoencoder.train(pictures, a.seconds, 4 if a.tiny else a.batch or 64, device, a.tiny, compiled(device, a))
        latents = autoencoder.normalise(vae, pictures, device)
    vae.save_pretrained(a.work / "vae")
    autoencoder.report(vae, pictures, a.work / "autoencoder.png", device)
    vocabulary = learn(json.loads((a.data / "captions.json").read_text()))
    vocabulary.save(a.work / "tokenizer")
    print("vocabulary:", len(vocabulary), flush=True)
    ids = diffusion.draw_captions(pictures.captions, vocabulary, a.seed)
    torch.save({"latents": latents, "ids": ids, "weights": pictures.weights}, a.work / "set.pt")
    print("autoencoder done after", round(time.time() - began), "s", flush=True)


def train_diffusion(a: argparse.Namespace, device: str) -> None:
    from diffusers import AutoencoderKL

    began = time.time()
    vocabulary = Vocabulary.load(a.work / "tokenizer")
    trainer = diffusion.Trainer(vocabulary, device, a.tiny, compiled(device, a), 8 if a.tiny else a.batch or 512)
    state = a.work / "state.pt"
    if state.exists():
        trainer.load(state)
    elif a.adopt:
        trainer.adopt(a.adopt)
        trainer.elapsed = a.elapsed
    samples = torch.load(a.work / "set.pt", map_location=device)
    trainer.train(samples["latents"], samples["ids"], samples["weights"], a.total, a.until)
    trainer.save(state)
    trainer.use_average()
    vae = AutoencoderKL.from_pretrained(a.work / "vae", torch_dtype=torch.float32).to(device).eval()
    size = export(a.work / "model", vae, trainer.text, trainer.unet, vocabulary)
    print("model:", size, "bytes", flush=True)
    prompts = PROMPTS[:2] if a.tiny else PROMPTS
    save_sheet(trainer.sample(vae, vocabulary, prompts, 2 if a.tiny else 20, 4.0, 0), 8, a.work / "samples.png")
    print("diffusion at step", trainer.step, "after", round(time.time() - began), "s", flush=True)


def warm(a: argparse.Namespace, device: str) -> None:
    """One step on noise, with the shapes of the real one: fills the compiler's cache."""
    vocabulary = learn(json.loads((a.data / "captions.json").read_text()))
    trainer = diffusion.Trainer(vocabulary, device, a.tiny, compiled(device, a), 8 if a.tiny else a.batch or 512)
    latents = torch.randn(trainer.batch, 4, nets.LATENT, nets.LATENT, device=device)
    ids = torch.zeros(trainer.batch, nets.TOKENS, dtype=torch.long, device=device)
    ids[:, -1] = len(vocabulary) - 1
    trainer.loss(latents, ids).backward()
    print("UNet compiled", flush=True)


def compiled(device: str, a: argparse.Namespace) -> bool:
    return device == "cuda" and not a.eager


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the folder that prepare.py made")
    parser.add_argument("--work", type=Path, required=True, help="where checkpoints and the model go")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=int, help="instead of 64 (autoencoder) and 512 (diffusion)")
    parser.add_argument("--tiny", action="store_true", help="small networks and data: does it run?")
    parser.add_argument("--eager", action="store_true", help="do not compile")
    commands = parser.add_subparsers(dest="command", required=True)
    first = commands.add_parser("autoencoder")
    first.add_argument("--seconds", type=float, default=270)
    first.add_argument("--vae", type=Path, help="a trained autoencoder: only encode the pictures")
    second = commands.add_parser("diffusion")
    second.add_argument("--total", type=float, required=True, help="seconds of the whole schedule")
    second.add_argument("--until", type=float, required=True, help="seconds of it to have done when this run ends")
    second.add_argument("--adopt", type=Path, help="an exported model to start from where there is no checkpoint")
    second.add_argument("--elapsed", type=float, default=0, help="seconds of the schedule that the adopted model had")
    commands.add_parser("warm")
    a = parser.parse_args()

    a.work.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(a.seed)
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    device = "cuda" if torch.cuda.is_available() else "cpu"
    {"autoencoder": train_autoencoder, "diffusion": train_diffusion, "warm": warm}[a.command](a, device)


if __name__ == "__main__":
    main()
