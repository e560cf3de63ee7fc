"""Text to token ids and back: tokenizer.json, the chat template, and text that arrives token by token."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import tokenizers

from minimoe.errors import InputError

REPLACEMENT = "\ufffd"  # what a decoder writes for bytes that are not (yet) a whole character
# A character of Unicode's private use area, which stands for a special token's name while a template is rendered.
_MARK = "\uf8fe"


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
        self.bos_token = _token_text(settings.get("bos_token"))
        self.eos_token = _token_text(settings.get("eos_token"))
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
            raise InputError(f"{path} ({path.stat().st_size} bytes) is not a tokenizer: {error}.") from None
        settings = _read_settings(folder / "tokenizer_config.json")
        template_file = folder / "chat_template.jinja"
        template = template_file.read_text("utf-8") if template_file.is_file() else settings.get("chat_template")
        if isinstance(template, list):  # several named templates; "default" is the one for plain chat
            template = {entry.get("name"): entry.get("template") for entry in template}.get("default")
        return cls(backend, settings, template)

    @property
    def vocab_size(self) -> int:
        return self._backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, with whatever the tokenizer itself puts around it (OLMoE's: nothing)."""
        return self._backend.encode(text).ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, without special tokens; ids past the tokenizer's vocabulary have no text."""
        return self._backend.decode(list(ids), skip_special_tokens=True)

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
        names = sorted((t.content for t in self._backend.get_added_tokens_decoder().values() if t.special), key=len)
        spelled = re.compile("|".join(re.escape(name) for name in reversed(names)) or "(?!)")
        held: list[str] = []

        def hold(match: re.Match[str]) -> str:
            held.append(match.group())
            return _MARK

        safe = [{**m, "content": spelled.sub(hold, m["content"].replace(_MARK, REPLACEMENT))} for m in messages]
        rendered = self._render(safe).split(_MARK)
        if len(rendered) != len(held) + 1:
            raise InputError("the chat template repeats or drops a message that spells a special token.")
        ids = self._backend.encode(rendered[0], add_special_tokens=False).ids
        for name, text in zip(held, rendered[1:], strict=True):
            ids += self._encode_plain(name) + self._backend.encode(text, add_special_tokens=False).ids
        return ids

    def _encode_plain(self, text: str) -> list[int]:
        self._backend.encode_special_tokens = True
        try:
            return self._backend.encode(text, add_special_tokens=False).ids
        finally:
            self._backend.encode_special_tokens = False

    def _render(self, messages: Sequence[Mapping[str, str]]) -> str:
        import jinja2
        import jinja2.sandbox

        def refuse(message: str) -> NoReturn:
            raise InputError(f"the chat template refuses: {message}")

        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = refuse
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        try:
            return environment.from_string(self.chat_template or "").render(
                messages=messages,
                add_generation_prompt=True,
                bos_token=self.bos_token or "",
                eos_token=self.eos_token or "",
            )
        except jinja2.TemplateError as error:
            raise InputError(f"the model's chat template is broken: {error}.") from None


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
        settings = json.loads(path.read_text("utf-8"))
    except (ValueError, OSError) as error:
        raise InputError(f"{path} is not readable JSON: {error}.") from None
    if not isinstance(settings, dict):
        raise InputError(f"{path} must hold a JSON object.")
    return settings


def _token_text(value: Any) -> str | None:
    """A token in tokenizer_config.json: its text, or an object that holds it."""
    return value.get("content") if isinstance(value, dict) else value
