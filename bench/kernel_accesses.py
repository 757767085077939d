"""Which argument of a kernel each access to global memory goes to, and how wide it is, by its code.

Addresses are followed back to the parameters that they were made from, through arithmetic and not through
memory: a block number that was loaded from a table is an offset, not where the keys lie. For CUDA PTX serves,
as ptxas leaves the width of an access as it is. In ROCm's machine code registers are used again for
something else, so there it is LLVM's code, where each value has a name. Knows no kernel, starts no compiler.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_Origins = dict[str, frozenset[int]]

_PTX_STATEMENT = re.compile(r"^(?:@!?%\w+\s+)?([\w.:]+)\s+(.*);$")
_PTX_NAME = re.compile(r"%\w+")
_PTX_PARAMETER = re.compile(r"^ld\.param\.\w+$")
_PTX_GLOBAL = re.compile(r"^(ld|st)\.(?:[\w:]+\.)*?global\.(?:[\w:]+\.)*?(?:v(\d)\.)?[a-z]+(\d+)$")
_PTX_COPY = re.compile(r"^cp\.async\.c[ag]\.shared\.global")

_LLVM_VALUE = re.compile(r"^%([\w.]+) = (.*)$")
_LLVM_NAME = re.compile(r"%([\w.]+)")
_LLVM_LOAD = re.compile(r"^load (?:volatile )?(?P<type>.+?), ptr addrspace\(1\) %(?P<address>[\w.]+)")
_LLVM_STORE = re.compile(
    r"^store (?:volatile )?(?P<type><[^>]+>|\w+) [^%]*(?:%[\w.]+)?, ptr addrspace\(1\) %(?P<address>[\w.]+)"
)
_LLVM_BUFFER = re.compile(
    r"call (?P<result><[^>]+>|\w+) @llvm\.amdgcn\.raw\.ptr\.buffer\.(?P<what>load|store)(?P<lds>\.\w*lds)?"
    r"[\w.]*\((?P<arguments>.*)\)"
)
_LLVM_TYPE = re.compile(r"^(?:<(\d+) x )?(?:i(\d+)|(half|bfloat|float|double))>?$")
_LLVM_FLOATS = {"half": 16, "bfloat": 16, "float": 32, "double": 64}


@dataclass(frozen=True, slots=True)
class Access:
    """One instruction that reads or writes global memory.

    Attributes:
        arguments: Names of the pointers that its address may come from; one, if the kernel is plain.
        num_bytes: Of one thread.
        is_store: Whether it writes.
    """

    arguments: frozenset[str]
    num_bytes: int
    is_store: bool


def ptx_accesses(ptx: str, arguments: Sequence[str]) -> tuple[Access, ...]:
    """All accesses of a kernel to global memory.

    Args:
        ptx: Of one kernel, as Triton makes it.
        arguments: Names of its parameters, in order.
    """
    statements = [
        found.groups() for line in ptx.splitlines() if (found := _PTX_STATEMENT.match(line.strip()))
    ]
    edges, seeds, raw = [], {}, []
    for opcode, operands in statements:
        if _PTX_PARAMETER.match(opcode):
            number = re.search(r"_param_(\d+)", operands)
            if number is None:
                raise ValueError(f"a parameter without a number: {operands}")
            seeds[_PTX_NAME.findall(operands)[0]] = int(number[1])
        elif found := _PTX_GLOBAL.match(opcode):
            address = re.search(r"\[\s*(%\w+)", operands)
            if address is None:
                raise ValueError(f"an access without an address: {opcode} {operands}")
            raw.append((address[1], int(found[2] or 1) * int(found[3]) // 8, found[1] == "st"))
        elif _PTX_COPY.match(opcode):
            addresses = re.findall(r"\[\s*(%\w+)[^\]]*\]", operands)
            size = operands.split("]")[2].strip(" ,").split(",")[0]
            raw.append((addresses[1], int(size, 0), False))
        elif not opcode.startswith(("ld.", "st.", "ldmatrix", "stmatrix")):
            results, sources = _ptx_operands(operands)
            edges.append((results, sources))
    return _attributed(raw, _followed(edges, seeds), arguments)


def _ptx_operands(operands: str) -> tuple[list[str], list[str]]:
    """Registers that an instruction sets (the first operand), and all others."""
    end = operands.find("}") + 1 if operands.startswith("{") else operands.find(",")
    if end <= 0:
        return [], []
    return _PTX_NAME.findall(operands[:end]), _PTX_NAME.findall(operands[end:])


def llvm_accesses(llir: str, arguments: Sequence[str]) -> tuple[Access, ...]:
    """All accesses of a kernel to global memory, and to buffers made over it.

    Args:
        llir: LLVM's code of one kernel, optimised, as Triton makes it for ROCm.
        arguments: Names of its parameters, in order.
    """
    edges, raw = [], []
    names: list[str] = []
    for line in llir.splitlines():
        text = line.strip()
        if text.startswith("define ") and "amdgpu_kernel" in text:
            names = _LLVM_NAME.findall(text.split("(", 1)[1].rsplit(")", 1)[0])
            continue
        value = _LLVM_VALUE.match(text)
        code = (value[2] if value else text).removeprefix("tail ")
        loads = True
        if found := _LLVM_LOAD.match(code):
            raw.append((found["address"], _llvm_bytes(found["type"]), False))
        elif found := _LLVM_STORE.match(code):
            raw.append((found["address"], _llvm_bytes(found["type"]), True))
        elif found := _LLVM_BUFFER.search(code):
            raw.append(_llvm_buffer(found))
        else:
            loads = code.startswith("load ")
        if value and not loads:
            edges.append(([value[1]], _LLVM_NAME.findall(code)))
    return _attributed(raw, _followed(edges, {name: at for at, name in enumerate(names)}), arguments)


def _llvm_buffer(call: re.Match[str]) -> tuple[str, int, bool]:
    resource = re.search(r"ptr addrspace\(8\) %([\w.]+)", call["arguments"])
    if resource is None:
        raise ValueError(f"a buffer access without a buffer: {call[0]}")
    if call["lds"]:
        # (resource, LDS address, bytes, …)
        size = re.search(r"ptr addrspace\(3\)[^,]*, i32 (\d+)", call["arguments"])
        return resource[1], int(size[1]) if size else 0, False
    is_store = call["what"] == "store"
    kind = re.match(r"<[^>]+>|\w+", call["arguments"]) if is_store else None
    return resource[1], _llvm_bytes(kind[0] if kind else call["result"]), is_store


def _llvm_bytes(kind: str) -> int:
    found = _LLVM_TYPE.match(kind.strip())
    if found is None:
        raise ValueError(f"a type of unknown size: {kind}")
    bits = int(found[2]) if found[2] else _LLVM_FLOATS[found[3]]
    return int(found[1] or 1) * bits // 8


def _followed(edges: Iterable[tuple[list[str], list[str]]], seeds: dict[str, int]) -> _Origins:
    """Of every value the parameters that it was computed from; loops are followed until nothing is new."""
    origins: _Origins = {name: frozenset({number}) for name, number in seeds.items()}
    steps = list(edges)
    changed = True
    while changed:
        changed = False
        for results, sources in steps:
            found: frozenset[int] = frozenset().union(
                *(origins.get(source, frozenset()) for source in sources)
            )
            for result in results:
                known = origins.get(result, frozenset())
                if not found <= known:
                    origins[result] = known | found
                    changed = True
    return origins


def _attributed(
    raw: Iterable[tuple[str, int, bool]], origins: _Origins, arguments: Sequence[str]
) -> tuple[Access, ...]:
    """Accesses by name; a stride is in every address too, so who calls keeps only pointers."""
    return tuple(
        Access(
            frozenset(arguments[at] for at in origins.get(address, frozenset()) if at < len(arguments)),
            num_bytes,
            is_store,
        )
        for address, num_bytes, is_store in raw
    )
