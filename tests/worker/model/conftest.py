from pathlib import Path

import pytest

from tests.tiny_model import write_tiny_gguf
from worker.model.tokenizer import Tokenizer
from worker.model.weights.gguf import GgufFile, read_gguf, resolve_model_spec


@pytest.fixture(scope="package")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> GgufFile:
    return read_gguf(write_tiny_gguf(tmp_path_factory.mktemp("tiny") / "tiny.gguf"))


@pytest.fixture(scope="package")
def tiny_tokenizer(tiny: GgufFile) -> Tokenizer:
    return Tokenizer(tiny.tokenizer)


@pytest.fixture(scope="session")
def smollm2() -> GgufFile:
    return read_gguf(resolve_model_spec("smollm2-135m"))


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2: GgufFile) -> Tokenizer:
    return Tokenizer(smollm2.tokenizer)


@pytest.fixture
def tiny_path(tmp_path: Path) -> Path:
    return write_tiny_gguf(tmp_path / "tiny.gguf")
