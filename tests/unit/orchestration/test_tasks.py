"""Tasks: prompts that depend on seed and step alone, held-out prompts that are never trained on, rewards."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from orchestration.config import RunConfig
from orchestration.contracts import PromptGroup, Trajectory
from orchestration.models.tiny import build_tokenizer
from orchestration.tasks.base import PromptBuilder, Task
from orchestration.tasks.build import build_task
from orchestration.tasks.config import PromptConfig
from orchestration.tasks.needle import NeedleVocabulary
from tests.helpers.samples import make_trajectory
from tests.helpers.tiny_models import build_tiny_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer()


@pytest.fixture(scope="module")
def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte: any text is told apart from any other."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE({character: index for index, character in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template="{{ messages[-1].content }}")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 rows, 50 distinct prompts."""
    words = [f"value_{i % 8} filler_{i // 8}" for i in range(50)]
    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    rows = ({"prompt": word, "answer": i, "source": f"row {i}"} for i, word in enumerate([*words, *words[:10]]))
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def make_task(task: dict[str, Any], tokenizer, **sections: Any) -> Task:
    config = RunConfig.model_validate(
        {"model": {"path": "unused"}, "task": task, "sampling": {"group_size": 4}, **sections}
    )
    return build_task(config, tokenizer)


def prompts(groups: list[PromptGroup]) -> list[tuple[int, ...]]:
    return [group.prompt_token_ids for group in groups]


@pytest.fixture(params=["needle", "needle_lengths", "reasoning_gym", "jsonl"])
def new_task(request: pytest.FixtureRequest, data: Path, tokenizer, byte_tokenizer) -> Callable[[], Task]:
    config, used_tokenizer = {
        "needle": ({"type": "needle", "num_filler_tokens": 10}, tokenizer),
        "needle_lengths": (
            {"type": "needle", "num_filler_tokens": 12, "min_filler_tokens": 6, "num_needles": 2},
            tokenizer,
        ),
        "reasoning_gym": ({"type": "reasoning_gym", "dataset": "chain_sum"}, byte_tokenizer),
        "jsonl": ({"type": "jsonl", "path": str(data), "reward": "contains"}, tokenizer),
    }[request.param]
    return lambda: make_task(config, used_tokenizer, run={"seed": 3, "eval_samples_per_prompt": 2})


class TestEveryTask:
    def test_prompts_depend_on_seed_and_step_alone(self, new_task) -> None:
        first, second = new_task(), new_task()
        second.eval_groups(3)
        second.train_groups(0, 8)
        assert first.train_groups(5, 8) == second.train_groups(5, 8)
        assert first.eval_groups(4) == second.eval_groups(4)

    def test_groups_are_named_sampled_and_json_serialisable(self, new_task) -> None:
        task = new_task()
        train, evaluation = task.train_groups(3, 5), task.eval_groups(2)
        assert {group.num_samples for group in train} == {4}
        assert {group.num_samples for group in evaluation} == {2}
        ids = [group.group_id for group in (*train, *task.train_groups(4, 5), *evaluation)]
        assert len(set(ids)) == len(ids)
        json.dumps([(group.answer, dict(group.metadata)) for group in (*train, *evaluation)])


@pytest.mark.parametrize("name", ["needle", "jsonl"])
def test_other_steps_and_seeds_bring_other_prompts(name: str, tokenizer, data: Path) -> None:
    config = {"type": "needle"} if name == "needle" else {"type": "jsonl", "path": str(data)}
    task, other = make_task(config, tokenizer), make_task(config, tokenizer, run={"seed": 1})
    assert prompts(task.train_groups(0, 8)) != prompts(task.train_groups(1, 8))
    assert prompts(task.train_groups(0, 8)) != prompts(other.train_groups(0, 8))


class TestHeldOutPrompts:
    def test_a_generator_of_few_prompts(self) -> None:
        """8 x 8 prompts at most: without a split, every one of them would be trained on."""
        config = {"type": "needle", "num_filler_tokens": 2}
        task = make_task(config, build_tokenizer())
        trained = {prompt for step in range(30) for prompt in prompts(task.train_groups(step, 16))}
        evaluated = prompts(task.eval_groups(64))
        assert 1 <= len(evaluated) < 64
        assert len(set(evaluated)) == len(evaluated)
        assert not trained & set(evaluated)
        assert len(trained) > 64

    def test_duplicate_rows_stay_on_one_side(self, data: Path, tokenizer) -> None:
        task = make_task({"type": "jsonl", "path": str(data), "eval_fraction": 0.2}, tokenizer)
        trained = {prompt for step in range(8) for prompt in prompts(task.train_groups(step, 8))}
        evaluated = prompts(task.eval_groups(100))
        assert len(evaluated) == len(set(evaluated)) == 10
        assert len(trained) == 40
        assert not trained & set(evaluated)

    def test_a_file_of_their_own(self, data: Path, tokenizer, tmp_path: Path) -> None:
        held_out = tmp_path / "eval.jsonl"
        held_out.write_text(data.read_text().splitlines()[0] + "\n" + '{"prompt": "value_7 value_7", "answer": 1}')
        task = make_task({"type": "jsonl", "path": str(data), "eval_path": str(held_out)}, tokenizer)
        trained = {prompt for step in range(8) for prompt in prompts(task.train_groups(step, 8))}
        assert len(prompts(task.eval_groups(100))) == 2
        assert len(trained) == 49, "the prompt that both files have must not be trained on"

    def test_a_single_row_is_trained_on(self, tokenizer, tmp_path: Path) -> None:
        path = tmp_path / "one.jsonl"
        path.write_text('{"prompt": "value_1", "answer": 1}\n')
        task = make_task({"type": "jsonl", "path": str(path)}, tokenizer)
        assert len(task.train_groups(0, 3)) == 3
        assert task.eval_groups(3) == []


def test_an_epoch_of_jsonl_has_every_row_once_and_the_next_is_shuffled_anew(data: Path, tokenizer) -> None:
    task = make_task({"type": "jsonl", "path": str(data), "eval_fraction": 0.0}, tokenizer)
    rows = [group.metadata["source"] for step in range(12) for group in task.train_groups(step, 10)]
    first, second = rows[:60], rows[60:]
    assert Counter(first) == Counter(second) == Counter(f"row {i}" for i in range(60))
    assert first != second
    steps_of_seven = [group.metadata["source"] for step in range(10) for group in task.train_groups(step, 7)]
    assert steps_of_seven == rows[:70], "an epoch may end inside a step"


class TestNeedle:
    def test_prompt_is_what_the_chat_template_makes(self, tokenizer) -> None:
        task = make_task({"type": "needle", "num_filler_tokens": 12, "num_needles": 2}, tokenizer)
        for group in task.train_groups(0, 20):
            text = tokenizer.decode(group.prompt_token_ids[1:-1])
            chat = tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
            )
            assert tuple(tokenizer(chat)["input_ids"]) == group.prompt_token_ids
            values = set(NeedleVocabulary.of(tokenizer).values)
            assert [token for token in group.prompt_token_ids if token in values] == group.answer

    def test_lengths_vary_between_the_bounds(self, tokenizer) -> None:
        task = make_task({"type": "needle", "num_filler_tokens": 9, "min_filler_tokens": 7}, tokenizer)
        assert {len(prompt) - 2 for prompt in prompts(task.train_groups(0, 64))} == {7, 8, 9}

    @pytest.mark.parametrize(
        ("response", "reward"),
        [("a b end", 1.0), ("a b", 2 / 3), ("a end", 1 / 3), ("b a end", 1 / 3), ("", 0.0), ("a b end end", 1.0)],
    )
    def test_reward_is_the_fraction_of_right_positions(self, tokenizer, response: str, reward: float) -> None:
        task = make_task({"type": "needle", "num_needles": 2}, tokenizer)
        vocabulary = NeedleVocabulary.of(tokenizer)
        tokens = {"a": vocabulary.values[0], "b": vocabulary.values[1], "end": vocabulary.end}
        ids = tuple(tokens[name] for name in response.split())
        sample = respond(task.train_groups(0, 1)[0], response_token_ids=ids, answer=list(vocabulary.values[:2]))
        assert task.reward(sample) == pytest.approx(reward)

    def test_another_tokenizer_is_refused(self) -> None:
        with pytest.raises(
            ValueError, match=r"task\.type: the needle task expects the tokenizer of .* 'value_0'|lacks"
        ):
            make_task({"type": "needle"}, build_tiny_tokenizer())


class TestReasoningGym:
    @pytest.fixture
    def task(self, byte_tokenizer) -> Task:
        return make_task(self.config(answer_extraction="last_number", format_weight=0.2), byte_tokenizer)

    @staticmethod
    def config(**changes: Any) -> dict[str, Any]:
        parameters = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
        return {"type": "reasoning_gym", "dataset": "chain_sum", "parameters": parameters, **changes}

    def test_the_verifier_scores_the_extracted_answer(self, task: Task) -> None:
        group = task.train_groups(0, 1)[0]
        assert task.reward(respond(group, text=f"It is {group.answer}")) == pytest.approx(0.8)
        assert task.reward(respond(group, text=f" {group.answer}.")) == pytest.approx(1.0)
        assert task.reward(respond(group, text=group.answer, finish_reason="length")) == pytest.approx(0.8)
        assert task.reward(respond(group, text="77777")) == pytest.approx(0.2), "only the form is right"
        assert task.reward(respond(group, text="no idea")) == 0.0

    def test_answer_tags(self, byte_tokenizer) -> None:
        task = make_task(self.config(answer_extraction="answer_tag", format_weight=0.5), byte_tokenizer)
        group = task.train_groups(0, 1)[0]
        tag = f"<answer> {group.answer} </answer>"
        assert task.reward(respond(group, text=f"7 8 9 {tag}")) == pytest.approx(1.0)
        assert task.reward(respond(group, text=f"<answer>x</answer>{tag}")) == pytest.approx(0.5)
        assert task.reward(respond(group, text=group.answer)) == 0.0

    @pytest.mark.parametrize(
        ("changes", "expected"),
        [
            ({"dataset": "chain_sums"}, r"task\.dataset: .*'chain_sums', did you mean 'chain_sum'\?"),
            (
                {"parameters": {"terms": 2}},
                r"task\.parameters\.terms: chain_sum of reasoning-gym has no such parameter",
            ),
            (
                {"parameters": {"min_terms": 9, "max_terms": 2}},
                r"task\.parameters, task\.num_examples .*: chain_sum of .* refuses",
            ),
        ],
    )
    def test_mistakes_name_the_setting(self, byte_tokenizer, changes: dict[str, Any], expected: str) -> None:
        with pytest.raises(ValueError, match=expected):
            make_task(self.config(**changes), byte_tokenizer)


class TestJsonl:
    def write(self, path: Path, *rows: Any) -> dict[str, Any]:
        path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
        return {"type": "jsonl", "path": str(path), "eval_fraction": 0.0}

    def test_values_arrive_as_they_are_written(self, tokenizer, tmp_path: Path) -> None:
        """A reader with one type a column would make a date of this answer, and add nulls to the metadata."""
        rows = [
            {"prompt": "value_1", "answer": "2023-01-01", "meta": {"a": 1}},
            {"prompt": "value_2", "answer": 7, "meta": {"b": 2}},
        ]
        task = make_task(self.write(tmp_path / "d.jsonl", *rows), tokenizer)
        found = {json.dumps(group.answer): group.metadata for group in task.train_groups(0, 2)}
        assert found == {'"2023-01-01"': {"meta": {"a": 1}}, "7": {"meta": {"b": 2}}}

    def test_messages(self, tokenizer, tmp_path: Path) -> None:
        chat = [
            {"role": "user", "content": "value_1"},
            {"role": "assistant", "content": "value_2"},
            {"role": "user", "content": "value_3"},
        ]
        task = make_task(self.write(tmp_path / "d.jsonl", {"messages": chat, "answer": 1}), tokenizer)
        (prompt,) = prompts(task.train_groups(0, 1))
        words = " ".join(tokenizer.convert_ids_to_tokens(prompt))
        assert words == "<|user|> value_1 <|assistant|> value_2 <|end|> <|user|> value_3 <|assistant|>"

    def test_long_prompts_are_skipped_counted_and_reported_once(self, tokenizer, tmp_path: Path, caplog) -> None:
        rows = [{"prompt": "value_1 " * n, "answer": n} for n in (1, 50, 60)]
        sections = {"rollout": {"max_model_len": 40}, "sampling": {"max_response_tokens": 20}}
        task = make_task(self.write(tmp_path / "d.jsonl", *rows), tokenizer, **sections)
        assert task.num_skipped == 2
        assert {group.answer for group in task.train_groups(0, 4)} == {1}
        assert sum("are skipped" in record.getMessage() for record in caplog.records) == 1

    @pytest.mark.parametrize(
        ("rows", "expected"),
        [
            ([], r"task\.path: expected at least 1 row"),
            (["{"], r"task\.path: .*, line 1: not JSON"),
            (["[1]"], r"line 1: expected a JSON object, got \[1\]"),
            ([{"prompt": "value_1"}], r"task\.answer_column: expected 'answer' in .*d\.jsonl, it has prompt"),
            (
                [{"question": "x", "answer": 1}],
                r"task\.prompt_column, task\.messages_column: .* it has question, answer",
            ),
            (["", {"prompt": "value_1", "answer": 1}, {"answer": 1}], r"line 3: expected a column 'prompt'"),
            (
                [{"prompt": "value_1", "answer": 1}, {"prompt": " ", "answer": 1}],
                r"line 2: prompt: .* at least 1 token",
            ),
            ([{"prompt": 3, "answer": 1}], r"line 1: prompt: expected text, got 3"),
            ([{"messages": "hi", "answer": 1}], r"line 1: messages: expected a list of objects with role and content"),
            ([{"prompt": "value_1 " * 3000, "answer": 1}], r"expected a prompt of at most 1984 tokens"),
        ],
    )
    def test_mistakes_name_the_column_the_file_and_the_line(self, tokenizer, tmp_path, rows, expected: str) -> None:
        with pytest.raises(ValueError, match=expected) as caught:
            make_task(self.write(tmp_path / "d.jsonl", *rows), tokenizer)
        assert "\n" not in str(caught.value)

    def test_missing_file(self, tokenizer) -> None:
        with pytest.raises(ValueError, match=r"task\.path: can't read /nope\.jsonl: No such file"):
            make_task({"type": "jsonl", "path": "/nope.jsonl"}, tokenizer)

    def test_own_reward_function_sees_response_answer_and_other_columns(self, tokenizer, tmp_path: Path) -> None:
        source = tmp_path / "my_reward.py"
        source.write_text(
            "def score(*, response, answer, metadata, **_):\n    return len(response) + answer + metadata['bonus']\n"
        )
        config = self.write(tmp_path / "d.jsonl", {"prompt": "value_1", "answer": 10, "bonus": 100})
        task = make_task({**config, "reward": f"{source}:score"}, tokenizer)
        assert task.reward(respond(task.train_groups(0, 1)[0], text="abc")) == 113


class TestPromptBuilder:
    def test_bos_is_never_doubled(self) -> None:
        tokenizer = build_tiny_tokenizer()
        tokenizer.add_bos_token = True
        tokenizer.chat_template = "<bos> {% for m in messages %}{{ m.content }} {% endfor %}"
        plain = PromptBuilder(tokenizer, PromptConfig(apply_chat_template=False))
        for built in (
            PromptBuilder(tokenizer, PromptConfig()).from_question("t5"),
            plain.from_text("<bos> t5"),
        ):
            assert built.count(tokenizer.bos_token_id) == 1
        assert plain.from_text("t5")[-1] == 5

    def test_system_prompt_goes_first_unless_the_chat_has_one(self, tokenizer) -> None:
        builder = PromptBuilder(tokenizer, PromptConfig(system_prompt="value_1"))
        own = [{"role": "system", "content": "value_2"}, {"role": "user", "content": "value_3"}]

        def words(ids: tuple[int, ...]) -> str:
            return " ".join(tokenizer.convert_ids_to_tokens(ids))

        assert words(builder.from_question("value_3")) == "<|system|> value_1 <|user|> value_3 <|assistant|>"
        assert words(builder.from_messages(own)) == "<|system|> value_2 <|user|> value_3 <|assistant|>"

    def test_a_tokenizer_without_chat_template_is_refused(self) -> None:
        with pytest.raises(ValueError, match=r"task\.apply_chat_template: expected a tokenizer with a chat template"):
            PromptBuilder(build_tiny_tokenizer(), PromptConfig())


@given(a=st.integers(-(10**6), 10**6), b=st.integers(0, 10**6))
def test_the_last_number_of_a_sum_is_its_result(a: int, b: int) -> None:
    from orchestration.tasks.rewards import find_last_number, to_float

    number = find_last_number(f"We have {b}-{b}={a:,}.")
    assert number is not None
    assert to_float(number) == a
    assert find_last_number(f"{a}-{b}") == str(b)


def respond(group: PromptGroup, **changes: Any) -> Trajectory:
    """A sample of `group`; the number of its tokens doesn't matter to a reward."""
    ids = changes.pop("response_token_ids", (9, 1))
    values = {"answer": group.answer, "metadata": group.metadata, **changes}
    sample = make_trajectory(**values)
    object.__setattr__(sample, "response_token_ids", ids)
    return sample
