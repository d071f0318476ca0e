"""Faults that users of other systems reported, each as a small change of our own code that brings it back.

A fault names the case of docs/cases.md, its public origin, the change, and the test that has to notice it. The change is text
for text, so that it says loudly when the code around it has moved on: then plant it anew where it belongs now.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_SAMPLES = "tests/contract/test_ledger_samples.py"
_BATCHES = "tests/contract/test_ledger_batches.py"
HANGS = "Timeout"  # the symptom of a fault that makes its test wait for ever
_SCRIPTS = "services/buffer/scripts"


@dataclass(frozen=True)
class Fault:
    """`old` occurs once in `path`; with `new` in its place, test `caught_by` fails and its output contains `symptom`."""

    case: int
    name: str
    origin: str
    path: str
    old: str
    new: str
    caught_by: str
    symptom: str
    fast: bool = False  # belongs to `make test`; the others to `make test-planted`

    @property
    def id(self) -> str:
        return f"{self.case}-{self.name.replace(' ', '-')}"

    def plant(self, tree: Path) -> Path:
        """Change the copy of the code in `tree`; returns the file."""
        file = tree / self.path
        file.write_text(file.read_text().replace(self.old, self.new))
        return file


FAULTS = (
    Fault(
        1, "an expired lease is never granted again", "verl#7155",
        f"{_SCRIPTS}/grant_samples.lua", "grant_queue('leases', due())", "",
        f"{_SAMPLES}::test_expiry_voids_nothing_until_somebody_else_is_granted[valkey-9]", "again, = [g for g in await grant",
        fast=True),
    Fault(
        1, "nobody says what is awaited", "verl#7155",
        "services/buffer/sentences.py", """oldest = f", oldest {_holder(facts)}" if "draw" in facts else \"\"""", 'oldest = ""',
        "tests/unit/test_buffer_service.py::test_requests_that_cannot_be_served_say_why", "oldest draw 0 leased by rollout-0"),
    Fault(
        2, "no deadline for the group of a straggler", "NeMo-RL#3238",
        f"{_SCRIPTS}/sweep.lua", "if group_ms > 0 and drawn + group_ms <= now then", "if false then",
        f"{_SAMPLES}::test_a_group_over_its_deadline_is_dropped_by_name[valkey-9]", "{'timeout': 4}"),
    Fault(
        3, "a failed sample keeps its lease", "AReaL#588",
        f"{_SCRIPTS}/submit_samples.lua", "      fail(d, i, sample, failure)\n", "",
        f"{_SAMPLES}::test_failed_samples_make_a_group_short_or_drop_it[valkey-9]", '.groups["short"] == 1'),
    Fault(
        3, "a malformed sample keeps its lease", "AReaL#588",
        "services/rollout/worker.py", "            self._refused(key, error)\n", "",
        "tests/unit/test_rollout_worker.py::test_what_the_buffer_cannot_take_now_is_kept", HANGS),
    Fault(
        4, "the exception of a task is swallowed", "SkyRL#1691",
        "slipstream/lifecycle.py", "self._failed(task.get_name(), error)", "pass",
        "tests/unit/test_lifecycle.py::test_a_task_that_raises_stops_the_process[error0-1]", HANGS),
    Fault(
        4, "the thread of the engine dies alone", "SkyRL#1691",
        "services/rollout/torch_engine.py",
        "self._loop.call_soon_threadsafe(self._fail, error)\n            raise\n", "return\n",
        "tests/unit/test_engine_thread.py::test_a_thread_that_dies_takes_nobody_with_it_silently", HANGS),
    Fault(
        4, "a dead engine takes its samples with it", "SkyRL#1691",
        "services/rollout/player.py", 'self._give_back(running, b"")\n                self._context.lifecycle.request_stop',
        "self._fail(running, generation.message)\n                self._context.lifecycle.request_stop",
        "tests/unit/test_rollout_engine_death.py::test_a_dead_engine_ends_the_worker_and_not_the_samples",
        "[3, 4, 5, 10, 11, 12] == [3, 4, 5]"),
    Fault(
        5, "no progress looks like running", "Relax#10",
        "slipstream/service.py", "return self.awaited[1] > self.run.service.stall_s", "return False",
        "tests/contract/test_service.py::test_a_wait_that_lasts_too_long_is_a_stall", "stalled: waiting for batch 7"),
    Fault(
        5, "a dead fleet passes for a long generation", "Relax#10",
        "services/buffer/stalls.py", 'elif faults == self._faults and samples.get("leased", 0) and self._kept_alive:',
        'elif samples.get("leased", 0):',
        "tests/unit/test_stalls.py::test_a_long_generation_is_no_stall_and_a_dead_fleet_is", "a worker died"),
    Fault(
        6, "answers are scored one after the other", "verl#6673",
        "services/reward/sandbox.py", "patience_s = min(PATIENCE_S, limit_s / 2)", "patience_s = limit_s",
        "tests/unit/test_scorers.py::test_one_hanging_answer_holds_back_nobody", "order[-1] == 100"),
    Fault(
        6, "no time limit for a scorer", "verl#6673",
        "services/reward/sandbox.py", "async with asyncio.timeout(limit_s - patience_s):", "async with asyncio.timeout(None):",
        "tests/unit/test_scorers.py::test_a_backtracking_pattern_is_killed", "signal 14"),
    Fault(
        7, "a resume waits for rollouts before it publishes", "prime-rl#3004",
        "services/trainer/loop.py",
        "await self._publish(await self._in_torch(self._weights))\n        await self._turns.give(self.learner)\n",
        "await self._turns.give(self.learner)\n",
        "tests/unit/test_trainer_resume.py::test_a_resume_publishes_before_it_waits_for_a_batch", HANGS),
    Fault(
        8, "scored groups beyond the batch are dropped", "slime#2238",
        f"{_SCRIPTS}/number_batch.lua", "for n = 1, per_batch do taken[n] = chosen[n] end",
        "for n, c in ipairs(chosen) do if n <= per_batch then taken[n] = c else drop(c[1], 'surplus') end end",
        f"{_BATCHES}::test_batches_take_complete_groups_in_draw_order[valkey-9]", "ledger.number_batch(1, 2)).numbered",
        fast=True),
    Fault(
        9, "a full buffer evicts what is finished", "AReaL#1481",
        f"{_SCRIPTS}/ledger.lua", "  return needed > rules.quota_bytes and freeable and 'bytes' or nil\n",
        "  if needed > rules.quota_bytes and freeable then\n"
        "    local old = call('XRANGE', K.ready, '-', '+', 'COUNT', 1)[1]\n"
        "    if old then group(tonumber(old[2][2])); free(tonumber(old[2][2])); call('XDEL', K.ready, old[1]) end\n"
        "  end\n",
        f"{_BATCHES}::test_bytes_bound_the_draws_and_ask_for_a_checkpoint[valkey-9]", 'refused.waiting.why == "bytes"'),
    Fault(
        10, "a repeated submit leaves an orphan", "AReaL#1498",
        f"{_SCRIPTS}/submit_samples.lua", "outcome = checksum(sample.info) == checksum(info) and 'accepted' or 'conflict'",
        "add('bytes', #ARGV[4 + 2 * n])",
        f"{_SAMPLES}::test_one_body_per_sample[valkey-9]", "Outcome.CONFLICT"),
    Fault(
        11, "a batch that is asked for again is composed again", "SkyRL#2035",
        f"{_SCRIPTS}/number_batch.lua", "if batch <= numbered then\n", "if false then\n",
        f"{_BATCHES}::test_a_restarted_trainer_gets_the_same_batches_and_fences_the_old_one[valkey-9]",
        "ledger.number_batch(6, 2)).numbered", fast=True),
    Fault(
        12, "a full buffer refuses what is numbered", "NeMo-RL#3066",
        f"{_SCRIPTS}/number_batch.lua", "if batch <= numbered then\n",
        "if draw_refusal() == 'bytes' then return finish({numbered = false, why = 'unfinished', facts = {\n"
        "  batch = batch, undrawn = 0, of = per_batch, unfinished = per_batch}}) end\n"
        "if batch <= numbered then\n",
        "tests/unit/test_resume.py::test_a_full_buffer_does_not_hold_up_a_resume", "== [[0], [1]]"),
    Fault(
        12, "nobody tells the trainer to make room", "NeMo-RL#3066",
        f"{_SCRIPTS}/number_batch.lua", "full = draw_refusal() == 'bytes' and numbered > committed", "full = false",
        "tests/unit/test_resume.py::test_a_full_buffer_does_not_hold_up_a_resume", "checkpoint_now"),
    Fault(
        13, "the cursor is ahead of what is drawn", "NeMo-RL#3599",
        f"{_SCRIPTS}/grant_samples.lua", "call('HINCRBY', K.cursor, task[1], 1)",
        "if position() == request.start then call('HINCRBY', K.cursor, task[1], #request.tasks) end",
        "tests/unit/test_resume.py::test_no_task_is_skipped_and_none_comes_twice", "assert Counter(", fast=True),
    Fault(
        14, "finished groups vanish at a resume", "OpenRLHF#1322",
        f"{_SCRIPTS}/take_incarnation.lua", "local incarnation = max(",
        "for _, entry in ipairs(call('XRANGE', K.ready, '-', '+')) do drop(tonumber(entry[2][2]), 'resume') end\n"
        "local incarnation = max(",
        "tests/unit/test_resume.py::test_finished_groups_outlive_a_resume", "== [2, 3]"),
    Fault(
        15, "a resume draws a window on top of what is under way", "verl#7762",
        f"{_SCRIPTS}/take_incarnation.lua", "local incarnation = max(",
        "add('dropped', outstanding())\nlocal incarnation = max(",
        "tests/unit/test_resume.py::test_a_resume_draws_nothing_on_top_of_what_is_under_way",
        "not (await client.lease(wait_s=0)).leases"),
    Fault(
        15, "a resume warms up again", "verl#7762",
        "services/trainer/loop.py", "        if loaded is None:\n            await warm_up(",
        "        if loaded is None or not loaded[0].step:\n            await warm_up(",
        "tests/unit/test_trainer_loop.py::test_warm_up_is_kept", "len(warmups) == 1"),
    Fault(
        16, "published steps outlive their trainer", "AReaL#1388",
        f"{_SCRIPTS}/take_incarnation.lua", "set('published', min(get('published'), request.checkpoint))\n", "",
        f"{_BATCHES}::test_a_restarted_trainer_gets_the_same_batches_and_fences_the_old_one[valkey-9]",
        '.meta["published"] == 1'),
    Fault(
        16, "lag is counted across a dead branch", "AReaL#1388",
        f"{_SCRIPTS}/ledger.lua", "return (not fork or step <= fork) and step or 2 * fork - step", "return step",
        "tests/unit/test_resume.py::test_lag_stays_bounded_over_a_recovery", "test_lag_stays_bounded_over_a_recovery"),
    Fault(
        17, "a swap cancels the requests in flight", "verl#7611, miles#2589",
        "services/rollout/torch_engine.py", "                tensors, probes = item.tensors, item.probes\n",
        "                ended = decoder.abort([r.id for r in decoder.rows.requests])\n"
        "                self._loop.call_soon_threadsafe(self._deliver, self._pieces(decoder, ended))\n"
        "                tensors, probes = item.tensors, item.probes\n",
        "tests/unit/test_engine_thread.py::test_a_swap_lands_between_steps_and_drops_nothing", "set(versions) == {1, 2}"),
)
