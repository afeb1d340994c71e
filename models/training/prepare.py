"""Fetch the pictures and their words, and join them into one data folder.

    python prepare.py DATA

needs `npm` and a network. DATA then holds `pictures/*.webp` (256 x 256, with transparency) and `captions.json`:
file name -> {"name", "words", "group", "tone"}. The three packages are pinned and MIT-licensed; nothing else is read.
"""

import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

PICTURES = "@lobehub/fluent-emoji-3d@1.1.0"
NAMES = "unicode-emoji-json@0.9.0"
WORDS = "emojilib@4.0.3"

TONES = {
    0x1F3FB: "light",
    0x1F3FC: "medium light",
    0x1F3FD: "medium",
    0x1F3FE: "medium dark",
    0x1F3FF: "dark",
}
VARIATION_SELECTOR = 0xFE0F


def fetch(package: str, folder: Path) -> Path:
    """Unpacks an npm package below `folder` and returns where its files are."""
    reply = subprocess.run(
        ["npm", "pack", "--json", package], cwd=folder, check=True, capture_output=True, text=True
    ).stdout
    archive = folder / json.loads(reply)[0]["filename"]
    target = folder / archive.stem
    with tarfile.open(archive) as tar:
        tar.extractall(target, filter="data")
    return target / "package"


def key(code_points: list[int]) -> str:
    """What pictures, names and words have in common: the emoji without tones and variation selectors."""
    return "".join(chr(c) for c in code_points if c not in TONES and c != VARIATION_SELECTOR)


def join(pictures: Path, names: dict, words: dict) -> dict:
    """File name -> caption data, for every picture that has a name."""
    by_key = {key([ord(c) for c in emoji]): (emoji, entry) for emoji, entry in names.items()}
    captions = {}
    for path in sorted(pictures.glob("*.webp")):
        points = [int(part, 16) for part in path.stem.split("-")]
        # A few files are named otherwise, or show a skin tone alone.
        if max(points) > sys.maxunicode or not key(points) or key(points) not in by_key:
            continue
        emoji, entry = by_key[key(points)]
        tones = list(dict.fromkeys(TONES[c] for c in points if c in TONES))
        name = entry["name"].replace("’", "'").replace(":", "").lower()
        own = [w.replace("_", " ").strip().lower() for w in words.get(emoji, [])]
        captions[path.name] = {
            "name": name,
            "words": [w for w in dict.fromkeys(own) if w and w != name],
            "group": entry["group"],
            "tone": " and ".join(tones),
        }
    return captions


def main() -> None:
    data = Path(sys.argv[1])
    data.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        pictures = fetch(PICTURES, scratch) / "assets"
        names = json.loads((fetch(NAMES, scratch) / "data-by-emoji.json").read_text())
        words = json.loads((fetch(WORDS, scratch) / "dist" / "emoji-en-US.json").read_text())
        captions = join(pictures, names, words)
        (data / "pictures").mkdir(exist_ok=True)
        for name in captions:
            shutil.copy(pictures / name, data / "pictures" / name)
    (data / "captions.json").write_text(json.dumps(captions, indent=0, ensure_ascii=False))
    print(f"{len(captions)} pictures with names in {data}")


if __name__ == "__main__":
    main()
