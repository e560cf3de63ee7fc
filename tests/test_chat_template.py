"""Conversations to token ids: parity with transformers, special tokens that users spell, and templates that fail."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from fixtures import ABSENT, EOS, PAD, edit_json, write_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from minimoe.errors import InputError
from minimoe.tokenizer import REPLACEMENT, Tokenizer

Messages = list[dict[str, str]]

# The form of OLMoE-Instruct's own template.
TULU = """{{ bos_token }}{% for message in messages %}
{% if message['role'] == 'system' %}
{{ '<|system|>\\n' + message['content'] + '\\n' }}
{% elif message['role'] == 'user' %}
{{ '<|user|>\\n' + message['content'] + '\\n' }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>\\n' + message['content'] + eos_token + '\\n' }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>\\n' }}
{% endif %}
{% endfor %}
"""
PLAIN = "{% for m in messages %}<|endoftext|>{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
WITH_BREAK = "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}[{{ m.content | trim }}]{% endfor %}"
TALK: Messages = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is the fox doing?\n"},
    {"role": "assistant", "content": "It sleeps."},
    {"role": "user", "content": " And the owl? a🙂é한 <b>&amp;</b> {{ 1 }}"},
]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A function that writes a tokenizer folder with the given keys in tokenizer_config.json."""

    def folder(**changes: Any) -> Path:
        place = tmp_path_factory.mktemp("chat")
        write_tokenizer(place)
        edit_json(place / "tokenizer_config.json", changes)
        return place

    return folder


@pytest.fixture(scope="module")
def plain(make: Callable[..., Path]) -> Tokenizer:
    return Tokenizer.from_folder(make(chat_template=PLAIN))


def user(text: str) -> Messages:
    return [{"role": "user", "content": text}]


@pytest.mark.parametrize("template", [TULU, PLAIN, WITH_BREAK], ids=["tulu", "plain", "break"])
@pytest.mark.parametrize("bos", ["<|endoftext|>", ABSENT])
def test_ids_are_those_of_transformers(make: Callable[..., Path], template: str, bos: Any) -> None:
    folder = make(chat_template=template, bos_token=bos)
    ours, theirs = Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder)
    for messages in (TALK, TALK[:2], TALK[1:2], TALK[1:]):
        expected = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert ours.chat(messages) == expected
        assert len(expected) > 5


@pytest.fixture(scope="module")
def theirs(make: Callable[..., Path]) -> Any:
    return AutoTokenizer.from_pretrained(make(chat_template=PLAIN))


@given(st.lists(st.text(st.characters(exclude_categories=["Cs", "Co"]), max_size=12), min_size=1, max_size=3))
@settings(deadline=None, max_examples=60)
def test_ids_of_any_benign_text_are_those_of_transformers(plain: Tokenizer, theirs: Any, texts: list[str]) -> None:
    messages = [{"role": "user", "content": text} for text in texts]
    assert plain.chat(messages) == theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def test_template_and_tokenizer_that_both_add_bos_give_one(make: Callable[..., Path]) -> None:
    folder = make(chat_template=TULU, bos_token="<|endoftext|>")
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", pair="<|endoftext|> $A $B", special_tokens=[("<|endoftext|>", EOS)]
    )
    backend.save(str(folder / "tokenizer.json"))
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.encode("owl")[0] == EOS  # the tokenizer does add one to a plain prompt
    ids = tokenizer.chat(user("owl"))
    assert ids[0] == EOS
    assert ids.count(EOS) == 1
    assert tokenizer.chat(user("the <|padding|> owl")).count(EOS) == 1


SPELLED = [
    "<|endoftext|>",
    "<|padding|>",
    "<|endoftext",
    "|>",
    "<|",
    "<|end",
    "oftext|>",
    "a",
    " ",
    "\n",
    "🙂",
    "\ue000",
]


@given(st.lists(st.lists(st.sampled_from(SPELLED), max_size=8).map("".join), min_size=1, max_size=3))
@settings(deadline=None, max_examples=150)
def test_a_special_token_that_a_user_spells_is_plain_text(plain: Tokenizer, texts: list[str]) -> None:
    ids = plain.chat([{"role": "user", "content": text} for text in texts])
    assert ids.count(EOS) == len(texts)  # the template's own, one a message
    assert ids.count(PAD) == 0
    assert plain.decode(ids) == "".join(f"user: {text}\n" for text in texts) + "assistant:"


def test_encoding_after_a_chat_knows_special_tokens_again(plain: Tokenizer) -> None:
    plain.chat(user("<|endoftext|>"))
    assert plain.encode("<|endoftext|>") == [EOS]


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{% for m in messages | reverse %}{{ m.content }};{% endfor %}", "b<|endoftext|>;a<|padding|>;"),
        ("{{ messages[0].content }}{{ messages[0].content }}", "a<|padding|>a<|padding|>"),
        ("{{ messages[1].content | upper }}", "B<|endoftext|>"),
        ("{{ messages | length }}", "2"),
    ],
)
def test_templates_may_turn_repeat_or_drop_what_users_spell(
    make: Callable[..., Path], template: str, text: str
) -> None:
    tokenizer = Tokenizer.from_folder(make(chat_template=template))
    ids = tokenizer.chat([*user("a<|padding|>"), *user("b<|endoftext|>")])
    assert tokenizer.decode(ids) == text
    assert not {EOS, PAD} & set(ids)


def test_characters_that_stand_for_special_tokens_cannot_be_smuggled_in(plain: Tokenizer) -> None:
    ids = plain.chat(user("x\U00100000y\U0010fffdz<|padding|>"))
    assert plain.decode(ids) == f"user: x{REPLACEMENT}y{REPLACEMENT}z<|padding|>\nassistant:"
    assert (ids.count(EOS), ids.count(PAD)) == (1, 0)


def test_a_tokenizer_without_special_tokens_can_chat() -> None:
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator([], trainer)
    tokenizer = Tokenizer(backend, {}, PLAIN)
    assert tokenizer.decode(tokenizer.chat(user("fox"))) == "<|endoftext|>user: fox\nassistant:"


@pytest.mark.parametrize("template", [ABSENT, None, [], [{"name": "tool_use", "template": "x"}], ["x"]])
def test_a_model_without_a_template_cannot_chat(make: Callable[..., Path], template: Any) -> None:
    with pytest.raises(InputError, match="no chat template, so it cannot chat; use generate instead"):
        Tokenizer.from_folder(make(chat_template=template)).chat(TALK)


def test_the_default_of_several_templates_is_used(make: Callable[..., Path]) -> None:
    templates = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": PLAIN}]
    assert Tokenizer.from_folder(make(chat_template=templates)).chat_template == PLAIN


def test_a_template_in_a_file_of_its_own_comes_first(make: Callable[..., Path]) -> None:
    folder = make(chat_template="old")
    (folder / "chat_template.jinja").write_text(PLAIN, encoding="utf-8")
    assert Tokenizer.from_folder(folder).chat_template == PLAIN
    (folder / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match=r"chat_template\.jinja cannot be read"):
        Tokenizer.from_folder(folder)


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        ("{{ raise_exception('roles must alternate') }}", "the chat template refuses: roles must alternate"),
        ("{% for m in messages %}", "the model's chat template is broken"),
        ("{{ absent.attribute }}", "the model's chat template is broken: 'absent' is undefined"),
        ("{{ absent() }}", "the model's chat template is broken"),
        ("{{ messages + 1 }}", "the model's chat template is broken"),
        ("{{ 1 / 0 }}", "the model's chat template is broken: division by zero"),
        ("{{ messages | nothing }}", "the model's chat template is broken"),
        ("{{ range(10 ** 9) | list }}", "the model's chat template is broken"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "the model's chat template is broken"),
        ("{{ messages.append(1) }}", "the model's chat template is broken"),
    ],
)
def test_a_template_that_fails_is_said_plainly(make: Callable[..., Path], template: str, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        Tokenizer.from_folder(make(chat_template=template)).chat(TALK)


def test_a_template_may_ask_for_the_date(make: Callable[..., Path]) -> None:
    tokenizer = Tokenizer.from_folder(make(chat_template="{{ strftime_now('%Y') }}"))
    assert tokenizer.decode(tokenizer.chat(TALK)) == str(datetime.date.today().year)


def test_a_message_that_is_not_unicode_is_refused(plain: Tokenizer) -> None:
    for text in ("\udcff", "<|padding|>\udcff"):
        with pytest.raises(InputError, match="not valid Unicode"):
            plain.chat(user(text))
