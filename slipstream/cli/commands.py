"""Arguments and options of every command. The work is elsewhere and imported when a command runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from slipstream import cli

app = typer.Typer(
    name="slipstream", add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False,
    help="Asynchronous reinforcement learning of Mixture-of-Experts language models.")
env = typer.Typer(no_args_is_help=True, help="Serve and check environments.")
config = typer.Typer(no_args_is_help=True, help="Settings of the run file.")
app.add_typer(env, name="env")
app.add_typer(config, name="config")

RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="Name of a run under runs/, its folder, or its run file.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks.")]


@app.callback(invoke_without_command=True)
def _app(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        from slipstream import __version__
        print(f"slipstream {__version__}")
        raise typer.Exit


@app.command()
def run(
    run_file: Annotated[Path, typer.Argument(metavar="RUN.toml", help="Run file.")],
    set_: Annotated[list[str] | None, typer.Option(
        "--set", metavar="KEY=VALUE", help="Override a setting: --set schedule.max_lag=1. Repeatable.")] = None,
    dry_run: Annotated[bool, typer.Option(
        "--dry-run", help="Print the resolved run file, say everything that cannot work, and stop.")] = False,
    plain: Annotated[bool, typer.Option("--plain", help="Lines instead of the live view.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Delete what the run folder holds and start over.")] = False,
    debug: Debug = False,
) -> None:
    """Train: start all services on this machine, show progress, stop them in order. Resumes the run its folder holds."""
    from slipstream.config import load

    settings = load(run_file, set_ or [])
    if dry_run:
        from slipstream.cli import dry_run as trial
        raise typer.Exit(trial.run(settings, fresh))
    from slipstream.cli import run as command
    raise typer.Exit(command.run(settings, command.Options(plain=plain, fresh=fresh, debug=debug, started=cli.STARTED)))


@app.command()
def status(
    run: RunArgument, as_json: Annotated[bool, typer.Option("--json", help="Everything, as JSON.")] = False,
    debug: Debug = False,
) -> None:
    """What each process of a run does and waits for."""
    from slipstream.cli import existing_run
    raise typer.Exit(existing_run.status(run, as_json))


@app.command()
def watch(
    run: RunArgument, plain: Annotated[bool, typer.Option("--plain", help="Lines instead of the live view.")] = False,
    debug: Debug = False,
) -> None:
    """The live view of a running run; changes nothing."""
    from slipstream.cli import existing_run
    raise typer.Exit(existing_run.watch(run, plain))


@app.command()
def generate(
    run: RunArgument,
    text: Annotated[str, typer.Argument(metavar="TEXT", help="Prompt.")],
    max_new_tokens: Annotated[int, typer.Option(min=0, help="Most tokens of an answer; 0 = the run's.")] = 0,
    greedy: Annotated[bool, typer.Option("--greedy/--sample", help="The most probable token, or a draw.")] = True,
    n: Annotated[int, typer.Option("--n", min=1, help="Answers, one a line.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Seed of --sample.")] = 0,
    chat: Annotated[bool, typer.Option("--chat", help="Put the prompt through the model's chat template.")] = False,
    debug: Debug = False,
) -> None:
    """Ask the model of a run: the trained one, or while it trains, a rollout worker's."""
    from slipstream.cli import existing_run
    raise typer.Exit(existing_run.generate(
        run, text, ["--max-new-tokens", str(max_new_tokens), "--n", str(n), "--seed", str(seed),
                    *([] if greedy else ["--sample"]), *(["--chat"] if chat else []), *(["--debug"] if debug else [])]))


@app.command()
def ledger(
    run: RunArgument,
    dead: Annotated[bool, typer.Option("--dead", help="Also list what was dropped or closed as failed, and why.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
    debug: Debug = False,
) -> None:
    """Where every draw and sample of a run is; exit code 1 when the account does not add up."""
    from slipstream.cli import account
    raise typer.Exit(account.ledger(run, dead, as_json))


@app.command()
def replay(
    run: RunArgument,
    to: Annotated[int | None, typer.Option("--to", metavar="K", min=1, help="Last step; default: newest published.")] = None,
    debug: Debug = False,
) -> None:
    """Train again from the first checkpoint and the batch log, and compare every published version. Changes nothing."""
    from slipstream.cli import branches
    raise typer.Exit(branches.replay(run, to))


@app.command()
def sft(
    run_file: Annotated[Path, typer.Argument(metavar="RUN.toml", help="Run file with the table \\[sft].")],
    set_: Annotated[list[str] | None, typer.Option(
        "--set", metavar="KEY=VALUE", help="Override a setting: --set sft.epochs=2. Repeatable.")] = None,
    dry_run: Annotated[bool, typer.Option(
        "--dry-run", help="Print the resolved run file, say what cannot work, and stop.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Delete what the run folder holds and start over.")] = False,
    debug: Debug = False,
) -> None:
    """Supervised fine-tuning on a dataset, before a run: leaves a model directory. Resumes what its folder holds."""
    from slipstream.cli import sft as command
    from slipstream.config import load

    settings = load(run_file, set_ or [])
    if dry_run:
        from slipstream.cli import dry_run as trial
        raise typer.Exit(trial.sft(settings, fresh))
    raise typer.Exit(command.sft(settings, fresh))


@app.command()
def fork(
    place: Annotated[str, typer.Argument(metavar="RUN@K", help="Run, and the step after which the new one starts.")],
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the new run.")],
    set_: Annotated[list[str] | None, typer.Option(
        "--set", metavar="KEY=VALUE", help="Override a setting of the new run. Repeatable.")] = None,
    debug: Debug = False,
) -> None:
    """Start a new run where another one stood after step K. The origin is not changed."""
    from slipstream.cli import branches
    raise typer.Exit(branches.fork(place, name, set_ or []))


@app.command()
def certs(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where to keep the authority and the certificates.")],
    role: Annotated[list[str] | None, typer.Option("--role", help="Renew only this one; default: all. Repeatable.")] = None,
    run: Annotated[str, typer.Option("--run", metavar="NAME", help="Good for this run only; default: for every run.")] = "",
    lifetime: Annotated[str, typer.Option("--lifetime", metavar="TIME", help="90s, 15m, 1h or 30d.")] = "90d",
    debug: Debug = False,
) -> None:
    """Make a certificate for each role, for this machine, with an authority of your own. Run it again to renew them."""
    from slipstream.cli import certificates
    raise typer.Exit(certificates.certs(folder, role or [], run, lifetime))


@app.command()
def token(
    secret_file: Annotated[Path, typer.Option("--secret-file", help="The run's secrets: <run folder>/secret.")],
    name: Annotated[str, typer.Option("--name", help="Whose token it is: quotas and errors go by it.")],
    role: Annotated[str, typer.Option("--role", help="client or cli.")] = "client",
    ttl: Annotated[str, typer.Option("--ttl", metavar="TIME", help="90s, 15m, 1h or 30d.")] = "1h",
    calls_per_minute: Annotated[int, typer.Option(min=0, help="Quota; 0 = the run file's.")] = 0,
    bytes_per_minute: Annotated[int, typer.Option(min=0, help="Quota, both ways; 0 = the run file's.")] = 0,
    debug: Debug = False,
) -> None:
    """Print a token for a program outside: who, role, until when, how much. Signed, not encrypted; pass it on in private."""
    from slipstream.cli import certificates
    raise typer.Exit(certificates.token(secret_file, role, name, ttl, calls_per_minute, bytes_per_minute))


@app.command()
def doctor(
    run_file: Annotated[Path, typer.Argument(metavar="RUN.toml", help="Run file, as the service is given it.")],
    set_: Annotated[list[str] | None, typer.Option(
        "--set", metavar="KEY=VALUE", help="Override a setting. Repeatable.")] = None,
    role: Annotated[list[str] | None, typer.Option(
        "--role", help="Check what this role needs; default: every role the folder has. Repeatable.")] = None,
    tls_dir: Annotated[str, typer.Option("--tls-dir", help="As given to the service.")] = "",
    secret_file: Annotated[str, typer.Option("--secret-file", help="As given to the service.")] = "",
    expect_hash: Annotated[str, typer.Option("--expect-hash", help="Run-file hash of the others, to compare with.")] = "",
    debug: Debug = False,
) -> None:
    """Check certificates, secrets, plaintext, Redis, the object store and the run file: one line each, with the remedy."""
    from slipstream.cli import doctor as command
    raise typer.Exit(command.doctor(
        run_file, set_ or [], command.Given(tuple(role or ()), tls_dir, secret_file, expect_hash)))


@env.command("serve")
def env_serve(
    entry: Annotated[str, typer.Argument(metavar="MODULE:CLASS", help="The environment's class.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 = a free one.")] = 0,
    arg: Annotated[list[str] | None, typer.Option(
        "--arg", metavar="KEY=VALUE", help="Argument of the class. Repeatable.")] = None,
    name: Annotated[str, typer.Option(help="Name that Describe tells; default: the class's.")] = "",
    tls_dir: Annotated[str, typer.Option("--tls-dir", help="Folder of certificates; without, plaintext for everybody.")] = "",
    insecure: Annotated[bool, typer.Option(
        "--insecure", help="Allow plaintext, for everybody who reaches it, on a --host that is not loopback.")] = False,
    run: Annotated[str, typer.Option("--run", metavar="NAME", help="With certificates of one run only: its name.")] = "",
    health_port: Annotated[int, typer.Option(min=0, max=65535, help="Plaintext port for probes; 0 = none.")] = 0,
    metrics_port: Annotated[int, typer.Option(min=0, max=65535, help="Prometheus port; 0 = none.")] = 0,
    log_content: Annotated[bool, typer.Option(
        "--log-content", help="Log what exceptions of your code say, which may quote prompts; at a terminal always.")] = False,
    debug: Debug = False,
) -> None:
    """Serve an environment over gRPC until Ctrl-C."""
    from slipstream import environment
    from slipstream.cli.environments import arguments, proven
    environment.serve(
        environment.load(entry, arguments(arg or []), "MODULE:CLASS"), host, port, name, proven(tls_dir, "environment", run),
        health_port, metrics_port, insecure, log_content)


@env.command("check")
def env_check(
    address: Annotated[str, typer.Argument(metavar="HOST:PORT", help="Where the environment is served.")],
    insecure: Annotated[bool, typer.Option("--insecure", help="Allow plaintext to an address that is not loopback.")] = False,
    tls_dir: Annotated[str, typer.Option("--tls-dir", help="Folder of certificates.")] = "",
    debug: Debug = False,
) -> None:
    """Ask an environment to describe itself and to start one episode."""
    from slipstream.cli.environments import check
    check(address, insecure, tls_dir)


@config.command("schema")
def config_schema() -> None:
    """JSON Schema of the run file, for editors."""
    import json

    from slipstream.config import json_schema
    json.dump(json_schema(), sys.stdout, indent=1)
    print()


@config.command("reference")
def config_reference() -> None:
    """All settings with default and meaning, as Markdown."""
    from slipstream.cli.reference import markdown
    print(markdown(), end="")
