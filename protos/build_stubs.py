"""Generates the gRPC stubs; hatchling calls it at every install, `make stubs` by hand.

Writes `*_pb2.py`, `*_pb2.pyi`, `*_pb2_grpc.py` and `*_pb2_grpc.pyi` beside the protos under
`protos/pagecast/`. They are not tracked. Needs grpcio-tools and mypy-protobuf.
"""

import os
import sys
import sysconfig
from pathlib import Path
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ModuleNotFoundError:  # run by hand, outside a build
    BuildHookInterface = object  # type: ignore[assignment, misc]

PROTO_ROOT = Path(__file__).resolve().parent


def build_stubs() -> None:
    """Run protoc over every proto. Raises RuntimeError with protoc's exit code if it fails."""
    from importlib.resources import files  # noqa: PLC0415

    from grpc_tools import protoc  # noqa: PLC0415  a build requirement, absent at run time

    well_known = files("grpc_tools") / "_proto"
    plugin = Path(sysconfig.get_path("scripts")) / "protoc-gen-mypy_grpc"
    search = [str(plugin.parent), *(str(Path(entry).parent / "bin") for entry in sys.path)]
    os.environ["PATH"] = os.pathsep.join([*search, os.environ.get("PATH", "")])
    protos = sorted(str(path.relative_to(PROTO_ROOT)) for path in PROTO_ROOT.glob("pagecast/**/*.proto"))
    out = str(PROTO_ROOT)
    code = protoc.main(
        [
            "protoc",
            f"-I{out}",
            f"-I{well_known}",
            f"--python_out={out}",
            f"--pyi_out={out}",
            f"--grpc_python_out={out}",
            f"--mypy_grpc_out={out}",
            *protos,
        ]
    )
    if code != 0:
        raise RuntimeError(f"protoc failed with exit code {code}")


class StubsHook(BuildHookInterface):  # type: ignore[misc, valid-type]
    """The build hook that hatchling finds in this file."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Generate the stubs before files are collected."""
        del version, build_data
        build_stubs()


if __name__ == "__main__":
    build_stubs()
