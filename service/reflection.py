"""Server reflection, v1 and v1alpha. Knows descriptors; does not know what services do.

The two protocols have the same messages under two packages, and the same bytes on the wire; the library
has v1alpha alone. So one servicer answers both, and the descriptor of v1, which clients ask for like any
other, is v1alpha's under the other package.
"""

from collections.abc import Iterable

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool
from google.protobuf.descriptor import FileDescriptor
from google.rpc import error_details_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

V1ALPHA_NAME: str = reflection.SERVICE_NAME
V1_NAME = V1ALPHA_NAME.replace(".v1alpha.", ".v1.")


def add_reflection(server: grpc.aio.Server, files: Iterable[FileDescriptor]) -> None:
    """Describe every service of `files`, and reflection itself, on a server that has not started.

    Args:
        server: Where the services are.
        files: Files whose services it has; what they import is described too, and so are error details.
    """
    files = (*files, reflection_pb2.DESCRIPTOR)
    names = [service.full_name for file in files for service in file.services_by_name.values()]
    pool = _pool((*files, error_details_pb2.DESCRIPTOR))
    servicer = reflection.aio.ReflectionServicer([*names, V1_NAME], pool=pool)
    method = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    for name in (V1ALPHA_NAME, V1_NAME):
        handler = grpc.method_handlers_generic_handler(name, {"ServerReflectionInfo": method})
        server.add_generic_rpc_handlers((handler,))


def _pool(files: Iterable[FileDescriptor]) -> descriptor_pool.DescriptorPool:
    """Return a pool of its own with `files`, what they import, and v1: the process's is everybody's."""
    pool = descriptor_pool.DescriptorPool()
    seen: set[str] = set()
    for file in files:
        _add(pool, file, seen)
    pool.Add(_v1_file())
    return pool


def _add(pool: descriptor_pool.DescriptorPool, file: FileDescriptor, seen: set[str]) -> None:
    if file.name in seen:
        return
    seen.add(file.name)
    for dependency in file.dependencies:
        _add(pool, dependency, seen)
    pool.AddSerializedFile(file.serialized_pb)


def _v1_file() -> descriptor_pb2.FileDescriptorProto:
    """Return v1alpha's file as one of v1: the package is in its name, its types and its options."""
    file = descriptor_pb2.FileDescriptorProto()
    reflection_pb2.DESCRIPTOR.CopyToProto(file)
    file.name = "grpc/reflection/v1/reflection.proto"  # as gRPC has it
    file.package = file.package.replace("v1alpha", "v1")
    for message in file.message_type:
        for field in filter(lambda field: field.type_name, message.field):
            field.type_name = field.type_name.replace(".v1alpha.", ".v1.")
    for method in file.service[0].method:
        method.input_type = method.input_type.replace(".v1alpha.", ".v1.")
        method.output_type = method.output_type.replace(".v1alpha.", ".v1.")
    file.ClearField("options")
    return file
