"""The head of a GGUF file."""

from pathlib import Path

import gguf
import pytest

from kvplane_node_agent.gguf_file import read_metadata


def write(path: Path) -> None:
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(3)
    writer.add_array("llama.attention.head_count_kv", [4, 2, 4])
    writer.add_array("tokenizer.ggml.tokens", ["a", "bc", ""])
    writer.add_array("tokenizer.ggml.scores", [0.5] * 5000)
    writer.add_bool("llama.flag", True)
    writer.add_name("the last key")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def test_metadata_is_read_without_the_vocabulary(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf")
    assert read_metadata(tmp_path / "m.gguf") == {
        "general.architecture": "llama",
        "general.name": "the last key",
        "llama.attention.head_count_kv": [4, 2, 4],
        "llama.block_count": 3,
        "llama.flag": True,
    }


def test_it_reads_what_the_reference_reader_reads(nano_model: Path) -> None:
    ours = read_metadata(nano_model)
    fields = gguf.GGUFReader(nano_model).fields
    assert {key: fields[key].contents() for key in ours} == ours


@pytest.mark.parametrize("size", [0, 3, 10, 30, 60, 120])
def test_a_file_that_is_cut_short_is_refused(tmp_path: Path, size: int) -> None:
    write(tmp_path / "m.gguf")
    short = tmp_path / "short.gguf"
    short.write_bytes((tmp_path / "m.gguf").read_bytes()[:size])
    with pytest.raises(ValueError, match="cut short"):
        read_metadata(short)


@pytest.mark.parametrize(
    "head", [b"GGML\3\0\0\0", b"GGUF\1\0\0\0", b"GGUF\0\0\0\3"], ids=["other", "old", "big endian"]
)
def test_another_kind_of_file_is_refused(tmp_path: Path, head: bytes) -> None:
    (tmp_path / "m.gguf").write_bytes(head + bytes(64))
    with pytest.raises(ValueError, match="not a GGUF file of version 2 or 3"):
        read_metadata(tmp_path / "m.gguf")
