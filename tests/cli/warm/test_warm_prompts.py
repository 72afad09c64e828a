"""Lines of prompt files: what they mean, and what is refused."""

from __future__ import annotations

import json
import sys
from types import ModuleType

import pytest

from tests.support import blocks
from tests.support.fake_openai import letters, render
from tierd.cli.common.prompts import LocalTokenizer, hashes_of, parse, tokens_of
from tierd.errors import ConfigError
from tierd.hashing import KeyStyle, Lora, RequestExtras, hash_blocks
from tierd.sizes import parse_time

SPACE = blocks.namespace(hash_scheme=KeyStyle.TAGGED.value)


def line(**fields: object) -> bytes:
    return json.dumps(fields).encode()


class Letters:
    """A tokenizer."""

    def tokens(self, request):
        return letters(render(request))


@pytest.mark.parametrize(
    ("given", "tokens", "salt", "lora"),
    [
        (b"[1, 2, 3]", [1, 2, 3], None, None),
        (line(tokens=[1], salt="s", lora=["a", "/a"]), [1], "s", Lora("a", "/a")),
        (line(prompt=[4, 5], cache_salt="s", temperature=0, max_tokens=9), [4, 5], "s", None),
        (line(prompt="ab", model="base", stream=True), letters("ab"), None, None),
        (line(prompt="ab", model="sql"), letters("ab"), None, Lora("sql", "/adapters/sql")),
        (
            line(messages=[{"role": "user", "content": "hi"}], top_p=1),
            letters('[[{"role": "user", "content": "hi"}], null]assistant:'),
            None,
            None,
        ),
    ],
)
def test_every_form_of_a_prompt_line(given, tokens, salt, lora) -> None:
    """A prompt would be warmed under hashes that its request does not have."""
    prompt = parse(given, {"sql": "/adapters/sql"})
    assert (tokens_of(prompt, Letters()), prompt.salt, prompt.lora) == (tokens, salt, lora)


def test_chat_options_reach_the_tokenizer() -> None:
    """A chat with tools or its own template would be hashed as another chat."""
    passed = {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "add_generation_prompt": False,
        "continue_final_message": True,
        "chat_template": "{{ x }}",
        "chat_template_kwargs": {"x": 1},
    }
    prompt = parse(line(**passed, n=1, cache_salt="s", model="m"), {})
    assert prompt.request == {**passed, "model": "m"}


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (b"nothing", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'{"prompt": "\xff"}', "not JSON"),
        (b"7", "want a list of token ids"),
        (line(text="x"), "want a list of token ids"),
        (line(tokens=[], top_p=1), "unknown field 'top_p'"),
        (line(tokens=[], lora="x"), "lora must be"),
        (line(tokens=[], lora=["x", 1]), "lora path must be text"),
        (line(tokens=[], lora=["\ud800", "x"]), "lora name cannot be encoded as UTF-8"),
        (line(tokens=[], salt=1), "salt must be text"),
        (line(prompt=["a", "b"]), "one prompt per line"),
        (line(prompt=[[1], [2]]), "one prompt per line"),
        (line(prompt=None), "prompt must be text"),
        (line(prompt="x", model=3), "model must be text"),
        (line(prompt="x", prompt_embeds="AAA"), "'prompt_embeds' changes"),
        (line(messages=[], reasoning_effort="low"), "'reasoning_effort' changes"),
        (line(messages="hi"), "messages must be"),
        (line(messages=[{"content": [{"type": "image_url"}]}]), "'image_url'"),
        (line(messages=[{"content": ["hi"]}]), "only parts of type 'text'"),
    ],
)
def test_malformed_prompt_lines_are_refused(given, named) -> None:
    """A line with a mistake would warm something else, or end in a traceback."""
    with pytest.raises(ConfigError) as caught:
        parse(given, {})
    assert named in str(caught.value)


def test_salt_and_adapter_are_in_the_hashes() -> None:
    """A tenant's blocks would be warmed as another's."""
    tokens = list(range(40))
    lora = Lora("sql", "/adapters/sql")
    kinds = [hashes_of(tokens, SPACE, salt, lo) for salt in (None, "a") for lo in (None, lora)]
    assert len({hashes[1] for hashes in kinds}) == 4
    keys = RequestExtras(salt="a", lora=lora).block_keys(2, 16, KeyStyle.TAGGED)
    assert kinds[3] == hash_blocks(tokens, 16, parent=SPACE.hash_root, extra=keys)
    for wrong in ([1.5] * 16, "text", [True] * 16):
        with pytest.raises(ConfigError, match="token"):
            hashes_of(wrong, SPACE, "a", None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="tokens must be"):
        hashes_of(tokens_of(parse(b'{"tokens": null}', {}), None), SPACE, None, None)
    with pytest.raises(ConfigError, match="salt is empty"):
        hashes_of(tokens, SPACE, "", None)
    with pytest.raises(ConfigError, match="opaque-test is private to its engine"):
        hashes_of(tokens, blocks.namespace(), None, None)


def test_text_needs_a_tokenizer() -> None:
    """An operator would not know what is missing."""
    with pytest.raises(ConfigError, match=r"--tokenizer DIR .* --engine URL"):
        tokens_of(parse(line(prompt="x"), {}), None)


class FakeTokenizer:
    """The methods of the library's tokenizer that tierd uses."""

    def __call__(self, text, add_special_tokens):
        return {"input_ids": [1] * add_special_tokens + letters(text)}

    def apply_chat_template(self, messages, *, tokenize, add_generation_prompt, **options):
        assert not tokenize
        if options.get("broken"):
            raise ValueError("no such variable")
        return "".join(m["content"] for m in messages) + ":" * add_generation_prompt


@pytest.fixture
def library(monkeypatch):
    """`transformers` and `jinja2` as this command uses them; an engine's environment has them."""
    transformers, jinja2 = ModuleType("transformers"), ModuleType("jinja2")

    class AutoTokenizer:
        @staticmethod
        def from_pretrained(directory, *, local_files_only):
            assert local_files_only, "an operator's command would load from a hub"
            if directory.endswith("empty"):
                raise OSError("no tokenizer there")
            return FakeTokenizer()

    transformers.AutoTokenizer = AutoTokenizer  # type: ignore[attr-defined]
    jinja2.TemplateError = type("TemplateError", (Exception,), {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformers", transformers)
    monkeypatch.setitem(sys.modules, "jinja2", jinja2)


def test_local_tokenizer(library, tmp_path) -> None:
    """Text would become other tokens than in the engine: no special ones, or them twice."""
    tokenizer = LocalTokenizer(str(tmp_path))
    chat: dict[str, object] = {"messages": [{"role": "user", "content": "hi"}]}
    assert tokenizer.tokens({"prompt": "hi"}) == [1, *letters("hi")]
    assert tokenizer.tokens({"prompt": "hi", "add_special_tokens": False}) == letters("hi")
    assert tokenizer.tokens(chat) == letters("hi:")
    assert tokenizer.tokens({**chat, "add_generation_prompt": False}) == letters("hi")
    with pytest.raises(ConfigError, match="the chat template failed: no such variable"):
        tokenizer.tokens({**chat, "chat_template_kwargs": {"broken": 1}})
    lacking: list[dict[str, object]] = [
        {"tools": []},
        {"messages": [{"role": "tool", "content": "x", "id": 1}]},
    ]
    for more in lacking:
        with pytest.raises(ConfigError, match="--engine URL instead"):
            tokenizer.tokens({**chat, **more})
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="empty: no tokenizer there"):
        LocalTokenizer(str(tmp_path / "empty"))


def test_missing_tokenizer_packages_are_named(monkeypatch, tmp_path) -> None:
    """A traceback would hide what to install."""
    with pytest.raises(ConfigError, match="missing: no such directory"):
        LocalTokenizer(str(tmp_path / "missing"))
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match="pip install transformers"):
        LocalTokenizer(str(tmp_path))


def test_times_are_parsed() -> None:
    """`--pin 30m` would keep blocks for half a minute."""
    assert [parse_time(text) for text in ("90", "1.5s", "30m", "2 h", "1d")] == [
        *(90, 1.5, 1800, 7200, 86400)
    ]
    for wrong in ("", "h", "-1", "1w", "1m30s"):
        with pytest.raises(ConfigError, match="is not a time"):
            parse_time(wrong)
