"""A CLIP-style byte-pair vocabulary, learned from the captions' words."""

import json
from pathlib import Path

from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

import colours
import words
from nets import TOKENS

# Of the trainer; the two alphabets (bytes, and bytes that end a word) and the special tokens come on top in part.
SIZE = 2240
START, END = "<|startoftext|>", "<|endoftext|>"
SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"


class Vocabulary:
    """`encode` gives 77 ids: start, the text, end, and the end repeated, as CLIP's tokenizer pads."""

    def __init__(self, vocab: dict[str, int], merges: list[tuple[str, str]]):
        self.vocab, self.merges = vocab, merges
        self.tokenizer = tokenizer(
            models.BPE(vocab=vocab, merges=merges, end_of_word_suffix="</w>", continuing_subword_prefix="", unk_token=END)
        )
        self.start, self.end = vocab[START], vocab[END]

    def __len__(self) -> int:
        return len(self.vocab)

    def encode(self, texts: list[str]) -> list[list[int]]:
        found = []
        for encoding in self.tokenizer.encode_batch(texts):
            ids = encoding.ids[: TOKENS - 2]
            found.append([self.start, *ids, *[self.end] * (TOKENS - 1 - len(ids))])
        return found

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "vocab.json").write_text(json.dumps(self.vocab, ensure_ascii=False))
        lines = "\n".join(" ".join(pair) for pair in self.merges)
        (folder / "merges.txt").write_text(f"#version: 0.2\n{lines}\n")
        special = {"bos_token": START, "eos_token": END, "pad_token": END, "unk_token": END}
        (folder / "special_tokens_map.json").write_text(json.dumps(special, indent=2))
        config = special | {"model_max_length": TOKENS, "tokenizer_class": "CLIPTokenizer", "do_lower_case": True}
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2))

    @classmethod
    def load(cls, folder: Path) -> "Vocabulary":
        lines = (folder / "merges.txt").read_text().splitlines()[1:]
        return cls(json.loads((folder / "vocab.json").read_text()), [tuple(line.split(" ")) for line in lines])


def tokenizer(model: models.BPE) -> Tokenizer:
    made = Tokenizer(model)
    made.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()]
    )
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="removed", invert=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return made


def learn(entries: dict) -> Vocabulary:
    texts = [entry["name"] + " " + " ".join(entry["words"]) for entry in entries.values()]
    common = [name + " " + " ".join(synonyms) for name, synonyms in words.SYNONYMS.items()]
    common += [*words.TEMPLATES, *colours.WORDS, "colored", "coloured", "skin tone", "big small with without the a an of"]
    learner = tokenizer(models.BPE(unk_token=None, end_of_word_suffix="</w>", continuing_subword_prefix=""))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=SIZE, end_of_word_suffix="</w>", initial_alphabet=alphabet, show_progress=False
    )
    learner.train_from_iterator(texts + common * 20, trainer)
    merges = [tuple(m) if isinstance(m, list) else tuple(m.split(" ")) for m in json.loads(learner.to_str())["model"]["merges"]]
    # CLIP's order: bytes, bytes that end a word, merges, specials.
    order = [*alphabet, *(c + "</w>" for c in alphabet), *("".join(m) for m in merges), START, END]
    vocab = {token: index for index, token in enumerate(dict.fromkeys(order))}
    return Vocabulary(vocab, merges)
