"""Runs one engine for `pagecast bench peers`, with its own python: `peer_driver.py ENGINE MODEL THREADS`.

Imports nothing of Pagecast and nothing outside the standard library but the engine's packages. Loads once and
says `{"ready": …}`; then each line on standard input is a case, and each answer one line on standard output:

    {"what": "decode", "sessions": 4, "context": 128, "tokens": 32, "repeats": 1}
        {"ms": […]} of each repeat, the mean step of all sessions
    {"what": "first_token", "sessions": 1, "context": 128, "repeats": 1}
        {"ms": […]} from nothing to the token

An answer may be `{"error": …}`. What the engine itself prints goes to standard error.
"""

import json
import os
import random
import sys
import time
from importlib import import_module
from typing import Any, Protocol, TextIO

VOCABULARY = 40_000
"""Ids of prompts are drawn below it; every engine's cost is the same for any id."""


class Engine(Protocol):
    """A loaded model that decodes greedily, and whose end-of-text token ends nothing."""

    version: str

    def first_token(self, prompts: list[list[int]]) -> float:
        """Seconds from nothing to the first token of every prompt."""

    def decode(self, prompts: list[list[int]], tokens: int) -> float:
        """Seconds of the `tokens` steps that come behind the first token of every prompt."""


class OpenVino:
    """OpenVINO GenAI with its scheduler, which computes all prompts in one step and caches no prefix.

    Args:
        path: A GGUF file, or a folder that OpenVINO reads.
        threads: For inference.
    """

    def __init__(self, path: str, threads: int) -> None:
        self._genai: Any = import_module("openvino_genai")
        self._openvino: Any = import_module("openvino")
        self._numpy: Any = import_module("numpy")
        self.version = str(self._genai.__version__)
        scheduler = self._genai.SchedulerConfig()
        scheduler.enable_prefix_caching = False
        scheduler.max_num_batched_tokens = 1 << 14
        scheduler.cache_size = 2
        self._pipeline = self._genai.LLMPipeline(
            path, "CPU", INFERENCE_NUM_THREADS=threads, scheduler_config=scheduler
        )

    def first_token(self, prompts: list[list[int]]) -> float:
        """See `Engine`."""
        return float(self._generate(prompts, 1).get_ttft().mean) / 1e3

    def decode(self, prompts: list[list[int]], tokens: int) -> float:
        """See `Engine`."""
        # When each step of all sessions was done, by its own clock, in milliseconds.
        done = list(self._generate(prompts, tokens + 1).raw_metrics.m_new_token_times)
        if len(done) != tokens + 1:
            raise RuntimeError(f"{tokens + 1} tokens took {len(done)} steps: the prompts were cut")
        return float(done[-1] - done[0]) / 1e3

    def _generate(self, prompts: list[list[int]], tokens: int) -> Any:
        numpy = self._numpy
        config = self._genai.GenerationConfig()
        config.max_new_tokens = tokens
        config.ignore_eos = True
        config.do_sample = False
        ids = numpy.asarray(prompts, numpy.int64)
        tensors = (self._openvino.Tensor(each) for each in (ids, numpy.ones_like(ids)))
        found = self._pipeline.generate(self._genai.TokenizedInputs(*tensors), config)
        if any(len(row) != tokens for row in found.tokens):
            raise RuntimeError(f"wanted {tokens} tokens of each prompt, got {[len(r) for r in found.tokens]}")
        return found.perf_metrics


class OnnxRuntime:
    """onnxruntime-genai on a folder that its model builder made.

    Args:
        path: The folder.
        threads: Within an operator.
    """

    def __init__(self, path: str, threads: int) -> None:
        self._genai: Any = import_module("onnxruntime_genai")
        self._numpy: Any = import_module("numpy")
        self.version = str(self._genai.__version__)
        config = self._genai.Config(path)
        config.overlay(
            json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": threads}}}})
        )
        self._model = self._genai.Model(config)

    def first_token(self, prompts: list[list[int]]) -> float:
        """See `Engine`."""
        generator = self._generator(prompts, 1)
        start = time.perf_counter()
        generator.append_tokens(self._numpy.asarray(prompts, self._numpy.int32))
        generator.generate_next_token()
        return time.perf_counter() - start

    def decode(self, prompts: list[list[int]], tokens: int) -> float:
        """See `Engine`."""
        generator = self._generator(prompts, tokens + 1)
        generator.append_tokens(self._numpy.asarray(prompts, self._numpy.int32))
        generator.generate_next_token()
        start = time.perf_counter()
        for _ in range(tokens):
            generator.generate_next_token()
        return time.perf_counter() - start

    def _generator(self, prompts: list[list[int]], tokens: int) -> Any:
        length = len(prompts[0]) + tokens
        params = self._genai.GeneratorParams(self._model)
        # Neither end may end a turn: the least length is the most.
        params.set_search_options(
            max_length=length, min_length=length, batch_size=len(prompts), do_sample=False
        )
        return self._genai.Generator(self._model, params)


class Transformers:
    """transformers on torch, float32, with its default cache.

    Args:
        path: A GGUF file, or a folder of `save_pretrained`.
        threads: Of torch.
    """

    def __init__(self, path: str, threads: int) -> None:
        self._torch: Any = import_module("torch")
        transformers: Any = import_module("transformers")
        self.version = str(transformers.__version__)
        self._torch.set_num_threads(threads)
        folder, _, name = path.rpartition("/")
        from_file = {"gguf_file": name} if name.endswith(".gguf") else {}
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            folder if from_file else path, dtype=self._torch.float32, **from_file
        ).eval()

    def first_token(self, prompts: list[list[int]]) -> float:
        """See `Engine`."""
        start = time.perf_counter()
        self._start(prompts)
        return time.perf_counter() - start

    def decode(self, prompts: list[list[int]], tokens: int) -> float:
        """See `Engine`."""
        drawn, cache = self._start(prompts)
        start = time.perf_counter()
        for _ in range(tokens):
            drawn, cache = self._step(drawn, cache)
        return time.perf_counter() - start

    def _start(self, prompts: list[list[int]]) -> tuple[Any, Any]:
        return self._step(self._torch.tensor(prompts), None)

    def _step(self, ids: Any, cache: Any) -> tuple[Any, Any]:
        with self._torch.inference_mode():
            found = self._model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            return found.logits[:, -1].argmax(-1, keepdim=True), found.past_key_values


ENGINES: dict[str, type[OpenVino] | type[OnnxRuntime] | type[Transformers]] = {
    "openvino": OpenVino,
    "onnxruntime": OnnxRuntime,
    "transformers": Transformers,
}


def answer(engine: Engine, case: dict[str, Any]) -> dict[str, Any]:
    """Runs one case; what goes wrong is the answer."""
    number = int(case["sessions"])
    rng = random.Random(number)  # noqa: S311 - no secret
    prompts = [[rng.randrange(3, VOCABULARY) for _ in range(int(case["context"]))] for _ in range(number)]
    repeats = range(int(case["repeats"]))
    try:
        if case["what"] == "first_token":
            return {"ms": [engine.first_token(prompts) * 1e3 for _ in repeats]}
        tokens = int(case["tokens"])
        return {"ms": [engine.decode(prompts, tokens) * 1e3 / tokens for _ in repeats]}
    except Exception as error:  # noqa: BLE001 - an engine that fails one case may do the next
        return {"error": f"{type(error).__name__}: {error}"}


def converse(engine: Engine, cases: TextIO, answers: TextIO) -> None:
    """Answers cases, one JSON object a line, until there are no more."""
    print(json.dumps({"ready": engine.version}), file=answers, flush=True)
    for line in cases:
        print(json.dumps(answer(engine, json.loads(line))), file=answers, flush=True)


def main(arguments: list[str]) -> None:
    """Loads the engine that the arguments name, and answers."""
    name, path, threads = arguments
    # The engine's own lines must not come between answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    converse(ENGINES[name](path, int(threads)), sys.stdin, answers)


if __name__ == "__main__":
    main(sys.argv[1:])
