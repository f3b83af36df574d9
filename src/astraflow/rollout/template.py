"""Messages to token ids by the model's own chat template; text of messages can never become a control token (F23).

Owns: rendering, encoding, decoding. Knows nothing of engines or episodes.

    messages ── disguise control text in contents ── jinja template ── Rendered ── encode ── ids

Benign messages are encoded in one go, so their ids are those of ``apply_chat_template`` by construction. Where a
content holds the text of a control token, a private character is put inside it before rendering; the rendered text is
then split at the true control tokens and what lies between is encoded by a tokenizer that knows none.
"""

from __future__ import annotations

import datetime
import json
import re
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
import jinja2.sandbox
from tokenizers import Tokenizer

from astraflow.errors import BadRequest, ConfigError
from astraflow.rollout.workflow import Message

_SENTINELS = range(0xF0000, 0xF0100)
"""Private-use characters: one that no message contains is taken."""
_OPENINGS = 128
"""First prompts remembered: those of the groups that are being played."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendered:
    """What the template wrote. ``mark`` (a private character, empty if none was needed) sits in disguised text."""

    text: str
    mark: str = ""

    @property
    def plain(self) -> str:
        return self.text.replace(self.mark, "") if self.mark else self.text

    def after(self, prefix: str) -> Rendered | None:
        """The rest behind ``prefix`` (a plain text), or None if it does not begin with it."""
        if not self.mark:
            return Rendered(text=self.text[len(prefix) :]) if self.text.startswith(prefix) else None
        if not self.plain.startswith(prefix):
            return None
        at = left = 0
        while left < len(prefix):
            left += self.text[at] != self.mark
            at += 1
        return Rendered(text=self.text[at:], mark=self.mark)


class ChatTemplate:
    """``tokenizer`` is the text of a tokenizer.json; ``names`` holds bos_token, eos_token and so on."""

    def __init__(
        self, tokenizer: str, template: str, *, names: Mapping[str, str] | None = None, bos: bool | None = None
    ) -> None:
        """``bos``: whether a prompt begins with bos_token, exactly once (F24); None: as template and tokenizer say."""
        self._json = tokenizer
        self._tokenizer = Tokenizer.from_str(tokenizer)
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._names = dict(names or {})
        added = self._tokenizer.get_added_tokens_decoder()
        self._added = {token.content: id for id, token in added.items()}
        self.control_ids = frozenset(id for id, token in added.items() if token.special)
        """Ids of special tokens: never inside a message's content."""
        special = [token.content for token in added.values() if token.special]
        markup = [t.content for t in added.values() if t.special or re.fullmatch(r"<.*>|\[.*\]", t.content)]
        self._special, self._markup = _Guard(special), _Guard(markup)
        self._split = re.compile("|".join(re.escape(t) for t in sorted(self._added, key=len, reverse=True)) or r"(?!)")
        self._template = _compile(template)
        self.dated = "strftime_now" in template
        """Whether the same messages are other tokens tomorrow."""
        self._bos = self._added.get(self._names.get("bos_token", ""))
        self._unknown = self._harmless_unknown()
        self._adds_bos = self._decide_bos(bos)
        self._openings: OrderedDict[tuple[str, ...], tuple[Rendered, tuple[int, ...]]] = OrderedDict()

    @classmethod
    def from_folder(cls, folder: Path, *, bos: bool | None = None) -> ChatTemplate:
        """Of a model folder as ``save_pretrained`` writes it. Raises ConfigError naming the missing file."""
        config = json.loads(_read(folder / "tokenizer_config.json"))
        path = folder / "chat_template.jinja"
        template = path.read_text(encoding="utf-8") if path.exists() else config.get("chat_template")
        if not isinstance(template, str):
            raise ConfigError(f"{folder} has no chat template: neither chat_template.jinja nor tokenizer_config.json")
        names = {
            name: value["content"] if isinstance(value, dict) else value
            for name, value in config.items()
            if name.endswith("_token") and isinstance(value, str | dict)
        }
        return cls(_read(folder / "tokenizer.json"), template, names=names, bos=bos)

    def render(
        self, messages: Sequence[Message], *, generation: bool = True, tools: Sequence[Any] | None = None
    ) -> Rendered:
        """Raises BadRequest when the template refuses the messages."""
        mark = self._mark_for(messages, tools)
        shown = [self._disguise_message(message, mark) for message in messages] if mark else list(messages)
        shown_tools = _map_text(tools, lambda text: self._markup.disguise(text, mark)) if mark and tools else tools
        try:
            text = self._template.render(
                messages=shown, tools=shown_tools, add_generation_prompt=generation, documents=None, **self._names
            )
        except (jinja2.TemplateError, TypeError, KeyError) as error:
            raise BadRequest(f"the chat template refused the messages: {error}") from error
        return Rendered(text=text, mark=mark)

    def encode(self, rendered: Rendered, *, start: bool = True) -> list[int]:
        """Token ids; ``start``: this is the beginning of a sequence (bos, if one belongs there)."""
        if not rendered.mark:
            ids: list[int] = self._tokenizer.encode(rendered.text, add_special_tokens=False).ids
        else:
            ids = self._encode_marked(rendered)
        if start and self._adds_bos and self._bos is not None and ids[:1] != [self._bos]:
            ids.insert(0, self._bos)
        return ids

    def opening(self, messages: Sequence[Message], keys: tuple[str, ...]) -> tuple[Rendered, list[int]]:
        """Rendered text and ids of a history's first prompt, which all episodes of a group begin with.

        ``keys``: equal for equal messages. Raises BadRequest.
        """
        found = self._openings.get(keys)
        if found is None:
            rendered = self.render(messages)
            found = self._openings[keys] = (rendered, tuple(self.encode(rendered)))
            if len(self._openings) > _OPENINGS:
                self._openings.popitem(last=False)
        return found[0], list(found[1])

    def encode_reply(self, text: str) -> list[int]:
        """Ids of a reply's text that nobody sampled (supervised targets): no control token in it."""
        mark = self._mark_for([{"role": "assistant", "content": text}], None)
        return self.encode(Rendered(text=self._special.disguise(text, mark) if mark else text, mark=mark), start=False)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids, control tokens written out."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def leading_control(self, rendered: Rendered) -> tuple[int, Rendered] | None:
        """The control token that the text begins with, and what follows it."""
        found = self._split.match(rendered.text)
        if found is None or self._added[found.group()] not in self.control_ids:
            return None
        return self._added[found.group()], Rendered(text=rendered.text[found.end() :], mark=rendered.mark)

    def end_of(self, prompt: str, reply: str, messages: Sequence[Message]) -> int | None:
        """The control token that the template writes behind a reply; else the tokenizer's end of text, if any."""
        whole = self.render([*messages, {"role": "assistant", "content": reply}], generation=False)
        rest = whole.after(prompt + reply) or whole.after(prompt + reply.strip())
        closing = self.leading_control(rest) if rest is not None else None
        return self.eos_id if closing is None else closing[0]

    @property
    def eos_id(self) -> int | None:
        return self._added.get(self._names.get("eos_token", ""))

    def _harmless_unknown(self) -> frozenset[int]:
        """The token for characters that are not in the alphabet, unless the template writes the same one as control."""
        others = [text for name, text in self._names.items() if name != "unk_token"]
        unknown = self._names.get("unk_token", "")
        return frozenset() if unknown in others or unknown not in self._added else frozenset({self._added[unknown]})

    def _decide_bos(self, bos: bool | None) -> bool:
        if bos and self._bos is None:
            raise ConfigError(f"bos=True, but the tokenizer has no bos_token; it has {sorted(self._names)}")
        if bos is not None:
            return bos
        return self._bos is not None and self._tokenizer.encode("a").ids[:1] == [self._bos]

    def _mark_for(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> str:
        texts = list(_texts([messages, tools]))
        if not any(self._markup.touches(text) for text in texts):
            return ""
        return next(chr(code) for code in _SENTINELS if not any(chr(code) in text for text in texts))

    def _disguise_message(self, message: Message, mark: str) -> Any:
        """An assistant may write its own markup (<think>); nobody may write a special token."""
        guard = self._special if message.get("role") == "assistant" else self._markup
        return _map_text(message, lambda text: guard.disguise(text, mark))

    @cached_property
    def _plain(self) -> Tokenizer:
        """The same tokenizer without added tokens: made only once somebody writes control text."""
        bare = json.loads(self._json)
        bare["added_tokens"], bare["post_processor"] = [], None
        tokenizer = Tokenizer.from_str(json.dumps(bare))
        tokenizer.no_padding()
        tokenizer.no_truncation()
        return tokenizer

    def _encode_marked(self, rendered: Rendered) -> list[int]:
        ids: list[int] = []
        at = 0
        for found in self._split.finditer(rendered.text):
            ids += self._encode_plain(rendered.text[at : found.start()], rendered.mark)
            ids.append(self._added[found.group()])
            at = found.end()
        return ids + self._encode_plain(rendered.text[at:], rendered.mark)

    def _encode_plain(self, text: str, mark: str) -> list[int]:
        ids: list[int] = self._plain.encode(text.replace(mark, ""), add_special_tokens=False).ids
        if not (self.control_ids - self._unknown).isdisjoint(ids):
            raise BadRequest("a message's text encodes to a control token; this tokenizer cannot take it safely")
        return ids


class _Guard:
    """Finds and breaks the text of control tokens."""

    def __init__(self, tokens: Sequence[str]) -> None:
        by_length = sorted({token for token in tokens if token}, key=len, reverse=True)
        self._inside = re.compile("|".join(re.escape(token) for token in by_length) or r"(?!)")
        self._beginnings = {token[:n] for token in by_length for n in range(1, len(token))}
        self._longest = max((len(token) for token in by_length), default=0)

    def touches(self, text: str) -> bool:
        return self._inside.search(text) is not None or self._begins_at_end(text)

    def disguise(self, text: str, mark: str) -> str:
        """``mark`` after the first character of every token's text, and behind a text that ends within one."""
        broken = self._inside.sub(lambda found: found.group()[0] + mark + found.group()[1:], text)
        while (again := self._inside.sub(lambda found: found.group()[0] + mark + found.group()[1:], broken)) != broken:
            broken = again
        return broken + mark if self._begins_at_end(text) else broken

    def _begins_at_end(self, text: str) -> bool:
        return any(text[-n:] in self._beginnings for n in range(1, min(len(text), self._longest) + 1))


def _compile(template: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    today = datetime.datetime.now(datetime.UTC)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, indent: int | None = None, **_: Any) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: today.strftime(form)
    # `generation` marks assistant text for other libraries; here it is a block that is always written
    text = re.sub(r"\{%(-?)\s*generation\s*(-?)%\}", r"{%\1 if true \2%}", template)
    text = re.sub(r"\{%(-?)\s*endgeneration\s*(-?)%\}", r"{%\1 endif \2%}", text)
    try:
        return environment.from_string(text)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(f"the chat template is not valid jinja: {error}") from error


def _texts(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield str(key)
            yield from _texts(item)
    elif isinstance(value, Sequence) and not isinstance(value, bytes):
        for item in value:
            yield from _texts(item)


def _map_text(value: Any, change: Any) -> Any:
    """The same structure with every text changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_map_text(key, change): _map_text(item, change) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [_map_text(item, change) for item in value]
    return value


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ConfigError(f"{path} is missing: not a complete model folder") from error
