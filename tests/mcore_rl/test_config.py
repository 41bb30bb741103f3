"""The configuration: what a user writes is what runs, or is refused with every problem named."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_rl.config import Config, DataConfig, ModelSection, OptimizerConfig, RunConfig, describe, load_config, markdown
from mcore_rl.config.describe import options
from parallel.errors import UserError

BASE = "run: {dir: runs/a}\nmodel: {path: m, dtype: float32}\ndata: {train: a.jsonl}\n"


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    return path


def refused(path: Path, *overrides: str, kind: str = "train") -> str:
    with pytest.raises(UserError) as error:
        load_config(path, list(overrides), kind)
    return str(error.value)


def test_defaults_and_overrides(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, BASE), ["actor.parallel.tp=2", "rollout.stop_token_ids=[3, 5]", "actor.optimizer.lr=2e-5"])
    assert (config.actor.parallel.tp, config.rollout.stop_token_ids, config.actor.optimizer.lr) == (2, (3, 5), 2e-5)
    assert config.run.steps == 100 and config.reference.parallel is None and config.total_updates == 100


def test_resolved_yaml_loads_to_an_equal_config(tmp_path: Path) -> None:
    for number, (kind, extra) in enumerate([
        ("train", []), ("train", ["algorithm.kl_coefficient=0.1", "reference.parallel.tp=2", "model.init.num_layers=2"]),
        ("train", ["evaluation.data=e.jsonl", "evaluation.every=5", "evaluation.samples=4", "data.prompt_format=chat",
                   "warm_up.config=w.yaml"]),
        ("sft", ["sft.output=out", "sft.steps=7"]), ("evaluate", ["evaluation.data=e.jsonl"]),
    ]):
        config = load_config(write(tmp_path, BASE), extra, kind)
        again = tmp_path / f"again{number}.yaml"
        again.write_text(config.to_yaml())
        assert load_config(again, [], kind) == config


@settings(max_examples=40, deadline=None)
@given(text=st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), min_size=1),
       lr=st.floats(1e-12, 0.99), seed=st.integers(0, 2**63))
def test_any_text_and_number_survives_the_resolved_yaml(text: str, lr: float, seed: int) -> None:
    import tempfile

    config = Config(kind="train", run=RunConfig(dir=text, seed=seed), model=ModelSection(path="m"), data=DataConfig(train=text))
    config = dataclasses.replace(config, actor=dataclasses.replace(config.actor, optimizer=OptimizerConfig(lr=lr)))
    with tempfile.TemporaryDirectory() as directory:
        assert load_config(write(Path(directory), config.to_yaml())) == config


def test_all_unknown_keys_are_listed_with_line_and_nearest_key(tmp_path: Path) -> None:
    text = ("actor:\n  optim:\n    learning_rte: 2.0e-6\n  megatron:\n    tensor_model_paralel_size: 2\nrollout:\n  temprature: 0.6\n"
            "  n: 8\n  clip_ratio_low: 0.1\nalgorithmm:\n  kl_coef: 0.001\nRollout: {}\n")
    path = write(tmp_path, text)
    message = refused(path, "rollout.top_pp=0.9", "--resume-form")
    for line, key, guess in [(2, "actor.optim", "actor.optimizer"), (3, "actor.optim.learning_rte", "actor.optimizer.lr"),
                             (5, "actor.megatron.tensor_model_paralel_size", "actor.parallel.tp"),
                             (8, "rollout.n", "rollout.samples_per_prompt"),
                             (7, "rollout.temprature", "rollout.temperature"), (11, "algorithmm.kl_coef", "algorithm.kl_coefficient"),
                             (10, "algorithmm", "algorithm"), (12, "Rollout", "rollout")]:
        assert f"{path}:{line}: unknown key {key}; did you mean {guess}?" in message
    assert f"{path}:9: unknown key rollout.clip_ratio_low; that key is valid as algorithm.clip_ratio_low" in message
    assert "unknown key rollout.top_pp; did you mean rollout.top_p?" in message
    assert "--resume-form" in message and "section.key=value" in message


@pytest.mark.parametrize(("written", "value"), [
    ("1e-6", 1e-6), ("1.0e-6", 1e-6), ("1E-2", 1e-2), (".000001", 1e-6), ("'1e-6'", 1e-6), ("+1e-3", 1e-3)])
def test_numbers_are_numbers_however_they_are_written(tmp_path: Path, written: str, value: float) -> None:
    path = write(tmp_path, BASE + f"actor: {{optimizer: {{lr: {written}}}}}\n")
    assert load_config(path).actor.optimizer.lr == value
    assert load_config(write(tmp_path, BASE), [f"actor.optimizer.lr={written}"]).actor.optimizer.lr == value


@pytest.mark.parametrize("written", [
    "1e-6x", "1e", "-1e-3", "1", "1e6", "1e+6", "null", "None", "true", "[1]", ".inf", ".nan", "nan", "4:00:00"])
def test_bad_learning_rates_are_refused_with_key_value_and_line(tmp_path: Path, written: str) -> None:
    path = write(tmp_path, BASE + f"actor:\n  optimizer:\n    lr: {written}\n")
    message = refused(path)
    assert f"{path}:6: actor.optimizer.lr is {written}" in message


def test_yaml_1_1_traps(tmp_path: Path) -> None:
    run = "run:\n  dir: {dir}\n  steps: {steps}\nmodel: {{path: 3.10}}\ndata: {{train: 4:00:00, shuffle: off}}\n"
    for steps, value in (("1_000", 1000), ("1e3", 1000), ("10", 10)):
        config = load_config(write(tmp_path, run.format(dir="off", steps=steps)))
        assert (config.run.dir, config.run.steps, config.model.path, config.data.train, config.data.shuffle) == (
            "off", value, "3.10", "4:00:00", False)
    for steps in ("010", "1.5", "0x10", "~", "yes"):
        assert f"run.steps is {steps}" in refused(write(tmp_path, run.format(dir="a", steps=steps)))
    assert "run.dir is None" in refused(write(tmp_path, run.format(dir="None", steps=1)))
    assert load_config(write(tmp_path, BASE), ["checkpoint.every=1", "checkpoint.keep=None"]).checkpoint.keep is None
    assert "checkpoint.keep is 0; it must be >= 1" in refused(write(tmp_path, BASE), "checkpoint.every=1", "checkpoint.keep=0")


def test_duplicate_keys_are_refused_with_both_lines(tmp_path: Path) -> None:
    message = refused(write(tmp_path, "rollout:\n  max_tokens: 8\n  temperature: 1.0\n  max_tokens: 16\ndata:\n  max_prompt_tokens: 1024\n"
                                      "rollout:\n  temperature: 0.7\n"))
    assert "duplicate key rollout.max_tokens (lines 2 and 4)" in message and "duplicate key rollout (lines 1 and 7)" in message
    assert "already set by override" in refused(write(tmp_path, BASE), "rollout.max_tokens=4", "rollout.max_tokens=32")


def test_merge_keys_notes_and_broken_yaml(tmp_path: Path) -> None:
    merged = load_config(write(tmp_path, BASE + "x-a: &x {lr: 1.0e-6, eps: 1e-7}\nx-a: note\nactor: {optimizer: {<<: *x, lr: 2.0e-6}}\n"))
    assert (merged.actor.optimizer.lr, merged.actor.optimizer.eps) == (2e-6, 1e-7)
    path = write(tmp_path, BASE + "rollout:\n\tmax_tokens: 3\n")
    assert f"{path}:5:1" in refused(path) and "tabs" in refused(path)
    assert "rollout is null; it is a section" in refused(write(tmp_path, BASE + "rollout: null\n"))
    assert "rollout is 3; it is a section" in refused(write(tmp_path, BASE + "rollout: 3\n"))
    assert "tag" in refused(write(tmp_path, BASE + "rollout: {max_tokens: !!python/name:os.system 3}\n"))
    assert "another mapping" in refused(write(tmp_path, BASE + "actor: &a {<<: *a}\n"))
    assert "mapping of sections" in refused(write(tmp_path, "- 1\n"))
    assert "does not exist" in refused(tmp_path / "absent.yaml")
    assert "run.dir is not set" in refused(write(tmp_path, ""))


@pytest.mark.parametrize(("override", "words"), [
    ("reference.path=x", "algorithm.kl_coefficient is 0"), ("reference.parallel.tp=2", "algorithm.kl_coefficient is 0"),
    ("algorithm.kl_estimator=k1", "algorithm.kl_coefficient is 0"), ("critic.optimizer.lr=1e-5", "algorithm.name is grpo, which has no critic"),
    ("critic.parallel.tp=2", "algorithm.name is grpo"), ("critic.path=x", "algorithm.name is grpo"),
    ("algorithm.gamma=0.9", "algorithm.name is grpo"), ("algorithm.kl_in=reward", "algorithm.name is grpo"),
    ("reward.function=a:b", "reward.name is exact_match"),
    ("sft.output=x", "mcore-rl sft"), ("data.system_prompt=x", "data.prompt_format is text"), ("data.response_field=r", "mcore-rl sft"),
    ("evaluation.samples=4", "evaluation.data is not set"), ("actor.optimizer.min_lr=1e-9", "schedule is constant")])
def test_keys_without_effect_are_refused(tmp_path: Path, override: str, words: str) -> None:
    message = refused(write(tmp_path, BASE), override)
    assert f"override '{override}': {override.split('=')[0]} has no effect" in message and words in message


@pytest.mark.parametrize(("overrides", "words"), [
    (["critic.enabled=true"], "unknown key critic.enabled"),
    (["algorithm.name=ppo", "critic.updates_per_step=7"], "critic.updates_per_step 7 does not divide"),
    (["algorithm.name=ppo", "critic.optimizer.schedule=linear", "critic.optimizer.warmup_steps=100"],
     "critic.optimizer.warmup_steps 100 is not below the 100"),
    (["algorithm.name=ppo", "algorithm.kl_coefficient=0.1", "algorithm.kl_in=reward", "actor.skip_old_log_probs=true"],
     "whose KL is that of the old log-probs"),
    (["algorithm.name=ppo", "algorithm.kl_in=reward"], "algorithm.kl_coefficient is 0"),
    (["algorithm.name=ppo", "critic.value_clip=0"], "critic.value_clip is 0"),
    (["algorithm.name=ppo", "critic.max_tokens_per_micro_batch=8"], "less than the 1280 tokens"),
    (["algorithm.name=ppo", "critic.max_tokens_per_micro_batch=2000", "critic.micro_batch_size=3"], "takes its place"),
    (["algorithm.name=ppo", "critic.packing=shared_prompt", "actor.layer_implementation=te"], "critic.packing is shared_prompt"),
    (["algorithm.name=ppo", "critic.parallel.sequence_parallel=true"], "critic.parallel.sequence_parallel is true with tp 1"),
    (["evaluation.every=2"], "evaluation.data is not set"),
    (["rollout.samples_per_prompt=1"], "compares the samples"), (["rollout.temperature=0"], "greedy"),
    (["actor.updates_per_step=7"], "does not divide the 64 samples"), (["reward.name=function"], "reward.function is not set"),
    (["actor.updates_per_step=2", "actor.skip_old_log_probs=true"], "skip_old_log_probs"),
    (["actor.optimizer.schedule=cosine", "actor.optimizer.warmup_steps=100"], "not below the 100 steps"),
    (["actor.parallel.sequence_parallel=true"], "actor.parallel.sequence_parallel is true with tp 1"),
    (["actor.parallel.tp=0"], "actor.parallel.tp is 0"), (["rollout.engine=embeded"], "did you mean embedded?"),
    (["algorithm.log_prob_gap_max=atuo"], "allowed: number or auto or null"), (["rollout.stop_token_ids=3"], "list of whole numbers"),
    (["rollout={max_tokens: 3}"], "key by key"), (["actor.optimizer.lr="], "one value per key"),
    (["data.answer_field=null"], "name the field")])
def test_contradictions_and_bad_values_are_refused(tmp_path: Path, overrides: list[str], words: str) -> None:
    assert words in refused(write(tmp_path, BASE), *overrides)


def test_sft_needs_its_section_and_train_sections_have_no_effect_there(tmp_path: Path) -> None:
    assert "the section sft is missing" in refused(write(tmp_path, BASE), kind="sft")
    assert "sft.output is not set" in refused(write(tmp_path, BASE + "sft: {steps: 3}\n"), kind="sft")
    assert "rollout.max_tokens has no effect" in refused(write(tmp_path, BASE + "sft: {output: o}\nrollout: {max_tokens: 3}\n"), kind="sft")
    assert load_config(write(tmp_path, BASE + "sft: {output: o, steps: 9}\n"), kind="sft").total_updates == 9


def test_gates_follow_the_precision_unless_set(tmp_path: Path) -> None:
    path = write(tmp_path, BASE)
    assert (load_config(path).log_prob_gap_gate, load_config(path).ratio_deviation_gate) == (1e-3, 1e-4)
    half = load_config(path, ["model.dtype=bfloat16"])
    assert (half.log_prob_gap_gate, half.ratio_deviation_gate) == (None, None)
    assert load_config(path, ["rollout.dtype=bfloat16"]).log_prob_gap_gate is None
    fixed = load_config(path, ["algorithm.log_prob_gap_max=0.5", "algorithm.ratio_deviation_max=null"])
    assert (fixed.log_prob_gap_gate, fixed.ratio_deviation_gate) == (0.5, None)


def test_every_key_has_a_help_line_and_the_page_is_up_to_date() -> None:
    assert all(item.metadata.get("help") for _, item, _ in options())
    assert "actor.optimizer.lr" in describe("train") and "sft.output" in describe("sft") and "sft.output" not in describe("train")
    page = Path(__file__).parents[2] / "docs/configuration.md"
    assert page.read_text() == markdown(), "run: python -m mcore_rl.config > docs/configuration.md"


def test_the_actors_schedule_counts_the_steps_after_the_critics_warm_up(tmp_path: Path) -> None:
    ppo = load_config(write(tmp_path, BASE), ["algorithm.name=ppo", "critic.warmup_steps=30", "rollout.samples_per_prompt=1"])
    assert ppo.has_critic and ppo.total_updates == 70 and not load_config(write(tmp_path, BASE)).has_critic
    again = tmp_path / "again.yaml"
    again.write_text(ppo.to_yaml())
    assert load_config(again) == ppo and "critic" not in load_config(write(tmp_path, BASE)).to_dict()


@pytest.mark.parametrize(("overrides", "words"), [
    (["actor.freeze=['*.layers.0.*']"], "actor.freeze matches model.layers.0."),
    (["actor.freeze=['*norm*']", "actor.parallel.pp=2", "actor.optimizer.distributed=false"], "set actor.optimizer.distributed=true")])
def test_frozen_parameters_that_checkpoints_cannot_hold_are_refused(tmp_path: Path, overrides: list[str], words: str) -> None:
    from mcore_rl.run import check_frozen
    from parallel.model_config import ModelConfig
    from tests.runs import write_run

    path = write_run(tmp_path)
    model = ModelConfig.from_directory(tmp_path / "model")
    with pytest.raises(UserError) as refusal:
        check_frozen(load_config(path, [*overrides, "checkpoint.every=1"]), model)
    assert words in str(refusal.value)
    check_frozen(load_config(path, [*overrides, "checkpoint.every=0"]), model)
    check_frozen(load_config(path, ["actor.freeze=['*norm*']", "checkpoint.every=1"]), model)
