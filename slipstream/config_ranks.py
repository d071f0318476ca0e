"""What a run file cannot ask of a trainer on several ranks; the table is in docs/guides/expert-parallelism.md."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slipstream.config import RunFile


def runs_on_many(run: RunFile) -> None:
    """Raises ValueError for settings that need one rank, or undivided sequences: what conflicts, why, and the remedy.

    What only the shape of a model tells is refused where it is built: services/trainer/parallel/mesh.py.
    """
    parallel, lora = run.trainer.parallel, run.model.lora
    if parallel.ranks == 1:
        return
    ranks, divided = f"trainer.parallel.ranks = {parallel.ranks}", parallel.context > 1
    context, tensor, experts = (f"{ranks} and trainer.parallel.{name} = {getattr(parallel, name)}"
                                for name in ("context", "tensor", "experts"))
    pinned = f"schedule.mode = {run.schedule.mode}, max_lag = {run.schedule.max_lag}, and so " if run.schedule.pinned else ""
    refused = {
        f"{ranks} with {pinned}schedule.deterministic = true: deterministic kernels hold all experts of a layer; set ranks = "
        "1, or schedule.deterministic = false": run.deterministic,
        f"{context} with trainer.packing = packed: pieces of a packed row would cut segments; set trainer.packing = rows, or "
        "context = 1": divided and run.trainer.packing == "packed",
        f"{context} with algorithm.route_replay = trainer: the trainer would record the routes of pieces; set route_replay = "
        "auto, or context = 1": divided and run.algorithm.route_replay == "trainer",
        f"{tensor} with model.lora: PEFT does not split A and B with the matrices beside them; set tensor = 1, or remove "
        "model.lora": lora is not None and parallel.tensor > 1,
        f"{ranks} with model.lora.save_merged = true: no rank has the whole of what would be added up; set it to false and "
        "merge model/ with PEFT afterwards, or set ranks = 1": lora is not None and lora.save_merged,
        f"{experts} with experts in model.lora.targets: PEFT adds to the whole stack of a layer's experts, and no rank has it; "
        'set targets = ["attention"], or experts = 1': lora is not None and parallel.experts > 1 and "experts" in lora.targets,
    }
    if found := next((sentence for sentence, holds in refused.items() if holds), None):
        raise ValueError(found)
