"""Writes the model folder in diffusers layout, weights in float16."""

import copy
import json
import shutil
from pathlib import Path

import nets

DEFAULTS = {"defaults": {"steps": 20, "guidance_scale": 4.0, "width": 256, "height": 256, "sampler": "ddim"}}
INDEX = {
    "_class_name": "StableDiffusionPipeline",
    "_diffusers_version": "0.30.0",
    "feature_extractor": [None, None],
    "image_encoder": [None, None],
    "requires_safety_checker": False,
    "safety_checker": [None, None],
    "scheduler": ["diffusers", "DDIMScheduler"],
    "text_encoder": ["transformers", "CLIPTextModel"],
    "tokenizer": ["transformers", "CLIPTokenizer"],
    "unet": ["diffusers", "UNet2DConditionModel"],
    "vae": ["diffusers", "AutoencoderKL"],
}


def export(folder: Path, vae, text, unet, vocabulary) -> int:
    """Returns the folder's size in bytes."""
    for name, network in (("vae", vae), ("text_encoder", text), ("unet", unet)):
        copy.deepcopy(network).half().save_pretrained(folder / name)
        config = folder / name / "config.json"
        # The library makes weights readable by their owner alone; the folder is to be shared.
        for weights in (folder / name).glob("*.safetensors"):
            weights.chmod(0o644)
        kept = {key: value for key, value in json.loads(config.read_text()).items() if key != "_name_or_path"}
        config.write_text(json.dumps(kept, indent=2) + "\n")
    nets.scheduler().save_pretrained(folder / "scheduler")
    vocabulary.save(folder / "tokenizer")
    (folder / "model_index.json").write_text(json.dumps(INDEX, indent=2) + "\n")
    (folder / "sdd.json").write_text(json.dumps(DEFAULTS, indent=2) + "\n")
    shutil.copy(Path(__file__).parent / "LICENSE-DATA", folder / "LICENSE")
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
