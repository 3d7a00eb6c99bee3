"""Break each promise by hand and see the test that fails: `.venv/bin/python tests/drills/broken_promises.py [--report] [WORD]`.

Works on a copy of the checkout. A breakage is a few words of the product replaced by others; the named tests must pass before and fail
after. With --report the table goes to docs/results/promises.md. Minutes; not part of the test command.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 600
INSPECT = "tests/tasks/evaluations/test_inspect.py"
JUDGE_SERVER = "tests/infra/engines/test_judge_server.py"


class Breakage(NamedTuple):
    promise: str
    what: str
    """Is broken, for people."""
    path: str
    old: str
    new: str
    test: str


BREAKAGES = (
    Breakage(
        "1 transaction",
        "files are written in place",
        "infra/store/files.py",
        'partial = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}.partial")',
        "partial = path",
        "tests/infra/store/test_files.py::test_a_write_that_breaks_off_leaves_what_was_there_and_nothing_else",
    ),
    Breakage(
        "1 transaction",
        "a finished rollout is not found again",
        "tasks/roll_out.py",
        "samples = finished(step_folder(prompts), inputs)",
        "samples = None",
        "tests/tasks/test_roll_out.py::test_a_finished_rollout_is_found_without_an_engine",
    ),
    Breakage(
        "1 transaction",
        "a finished training step is not found again",
        "tasks/train.py",
        "if (done := committed(adapter, inputs, folder.result)) is not None:",
        "if (done := None) is not None:",
        "tests/flows/test_step.py::test_a_step_that_failed_after_training_does_not_train_again",
    ),
    Breakage(
        "1 transaction",
        "a finished training step is not found again where the size of micro-batches has changed meanwhile",
        "tasks/train.py",
        'config.model_dump_json(exclude={"max_tokens_per_microbatch"})',
        "config.model_dump_json()",
        "tests/tasks/test_train.py::test_a_training_is_found_again_whatever_the_size_of_its_microbatches",
    ),
    Breakage(
        "1 transaction",
        "a training of which a power cut took a part is gone on from",
        "tasks/train.py",
        "if not all(whole.values()):",
        "if not whole:",
        "tests/tasks/test_train.py::test_an_adapter_counts_as_made_if_its_inputs_made_it_and_all_of_it_is_there",
    ),
    Breakage(
        "1 transaction",
        "a step is committed before its adapter is on the disk",
        "tasks/commit_step.py",
        "sync_folder(adapter_folder(made.run, made.adapter.version))",
        "pass",
        "tests/flows/test_early_rollout.py::test_a_run_that_fails_leaves_no_rollout_at_work_and_goes_on_from_what_reached_the_disk",
    ),
    Breakage(
        "1 transaction",
        "a step counts as committed without its manifest",
        "infra/runs/lineage.py",
        "folder.name.isdecimal() and StepFolder(folder).manifest.exists()",
        "folder.name.isdecimal()",
        "tests/tasks/test_open_step.py::test_a_step_without_a_manifest_is_made_again",
    ),
    Breakage(
        "1 transaction",
        "changed code is not seen",
        "tasks/support/caching.py",
        "code = code_digest.digest(context.task.fn.__module__)",
        'code = ""',
        "tests/tasks/support/test_caching.py::test_other_code_has_other_keys",
    ),
    Breakage(
        "1 transaction",
        "a file that has changed is used",
        "infra/store/files.py",
        "if (found := sha256_of(path)) != file.sha256:",
        'if (found := "") == file.sha256:',
        "tests/infra/store/test_files.py::test_a_damaged_file_is_named",
    ),
    Breakage(
        "1 transaction",
        "a digest is remembered of a file that was written to since",
        "infra/store/digests.py",
        "changed_ns=found.st_ctime_ns",
        "changed_ns=0",
        "tests/infra/store/test_digests.py::test_a_file_that_was_written_to_is_read_again_whatever_its_time_of_modification_says",
    ),
    Breakage(
        "2 fencing",
        "an engine that serves another adapter is asked all the same",
        "infra/engines/checked.py",
        "        if served != asked:",
        "        if served is None:",
        "tests/infra/engines/test_conformance.py::test_a_sample_of_an_adapter_that_is_not_served_is_refused",
    ),
    Breakage(
        "2 fencing",
        "the trainer takes samples of another adapter",
        "infra/megatron/program/check_job.py",
        "if (batch.adapter_version, batch.adapter_sha256) != sampler:",
        "if False:",
        "tests/infra/megatron/test_program.py::test_a_batch_with_bad_metadata_is_refused",
    ),
    Breakage(
        "2 fencing",
        "samples that are older than trainer.loss.correction.max_staleness are trained on",
        "infra/trainers/jobs.py",
        "<= config.loss.correction.max_staleness and _is_known(batch)",
        "and _is_known(batch)",
        "tests/tasks/test_train.py::test_a_batch_of_the_adapter_before_is_for_a_trainer_that_allows_it_and_of_that_very_adapter",
    ),
    Breakage(
        "2 fencing",
        "a step is sampled by the adapter that happens to be there, not by the one of its number",
        "tasks/support/prefetch_rollout.py",
        "behavior = adapter if later.index - max_staleness(config) == step.index else behavior_adapter(config, later, adapter)",
        "behavior = adapter",
        "tests/flows/test_steps_ahead.py::test_rollouts_behind_one_that_fails_wait_until_its_step_has_made_it",
    ),
    Breakage(
        "2 fencing",
        "an answer that goes on has another beginning than it was given",
        "infra/engines/rollout_collector.py",
        "        if said != (",
        "        if False and said != (",
        "tests/infra/engines/test_partial.py::test_an_answer_that_does_not_go_on_with_its_beginning_is_refused",
    ),
    Breakage(
        "3 golden wake",
        "no golden check",
        "infra/engines/checked.py",
        "health_checks.check_base(self._ask, program.golden_tokens, self._weights, program.dtype, program.launch)",
        "program.golden_tokens",
        "tests/infra/engines/test_conformance.py::test_an_engine_that_answers_garbage_after_a_wake_is_refused_each_time_until_it_is_sound",
    ),
    Breakage(
        "3 golden wake",
        "a server is not measured by its own answers before its sleep",
        "infra/engines/health_checks.py",
        "if before.launch == launch:",
        "if False:",
        "tests/infra/engines/test_health_checks.py::test_a_server_must_answer_as_it_did_before_its_sleep_more_closely_than_another_one_must",
    ),
    Breakage(
        "3 golden wake",
        "experts with adapters are left to a reload that passes over them",
        "infra/colocation/plans.py",
        "return on_experts if a.experts and",
        "return () if a.experts and",
        "tests/infra/colocation/test_plans.py::test_experts_with_adapters_are_never_left_to_be_read_again",
    ),
    Breakage(
        "3 golden wake",
        "no canary",
        "infra/engines/checked.py",
        "health_checks.check_adapter(self._ask, adapter, dtype, probes_cache=probes_cache, is_merged=merged, before=before)",
        "pass",
        "tests/infra/engines/test_conformance.py::test_an_engine_that_does_not_serve_the_new_adapter_is_refused",
    ),
    Breakage(
        "3 golden wake",
        "what an adapter does is not compared with what it does in the trainer",
        "infra/engines/health_checks.py",
        "    if scores.without is not None and not is_merged:\n        _check_effect",
        "    if False:\n        _check_effect",
        "tests/infra/engines/test_health_checks.py::test_an_adapter_that_is_served_in_part_is_caught_where_bfloat16_would_hide_it",
    ),
    Breakage(
        "3 golden wake",
        "an unsound first launch stays the measure",
        "infra/engines/checked.py",
        "health_checks.forget_unconfirmed(weights)",
        "pass",
        "tests/infra/engines/test_conformance.py::test_an_engine_that_is_unsound_from_its_first_launch_on_is_no_measure_for_the_next",
    ),
    Breakage(
        "3 golden wake",
        "an engine that has slept is still vouched for",
        "infra/engines/server/server_process.py",
        "return state.but(is_verified=False)",
        "return state",
        "tests/infra/engines/test_colocation.py::test_an_adapter_that_was_checked_before_the_sleep_is_checked_again_after_it",
    ),
    Breakage(
        "4 replay",
        "a replay that differs is committed all the same",
        "tasks/replays/compare_digests.py",
        "if different and must_be_equal(origin, config) and not allow_difference:",
        "if different is None:",
        "tests/flows/test_replay.py::test_a_replay_that_differs_is_not_committed_unless_it_is_allowed_and_then_goes_on",
    ),
    Breakage(
        "5 memory hand-over",
        "the driver's word is not waited for",
        "infra/colocation/confirm_memory.py",
        "if held > allowed.get(gpu, promise.left_bytes + MARGIN_BYTES)}",
        "if held > 10**18}",
        "tests/infra/engines/test_colocation.py::test_memory_that_is_not_freed_is_an_error_that_says_who_has_it_and_what_was_expected",
    ),
    Breakage(
        "6 classes of failure",
        "an error in a rollout that began early is nobody's",
        "infra/concurrency/prefetch.py",
        "        raise error",
        "        pass",
        "tests/infra/concurrency/test_prefetch.py::test_join_raises_the_error_of_the_work_once",
    ),
    Breakage(
        "6 classes of failure",
        "rollouts behind one that failed begin all the same, beside the step that makes it again",
        "infra/concurrency/prefetch.py",
        "            if before.error or before.is_left:",
        "            if before.is_left:",
        "tests/infra/concurrency/test_prefetch.py::test_work_behind_one_that_fails_begins_only_when_it_is_started_again_after_the_error_was_raised",
    ),
    Breakage(
        "6 classes of failure",
        "what was sampled before a failure is thrown away",
        "infra/engines/rollout_collector.py",
        "kept = journal.samples if journal is not None else {}",
        "kept = {}",
        "tests/infra/engines/test_partial_rollouts.py",
    ),
    Breakage(
        "6 classes of failure",
        "an engine that failed is not ended",
        "infra/engines/checked.py",
        '            words = f"{error}\\n{self.program.log_tail()}"\n            self.program.stop()',
        '            words = f"{error}\\n{self.program.log_tail()}"',
        "tests/infra/engines/test_sglang.py::test_a_server_that_hangs_in_its_check_is_ended_too",
    ),
    Breakage(
        "6 classes of failure",
        "every error is tried again",
        "tasks/support/retries.py",
        "    return said.is_retried",
        "    return True",
        "tests/tasks/support/test_retries.py::test_prefect_makes_as_many_attempts_as_the_class_has_and_the_error_says_so",
    ),
    Breakage(
        "7 one owner of the GPUs",
        "no process waits for the lock",
        "infra/processes/gpu_lock.py",
        "    return lock_folder.wait(lambda: lock_folder.try_to_lock(stream), _message)",
        "    return not lock_folder.try_to_lock(stream)",
        "tests/infra/processes/test_gpu_lock.py::test_a_second_owner_waits_says_for_whom_and_goes_on_when_the_first_is_killed",
    ),
    Breakage(
        "7 one owner of the GPUs",
        "what a dead owner left is not ended",
        "infra/processes/gpu_lock.py",
        "            gpu_programs.end_leftovers()\n            yield",
        "            yield",
        "tests/infra/processes/test_gpu_lock.py::test_what_a_killed_owner_left_is_ended_by_the_next_even_where_it_let_go_of_the_lock",
    ),
    Breakage(
        "partial rollouts",
        "groups that were aborted are left out of the next step too",
        "infra/engines/rollout_collector.py",
        "self.must_be_whole = partial.prompt_ids if partial else frozenset[int]()",
        "self.must_be_whole = frozenset[int]()",
        "tests/infra/engines/test_partial.py::test_groups_that_were_begun_are_waited_for_and_those_whole_before_them_go_on",
    ),
    Breakage(
        "partial rollouts",
        "an answer that had ended when it was aborted goes on",
        "infra/engines/partial.py",
        "            sample = self._ended(sample)",
        "            pass",
        "tests/infra/engines/test_partial.py::test_what_is_broken_off_goes_on_unless_it_had_just_ended",
    ),
    Breakage(
        "8 could not be judged is never 0",
        "an unjudged sample counts as 0 in its group",
        "tasks/assemble.py",
        "return [sample for sample in samples if sample.prompt_id in kept and sample.reward is not None]",
        "return [replace(sample, reward=sample.reward or 0.0) for sample in samples if sample.prompt_id in kept]",
        "tests/tasks/test_unjudged.py::test_an_unjudged_sample_is_in_no_baseline_and_a_group_with_one_judged_sample_teaches_nothing",
    ),
    Breakage(
        "8 could not be judged is never 0",
        "a reward that gives no number gives 0",
        "infra/rewards/calls.py",
        "            return of_error(error)\n        return self._outcome(value)\n\n    def _outcome",
        "            return Outcome(0.0, {})\n        return self._outcome(value)\n\n    def _outcome",
        "tests/tasks/test_unjudged.py::test_unjudged_samples_are_null_with_a_reason_in_the_file_and_the_others_are_as_without_them",
    ),
    Breakage(
        "8 could not be judged is never 0",
        "a step with too many unjudged samples goes on",
        "tasks/rewards/apply.py",
        "if self.stops and len(self.unjudged) > limit * num:",
        "if False:",
        "tests/tasks/test_unjudged.py::test_above_the_share_the_step_stops_with_three_cases_and_then_judges_only_what_is_missing",
    ),
    Breakage(
        "8 could not be judged is never 0",
        "an evaluation of unjudged answers may be the best",
        "infra/runs/evaluations.py",
        "return [each for each in evaluations if each.is_eligible]",
        "return list(evaluations)",
        "tests/tasks/test_unjudged.py::test_an_evaluation_with_too_many_unjudged_answers_is_neither_the_best_nor_counted_for_patience",
    ),
    Breakage(
        "1 transaction",
        "the draws of a step share one folder",
        "infra/store/layout.py",
        "return StepFolder(folder).draw(step.draw) if step.draw else folder",
        "return folder",
        "tests/flows/test_dynamic_sampling.py::test_a_step_that_is_killed_in_its_second_draw_has_the_same_groups_and_samples_nothing_twice",
    ),
    Breakage(
        "1 transaction",
        "an evaluation set that is done is done again",
        "tasks/evaluations/evaluate_adapter.py",
        'also=lambda inputs: _sources(inputs["eval_config"]) + dataset.fingerprint(inputs["eval_config"].data)',
        "also=lambda inputs: str(time.time())",
        "tests/flows/test_evaluation_sets.py::test_an_evaluation_that_is_killed_in_its_second_set_does_not_ask_the_first_again",
    ),
    Breakage(
        "1 transaction",
        "a scoring that was killed begins again",
        "tasks/rewards/apply.py",
        "journal.outcomes.get(",
        "{}.get(",
        "tests/tasks/test_unjudged.py::test_above_the_share_the_step_stops_with_three_cases_and_then_judges_only_what_is_missing",
    ),
    Breakage(
        "9 only what was sampled is trained",
        "tokens that were given are in the loss",
        "infra/data/turns/loss_masks.py",
        "mask = sample.is_sampled",
        "mask = np.ones(len(sample.output_tokens), np.bool_)",
        "tests/infra/data/turns/test_credit.py::test_episodes_are_credited_and_masked_as_in_tinker_cookbook",
    ),
    Breakage(
        "9 only what was sampled is trained",
        "a token is in the loss of each branch that shares it",
        "infra/data/turns/loss_masks.py",
        "mask[: max((_num_shared(sample, other) for other in earlier), default=0)] = False",
        "pass",
        "tests/infra/data/turns/test_credit.py::test_a_token_that_two_branches_share_is_in_the_loss_once",
    ),
    Breakage(
        "9 only what was sampled is trained",
        "two branches of one episode are each other's baseline",
        "infra/data/turns/credit.py",
        "if not any(sample.branch for sample in samples):",
        "if True:",
        "tests/infra/data/turns/test_credit.py::test_the_branches_of_an_episode_count_once_in_the_baseline",
    ),
    Breakage(
        "10 a turn that is done is never done again",
        "recorded turns are sampled again",
        "infra/environments/episodes.py",
        "recorded = self.turns.records.get(name, [])",
        "recorded = self.turns.records.get(name, [])[:0]",
        "tests/tasks/test_episode_rollout.py::test_after_a_kill_no_complete_turn_is_sampled_again_and_the_trajectories_are_the_undisturbed_ones",
    ),
    Breakage(
        "10 a turn that is done is never done again",
        "other observations than those on record are not seen",
        "infra/environments/episodes.py",
        "elif is_game and (len(trajectories) > 1 or recorded != counts.turns):",
        "elif False:",
        "tests/tasks/test_episode_rollout.py::test_other_observations_than_those_on_record_fail_the_episode",
    ),
    Breakage(
        "10 a turn that is done is never done again",
        "a worker that takes the place of a lost one gets no recorded turns",
        "infra/gateway/session/session.py",
        "            turn.is_delivered = turn.is_registered = False",
        "            pass",
        "tests/tasks/test_episode_rollout.py::test_an_environment_whose_worker_is_killed_goes_on_with_the_turns_on_record",
    ),
    Breakage(
        "12 no effect is made twice",
        "a call whose result is on record is made again",
        "infra/environments/tools.py",
        'if call["is_done"]:',
        "if False:",
        "tests/tasks/test_tool_calls.py::test_a_call_whose_result_is_on_record_is_not_made_again",
    ),
    Breakage(
        "12 no effect is made twice",
        "a call without a result is made again",
        "infra/gateway/session/calls.py",
        "            if known.is_open:",
        "            if False:",
        "tests/tasks/test_tool_calls.py::test_after_a_kill_in_the_middle_of_a_call_only_an_idempotent_one_is_made_again",
    ),
    Breakage(
        "12 no effect is made twice",
        "an episode with effects begins again without its record",
        "infra/environments/episodes.py",
        "        if not self.restarts or not made:",
        "        if True:",
        "tests/tasks/test_tool_calls.py::test_an_episode_that_begins_again_makes_no_effect_twice",
    ),
    Breakage(
        "12 no effect is made twice",
        "a worker that takes the place of a lost one repeats effects",
        "infra/gateway/session/calls.py",
        "        if restarts and made:",
        "        if False:",
        "tests/tasks/test_tool_calls.py::test_an_episode_that_restarts_after_its_worker_is_killed_makes_no_effect_twice",
    ),
    Breakage(
        "12 no effect is made twice",
        "calls are forgotten with the turns of an engine that answered wrongly",
        "infra/gateway/session/records.py",
        "        self._rewrite(call for calls in self.calls.values() for call in calls)",
        "        self.calls.clear()",
        "tests/tasks/test_tool_calls.py::test_a_call_outlives_the_turns_of_an_engine_that_answered_wrongly",
    ),
    Breakage(
        "12 no effect is made twice",
        "an effect is made before it is on the disk",
        "infra/gateway/session/records.py",
        "self.write(call, syncs=call.is_open)",
        "self.write(call)",
        "tests/tasks/test_tool_calls.py::test_a_call_is_on_the_disk_before_it_is_made",
    ),
    Breakage(
        "8 could not be judged is never 0",
        "a failed episode has a reward of 0",
        "infra/environments/episodes.py",
        "reward, parts = episode.outcome.reward, episode.outcome.parts or {}",
        "reward, parts = episode.outcome.reward or 0.0, episode.outcome.parts or {}",
        "tests/tasks/test_episode_rollout.py::test_an_episode_whose_environment_fails_has_no_reward",
    ),
    Breakage(
        "8 could not be judged is never 0",
        "a judge's answer that cannot be read counts as the lowest score",
        "infra/rewards/judges/judging.py",
        "            return unjudged(failed.reason, failed.message)",
        "            return Outcome(self.config.min_score, {WHOLE_REWARD: self.config.min_score})",
        "tests/tasks/test_judge.py::test_votes_are_combined_and_more_than_half_must_be_readable",
    ),
    Breakage(
        "8 could not be judged is never 0",
        "a group of one is scored by RULER",
        "tasks/rewards/by_model.py",
        "        if len(group) < 2:",
        "        if len(group) < 1:",
        "tests/tasks/test_judge.py::test_a_group_of_one_is_unjudged_without_a_request_and_equal_samples_share_a_score",
    ),
    Breakage(
        "8 could not be judged is never 0",
        "the deadline of the whole scoring is not kept by workers",
        "infra/rewards/pool.py",
        "            if time.monotonic() >= self.until:",
        "            if False:",
        "tests/tasks/test_unjudged.py::test_at_the_deadline_of_the_scoring_the_step_stops_and_then_judges_only_what_is_missing",
    ),
    Breakage(
        "8 could not be judged is never 0",
        "a judge still gets requests after the deadline of the whole scoring",
        "infra/rewards/judges/endpoint.py",
        "        if self.until is not None:",
        "        if False:",
        "tests/tasks/test_judge.py::test_at_the_deadline_of_the_scoring_nothing_more_is_sent_and_what_is_under_way_is_kept",
    ),
    Breakage(
        "8 could not be judged is never 0",
        "samples share the CPU time of one",
        "infra/rewards/worker.py",
        "    seconds = math.ceil(used.ru_utime + used.ru_stime + cpu_s)",
        "    seconds = cpu_s",
        "tests/infra/rewards/test_hostile.py::test_each_sample_has_the_cpu_time_of_its_own",
    ),
    Breakage(
        "11 nothing is paid twice",
        "what was scored beside the rollout is not found by the scoring",
        "tasks/rewards/apply.py",
        "        if (known := journal.outcomes.get(key)) is None:",
        "        if (known := None) is None:",
        "tests/tasks/test_scored_ahead.py::test_complete_groups_are_scored_in_the_rollout_and_the_result_is_that_of_scoring_afterwards",
    ),
    Breakage(
        "8 could not be judged is never 0",
        "a score goes to a sample with the same number and another answer",
        "infra/rewards/scores.py",
        "sample.sample_index, hashlib.sha256(fields).hexdigest()",
        'sample.sample_index, ""',
        "tests/tasks/test_scored_ahead.py::test_other_samples_than_those_that_were_judged_get_no_score_of_theirs",
    ),
    Breakage(
        "8 could not be judged is never 0",
        "a group is scored before it is complete",
        "tasks/rewards/ahead.py",
        "if len(found) == self.group_size]",
        "if found]",
        "tests/tasks/test_scored_ahead.py::test_complete_groups_are_scored_in_the_rollout_and_the_result_is_that_of_scoring_afterwards",
    ),
    Breakage(
        "8 could not be judged is never 0",
        "what was unjudged beside the rollout is never tried again",
        "infra/rewards/scores.py",
        '        return [line for line in lines if line["outcome"][0] is not None]',
        "        return list(lines)",
        "tests/tasks/test_scored_ahead.py::test_what_was_tried_in_the_rollout_is_unjudged_without_another_try_but_in_a_later_attempt",
    ),
    Breakage(
        "11 nothing is paid twice",
        "a judge's answers are not found again",
        "infra/rewards/judges/judging.py",
        "known = self.ledger.found(dict.fromkeys(self.keys))",
        "known = self.ledger.found([])",
        "tests/tasks/test_judge.py::test_nothing_is_paid_twice_by_another_scoring_an_evaluation_or_another_run",
    ),
    Breakage(
        "11 nothing is paid twice",
        "answers are written when all have come",
        "infra/rewards/judges/ledger.py",
        '        self._file.execute("COMMIT")',
        "        pass",
        "tests/tasks/test_judge.py::test_a_flow_that_is_killed_while_its_judge_answers_goes_on_without_paying_again",
    ),
    Breakage(
        "11 nothing is paid twice",
        "a step that stops drops the answers that are under way",
        "infra/rewards/judges/endpoint.py",
        "                errors.append(error)\n                stop.set()",
        "                raise",
        "tests/tasks/test_judge.py::test_a_step_that_stops_awaits_the_answers_that_are_under_way",
    ),
    Breakage(
        "11 nothing is paid twice",
        "the budget is not looked at",
        "infra/rewards/judges/judging.py",
        "            if limit and used >= limit:",
        "            if False:",
        "tests/tasks/test_judge.py::test_a_budget_stops_the_run_before_more_is_asked_and_a_higher_one_goes_on",
    ),
    Breakage(
        "security",
        "the judge's key is shown where the endpoint repeats it",
        "infra/rewards/judges/endpoint.py",
        'text.replace(key, "***") if key else text',
        "text",
        "tests/tasks/test_judge.py::test_the_key_goes_to_the_endpoint_and_nowhere_else",
    ),
    Breakage(
        "security",
        "a reward gets all variables of the flow",
        "infra/processes/child_environment.py",
        'if name in OF_REWARDS or name.startswith("LC_") or name in names}',
        "if name not in names or True}",
        "tests/tasks/test_reward_files.py::test_a_reward_gets_the_variables_that_are_named_and_no_others",
    ),
    Breakage(
        "stores",
        "a run whose answer was lost is not looked for before it is made again",
        "infra/tracking/mlflow_store.py",
        "ids = [str(entry.info.run_id) for entry in found]",
        "ids = []",
        "tests/infra/tracking/test_upload.py::test_every_answer_is_lost_once_and_nothing_is_there_twice",
    ),
    Breakage(
        "stores",
        "what was delivered is not marked as delivered",
        "infra/tracking/mlflow_store.py",
        "write_json(folder / DELIVERED, {",
        "_ = (folder / DELIVERED, {",
        "tests/infra/tracking/test_upload.py::test_a_store_that_never_answers_holds_no_step_and_gets_all_when_it_does",
    ),
    Breakage(
        "security",
        "requests to the engine carry no key",
        "infra/engines/server/server_process.py",
        'return {"Authorization": f"Bearer {read_secret(path).get_secret_value()}"} if path.exists() else {}',
        "return {}",
        "tests/infra/engines/test_sglang.py::test_a_later_engine_adopts_the_living_server",
    ),
    Breakage(
        "security",
        "a file of another folder is taken for one of the workspace",
        "infra/records.py",
        'if path.startswith("/") or ".." in path.split("/"):',
        "if not path:",
        "tests/test_security.py::test_a_record_of_a_file_outside_the_workspace_is_refused",
    ),
    Breakage(
        "9 only what was sampled is trained",
        "what a renderer made of the tokens on record is not compared with them",
        "infra/gateway/session/session.py",
        "if prompt[: len(known)] != known:",
        "if False:",
        "tests/infra/gateway/test_session.py::test_a_renderer_that_changes_tokens_on_record_is_caught",
    ),
    Breakage(
        "9 only what was sampled is trained",
        "an answer that the agent changed counts as sampled",
        "infra/gateway/rendering/messages.py",
        "return self.content.strip() == other.content.strip() and calls[0] == calls[1] and is_same_reasoning",
        "return True",
        "tests/infra/gateway/test_session.py::test_changed_answers_and_other_conversations_are_branches_and_are_counted",
    ),
    Breakage(
        "9 only what was sampled is trained",
        "branches are not counted",
        "infra/gateway/session/session.py",
        "self.counts.branches += bool(self.tracks) and self.limits.keep_reasoning",
        "self.counts.branches += 0",
        "tests/infra/gateway/test_session.py::test_changed_answers_and_other_conversations_are_branches_and_are_counted",
    ),
    Breakage(
        "9 only what was sampled is trained",
        "a turn does not name its adapter",
        "infra/engines/server/turns.py",
        "name = self.adapter.served_name",
        "name = None",
        "tests/infra/engines/test_conformance.py::test_each_turn_names_its_adapter",
    ),
    Breakage(
        "9 only what was sampled is trained",
        "a complete turn is not journaled",
        "infra/gateway/session/session.py",
        "self.on_turn(record)",
        "pass",
        "tests/infra/gateway/test_session.py::test_a_killed_episode_gets_its_recorded_turns_again_and_samples_none_twice",
    ),
    Breakage(
        "8 could not be judged is never 0",
        "an expression that math-verify does not finish counts as wrong",
        "infra/rewards/built_in/math_equal.py",
        "timeout_seconds=None",
        "timeout_seconds=1",
        "tests/tasks/test_built_in_rewards.py::test_an_expression_that_takes_for_ever_is_unjudged_and_never_0",
    ),
    Breakage(
        "8 could not be judged is never 0",
        "code whose process is killed from outside has failed its tests",
        "infra/rewards/built_in/python_tests.py",
        "_cpu_of_children() - before < tests.cpu_s",
        "False",
        "tests/tasks/test_built_in_rewards.py::test_a_process_that_is_killed_from_outside_is_unjudged",
    ),
    Breakage(
        "security",
        "code under test is left running",
        "infra/rewards/built_in/python_tests.py",
        "        end_orphans(set())\n",
        "",
        "tests/tasks/test_built_in_rewards.py::test_nothing_of_the_code_is_left_and_it_sees_neither_our_variables_nor_our_modules",
    ),
    Breakage(
        "1 transaction",
        "a late answer of a lost replica is taken beside the one that replaced it",
        "infra/engines/replicas/assignment.py",
        "if self._owner.get(key, replica) != replica:",
        "if False:",
        "tests/infra/engines/replicas/test_assignment.py::test_a_lost_replica_s_unfinished_samples_go_to_the_others_and_its_late_answers_are_not_taken",
    ),
    Breakage(
        "2 fencing",
        "a replica that serves another adapter than the others makes samples",
        "infra/engines/replicas/replica_set.py",
        "replica.check_served(adapter)",
        "pass",
        "tests/infra/engines/replicas/test_replica_set.py::test_an_adapter_is_served_by_all_replicas_or_no_sample_is_made",
    ),
    Breakage(
        "6 classes of failure",
        "samples of a lost replica are not made by the others",
        "infra/engines/replicas/shared_rollout.py",
        "self._begin(submit, moved, is_first=False)",
        "pass",
        "tests/infra/engines/replicas/test_replica_set.py::test_samples_of_a_replica_that_is_lost_in_a_rollout_are_made_by_the_other_and_none_twice",
    ),
    Breakage(
        "6 classes of failure",
        "after a wrong answer of a replica the others live on",
        "infra/engines/replicas/replica_set.py",
        "self.stop()\n            raise\n",
        "raise\n",
        "tests/infra/engines/replicas/test_replica_set.py::test_a_wrong_answer_of_one_replica_ends_the_sound_ones_too",
    ),
    Breakage(
        "13 a copy is what was copied",
        "an index is written without the files that it names",
        "infra/mirror/copying.py",
        "        remote.put(path_of(file), object_name(run, file))",
        "        pass",
        "tests/infra/mirror/test_copying.py::test_a_run_is_continued_on_another_machine_with_equal_bytes",
    ),
    Breakage(
        "13 a copy is what was copied",
        "a fetched file's digest is not looked at",
        "infra/mirror/fetching.py",
        "if (found := sha256_of(target)) != file.sha256:",
        "if False and (found := sha256_of(target)):",
        "tests/infra/mirror/test_copying.py::test_a_changed_object_is_found_and_nothing_is_left_behind",
    ),
    Breakage(
        "13 a copy is what was copied",
        "a machine that was away goes on beside another",
        "infra/mirror/copying.py",
        "if part.is_final and not is_same(copy, there):",
        "if False:",
        "tests/infra/mirror/test_copying.py::test_a_machine_that_was_away_cannot_go_on_beside_another",
    ),
    Breakage(
        "13 a copy is what was copied",
        "the second writer of an index replaces the first one's",
        "infra/mirror/remote.py",
        'self.files.pipe_file(place, data, mode="create")',
        "self.files.pipe_file(place, data)",
        "tests/infra/mirror/test_copying.py::test_of_two_writers_of_an_index_one_writes_it",
    ),
    Breakage(
        "13 a copy is what was copied",
        "retention removes an adapter of which there is no copy",
        "tasks/runs/apply_retention.py",
        "delivered if copied is None else delivered & copied",
        "delivered",
        "tests/tasks/runs/test_apply_retention.py::test_an_adapter_without_a_copy_in_the_store_stays",
    ),
    Breakage(
        "2 fencing",
        "a judge with a server of its own that answered while it should sleep goes on",
        "infra/engines/sglang/judge_server.py",
        "        if answered:",
        "        if False:",
        f"{JUDGE_SERVER}::test_a_judge_that_answered_in_its_sleep_gives_no_judgement",
    ),
    Breakage(
        "5 memory hand-over",
        "a judge with a server of its own is asked while the engine has its memory",
        "flows/drawing.py",
        "        release_memory(engine, adapter)\n        ask_judge(",
        "        ask_judge(",
        "tests/flows/test_judge_server.py::test_the_engine_makes_room_before_the_judge_is_asked_and_only_then",
    ),
    Breakage(
        "5 memory hand-over",
        "a judge with a server of its own stays awake after its start",
        "infra/engines/server/judge_engine.py",
        "        self.release_memory()",
        "        self.judge.is_asleep()",
        f"{JUDGE_SERVER}::test_judge_and_engine_take_turns_each_with_a_server_and_records_of_its_own",
    ),
    Breakage(
        "7 one owner of the GPUs",
        "the engine's wake ends the judge's server",
        "infra/engines/server/server_process.py",
        "if first is None or replica >= first]",
        "if True]",
        f"{JUDGE_SERVER}::test_judge_and_engine_take_turns_each_with_a_server_and_records_of_its_own",
    ),
    Breakage(
        "11 nothing is paid twice",
        "answers of another judge's model are found",
        "tasks/rewards/by_model.py",
        "{of_judge.by} {work.base_sha256}",
        "{of_judge.by}",
        f"{JUDGE_SERVER}::test_another_model_is_another_judge_and_none_is_paid_twice",
    ),
    Breakage(
        "8 could not be judged is never 0",
        "a reward model's NaN is a score",
        "infra/rewards/models/program.py",
        "if math.isfinite(value)",
        "if True",
        "tests/tasks/test_reward_model.py::test_a_number_that_is_not_finite_and_a_conversation_that_is_too_long_are_unjudged_and_never_0",
    ),
    Breakage(
        "1 transaction",
        "a reward model scores again what it had scored",
        "tasks/rewards/by_reward_model.py",
        "if key in journal.outcomes}",
        "if not key}",
        "tests/tasks/test_reward_model.py::test_a_scoring_goes_on_at_the_missing_batches_with_the_same_bits",
    ),
    Breakage(
        "1 transaction",
        "scores of another reward model are used",
        "tasks/rewards/by_reward_model.py",
        "{checks.digest(config.model)} ",
        "",
        "tests/tasks/test_reward_model.py::test_scores_of_another_model_or_of_other_settings_are_not_used",
    ),
    Breakage(
        "1 transaction",
        "a reward model's program has changed, and its scores are used",
        "tasks/rewards/by_reward_model.py",
        "{code_digest.digest('infra.rewards.models')}",
        "",
        "tests/tasks/test_reward_model.py::test_a_score_is_of_the_program_that_gave_it_though_no_task_imports_it",
    ),
    Breakage(
        "5 memory hand-over",
        "a reward model stays on the GPU after the scoring",
        "infra/rewards/models/scorer.py",
        "    if device_of(config) == \"cuda\":\n        close_all()",
        "    pass",
        "tests/tasks/test_reward_model.py::test_on_a_gpu_the_program_is_gone_when_the_samples_are_scored",
    ),
    Breakage(
        "5 memory hand-over",
        "a reward model is loaded beside an engine that is awake",
        "flows/drawing.py",
        "    if reward.uses_reward_model:\n        release_memory",
        "    if False:\n        release_memory",
        "tests/flows/test_reward_model_step.py::test_the_engine_makes_room_before_a_reward_model_is_loaded",
    ),
    Breakage(
        "5 memory hand-over",
        "an evaluation's reward model is loaded beside an engine that is awake",
        "tasks/rewards/by_reward_model.py",
        "        engine().release_memory()",
        "        engine()",
        "tests/tasks/test_reward_model.py::test_an_evaluation_is_scored_when_the_engine_has_made_room_and_wakes_it_for_what_is_asked_next",
    ),
    Breakage(
        "8 could not be judged is never 0",
        "a failed sample of an inspect task counts as 0",
        "infra/environments/inspect_tasks/asking.py",
        "reward=next(iter(scores.values())) if is_judged else None,",
        "reward=next(iter(scores.values())) if is_judged else 0.0,",
        f"{INSPECT}::test_a_sample_that_fails_is_unjudged_and_never_0",
    ),
    Breakage(
        "8 could not be judged is never 0",
        "a word that an inspect task's scorer gave counts as 0",
        "infra/environments/inspect_tasks/program.py",
        "return GRADES.get(value, WORDS.get(value.lower()))",
        "return GRADES.get(value, WORDS.get(value.lower(), 0.0))",
        f"{INSPECT}::test_a_score_that_is_no_number_is_unjudged",
    ),
    Breakage(
        "10 a turn that is done is never done again",
        "answers that an inspect task had before its engine died are asked for again",
        "infra/environments/inspect_tasks/asking.py",
        "gateway.open_session(Episode(EPISODE, 0, 0, 0), journal.records.get(EPISODE, []))",
        "gateway.open_session(Episode(EPISODE, 0, 0, 0))",
        f"{INSPECT}::test_an_engine_that_dies_is_asked_only_for_what_is_missing",
    ),
    Breakage(
        "10 a turn that is done is never done again",
        "answers that an inspect task had before its program was killed are asked for again",
        "infra/environments/inspect_tasks/asking.py",
        "gateway.open_session(Episode(EPISODE, 0, 0, 0), journal.records.get(EPISODE, []))",
        "gateway.open_session(Episode(EPISODE, 0, 0, 0))",
        f"{INSPECT}::test_a_program_that_is_killed_is_lost_and_its_answers_are_kept",
    ),
    Breakage(
        "2 fencing",
        "an inspect task takes the answers of another adapter",
        "tasks/rewards/by_inspect.py",
        '"adapter": request.adapter.sha256,',
        '"adapter": "",',
        f"{INSPECT}::test_answers_of_another_adapter_or_task_are_not_given_back",
    ),
    Breakage(
        "6 classes of failure",
        "an inspect task whose program was killed is bad input, and not tried again",
        "infra/environments/inspect_tasks/running.py",
        "raise EvaluationLost(\n            f\"the program",
        "raise ValueError(\n            f\"the program",
        f"{INSPECT}::test_a_program_that_is_killed_is_lost_and_its_answers_are_kept",
    ),
    Breakage(
        "6 classes of failure",
        "a conversation of an inspect task without room ends all others",
        "infra/gateway/session/session.py",
        'self.stop_reason = None if self.limits.has_many_conversations else "context"',
        'self.stop_reason = "context"',
        "tests/infra/gateway/test_session.py::test_of_many_conversations_one_without_room_ends_no_other",
    ),
)  # fmt: skip


@contextmanager
def copied() -> Iterator[Path]:
    """The checkout without its history, workspaces and environments; these are linked."""
    with tempfile.TemporaryDirectory(prefix="ratchet-broken-") as folder:
        copy = Path(folder) / "checkout"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv*", ".ratchet", "*cache*", "__pycache__"))
        for name in (".venv", ".venv-sglang", ".venv-inspect"):  # a link to nothing where the last was not made
            (copy / name).symlink_to(ROOT / name)
        yield copy


def passes(copy: Path, test: str) -> bool:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", test]
    environment = os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    if done.returncode not in (0, 1):  # neither passed nor failed: no such test, or nothing could be collected
        raise SystemExit(f"{test} could not be run:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.returncode == 0


def is_seen(copy: Path, breakage: Breakage) -> bool:
    """The test passes, and fails once the promise is broken."""
    path = copy / breakage.path
    sound = path.read_text()
    if sound.count(breakage.old) != 1:
        raise SystemExit(
            f"{breakage.path} holds {sound.count(breakage.old)} times {breakage.old!r}: say anew how to break {breakage.what!r}"
        )
    if not passes(copy, breakage.test) and not passes(copy, breakage.test):  # a port may just have been taken
        print(f"{breakage.test} fails even where nothing is broken", flush=True)
        return False
    path.write_text(sound.replace(breakage.old, breakage.new))
    try:
        return not passes(copy, breakage.test)
    finally:
        path.write_text(sound)


def main(arguments: list[str]) -> int:
    words = [word for word in arguments if not word.startswith("--")]
    chosen = [breakage for breakage in BREAKAGES if all(word in f"{breakage.promise} {breakage.what}" for word in words)]
    rows = ["| promise | broken by hand | the test that fails |", "|--|--|--|"]
    num_unseen = 0
    with copied() as copy:
        for breakage in chosen:
            seen = is_seen(copy, breakage)
            num_unseen += not seen
            print(f"{'seen' if seen else 'NOT SEEN'}  {breakage.promise}: {breakage.what}", flush=True)
            if seen:
                rows.append(f"| {breakage.promise} | {breakage.what} (`{breakage.path}`) | `{breakage.test}` |")
    if "--report" in arguments:
        text = "# Each promise and its test\n\nBroken by hand, one after the other: `python tests/drills/broken_promises.py --report`.\n\n"
        (ROOT / "docs/results/promises.md").write_text(text + "\n".join(rows) + "\n")
    return 1 if num_unseen else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
