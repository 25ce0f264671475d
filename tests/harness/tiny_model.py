"""Tiny models with random weights: word salad, but real tokens, a real KV cache and real slots.

Every word of WORDS is one token, bare or after a space; other text falls back to bytes. Control
tokens and bytes that are not ASCII are never drawn by greedy decoding, so an answer ends exactly
at its `max_tokens`. Same preset, seed and library versions, same bytes.
"""

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import numpy as np

VERSION = 1
"""Part of the cached file's name: raise it when what is written changes."""
CACHE = Path(__file__).parents[2] / ".cache" / "models"
_TEXT = """
the of and to in is it you that he was for on are with as his they be at one have this from
or had by hot but some what there we can out other were all your when up use word how said an
each she which do their time if will way about many then them would write like so these her long
make thing see him two has look more day could go come did sound no most number who over know
water than call first people may down side been now find any new work part take get place live
where after back little only round man year came show every good me give our under name very
system user assistant prompt context token cache model server node cluster request response
route prefix session document summary question please explain step result value error check
code data file memory block slot engine router agent registry store lease
"""
WORDS = tuple(_TEXT.split())
_CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_CHATML = (
    "{% for m in messages %}{{'<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{'<|im_start|>assistant\n'}}{% endif %}"
)


@dataclass(frozen=True, slots=True)
class Shape:
    """The size of a model."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    feed_forward: int
    context_tokens: int
    half_precision: bool

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of one token in an f16 KV cache: key and value, two bytes each."""
        return self.layers * self.kv_heads * (self.width // self.heads) * 2 * 2


SHAPES = {
    "nano": Shape(2, 64, 2, 1, 128, 8192, half_precision=False),
    "mini": Shape(6, 384, 6, 2, 1024, 16384, half_precision=True),
}


def tiny_model(preset: str, *, seed: int = 1, folder: Path = CACHE) -> Path:
    """Return the GGUF file of a preset of SHAPES, written the first time it is asked for."""
    path = folder / f"{preset}-{seed}-v{VERSION}.gguf"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        # Test runs side by side may write it at once: each its own file, the last rename wins.
        draft = path.with_suffix(f".{os.getpid()}.draft")
        _write(draft, preset, SHAPES[preset], seed)
        draft.replace(path)
    return path


def words(count: int, *, seed: int = 0) -> str:
    """Return `count` words, which are as many tokens; another seed gives another text."""
    return " ".join(random.Random(seed).choices(WORDS, k=count))


def _write(path: Path, preset: str, shape: Shape, seed: int) -> None:
    tokens, merges = _vocabulary()
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_name(f"kvplane test model {preset}")
    _describe(writer, shape, len(tokens))
    _tokenizer(writer, tokens, merges)
    for name, weights in _tensors(shape, tokens, np.random.default_rng(seed)):
        writer.add_tensor(f"{name}.weight", weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _describe(writer: Any, shape: Shape, vocabulary: int) -> None:
    writer.add_context_length(shape.context_tokens)
    writer.add_embedding_length(shape.width)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.feed_forward)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_rope_dimension_count(shape.width // shape.heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(vocabulary)
    kinds = gguf.LlamaFileType
    writer.add_file_type(kinds.MOSTLY_F16 if shape.half_precision else kinds.ALL_F32)


def _tokenizer(writer: Any, tokens: list[str], merges: list[tuple[str, str]]) -> None:
    kinds = gguf.TokenType
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([kinds.CONTROL if t in _CONTROL else kinds.NORMAL for t in tokens])
    writer.add_token_merges([f"{left} {right}" for left, right in merges])
    writer.add_bos_token_id(0)
    writer.add_pad_token_id(0)
    writer.add_eos_token_id(_CONTROL.index("<|im_end|>"))
    writer.add_add_bos_token(False)
    writer.add_chat_template(_CHATML)


def _vocabulary() -> tuple[list[str], list[tuple[str, str]]]:
    alphabet = _byte_letters()
    ranks: dict[tuple[str, str], int] = {}
    for word in WORDS:
        for letters in (word, alphabet[ord(" ")] + word):
            pieces = _encode(letters, ranks)
            for end in range(1, len(pieces)):
                ranks["".join(pieces[:end]), pieces[end]] = len(ranks)
    merged = (left + right for left, right in ranks)
    return list(dict.fromkeys((*_CONTROL, *alphabet, *merged))), list(ranks)


def _encode(letters: str, ranks: dict[tuple[str, str], int]) -> list[str]:
    pieces = list(letters)
    while True:
        known = [(ranks[pair], at) for at, pair in enumerate(pairwise(pieces)) if pair in ranks]
        if not known:
            return pieces
        at = min(known)[1]
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]


def _byte_letters() -> list[str]:
    """GPT-2's printable letter for each byte."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def _tensors(
    shape: Shape, tokens: list[str], random_: np.random.Generator
) -> Iterator[tuple[str, Any]]:
    width, kv_width = shape.width, shape.width // shape.heads * shape.kv_heads

    def matrix(rows: int, columns: int, scale: float = 1.0) -> Any:
        values = random_.standard_normal((rows, columns), dtype=np.float32)
        values *= np.float32(scale / columns**0.5)
        return values.astype(np.float16) if shape.half_precision else values

    ones = np.ones(width, np.float32)
    output = matrix(len(tokens), width, 4.0)
    output[[index for index, token in enumerate(tokens) if _silent(token)]] = 0
    yield "token_embd", matrix(len(tokens), width, width**0.5)
    yield "output_norm", ones
    yield "output", output
    for layer in range(shape.layers):
        block = f"blk.{layer}"
        yield f"{block}.attn_norm", ones
        yield f"{block}.attn_q", matrix(width, width)
        yield f"{block}.attn_k", matrix(kv_width, width)
        yield f"{block}.attn_v", matrix(kv_width, width)
        yield f"{block}.attn_output", matrix(width, width)
        yield f"{block}.ffn_norm", ones
        yield f"{block}.ffn_gate", matrix(shape.feed_forward, width)
        yield f"{block}.ffn_up", matrix(shape.feed_forward, width)
        yield f"{block}.ffn_down", matrix(width, shape.feed_forward)


def _silent(token: str) -> bool:
    # The first letter may stand for a space, which is not ASCII in GPT-2's alphabet.
    return token in _CONTROL or not (token if len(token) == 1 else token[1:]).isascii()
