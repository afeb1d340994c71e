#!/usr/bin/env python3
"""The same job in diffusers, for main_job.rs: main_job_peer.py MODEL STEPS ROUNDS. Prints one line of JSON, in seconds.

Two threads as the processors here, float32, no progress bar. `cold` is a whole process from start to picture, timed from
outside by a child of this one; the others are the least of ROUNDS warm ones."""
import json
import os
import subprocess
import sys
import time


def pipeline(model):
    import torch
    from diffusers import StableDiffusionPipeline

    pipe = StableDiffusionPipeline.from_pretrained(model, torch_dtype=torch.float32, safety_checker=None)
    pipe.set_progress_bar_config(disable=True)
    return torch, pipe


def main():
    model, steps, rounds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    if os.environ.get("SDD_PEER_ONCE"):
        torch, pipe = pipeline(model)
        generator = torch.Generator().manual_seed(1)
        pipe("a red heart", num_inference_steps=steps, guidance_scale=4.0, generator=generator).images[0].save("peer.png")
        return
    colds = []
    for _ in range(2):
        started = time.perf_counter()
        subprocess.run([sys.executable, *sys.argv], env={**os.environ, "SDD_PEER_ONCE": "1"}, check=True)
        colds.append(time.perf_counter() - started)
    torch, pipe = pipeline(model)
    best = {}

    def timed(name, run, share=1):
        started = time.perf_counter()
        result = run()
        best[name] = min(best.get(name, 1e9), (time.perf_counter() - started) / share)
        return result

    with torch.no_grad():
        for layout in (torch.contiguous_format, torch.channels_last):
            pipe.unet.to(memory_format=layout)
            pipe.vae.to(memory_format=layout)
            for _ in range(rounds):
                encode = lambda: pipe.encode_prompt("a red heart", "cpu", 1, True, "")
                negative_last = timed("encode", encode)
                hidden = torch.cat([negative_last[1], negative_last[0]])
                latents = torch.randn(1, 4, 32, 32)
                pair = torch.cat([latents, latents]).to(memory_format=layout)
                step = lambda: [pipe.unet(pair, 500, encoder_hidden_states=hidden) for _ in range(5)]
                timed("step", step, 5)
                timed("decode", lambda: pipe.vae.decode(latents / pipe.vae.config.scaling_factor))
                generator = torch.Generator().manual_seed(1)
                call = lambda: pipe(
                    "a red heart", num_inference_steps=steps, guidance_scale=4.0, generator=generator
                ).images[0].save("peer.png")
                timed("warm", call)
    print(json.dumps({"cold": min(colds), **best}))


if __name__ == "__main__":
    main()
