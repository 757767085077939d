"""Text to token ids and back to bytes. Knows no torch, no file format and no chat.

Byte-level BPE as in GPT-2 (Radford et al. 2019): text is cut into words by a regular expression, each byte
becomes one printable character, and merges join characters within a word. The `tokenizers` package merges.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

from tokenizers import AddedToken, Regex, pre_tokenizers
from tokenizers import Tokenizer as BpeTokenizer
from tokenizers.models import BPE

from worker.model.config import ModelFileError


class TokenType(IntEnum):
    """What a vocabulary entry is, as GGUF numbers it (0 is not used)."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class TokenizerFields:
    """Parts of a tokenizer as a model file states them.

    Attributes:
        model: Kind of tokenizer, `gpt2` for byte-level BPE.
        pre: Which rule cuts text into words.
        tokens: Text of every id.
        token_types: `TokenType` of every id.
        merges: Pairs "left right", the most wanted first.
        bos_id: Id that begins a text.
        eos_id: Id that ends a text.
        eot_id: Id that ends a turn.
        eom_id: Id that ends a message.
        unk_id: Id that stands for unknown text.
        add_bos: Whether a log begins with `bos_id`.
        chat_template: Jinja source, or None.
    """

    model: str
    pre: str
    tokens: tuple[str, ...]
    token_types: tuple[int, ...]
    merges: tuple[str, ...]
    bos_id: int | None
    eos_id: int | None
    eot_id: int | None
    eom_id: int | None
    unk_id: int | None
    add_bos: bool
    chat_template: str | None


class TextError(ValueError):
    """The text holds a character that can't become tokens; the message names it and its position."""


def _gpt2_words() -> list[pre_tokenizers.PreTokenizer]:
    return [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]


def _smollm_words() -> list[pre_tokenizers.PreTokenizer]:
    return [pre_tokenizers.Digits(individual_digits=True), *_gpt2_words()]


def _llama3_words() -> list[pre_tokenizers.PreTokenizer]:
    # Contractions; a word with at most one sign before it; up to three digits; signs; line ends; blanks.
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    return [
        pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]


# `tokenizer.ggml.pre` -> how text is cut into words, and whether a word that is a token skips the merges.
_WORD_RULES: dict[str, tuple[Callable[[], list[pre_tokenizers.PreTokenizer]], bool]] = {
    "smollm": (_smollm_words, False),
    "llama-bpe": (_llama3_words, True),
    "gpt-2": (_gpt2_words, False),
    "default": (_gpt2_words, False),
}


def _byte_characters() -> dict[int, str]:
    """Byte -> the printable character that stands for it: Latin-1 where visible, else U+0100 and up."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(0x100) if byte not in visible]
    return {byte: chr(byte) for byte in visible} | {byte: chr(0x100 + n) for n, byte in enumerate(hidden)}


class Tokenizer:
    """Byte-level BPE with control tokens that plain text can't reach.

    Attributes:
        vocab_size: Number of real tokens; ids from here on are padding and must never be drawn.
        bos_id: Id that begins a text, or None.
        add_bos: Whether a log begins with `bos_id`.
        eos_ids: Ids that end a reply.
        bos_text: Text of `bos_id`, or the empty string.
        eos_text: Text of the file's EOS id, or the empty string.
        log_prefix: Ids that a log starts with before any input: the BOS or nothing.
        max_token_bytes: Bytes of the longest token, at least 1.

    Raises:
        ModelFileError: The fields contradict each other or ask for what is not supported; names the key.
    """

    def __init__(self, fields: TokenizerFields) -> None:
        _check(fields)
        types = fields.token_types
        ends = [id_ for id_ in (fields.eos_id, fields.eot_id, fields.eom_id) if id_ is not None]
        roles = {*ends, *([] if fields.bos_id is None else [fields.bos_id])}
        # Some converters mark <|…|> tokens as user-defined: text must not reach those either.
        control = {
            id_
            for id_, (text, kind) in enumerate(zip(fields.tokens, types, strict=True))
            if id_ in roles
            or kind in {TokenType.UNKNOWN, TokenType.CONTROL}
            or (kind == TokenType.USER_DEFINED and text.startswith("<|") and text.endswith("|>"))
        }
        self.bos_id = fields.bos_id
        self.add_bos = fields.add_bos
        self.eos_ids = frozenset(ends)
        self.bos_text = "" if fields.bos_id is None else fields.tokens[fields.bos_id]
        self.eos_text = "" if fields.eos_id is None else fields.tokens[fields.eos_id]
        self.log_prefix = (fields.bos_id,) if fields.add_bos and fields.bos_id is not None else ()
        used = [id_ for id_, kind in enumerate(types) if kind != TokenType.UNUSED]
        self.vocab_size = used[-1] + 1 if used else 0
        self._bytes = _token_bytes(fields, control)
        self.max_token_bytes = max(1, *map(len, self._bytes))
        words = {
            fields.tokens[id_]: id_
            for id_ in used
            if id_ not in control and types[id_] in {TokenType.NORMAL, TokenType.USER_DEFINED}
        }
        # One character can't be broken by a marker, so it is never recognised.
        self._control_ids = {
            fields.tokens[id_]: id_ for id_ in sorted(control) if len(fields.tokens[id_]) > 1
        }
        by_length = sorted(self._control_ids, key=len, reverse=True)
        self._control_pattern = re.compile(
            f"({'|'.join(map(re.escape, by_length))})" if by_length else r"((?!))"
        )
        first = "".join(sorted({text[0] for text in by_length}))
        self._first_pattern = re.compile(f"[{re.escape(first)}]" if first else r"(?!)")
        self._missing_bytes = frozenset(
            byte for byte, char in _byte_characters().items() if char not in words
        )
        self._bpe = _build_bpe(fields, words)

    def encode_text(self, text: str) -> list[int]:
        """Ids of plain text; strings of control tokens in it stay text. Adds no BOS.

        Raises:
            TextError: A lone surrogate, or a byte that the vocabulary can't spell.
        """
        self._check_text(text)
        # A batch of one: unlike `encode`, it lets other threads run meanwhile.
        return self._bpe.encode_batch([text], add_special_tokens=False)[0].ids

    def protect(self, text: str, marker: str) -> str:
        """`text` with `marker` after every character that begins a control token's string.

        `encode_template` takes the markers out again after it has looked for those strings, so none is
        found in `text`, whatever the template joins it with behind it.
        """
        return self._first_pattern.sub(lambda match: match.group() + marker, text)

    def encode_template(self, rendered: str, marker: str) -> list[int]:
        """Ids of a rendered chat: control tokens where their strings stand whole, else plain text.

        Args:
            rendered: The template's text around contents that went through `protect`.
            marker: The character that `protect` put in.

        Raises:
            TextError: As `encode_text`.
        """
        ids: list[int] = []
        # re.split with one group alternates: text, control, text, control, …, text.
        for index, piece in enumerate(self._control_pattern.split(rendered)):
            if index % 2:
                ids.append(self._control_ids[piece])
            elif piece:
                ids.extend(self.encode_text(piece.replace(marker, "")))
        return ids

    def control_texts(self) -> tuple[str, ...]:
        """Strings that `encode_template` recognises."""
        return tuple(self._control_ids)

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes that `token_id` adds to a text; empty for control tokens and padding.

        Raises:
            ValueError: There is no such id.
        """
        if not 0 <= token_id < len(self._bytes):
            raise ValueError(f"token id {token_id} is not in 0..{len(self._bytes) - 1}")
        return self._bytes[token_id]

    def _check_text(self, text: str) -> None:
        try:
            data = text.encode()
        except UnicodeEncodeError as error:
            raise TextError(f"lone surrogate at character {error.start}") from error
        if self._missing_bytes.isdisjoint(data):
            return
        for position, char in enumerate(text):
            if not self._missing_bytes.isdisjoint(char.encode()):
                raise TextError(f"U+{ord(char):04X} at character {position} is not in the model's vocabulary")


def _check(fields: TokenizerFields) -> None:
    if fields.model != "gpt2":
        raise ModelFileError(f"tokenizer.ggml.model {fields.model!r} is not supported, only 'gpt2' is")
    if fields.pre not in _WORD_RULES:
        known = ", ".join(sorted(_WORD_RULES))
        raise ModelFileError(f"tokenizer.ggml.pre {fields.pre!r} is not supported, known are {known}")
    size = len(fields.tokens)
    if len(fields.token_types) != size:
        raise ModelFileError(
            f"tokenizer.ggml.token_type has {len(fields.token_types)} entries for {size} tokens"
        )
    for key, id_ in (
        ("bos_token_id", fields.bos_id),
        ("eos_token_id", fields.eos_id),
        ("eot_token_id", fields.eot_id),
        ("eom_token_id", fields.eom_id),
        ("unknown_token_id", fields.unk_id),
    ):
        if id_ is not None and not 0 <= id_ < size:
            raise ModelFileError(f"tokenizer.ggml.{key} is {id_}, the vocabulary has {size} tokens")
    if fields.add_bos and fields.bos_id is None:
        raise ModelFileError("tokenizer.ggml.add_bos_token is set without tokenizer.ggml.bos_token_id")
    if len(set(fields.tokens)) != size:
        raise ModelFileError("tokenizer.ggml.tokens holds a token twice")


def _token_bytes(fields: TokenizerFields, control: set[int]) -> tuple[bytes, ...]:
    byte_of = {char: byte for byte, char in _byte_characters().items()}

    def one(id_: int, text: str, kind: int) -> bytes:
        if id_ in control or kind == TokenType.UNUSED:
            return b""
        if kind == TokenType.USER_DEFINED or not all(char in byte_of for char in text):
            return text.encode()
        return bytes(byte_of[char] for char in text)

    return tuple(
        one(id_, text, kind)
        for id_, (text, kind) in enumerate(zip(fields.tokens, fields.token_types, strict=True))
    )


def _build_bpe(fields: TokenizerFields, words: dict[str, int]) -> BpeTokenizer:
    merges: list[tuple[str, str]] = []
    for merge in fields.merges:
        left, _, right = merge.partition(" ")
        if not (left in words and right in words and left + right in words):
            raise ModelFileError(f"tokenizer.ggml.merges: {merge!r} does not join tokens to a token")
        merges.append((left, right))
    word_rule, skips_merges = _WORD_RULES[fields.pre]
    bpe = BpeTokenizer(BPE(vocab=words, merges=merges, ignore_merges=skips_merges))
    bpe.pre_tokenizer = pre_tokenizers.Sequence(word_rule())
    user_defined = [
        text for text, id_ in words.items() if fields.token_types[id_] == TokenType.USER_DEFINED and text
    ]
    bpe.add_tokens([AddedToken(text, normalized=False) for text in user_defined])
    return bpe
