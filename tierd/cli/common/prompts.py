"""Turns a line of a prompt file into tokens and block hashes.

A line is a list of token ids, an object with "tokens", or an OpenAI API request for a completion
("prompt") or a chat ("messages"). The engine itself or a tokenizer on disk tokenizes text. Fields
whose effect on the tokens only the engine knows are refused: a wrong guess would warm blocks that
no request uses.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from tierd.errors import ConfigError, HashInputError
from tierd.hashing import KeyStyle, Lora, RequestExtras, hash_blocks
from tierd.types import Namespace

_OWN_FIELDS: Final = {"tokens", "salt", "lora", "namespace"}

_CHAT_FIELDS: Final = (
    "messages",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "chat_template",
    "chat_template_kwargs",
)
"""Fields of a chat that determine its tokens and that /tokenize accepts."""

_OPAQUE_FIELDS: Final = ("documents", "reasoning_effort", "mm_processor_kwargs", "prompt_embeds")
"""Fields that change a prompt and that /tokenize does not accept."""

_PLAIN_MESSAGE: Final = {"role", "content", "name"}


class Tokenizer(Protocol):
    """A tokenizer: an engine, or one on disk."""

    def tokens(self, request: Mapping[str, object]) -> list[int]:
        """Return the tokens of a request with "prompt" (text) or "messages" and their options.
        Raises ConfigError for one that it cannot tokenize; an engine also raises EngineAwayError
        and EngineRefusedError."""


class Prompt(NamedTuple):
    """The request of a line, not yet tokenized."""

    request: dict[str, object]
    """{"tokens": list}, or a request for a `Tokenizer`."""
    salt: str | None
    lora: Lora | None
    model: str | None
    namespaces: list[object] | None
    """The namespaces in the line; None: the command decides."""


def parse(line: bytes, adapters: Mapping[str, str]) -> Prompt:
    """Return the request in a line; `adapters` maps the model names of adapters to their paths.

    Raises ConfigError, whose message does not name file and line.
    """
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"not JSON: {error}") from error
    fields = {"tokens": value} if isinstance(value, list) else value
    if isinstance(fields, dict) and "tokens" in fields:
        return _own(fields)
    if not isinstance(fields, dict) or not fields.keys() & {"prompt", "messages"}:
        raise ConfigError(
            'want a list of token ids, an object with "tokens", or a request with '
            f'"prompt" or "messages", not {value!r:.40}'
        )
    return _openai(fields, adapters)


def tokens_of(prompt: Prompt, tokenizer: Tokenizer | None) -> list[int]:
    """Return the prompt's token ids, unchecked. Raises ConfigError for text without `tokenizer`,
    and what `tokenizer` raises."""
    if "tokens" in prompt.request:
        return prompt.request["tokens"]  # type: ignore[return-value]  # hash_blocks checks them
    if tokenizer is None:
        raise ConfigError(
            "the prompt is text: pass --tokenizer DIR (a directory with the model's tokenizer) "
            "or --engine URL (to use the engine's /tokenize)"
        )
    return tokenizer.tokens(prompt.request)


def hashes_of(
    tokens: list[int], namespace: Namespace, salt: str | None, lora: Lora | None
) -> list[bytes]:
    """Return the hashes of a prompt's full blocks. Raises ConfigError."""
    try:
        style = KeyStyle(namespace.hash_scheme)
    except ValueError:
        raise ConfigError(
            f"hash scheme {namespace.hash_scheme} is private to its engine: only that engine can "
            "compute its hashes"
        ) from None
    extras = RequestExtras(salt=salt, lora=lora)
    size = namespace.block_tokens
    try:
        keys = None
        if extras != RequestExtras():
            count = len(tokens) // size if isinstance(tokens, list) else 0
            keys = extras.block_keys(count, size, style)
        return hash_blocks(tokens, size, parent=namespace.hash_root, extra=keys)
    except HashInputError as error:
        raise ConfigError(str(error)) from error


def _own(fields: dict[str, object]) -> Prompt:
    if unknown := sorted(fields.keys() - _OWN_FIELDS):
        raise ConfigError(f"unknown field {unknown[0]!r}")
    given, own = fields.get("lora"), fields.get("namespace")
    lora = None
    if given is not None:
        if not isinstance(given, list) or len(given) != 2:
            raise ConfigError("lora must be a list [name, path]")
        lora = Lora(_text("lora name", given[0]), _text("lora path", given[1]))
    namespaces = None if own is None else own if isinstance(own, list) else [own]
    return Prompt({"tokens": fields["tokens"]}, _salt(fields, "salt"), lora, None, namespaces)


def _openai(fields: dict[str, object], adapters: Mapping[str, str]) -> Prompt:
    given = fields.get("model")
    model = None if given is None else _text("model", given)
    for name in _OPAQUE_FIELDS:
        if fields.get(name) is not None:
            raise ConfigError(
                f"{name!r} changes the prompt in a way that only the engine knows: pass token ids"
            )
    if "messages" in fields:
        request = {name: fields[name] for name in _CHAT_FIELDS if fields.get(name) is not None}
        _check_messages(fields["messages"])
    else:
        request = _completion(fields)
    if model is not None and "tokens" not in request:
        request["model"] = model
    lora = Lora(model, adapters[model]) if model is not None and model in adapters else None
    return Prompt(request, _salt(fields, "cache_salt"), lora, model, None)


def _completion(fields: dict[str, object]) -> dict[str, object]:
    prompt = fields["prompt"]
    if isinstance(prompt, str):
        request: dict[str, object] = {"prompt": prompt}
        if fields.get("add_special_tokens") is not None:
            request["add_special_tokens"] = fields["add_special_tokens"]
        return request
    if not isinstance(prompt, list) or (prompt and isinstance(prompt[0], str | list)):
        raise ConfigError("prompt must be text or a list of token ids: write one prompt per line")
    return {"tokens": prompt}


def _check_messages(messages: object) -> None:
    if not isinstance(messages, list) or not all(isinstance(each, dict) for each in messages):
        raise ConfigError("messages must be a list of objects")
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            kind = part.get("type") if isinstance(part, dict) else None
            if kind != "text":
                raise ConfigError(
                    f"a message has a part of type {kind!r:.40}: only parts of type 'text' can be "
                    "hashed without the engine"
                )


def _salt(fields: dict[str, object], name: str) -> str | None:
    salt = fields.get(name)
    return None if salt is None else _text(name, salt)


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"{name} must be text, not {value!r:.40}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{name} cannot be encoded as UTF-8: {value!r:.40}") from None
    return value


class LocalTokenizer:
    """A tokenizer from local files, with the library that the engine uses (transformers)."""

    def __init__(self, directory: str) -> None:
        """Load the tokenizer. Raises ConfigError if the library or the files are missing."""
        if not Path(directory).is_dir():
            raise ConfigError(f"--tokenizer {directory}: no such directory")
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            raise ConfigError(
                "--tokenizer needs transformers: pip install transformers, or pass --engine URL"
            ) from error
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        except (OSError, ValueError) as error:
            why = " ".join(str(error).split())
            raise ConfigError(f"--tokenizer {directory}: {why:.200}") from error

    def tokens(self, request: Mapping[str, object]) -> list[int]:
        """Return a request's tokens. Raises ConfigError for chats that an engine may render in
        another way: messages may have only a role, text content and a name."""
        if "messages" not in request:
            special = request.get("add_special_tokens", True)
            return self._encode(request["prompt"], special)
        messages = request["messages"]
        assert isinstance(messages, list)
        for message in messages:
            plain = isinstance(message.get("content"), str) and not message.keys() - _PLAIN_MESSAGE
            if not plain or "tools" in request:
                raise ConfigError(
                    "each engine renders tools and content in parts in its own way: pass --engine "
                    "URL instead of --tokenizer"
                )
        options = request.get("chat_template_kwargs") or {}
        if not isinstance(options, dict):
            raise ConfigError("chat_template_kwargs must be an object")
        try:
            from jinja2 import TemplateError
        except ImportError as error:
            raise ConfigError("chat templates need jinja2: pip install jinja2") from error
        try:
            text = self._tokenizer.apply_chat_template(
                messages,
                chat_template=request.get("chat_template"),
                add_generation_prompt=request.get("add_generation_prompt", True),
                continue_final_message=request.get("continue_final_message", False),
                tokenize=False,
                **options,
            )
        except (TemplateError, ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"the chat template failed: {error}") from error
        return self._encode(text, request.get("add_special_tokens", False))

    def _encode(self, text: object, special: object) -> list[int]:
        encoded = self._tokenizer(text, add_special_tokens=bool(special))
        return [int(token) for token in encoded["input_ids"]]
