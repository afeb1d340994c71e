"""Trains text encoder and UNet together on the latents, under one schedule that may be spread over several runs."""

import math
import random
import time
from pathlib import Path

import torch
import torch.nn.functional as F

import nets
from vocabulary import Vocabulary

PEAK_RATE = 1.2e-3
CAPTIONS_EACH = 48


def draw_captions(captions: list, vocabulary: Vocabulary, seed: int) -> torch.Tensor:
    """[N, CAPTIONS_EACH, 77] token ids: enough different captions for each picture, drawn once."""
    rng = random.Random(seed)
    texts = [caption.draw(rng) for caption in captions for _ in range(CAPTIONS_EACH)]
    print("captions such as", rng.sample(texts, 24), flush=True)
    ids = torch.tensor(vocabulary.encode(texts), dtype=torch.int16)
    return ids.view(len(captions), CAPTIONS_EACH, nets.TOKENS)


class Trainer:
    """Networks, their moving average, optimiser and clock."""

    def __init__(self, vocabulary: Vocabulary, device: str, tiny: bool, compiled: bool, batch: int):
        self.device, self.batch = device, batch
        self.text = nets.text_encoder(len(vocabulary), tiny).to(device)
        self.unet = nets.prepare(nets.unet(tiny), device)
        self.run_unet = torch.compile(self.unet, dynamic=False) if compiled else self.unet
        self.parameters = [*self.text.parameters(), *self.unet.parameters()]
        self.average = [p.detach().clone() for p in self.parameters]
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=PEAK_RATE, betas=(0.9, 0.99), weight_decay=0.01, fused=device == "cuda"
        )
        self.signal = nets.scheduler().alphas_cumprod.to(device)
        self.elapsed, self.step = 0.0, 0
        print("text encoder and UNet, millions of parameters:", nets.millions(self.text), nets.millions(self.unet), flush=True)

    def loss(self, latents: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Mean square error of the velocity. Timesteps are stratified over the batch, which halves the loss's noise."""
        count = len(latents)
        places = torch.arange(count, device=self.device) + torch.rand(count, device=self.device)
        t = (places * (len(self.signal) / count)).long().clamp_max(len(self.signal) - 1)
        noise = torch.randn_like(latents)
        a = self.signal[t].sqrt().view(-1, 1, 1, 1)
        s = (1 - self.signal[t]).sqrt().view(-1, 1, 1, 1)
        noisy = (a * latents + s * noise).contiguous(memory_format=torch.channels_last)
        with torch.autocast(self.device, dtype=torch.bfloat16):
            states = self.text(input_ids=ids)[0]
            velocity = self.run_unet(noisy, t, encoder_hidden_states=states).sample
        return F.mse_loss(velocity.float(), a * noise - s * latents)

    def train(self, latents: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, total: float, until: float) -> None:
        """Goes on to `until` seconds of the schedule's `total`; compilation does not count."""
        first, began, before = time.time(), None, self.elapsed
        losses, marked = [], (self.step, self.elapsed)
        while self.elapsed < until:
            rate = min(1, self.step / 500) * (0.005 + 0.995 * 0.5 * (1 + math.cos(math.pi * min(1, self.elapsed / total))))
            for group in self.optimizer.param_groups:
                group["lr"] = PEAK_RATE * rate
            rows = torch.multinomial(weights, self.batch, replacement=True)
            columns = torch.randint(0, ids.shape[1], (self.batch,), device=self.device)
            loss = self.loss(latents[rows], ids[rows, columns].long())
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
            self.optimizer.step()
            self.step += 1
            decay = min(0.999, (1 + self.step) / (10 + self.step))
            torch._foreach_lerp_(self.average, [p.detach() for p in self.parameters], 1 - decay)
            losses.append(loss.detach())
            if began is None:
                losses[-1].item()
                began = time.time()
                print("UNet: first step after", round(began - first, 1), "s", flush=True)
            # Reading the clock is right only if the device keeps up: wait for it now and then.
            if self.step % 50 == 0:
                losses[-1].item()
            self.elapsed = before + time.time() - began
            if self.step % 500 == 0:
                mean = torch.stack(losses).mean().item()
                speed = (self.step - marked[0]) / max(1e-3, self.elapsed - marked[1])
                print(f"UNet {self.step} {self.elapsed:.0f} s loss {mean:.5f} rate {rate:.3f} steps/s {speed:.1f}", flush=True)
                losses, marked = [], (self.step, self.elapsed)

    def save(self, path: Path) -> None:
        state = {
            "text": self.text.state_dict(),
            "unet": self.unet.state_dict(),
            "average": self.average,
            "optimizer": self.optimizer.state_dict(),
            "elapsed": self.elapsed,
            "step": self.step,
        }
        torch.save(state, path)

    def load(self, path: Path) -> None:
        state = torch.load(path, map_location=self.device)
        self.text.load_state_dict(state["text"])
        self.unet.load_state_dict(state["unet"])
        self.optimizer.load_state_dict(state["optimizer"])
        torch._foreach_copy_(self.average, state["average"])
        self.elapsed, self.step = state["elapsed"], state["step"]

    def adopt(self, model: Path) -> None:
        """Starts from an exported model, for want of a checkpoint: the optimiser's moments are lost."""
        from diffusers import UNet2DConditionModel
        from transformers import CLIPTextModel

        text = CLIPTextModel.from_pretrained(model / "text_encoder", dtype=torch.float32)
        unet = UNet2DConditionModel.from_pretrained(model / "unet", torch_dtype=torch.float32)
        self.text.load_state_dict(text.state_dict())
        self.unet.load_state_dict(unet.state_dict())
        torch._foreach_copy_(self.average, [p.detach() for p in self.parameters])

    @torch.no_grad()
    def use_average(self) -> None:
        torch._foreach_copy_(self.parameters, self.average)
        self.text.eval()
        self.unet.eval()

    @torch.no_grad()
    def sample(self, vae, vocabulary: Vocabulary, prompts: list[str], steps: int, guidance: float, seed: int) -> torch.Tensor:
        """Pictures [N, 3, 256, 256] by DDIM."""
        scheduler = nets.scheduler()
        scheduler.set_timesteps(steps)
        latents = torch.randn(len(prompts), 4, nets.LATENT, nets.LATENT, generator=torch.Generator().manual_seed(seed))
        latents = latents.to(self.device)
        ids = torch.tensor(vocabulary.encode([*prompts, *[""] * len(prompts)]), device=self.device)
        states = self.text(input_ids=ids)[0]
        for t in scheduler.timesteps:
            velocity = self.unet(torch.cat([latents, latents]), t, encoder_hidden_states=states).sample
            asked, plain = velocity.chunk(2)
            latents = scheduler.step(plain + guidance * (asked - plain), t, latents).prev_sample
        return torch.cat([vae.decode(part / vae.config.scaling_factor).sample for part in latents.split(32)])
