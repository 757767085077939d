"""One section of the GPU check, in a process of its own: `python -m bench.gpu_section NAME DEVICE SECONDS`.

What ends such a process, as an access outside of memory does on a GPU, ends no other section. Every line goes
out as it is found, as one JSON object; with `dry` as the last argument the names of cases do. With
`compile PART PARTS` every PARTS-th case from PART on has its kernels compiled, and nothing else.
"""

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from importlib import import_module

from bench.gpu_compile import compile_cases
from bench.gpu_values import Case, Clock, Line, Setting, run_cases


def cases_of(module: str, setting: Setting) -> Sequence[Case]:
    """Imports a section and lists its cases; needs no GPU."""
    listed: Sequence[Case] = import_module(module).cases(setting)
    return listed


def main(arguments: Sequence[str]) -> None:
    """Runs the section that the arguments name."""
    module, device, seconds, *how = arguments
    way, *parts = how or ["run"]
    setting = Setting(device, float(seconds), is_dry=way == "dry", compiles_alone=way == "compile")
    clock = Clock(setting.seconds)
    if not setting.is_dry:
        import torch  # noqa: PLC0415 - dear, and nothing of it is needed for a wrong argument

        from worker.kernels.triton import prepare_triton  # noqa: PLC0415

        if device == "cuda" and not torch.cuda.is_available():
            sys.exit("no CUDA device is visible to torch")
        prepare_triton(torch.device(device))
        if device == "cpu":
            torch.set_num_threads(1)
    cases = cases_of(module, setting)
    lines: Iterable[Line]
    if setting.is_dry:
        lines = (Line(case.name, note=case.plan) for case in cases)
    elif setting.compiles_alone:
        part, num_parts = (int(number) for number in parts)
        name = f"{module.rpartition('_')[2]}, part {part + 1} of {num_parts}"
        lines = [compile_cases(name, cases[part::num_parts], clock)]
    else:
        lines = run_cases(cases, clock)
    for line in lines:
        sys.stdout.write(json.dumps(asdict(line)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
