"""Trains the autoencoder, then gives each latent channel mean 0 and deviation 1."""

import math
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL

import nets
from pictures import Pictures


def distance(ours: torch.Tensor, theirs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Absolute differences of pixels and of their gradients at four sizes: the gradients keep edges sharp."""
    total = ours.new_zeros(())
    for _ in range(4):
        difference = ours - theirs
        total = total + (difference.abs() * weight).mean()
        total = total + (difference.diff(dim=-1).abs() * weight[..., 1:]).mean()
        total = total + (difference.diff(dim=-2).abs() * weight[..., 1:, :]).mean()
        ours, theirs, weight = F.avg_pool2d(ours, 2), F.avg_pool2d(theirs, 2), F.avg_pool2d(weight, 2)
    return total


def train(pictures: Pictures, seconds: float, batch: int, device: str, tiny: bool, compiled: bool) -> AutoencoderKL:
    vae = nets.prepare(nets.autoencoder(tiny), device)
    print("autoencoder, millions of parameters:", nets.millions(vae), flush=True)
    encoder, decoder = vae.encoder, vae.decoder
    if compiled:
        encoder, decoder = torch.compile(encoder, dynamic=False), torch.compile(decoder, dynamic=False)
    optimizer = torch.optim.AdamW(
        vae.parameters(), lr=1e-3, betas=(0.9, 0.99), weight_decay=1e-4, fused=device == "cuda"
    )
    # Repainted pictures, tones and flags need less room than what people ask for, but must not be strangers.
    weights = pictures.weights.clamp(0.03, 1.0)

    step, first = 0, time.time()
    began = first
    while (elapsed := time.time() - began) < seconds:
        rate = min(1, step / 200) * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * elapsed / seconds)))
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * rate
        rows = torch.multinomial(weights, batch, replacement=True)
        x = pictures.batch(rows)
        content = F.max_pool2d(pictures.content[rows], 3, 1, 1)
        if step % 2:
            x, content = x.flip(-1), content.flip(-1)
        weight = 0.3 + 0.7 * F.interpolate(content, size=x.shape[-2:])
        with torch.autocast(device, dtype=torch.bfloat16):
            mean, log_variance = vae.quant_conv(encoder(x)).float().chunk(2, 1)
            log_variance = log_variance.clamp(-30, 20)
            # Noise beyond the posterior's own: the decoder will be shown what a small denoiser predicts, not exact codes.
            spread = mean.detach().std((0, 2, 3), keepdim=True)
            extra = 0.06 * spread * torch.rand(batch, 1, 1, 1, device=device)
            noise = torch.randn_like(mean) * (log_variance.exp() + extra * extra).sqrt()
            y = decoder(vae.post_quant_conv(mean + noise))
        divergence = 0.5 * (mean * mean + log_variance.exp() - 1 - log_variance).mean()
        loss = distance(y.float(), x, weight) + 1e-3 * divergence
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        step += 1
        if step == 1:
            # Compilation is not training: the schedule starts after it.
            loss.item()
            began = time.time()
            print("autoencoder: first step after", round(began - first, 1), "s", flush=True)
        if step % 250 == 0:
            error = (y.float() - x).abs().mean().item()
            print(f"autoencoder {step} {elapsed:.0f} s loss {loss.item():.4f} kl {divergence.item():.2f} l1 {error:.4f}", flush=True)
    print("autoencoder steps:", step, flush=True)
    return vae.eval()


@torch.no_grad()
def normalise(vae: AutoencoderKL, pictures: Pictures, device: str) -> torch.Tensor:
    """Folds each channel's mean and deviation into the two 1 x 1 convolutions around the latents, and returns all latents
    in that scale: [N, 4, 32, 32]. The result is a plain autoencoder with scaling factor 1, and no channel is drowned in the
    noise of another's scale (under one factor the deviations were 0.75, 0.38, 1.37 and 0.72)."""
    latents = encode(vae, pictures, device)
    own = latents[: pictures.originals]
    mean, deviation = own.mean((0, 2, 3)), own.std((0, 2, 3))
    print("latent means", mean.tolist(), "deviations", deviation.tolist(), flush=True)
    quant, post = vae.quant_conv, vae.post_quant_conv
    channels = len(mean)
    post.bias += post.weight.flatten(1) @ mean
    post.weight *= deviation.view(1, -1, 1, 1)
    quant.weight[:channels] /= deviation.view(-1, 1, 1, 1)
    quant.bias[:channels] = (quant.bias[:channels] - mean) / deviation
    quant.bias[channels:] -= 2 * deviation.log()
    vae.register_to_config(scaling_factor=1.0)
    column = (1, -1, 1, 1)
    return (latents - mean.view(column)) / deviation.view(column)


@torch.no_grad()
def encode(vae: AutoencoderKL, pictures: Pictures, device: str) -> torch.Tensor:
    found = []
    for start in range(0, len(pictures), 64):
        rows = torch.arange(start, min(start + 64, len(pictures)), device=device)
        with torch.autocast(device, dtype=torch.bfloat16):
            moments = vae.quant_conv(vae.encoder(pictures.batch(rows)))
        found.append(moments.float().chunk(2, 1)[0])
    return torch.cat(found)


@torch.no_grad()
def report(vae: AutoencoderKL, pictures: Pictures, path: Path, device: str) -> None:
    """Sixteen pictures above their reconstructions, and the mean PSNR over 256."""
    from sheets import save_sheet

    pick = lambda n: torch.linspace(0, pictures.originals - 1, min(n, pictures.originals), device=device).long()
    ratios = []
    for rows in pick(256).split(32):
        x = pictures.batch(rows)
        y = vae.decode(vae.encode(x).latent_dist.mode()).sample.clamp(-1, 1)
        ratios.append(-10 * ((x - y) ** 2 / 4).mean((1, 2, 3)).log10())
    print("autoencoder PSNR, dB:", round(torch.cat(ratios).mean().item(), 2), flush=True)
    x = pictures.batch(pick(16))
    y = vae.decode(vae.encode(x).latent_dist.mode()).sample
    save_sheet(torch.stack([x[:8], y[:8], x[8:], y[8:]]).flatten(0, 1) if len(x) == 16 else torch.cat([x, y]), 8, path)
