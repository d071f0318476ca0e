"""Environment types ↔ protos. Decoding validates: what comes from another program is refused with the field's name."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from slipstream.environment import Action, EpisodeReset, EpisodeStep, Observation, Reset, Step, Task
from slipstream.errors import InvalidInput, SlipstreamError, from_status, to_status
from slipstream.protos.environment.v1 import environment_pb2 as pb
from slipstream.protos.types.v1 import sample_pb2


def reset_request(episodes: Sequence[EpisodeReset], environment: str) -> pb.ResetRequest:
    return pb.ResetRequest(episodes=[
        pb.EpisodeReset(
            episode=e.episode, task=sample_pb2.Task(environment=environment, index=e.task.index, seed=e.task.seed))
        for e in episodes])


def resets(request: pb.ResetRequest) -> list[EpisodeReset]:
    return [EpisodeReset(e.episode, Task(e.task.index, e.task.seed, e.task.environment)) for e in request.episodes]


def step_request(steps: Sequence[EpisodeStep]) -> pb.StepRequest:
    return pb.StepRequest(steps=[
        pb.EpisodeStep(
            episode=s.episode, sequence=s.sequence, action=s.action.text, finish_reason=s.action.finish_reason,  # pyright: ignore
            action_tokens=pb.TokenList(ids=[int(t) for t in s.action.tokens]))
        for s in steps])


def steps(request: pb.StepRequest) -> list[EpisodeStep]:
    return [
        EpisodeStep(s.episode, s.sequence, Action(s.action, list(s.action_tokens.ids), s.finish_reason)) for s in request.steps]


def reset_response(results: Sequence[Reset | SlipstreamError]) -> pb.ResetResponse:
    response = pb.ResetResponse()
    for result in results:
        item = response.results.add()
        if isinstance(result, SlipstreamError):
            item.status.CopyFrom(to_status(result))
            continue
        item.observation.CopyFrom(_observation_out(result))
        item.answer, item.scorer = result.answer, result.scorer
        item.info_json = json.dumps(result.info) if result.info else ""
    return response


def reset_results(response: pb.ResetResponse, expected: int) -> list[Reset | SlipstreamError]:
    _count(len(response.results), expected, "Reset")
    results: list[Reset | SlipstreamError] = []
    for i, item in enumerate(response.results):
        try:
            results.append(from_status(item.status) or _reset_in(item, f"results[{i}]"))
        except InvalidInput as error:
            results.append(error)
    return results


def step_response(results: Sequence[Step | SlipstreamError]) -> pb.StepResponse:
    response = pb.StepResponse()
    for result in results:
        item = response.results.add()
        if isinstance(result, SlipstreamError):
            item.status.CopyFrom(to_status(result))
            continue
        if result.observation is not None and not result.done:
            seen = result.observation
            item.observation.CopyFrom(_observation_out(Observation(seen) if isinstance(seen, str) else seen))
        item.done = result.done
        if result.reward is not None:
            item.reward = result.reward
        item.components.update(result.components)
    return response


def step_results(response: pb.StepResponse, expected: int) -> list[Step | SlipstreamError]:
    _count(len(response.results), expected, "Step")
    results: list[Step | SlipstreamError] = []
    for i, item in enumerate(response.results):
        try:
            results.append(from_status(item.status) or _step_in(item, f"results[{i}]"))
        except InvalidInput as error:
            results.append(error)
    return results


def _reset_in(item: pb.ResetResult, place: str) -> Reset:
    seen = _observation_in(item.observation, f"{place}.observation")
    try:
        info = json.loads(item.info_json) if item.info_json else {}
    except json.JSONDecodeError as error:
        raise InvalidInput(f"{place}.info_json is not JSON: {error}", "INFO_JSON", field=f"{place}.info_json") from None
    if not isinstance(info, dict):
        raise InvalidInput(f"{place}.info_json is not a JSON object", "INFO_JSON", field=f"{place}.info_json")
    return Reset(seen.text, seen.messages, seen.tokens, item.answer, item.scorer, info)


def _step_in(item: pb.StepResult, place: str) -> Step:
    if not item.done and not item.HasField("observation"):
        raise InvalidInput(f"{place} has neither done nor an observation", "OBSERVATION", field=f"{place}.observation")
    seen = _observation_in(item.observation, f"{place}.observation") if item.HasField("observation") else None
    if bad := next((n for n, v in {"reward": item.reward, **item.components}.items() if not math.isfinite(v)), None):
        raise InvalidInput(f"{place}.{bad} is not finite", "NON_FINITE_REWARD", field=bad)
    return Step(seen, item.done, item.reward if item.HasField("reward") else None, dict(item.components))


def _observation_out(seen: Observation) -> pb.Observation:
    wire = pb.Observation(conversation=seen.conversation, fork_of=seen.fork_of)
    if seen.text is not None:
        wire.text = seen.text
    elif seen.tokens is not None:
        wire.tokens.ids.extend(int(t) for t in seen.tokens)
    else:
        wire.messages.messages.extend(pb.Message(role=m["role"], content=m["content"]) for m in seen.messages or ())
        wire.messages.SetInParent()
    return wire


def _observation_in(wire: pb.Observation, place: str) -> Observation:
    where: Any = {"conversation": wire.conversation, "fork_of": wire.fork_of if wire.HasField("fork_of") else None}
    match wire.WhichOneof("content"):
        case "text":
            return Observation(text=wire.text, **where)
        case "tokens":
            return Observation(tokens=list(wire.tokens.ids), **where)
        case "messages":
            return Observation(messages=[{"role": m.role, "content": m.content} for m in wire.messages.messages], **where)
    raise InvalidInput(f"{place} has no content: set text, messages or tokens", "OBSERVATION", field=place)


def _count(got: int, expected: int, call: str) -> None:
    if got != expected:
        raise InvalidInput(f"{call} answered {got} results for {expected} items", "RESULT_COUNT", field="results", value=got)
