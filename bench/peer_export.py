"""Writes a GGUF file as float32 for transformers, with its python: `peer_export.py MODEL.gguf FOLDER`.

Imports nothing of Pagecast. The weights are the file's own, dequantised; what reads the folder runs the same
model as who reads the file.
"""

import sys
from importlib import import_module
from pathlib import Path
from typing import Any


def export(model: Path, folder: Path) -> None:
    """Reads the file and writes config, weights and tokenizer into a folder."""
    transformers: Any = import_module("transformers")
    torch: Any = import_module("torch")
    source = {"pretrained_model_name_or_path": str(model.parent), "gguf_file": model.name}
    read = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # A model that came from GGUF counts as quantised, and would not be saved.
    sizes = {name: value for name, value in read.config.to_dict().items() if name != "quantization_config"}
    plain = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    plain.load_state_dict(read.state_dict())
    plain.save_pretrained(str(folder))
    transformers.AutoTokenizer.from_pretrained(**source).save_pretrained(str(folder))


if __name__ == "__main__":
    export(Path(sys.argv[1]), Path(sys.argv[2]))
