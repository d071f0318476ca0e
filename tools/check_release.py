"""Refuse what services of the last release could not live beside: `make lint` runs this, an upgrade is rolling.

    python tools/check_release.py             exit code 1 with a line for each break
    python tools/check_release.py --record    at a release: write down what is there now (docs/releases/README.md)

tools/released.json is the last release as others see it:

    contract   every message field by number (name, type, oneof), enum value by number, method (types, streaming)
    settings   every setting of the run file with its default
    formats    numbers of the ledger, of manifests, checkpoints and run folders

Additions are free. In the contract nothing may go away or change, a new package `v2` lives beside `v1`. A setting may go away
or change its default, and a format its number, when docs/releases/next.md names it in backticks: who upgrades reads it there.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2

ROOT = Path(__file__).resolve().parent.parent
RELEASED = ROOT / "tools" / "released.json"
NEXT = ROOT / "docs" / "releases" / "next.md"
FORMATS = {  # the constant is read, not imported: the trainer's would bring torch along
    "format of the ledger": ("services/buffer/ledger.py", "SCHEMA"),
    "format of a version's manifest": ("slipstream/manifest.py", "FORMAT"),
    "format of a checkpoint": ("services/trainer/checkpoint.py", "FORMAT"),
    "format of a run folder": ("slipstream/formats.py", "RUN_FOLDER"),
}
_FIELD = descriptor_pb2.FieldDescriptorProto


def contract(files: list[descriptor_pb2.FileDescriptorProto]) -> dict[str, str]:
    """What a peer can see of the protos: a name for each thing that has to stay, and what it has to stay."""
    found: dict[str, str] = {}
    for file in files:
        for message in file.message_type:
            found.update(_message(f"{file.package}.{message.name}", message))
        for enum in file.enum_type:
            found.update(_enum(f"{file.package}.{enum.name}", enum))
        for service in file.service:
            for method in service.method:
                streams = method.client_streaming * "stream of ", method.server_streaming * "stream of "
                found[f"method {file.package}.{service.name}.{method.name}"] = (
                    f"{streams[0]}{method.input_type[1:]} -> {streams[1]}{method.output_type[1:]}")
    return dict(sorted(found.items()))


def _message(name: str, message: descriptor_pb2.DescriptorProto) -> Iterator[tuple[str, str]]:
    for field in message.field:
        kind = field.type_name[1:] or _FIELD.Type.Name(field.type).removeprefix("TYPE_").lower()
        label = "repeated " if field.label == _FIELD.LABEL_REPEATED else "optional " if field.proto3_optional else ""
        oneof = ""
        if field.HasField("oneof_index") and not field.proto3_optional:
            oneof = f" in oneof {message.oneof_decl[field.oneof_index].name}"
        yield f"field {field.number} of {name}", f"{label}{kind} {field.name}{oneof}"
    for nested in message.nested_type:
        yield from _message(f"{name}.{nested.name}", nested)
    for enum in message.enum_type:
        yield from _enum(f"{name}.{enum.name}", enum)


def _enum(name: str, enum: descriptor_pb2.EnumDescriptorProto) -> Iterator[tuple[str, str]]:
    for value in enum.value:
        yield f"value {value.number} of {name}", value.name


def files() -> list[descriptor_pb2.FileDescriptorProto]:
    """The descriptors in the generated stubs, which `tools/generate_protos.py --check` compares with protos/."""
    found = []
    for path in sorted((ROOT / "slipstream" / "protos").rglob("*_pb2.py")):
        module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
        file = descriptor_pb2.FileDescriptorProto()
        module.DESCRIPTOR.CopyToProto(file)
        found.append(file)
    return found


def settings() -> dict[str, str]:
    """Every setting with its default as JSON, or `required`."""
    from slipstream import config

    return {name: default for name, default, _ in config.settings()}


def formats() -> dict[str, str]:
    """The numbers that `slipstream/formats.py` lists."""
    found = {}
    for what, (path, constant) in FORMATS.items():
        numbers = re.findall(rf"^{constant} = (\d+)", (ROOT / path).read_text(), re.M)
        if len(numbers) != 1:
            raise SystemExit(f"check_release: {path} has no line `{constant} = NUMBER`: correct FORMATS in {__file__}")
        found[what] = numbers[0]
    return found


def breaks(before: Mapping[str, Any], now: Mapping[str, Any], note: str) -> list[str]:
    """What of the last release is gone or different, a sentence each; what the note names may be."""
    found = []
    for part in ("contract", "settings", "formats"):
        for name, was in before[part].items():
            found_now = now[part].get(name)
            if found_now == was or (part != "contract" and f"`{name}`" in note):
                continue
            change = f"is gone, it was {was}" if found_now is None else f"was {was} and is {found_now}"
            remedy = "add another one instead, or a package v2" if part == "contract" else (
                f"put it back, or tell in docs/releases/next.md, with `{name}`, what who upgrades has to do")
            found.append(f"{name} {change}: services of release {before['release']} would break; {remedy}")
    return found


def main() -> int:
    """Compare, or record."""
    sys.path.insert(0, str(ROOT))
    from slipstream import __version__

    now = {"release": __version__, "contract": contract(files()), "settings": settings(), "formats": formats()}
    if "--record" in sys.argv:
        RELEASED.write_text(json.dumps(now, indent=1) + "\n")
        return 0
    found = breaks(json.loads(RELEASED.read_text()), now, NEXT.read_text() if NEXT.exists() else "")
    for sentence in found:
        print(sentence)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
