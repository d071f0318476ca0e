"""The table `security` of a run file. It is no part of the run's hash: paths and limits differ between machines."""

from __future__ import annotations

from pydantic import Field

from slipstream.config_sections import Section


class Security(Section):
    tls_dir: str = Field(
        default="", description="Folder with tls.crt, tls.key and ca.crt, or one such folder per role; empty = plaintext, on "
        "loopback only.")
    secret_file: str = Field(
        default="", description="File of the secrets of tokens, one a line; empty = secret in the run folder.")
    client_calls_per_minute: int = Field(
        default=600, ge=0, description="Calls a minute of an outside client whose token names no quota; 0 = any.")
    client_bytes_per_minute: int = Field(
        default=64 << 20, ge=0,
        description="Bytes a minute, both ways, of an outside client whose token names no quota; 0 = any.")
    calls_per_minute: int = Field(
        default=0, ge=0, description="Calls a minute of one role at one address, for the run's own processes; 0 = any.")
    bytes_per_minute: int = Field(
        default=0, ge=0, description="Bytes a minute, both ways, of one role at one address, likewise; 0 = any.")
    log_content: bool = Field(
        default=False, description="Let log lines carry prompts, answers and the messages of users' code that may quote them.")
