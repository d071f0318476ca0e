"""Random streams: every consumer has its own, derived from the run's seed and its name, so that nobody's draw moves another's.

SplitMix64 (Steele, Lea, Flood 2014) as the mixing function: cheap, counter-based, the same in Python, numpy and torch.
"""

from __future__ import annotations

import zlib

MASK = (1 << 64) - 1


def mix(value: int) -> int:
    """SplitMix64 finaliser of a 64-bit value."""
    value = (value + 0x9E3779B97F4A7C15) & MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def stream(seed: int, name: str, *counters: int) -> int:
    """Seed of a named stream: a function of its arguments only, 64 bits."""
    value = mix(seed & MASK) ^ zlib.crc32(name.encode())
    for counter in counters:
        value = mix(value) ^ (counter & MASK)
    return mix(value)


def sample_seed(run_seed: int, draw: int, index: int) -> int:
    """Seed with which sample `index` of a draw is generated, whoever generates it and however often."""
    return stream(run_seed, "sample", draw, index)


def sample_seeds(run_seed: int, draw: int, count: int) -> list[int]:
    """`sample_seed` of samples 0 to count - 1, for a quarter of the work."""
    base = mix(mix(mix(run_seed & MASK) ^ zlib.crc32(b"sample")) ^ (draw & MASK))
    return [mix(base ^ index) for index in range(count)]


def task_seed(run_seed: int, environment: str, draw: int) -> int:
    """Seed of the task that a draw takes."""
    return stream(run_seed, "task/" + environment, draw)
