"""What benches/models.rs times, in torch: `models_peer.py FOLDER THREADS` reads names of parts from stdin, runs each once and
answers its seconds by the clock and by the processor."""
import sys
import time

import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from transformers import CLIPTextModel

folder, threads = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(threads)
text = CLIPTextModel.from_pretrained(f"{folder}/text_encoder", torch_dtype=torch.float32).eval()
unet = UNet2DConditionModel.from_pretrained(f"{folder}/unet", torch_dtype=torch.float32).eval()
vae = AutoencoderKL.from_pretrained(f"{folder}/vae", torch_dtype=torch.float32).eval()
ids = torch.full((2, 77), 5)
conditioning = torch.randn(2, 77, unet.config.cross_attention_dim)
latents = torch.randn(2, unet.config.in_channels, 32, 32)
z = torch.randn(1, vae.config.latent_channels, 32, 32)
pixels = torch.randn(1, 3, 256, 256)
parts = {
    "text": lambda: text(ids),
    "unet": lambda: unet(latents, 601, conditioning),
    "decode": lambda: vae.decode(z),
    "encode": lambda: vae.encode(pixels),
}
with torch.inference_mode():
    for line in sys.stdin:
        part = parts[line.strip()]
        wall, cpu = time.perf_counter(), time.process_time()
        part()
        print(time.perf_counter() - wall, time.process_time() - cpu, flush=True)
