"""A compiled decode pass: one graph for every width and length, and the same answers, log-probabilities and routes.

The oracle is transformers, uncompiled: one full forward, no cache. `make test` traces with a backend that compiles nothing;
`make test-compiled` compiles for every family, some minutes.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from services.rollout.decoder import Decoder
from services.rollout.engine import Request
from services.rollout.graph import DecodeGraph
from slipstream import config
from slipstream.errors import ConfigError, InvalidInput
from slipstream.model import state
from slipstream.protos.types.v1.policy_pb2 import PolicyVersion
from tests.engine_models import FAMILIES, MOE, full_logprobs, prompts, tiny

TOLERANCE, CONTEXT = 1e-5, 32
DEMO = Path(__file__).parents[2] / "examples" / "sort-digits" / "run.toml"


class Compiled(Decoder):
    """Its graph is made by `backend`."""

    backend = "eager"

    def _compiled(self) -> DecodeGraph:
        return DecodeGraph(self.model, self.cache, self.masks, self.backend)


def asked(routes: bool) -> list[Request]:
    """12 requests of six prompts that end at different lengths: passes of 8 rows down to 1, up to the end of the context."""
    return [Request(p, 25 - i % 9, seed=i, routes=routes) for i, p in enumerate(p for p in prompts(6) for _ in range(2))]


def compare(kind: type[Compiled], family: str) -> None:
    routes = family in MOE
    decoder = kind(tiny(family), 8, CONTEXT, capture_routes=routes, compiled="all")
    plain = Decoder(tiny(family), 8, CONTEXT, capture_routes=routes)
    for mine, other, request in zip(decoder.decode(asked(routes)), plain.decode(asked(routes)), asked(routes), strict=True):
        assert mine.tokens.tolist() == other.tokens.tolist()
        np.testing.assert_allclose(mine.logprobs, full_logprobs(tiny(family), request.prompt, mine), atol=TOLERANCE, rtol=0)
        assert (mine.routes is None) is (other.routes is None) is not routes
        if mine.routes is not None and other.routes is not None:
            assert np.array_equal(mine.routes, other.routes)
    assert decoder.graph is not None and decoder.graph.compiled == 1
    other = tiny(family, seed=1)
    decoder.load(state(other), PolicyVersion(number=2))
    answers = decoder.decode(asked(routes))
    for mine, request in zip(answers, asked(routes), strict=True):
        np.testing.assert_allclose(mine.logprobs, full_logprobs(other, request.prompt, mine), atol=TOLERANCE, rtol=0)
    assert decoder.graph.compiled == 1


@pytest.mark.slow
def test_one_graph_serves_every_width_and_length_and_the_next_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens and routes are those of the uncompiled decoder, log-probabilities those of a full forward, to 1e-5; a swap
    compiles nothing anew, and neither does a pass of another width."""
    monkeypatch.setitem(FAMILIES["mixtral-window"], "sliding_window", 20)  # longer than some passes, shorter than others
    compare(Compiled, "mixtral-window")


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("family", FAMILIES)
def test_any_family_compiles(family: str) -> None:
    """The same by torch's compiler, for every family: no break in the graph, no second graph."""
    compare(type("Inductor", (Compiled,), {"backend": "inductor"}), family)


def test_what_cannot_be_one_graph_is_refused_by_name() -> None:
    """A model with a step that torch cannot trace: its class, the reason and the remedy, instead of a slow mixture."""
    model = tiny("llama")
    model.model.layers[0].register_forward_hook(lambda module, args, output: torch._dynamo.graph_break())
    decoder = Compiled(model, 4, 48, compiled="all")
    with pytest.raises(InvalidInput, match=r'LlamaForCausalLM cannot be compiled: .*rollout.compile = "attention"'):
        decoder.decode([Request(np.array([3, 4], np.int32), 3)])


@pytest.mark.parametrize("setting, why", [("schedule.deterministic=true", "deterministic"), ("rollout.engine=vllm", "vllm")])
def test_settings_that_contradict_are_refused(setting: str, why: str) -> None:
    """Compiled kernels round by the pass they run in, and vLLM compiles by itself."""
    with pytest.raises(ConfigError, match=rf"rollout.compile = all .*{why}"):
        config.load(DEMO, ["rollout.compile=all", setting])
