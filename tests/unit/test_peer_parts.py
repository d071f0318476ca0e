"""Parts of peers by themselves: what a worker keeps for others, what others may cost it, whom it talks to."""

from __future__ import annotations

import pytest

from services.rollout import peers
from services.rollout.peer_memory import PeerMemory
from services.rollout.peers import Pace
from slipstream.auth_credentials import Credentials
from slipstream.errors import ConfigError
from slipstream.lifecycle import SystemClock


def test_what_a_loaded_version_lies_in_is_offered_for_nothing() -> None:
    """Views of tensors share the memory of what is kept, so it is not counted as long as they live: a version of any size stays
    on offer while it is loaded, and goes, oldest first, once it is not."""
    memory = PeerMemory(100)
    views = []
    for i in range(1, 9):
        memory.keep(str(i), bytes([i]) * 30)
        views.append(memoryview(memory.held(str(i)) or b"")[5:25])
    assert memory.bytes == 0 and all(memory.held(str(i)) for i in range(1, 9))
    memory.trim()
    assert all(memory.held(str(i)) for i in range(1, 9))
    views.clear()
    assert memory.bytes == 240
    memory.held("1")
    memory.trim()
    assert memory.bytes == 90 and [i for i in range(1, 9) if memory.held(str(i))] == [1, 7, 8]


def test_what_peers_cost_is_made_up_for_with_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting that the store would have cost, too, is not lost; answers that brought nothing are. Time makes up."""
    now = [0.0]
    clock = SystemClock()
    monkeypatch.setattr(clock, "monotonic", lambda: now[0])
    pace = Pace(clock)
    for _ in range(1000):
        pace.peer_took(0, 0.09, useful=True)  # twice QUICK_S is as good as the store
        pace.peer_took(0, 0.04, useful=False)
    assert pace.patient
    for _ in range(30):
        pace.store_took(0, 1.0)  # a store that takes a second
    pace.peer_took(0, 1.9, useful=True)
    assert pace.patient
    pace.peer_took(0, peers.LOST_MOST_S + 0.1, useful=False)
    assert not pace.patient
    now[0] += 1.5
    assert pace.patient
    for _ in range(10):
        pace.peer_took(0, 2.1 + peers.LOST_MOST_S / 10, useful=True)  # slower than the store, each time
    assert not pace.patient


def test_plaintext_to_another_machine_is_refused_at_start() -> None:
    """As for every other address."""
    with pytest.raises(ConfigError, match=r"objects.near.peers: workers:50051 is not loopback"):
        peers.Peers(("workers:50051",), "run", lambda: "", Credentials("rollout"), SystemClock())
