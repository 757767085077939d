"""Ours, for `pagecast bench peers`: a child that answers the same cases as `peer_driver` does.

    python -m bench.peer_pagecast MODEL THREADS WEIGHTS ACTIVATIONS KV_DTYPE

Beside cases it is asked `{"what": "read"}`, bytes per second of the machine, and `{"what": "floor", …}`, what
a step of a decode case reads.
"""

import gc
import json
import os
import sys
from typing import Any, TextIO

from bench.decode import Decoder, Wish, mean_context
from bench.floor import Reader, token_bytes, weight_bytes
from bench.loading import Bench
from worker.config import prepare_process


class Pagecast:
    """Cases on one model, each with sessions of its own that are made when it comes first.

    Args:
        bench: The model.
        reader: Tells the bandwidth.
    """

    def __init__(self, bench: Bench, reader: Reader) -> None:
        self._bench = bench
        self._reader = reader
        self._decoders: dict[Wish, Decoder] = {}

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        """Answers a question; what goes wrong is the answer."""
        try:
            return self._answer(question)
        except Exception as error:  # noqa: BLE001 - the next case may be done
            return {"error": f"{type(error).__name__}: {error}"}

    def _answer(self, question: dict[str, Any]) -> dict[str, Any]:
        match question["what"]:
            case "read":
                return {"bytes_per_s": self._reader.read()}
            case "floor":
                context, tokens = int(question["context"]), int(question["tokens"])
                of_token = token_bytes(self._bench.pool(1))
                attended = int(question["sessions"]) * mean_context(context, tokens)
                return {"bytes": weight_bytes(self._bench) + round(of_token * attended)}
            case "decode":
                sessions = int(question["sessions"]), int(question["context"])
                wish = Wish((sessions[0],), (sessions[1],), (), int(question["tokens"]), 1)
                decoder = self._decoder(wish)
                return {"ms": [sum(decoder.decode(0)) / wish.tokens for _ in range(int(question["repeats"]))]}
            case "first_token":
                decoder = self._decoder(Wish((), (), (int(question["context"]),), 1, 1))
                return {"ms": [decoder.first_token(0) for _ in range(int(question["repeats"]))]}
            case what:
                raise ValueError(f"what={what!r} is no question")

    def _decoder(self, wish: Wish) -> Decoder:
        if wish not in self._decoders:
            self._decoders[wish] = Decoder(self._bench, wish)
            gc.collect()
            gc.freeze()  # as a worker does
        return self._decoders[wish]


def converse(pagecast: Pagecast, version: str, questions: TextIO, answers: TextIO) -> None:
    """Answers questions, one JSON object a line, until there are no more."""
    print(json.dumps({"ready": version}), file=answers, flush=True)
    for line in questions:
        print(json.dumps(pagecast.answer(json.loads(line))), file=answers, flush=True)


def main(arguments: list[str]) -> None:
    """Loads the model that the arguments name, and answers."""
    model, threads, weights, activations, kv_dtype = arguments
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what else is printed must not come between answers
    prepare_process()
    numbers: Any = {"weights": weights, "activations": activations, "kv_dtype": kv_dtype}
    bench = Bench.load(model, kernels="native", num_threads=int(threads), **numbers)
    converse(Pagecast(bench, Reader(int(threads))), bench.title, sys.stdin, answers)


if __name__ == "__main__":
    main(sys.argv[1:])
