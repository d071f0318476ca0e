"""The contract's own rules, checked on the compiled descriptors: what `buf lint` calls STANDARD, plus comments on every RPC."""

import subprocess
import sys
from pathlib import Path

import grpc_tools
import pytest
from google.protobuf import descriptor_pb2

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> list[descriptor_pb2.FileDescriptorProto]:
    """Every file of protos/, with source comments."""
    out = tmp_path_factory.mktemp("protos") / "set.bin"
    google = next(Path(p) for p in sys.path if (Path(p) / "google" / "rpc" / "status.proto").exists())
    subprocess.run(
        [
            sys.executable,
            "-m",
            "grpc_tools.protoc",
            f"-I{ROOT / 'protos'}",
            f"-I{Path(grpc_tools.__file__).parent / '_proto'}",
            f"-I{google}",
            f"--descriptor_set_out={out}",
            "--include_source_info",
            *(str(p) for p in sorted((ROOT / "protos").rglob("*.proto"))),
        ],
        check=True,
    )
    return list(descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes()).file)


def test_folder_is_package_is_version(files):
    """A file's folder, its package and its version agree, so that v2 can live beside v1."""
    for file in files:
        assert file.package.replace(".", "/") == str(Path(file.name).parent)
        assert file.package.endswith(".v1")
        assert file.syntax == "proto3"


def test_each_rpc_has_its_own_request_and_response(files):
    """Requests and responses are never shared: a field added for one RPC cannot leak into another."""
    seen: set[str] = set()
    for file in files:
        for service in file.service:
            assert service.name.endswith("Service")
            for method in service.method:
                for kind, suffix in ((method.input_type, "Request"), (method.output_type, "Response")):
                    assert kind == f".{file.package}.{method.name}{suffix}"
                    assert kind not in seen
                    seen.add(kind)


def test_enums_start_unspecified_and_carry_their_name(files):
    """Zero means "not set", and values do not clash across enums."""
    for file in files:
        for enum in file.enum_type:
            prefix = "".join(("_" + c if c.isupper() else c.upper()) for c in enum.name).lstrip("_").replace("D_TYPE", "DTYPE")
            assert enum.value[0].name == f"{prefix}_UNSPECIFIED" and enum.value[0].number == 0
            assert all(v.name.startswith(prefix + "_") for v in enum.value)


def test_every_service_and_rpc_is_explained(files):
    """Purpose, precondition, errors and idempotency belong to the contract, not to folklore."""
    for file in files:
        commented = {tuple(loc.path) for loc in file.source_code_info.location if loc.leading_comments.strip()}
        for s, service in enumerate(file.service):
            assert (6, s) in commented, service.name
            for m, method in enumerate(service.method):
                assert (6, s, 2, m) in commented, f"{service.name}.{method.name}"


def test_bulk_numbers_are_bytes(files):
    """`repeated float` costs 85 times the encode time of bytes; only short per-turn lists may use it."""
    field = descriptor_pb2.FieldDescriptorProto
    allowed = {"per_turn"}
    for file in files:
        for message in file.message_type:
            for f in message.field:
                if f.label == field.LABEL_REPEATED and f.type in (field.TYPE_FLOAT, field.TYPE_DOUBLE):
                    assert f.name in allowed, f"{message.name}.{f.name}"


def test_generated_stubs_are_fresh():
    """The committed stubs are what the committed protos give."""
    subprocess.run([sys.executable, "tools/generate_protos.py", "--check"], cwd=ROOT, check=True, capture_output=True)
