"""The envelope: formulas against published totals and by hand, and the document as the command prints it."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.trainer.parallel.envelope import GIB, MODELS, Mesh, host, main, memory, table, verdict

DOCUMENT = Path(__file__).parents[2] / "docs" / "envelope.md"


def test_the_document_has_the_table_of_the_formulas() -> None:
    assert table() in DOCUMENT.read_text()


def test_experts_are_most_of_each_model() -> None:
    """A transposed figure in the table would show: routed experts are 93 to 99 % of published parameter counts."""
    for model in MODELS.values():
        assert 0.93 < model.expert_parameters / model.total < 0.99, model.name


def test_memory_by_hand() -> None:
    """Qwen3-30B on 16 GPUs, 8,192 tokens: 16 bytes a parameter over the ranks; 10 bytes a logit; recomputation."""
    model, mesh = MODELS["qwen3-30b-a3b"], Mesh(16, 16, 8192)
    taken = memory(model, mesh)
    assert taken.state == pytest.approx(16 * 30.5e9 / 16 / GIB) and taken.logits == pytest.approx(10 * 8192 * 151_936 / GIB)
    assert memory(model, Mesh(32, 16, 8192)).state == pytest.approx(taken.state / 2)
    kept = memory(model, Mesh(16, 16, 8192, recompute=False)).activations
    assert kept == pytest.approx(2 * 8192 * 48 * (10 * 2048 + 4 * 4096 + 8 * (2 * 2048 + 3 * 768)) / GIB)
    assert taken.activations < kept / 10


def test_ranks_that_share_a_sequence_divide_what_grows_with_it() -> None:
    """Logits by all of them; eager attention keeps T² for each head, of which a rank has its part."""
    model, alone, shared = MODELS["gpt-oss-120b"], Mesh(32, 16, 16384), Mesh(32, 16, 16384, context=8)
    one, other = memory(model, alone), memory(model, shared)
    assert one.scores == pytest.approx(2 * 16384**2 * 64 * 4 / GIB) and other.scores == pytest.approx(one.scores / 8)
    assert other.logits == pytest.approx(one.logits / 8) and other.state == one.state
    assert memory(MODELS["glm-4.5"], alone).scores == 0
    sent = 2 * 2 * 2048 * 8 * 96 * 128 / GIB
    per_token = 2 * 2048 * (92 * 5120 + 2 * (10 * 5120 + 4 * 96 * 128 + 8 * (2 * 5120 + 3 * 1536) + 3 * 1536)) / GIB
    assert memory(MODELS["glm-4.5"], shared).activations == pytest.approx(per_token + sent)


@pytest.mark.parametrize(("name", "mesh", "told"), [
    ("qwen3-30b-a3b", Mesh(24, 24, 4096), "do not divide"),
    ("qwen3-30b-a3b", Mesh(8, 8, 65536), "most of it logits"),
    ("qwen3-30b-a3b", Mesh(48, 16, 4096, context=24), "context = 24 does not divide"),
    ("deepseek-v3", Mesh(64, 64, 4096), "most of it state (156 GiB); more ranks"),
    ("qwen3-30b-a3b", Mesh(8, 8, 4096, gpu_gib=80, recompute=False), "GiB of 80"),
    ("kimi-k2", Mesh(256, 128, 4096), "rank 0 gathers each version on its host: 2361 GiB of 2048"),
])
def test_what_is_refused_says_why(name: str, mesh: Mesh, told: str) -> None:
    word, why = verdict(MODELS[name], mesh)
    assert word == "refused" and told in why


def test_a_host_holds_what_is_published_and_twice_where_versions_are_patches() -> None:
    """DeepSeek-V3 on 16 nodes: 14 bytes a parameter over the ranks, for 8 of them, and 2 for the version; or 4."""
    model, mesh = MODELS["deepseek-v3"], Mesh(128, 128, 4096)
    assert host(model, mesh, 1) == pytest.approx(671e9 * (14 / 16 + 2) / GIB)
    assert host(model, mesh) == pytest.approx(671e9 * (14 / 16 + 4) / GIB)
    assert verdict(model, mesh)[1].endswith("with trainer.full_every = 1")


def test_the_command_tells_one_case(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "qwen3-30b-a3b", "--length", "4096", "--ranks", "8", "--experts", "8"]) == 0
    assert "plausible: 75 GiB of 141" in capsys.readouterr().out
    assert main(["--model", "kimi-k2", "--ranks", "64"]) == 1
