"""The byte-level BPE tokenizer of the embedded model, learned from the training documents only."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from data import SEPARATOR, SHARES, read_documents, split
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

PADDING = "<|padding|>"

# Two speakers, one line a turn, as in the dialogue domain; the end-of-text token closes each reply.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ 'User: ' + message['content'] + '\n' }}"
    "{% elif message['role'] == 'assistant' %}"
    "{{ 'Assistant: ' + message['content'] + eos_token }}{% if not loop.last %}{{ '\n' }}{% endif %}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)


def learn(texts: Iterator[str], vocab_size: int) -> Tokenizer:
    """Learn byte-level BPE: every text can be encoded, and decoding gives the same bytes back.

    Each digit is a token of its own, so that numbers of all lengths are spelled alike.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[SEPARATOR, PADDING],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def training_texts(corpus: Path, byte_budget: int) -> Iterator[str]:
    """Training documents spread evenly over each domain's file, to about `share * byte_budget` bytes a domain."""
    for domain, share in SHARES.items():
        kept, _ = split(read_documents(corpus / f"{domain}.txt.xz"))
        stride = max(sum(map(len, kept)) / (share * byte_budget), 1.0)
        yield from (kept[int(i * stride)] for i in range(int(len(kept) / stride)))


def tokenizer_config(max_positions: int) -> dict[str, object]:
    """The tokenizer_config.json that transformers and minimoe read beside tokenizer.json."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SEPARATOR,
        "pad_token": PADDING,
        "add_bos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_positions,
        "chat_template": CHAT_TEMPLATE,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, default=Path("../shared/data/corpus"))
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--bytes", type=int, default=40_000_000, help="how much text to learn from")
    parser.add_argument("--out", type=Path, default=Path("weights/recipe/work/tokenizer.json"))
    options = parser.parse_args()
    tokenizer = learn(training_texts(options.corpus, options.bytes), options.vocab_size)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(options.out))
    print(json.dumps({"tokenizer": str(options.out), "vocab_size": tokenizer.get_vocab_size()}))


if __name__ == "__main__":
    main()
