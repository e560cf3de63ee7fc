"""Text to token ids and back: tokenizer.json, the chat template, and text that arrives token by token."""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import tokenizers

from minimoe.errors import InputError
from minimoe.weight_files import read_json, why_unreadable

REPLACEMENT = "\ufffd"  # what a decoder writes for bytes that are not (yet) a whole character
# Characters of Unicode's last private use plane: each stands for a special token's name while a template is rendered.
_FIRST_MARK = 0x100000
_MARK = re.compile("([\U00100000-\U0010ffff])")


class Tokenizer:
    """The tokenizer of a checkpoint folder.

    Attributes:
        vocab_size: entries, added tokens included.
        bos_token, eos_token: as tokenizer_config.json names them, or None.
        chat_template: a Jinja template, or None if the checkpoint has none.
    """

    def __init__(self, backend: tokenizers.Tokenizer, settings: Mapping[str, Any], chat_template: str | None) -> None:
        self._backend = backend
        self._backend.no_padding()
        self._backend.no_truncation()
        self.bos_token = _token_text(settings, "bos_token")
        self.eos_token = _token_text(settings, "eos_token")
        self.chat_template = chat_template

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """Read tokenizer.json and, if they are there, tokenizer_config.json and chat_template.jinja.

        Raises:
            InputError: a file that is missing or cannot be read; names it.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise InputError(f"{folder} has no tokenizer.json, so text cannot be turned into tokens.")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise InputError(why_unreadable(path, "a tokenizer", str(error))) from None
        settings = _read_settings(folder / "tokenizer_config.json")
        return cls(backend, settings, _read_template(folder / "chat_template.jinja", settings))

    @property
    def vocab_size(self) -> int:
        return self._backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, with whatever the tokenizer itself puts around it (OLMoE's: nothing).

        Raises:
            InputError: text that is not valid Unicode.
        """
        return self._encode(text, add_special_tokens=True)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, without special tokens; ids past the tokenizer's vocabulary have no text.

        Raises:
            InputError: an id that is none, such as a negative one.
        """
        try:
            return self._backend.decode(list(ids), skip_special_tokens=True)
        except (OverflowError, TypeError):
            raise InputError("token ids are whole numbers of at least 0.") from None

    def token_id(self, text: str | None) -> int | None:
        """The id of one token by its text, or None."""
        return None if text is None else self._backend.token_to_id(text)

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation, in the model's own format, ready for the assistant's answer.

        The template writes its own special tokens, so the tokenizer adds none; a message that spells one is
        encoded as the plain text it is.

        Args:
            messages: each with "role" (system, user, assistant) and "content".

        Raises:
            InputError: the model has no chat template, or the template refuses these messages.
        """
        if self.chat_template is None:
            raise InputError("this model has no chat template, so it cannot chat; use generate instead.")
        names = [token.content for token in self._backend.get_added_tokens_decoder().values() if token.special]
        marks = {name: chr(_FIRST_MARK + i) for i, name in enumerate(names)}
        meant = {mark: name for name, mark in marks.items()}
        spelled = re.compile("|".join(map(re.escape, names)) or "(?!)")

        def held(text: str) -> str:
            return spelled.sub(lambda match: marks[match.group()], _MARK.sub(REPLACEMENT, text))

        rendered = self._render([{**message, "content": held(message["content"])} for message in messages])
        ids: list[int] = []
        for part in _MARK.split(rendered):
            ids += self._encode_plain(meant[part]) if part in meant else self._encode(part, add_special_tokens=False)
        return ids

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        if not isinstance(text, str):
            raise InputError(f"only text can be encoded, not {type(text).__name__}.")
        try:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError:  # what the library raises for half a surrogate pair
            raise InputError("the text is not valid Unicode (a byte that is not UTF-8, perhaps); mend it.") from None

    def _encode_plain(self, text: str) -> list[int]:
        self._backend.encode_special_tokens = True
        try:
            return self._encode(text, add_special_tokens=False)
        finally:
            self._backend.encode_special_tokens = False

    def _render(self, messages: Sequence[Mapping[str, str]]) -> str:
        import jinja2.sandbox

        def refuse(message: str) -> NoReturn:
            raise InputError(f"the chat template refuses: {message}")

        # Set up as transformers does, which is what templates are written for.
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = refuse
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        try:
            return environment.from_string(self.chat_template or "").render(
                messages=messages,
                add_generation_prompt=True,
                bos_token=self.bos_token or "",
                eos_token=self.eos_token or "",
            )
        except InputError:
            raise
        except Exception as error:  # a template is code, and can fail in any way
            raise InputError(f"the model's chat template is broken: {error}.") from error


class TextStream:
    """Text that arrives token by token: whole characters only, and in sum exactly the decoded whole."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._start = 0  # ids before this one are only there in the text already given
        self._read = 0  # ids before this one have had their text given

    def push(self, token: int) -> str:
        """The text that this token completes; empty while a character is still split over tokens."""
        self._ids.append(token)
        # A window of a few tokens is decoded twice, with and without the new one: the difference is new text.
        before = self._tokenizer.decode(self._ids[self._start : self._read])
        after = self._tokenizer.decode(self._ids[self._start :])
        if after.endswith(REPLACEMENT) or len(after) <= len(before):
            return ""
        self._start, self._read = self._read, len(self._ids)
        return after[len(before) :]

    def finish(self) -> str:
        """What is left at the end: bytes that never became a character, as replacement characters."""
        before = self._tokenizer.decode(self._ids[self._start : self._read])
        after = self._tokenizer.decode(self._ids[self._start :])
        self._start = self._read = len(self._ids)
        return after[len(before) :]


def _read_settings(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        return {}
    try:
        return read_json(path)
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}).") from None


def _read_template(path: Path, settings: Mapping[str, Any]) -> str | None:
    """The chat template: the file of its own that newer checkpoints have, or the one in tokenizer_config.json."""
    if path.is_file():
        try:
            return path.read_text("utf-8")
        except (ValueError, OSError) as error:
            raise InputError(f"{path} cannot be read: {error}.") from None
    template = settings.get("chat_template")
    if isinstance(template, list):  # several named templates; "default" is the one for plain chat
        entries = [entry for entry in template if isinstance(entry, dict) and entry.get("name") == "default"]
        template = entries[0].get("template") if entries else None
    if template is not None and not isinstance(template, str):
        raise InputError(
            f"tokenizer_config.json: chat_template must be a text or a list of named texts, not {template!r}."
        )
    return template


def _token_text(settings: Mapping[str, Any], key: str) -> str | None:
    """A token in tokenizer_config.json: its text, or an object that holds it."""
    value = settings.get(key)
    text = value.get("content") if isinstance(value, dict) else value
    if text is not None and not isinstance(text, str):
        raise InputError(f"tokenizer_config.json: {key} must be a token's text, not {value!r}.")
    return text
