"""Figures and errors by formula, scorers against planted log-likelihoods, task files in words and in errors."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gatedlm.evaluation.jobs import jobs_of
from gatedlm.evaluation.longcontext import needles, parts
from gatedlm.evaluation.perplexity import counting, windows
from gatedlm.evaluation.reader import Row, Told, batches
from gatedlm.evaluation.score import difference, ratio
from gatedlm.evaluation.scorers import score
from gatedlm.evaluation.tasks import TaskSpec, extracted, load_task, records
from gatedlm.evaluation.text import choose
from gatedlm.evaluation.words import asked, shipped
from gatedlm.recipe import DataSpec, Recipe

Write = Callable[..., str]


def silent(done: int, total: int) -> None:
    assert 0 < done <= total


# Figures ----------------------------------------------------------------------------------------------------------


def test_a_mean_has_the_error_of_a_sample_mean() -> None:
    points = [1.0, 0.0, 0.0, 1.0, 1.0]
    told = ratio("", "acc", points)
    assert told.value == mean(points) and told.count == 5
    assert told.error == pytest.approx(stdev(points) / math.sqrt(5))
    assert ratio("", "acc", [1.0]).error is None


def test_a_ratio_weighs_items_and_its_error_is_the_jackknifes() -> None:
    """Leaving out one item at a time estimates the same error by other means; exp carries both along."""
    nats, tokens = [3.0, 8.0, 5.5, 7.0, 20.0, 11.0], [2, 4, 3, 3, 9, 5]
    told, grown = ratio("", "x", nats, tokens), ratio("", "x", nats, tokens, exponential=True)
    assert told.value == pytest.approx(54.5 / 26) and told.count == 26
    left = [(54.5 - n) / (26 - t) for n, t in zip(nats, tokens, strict=True)]
    jackknife = math.sqrt(5 / 6 * sum((one - mean(left)) ** 2 for one in left))
    assert told.error == pytest.approx(jackknife, rel=0.2)
    assert grown.value == pytest.approx(math.exp(54.5 / 26)) and told.error
    assert grown.error == pytest.approx(told.error * grown.value)


def test_a_figure_beyond_all_numbers_is_told_without_an_error() -> None:
    """Warnings are errors here."""
    told, near = (ratio("", "perplexity", [one, 2.0], [1, 1], exponential=True) for one in (1e5, 1400.0))
    assert (told.value, told.error, told.influences) == (math.inf, None, [])
    assert math.isfinite(near.value) and near.value > 1e300 and near.error and near.error > 1e300
    assert difference(near, told) == (math.inf, None) and difference(told, told)[1] is None


def test_differences_are_paired_by_items() -> None:
    one, other = [1.0, 0.0, 1.0, 1.0], [1.0, 1.0, 0.0, 1.0]
    apart, error = difference(ratio("", "acc", one), ratio("", "acc", other))
    assert (apart, error) == (0, pytest.approx(stdev([0, 1, -1, 0]) / 2))
    assert difference(ratio("", "acc", one), ratio("", "acc", one)) == (0, 0)
    assert difference(ratio("", "acc", one), ratio("", "acc", [1.0]))[1] is None


@pytest.mark.parametrize(("length", "context"), [(1, 8), (8, 8), (9, 8), (23, 8), (24, 7), (5, 1), (40, 2)])
def test_windows_ask_for_each_token_once_after_half_a_context(length: int, context: int) -> None:
    ids, asked_for = list(range(100, 100 + length)), []
    for row in windows(ids, 7, context):
        assert row.ids[0] == 7 and len(row.ids) <= context + 1
        assert row.start == 1 or row.start - 1 >= context // 2
        assert row.ids[1:] == ids[ids.index(row.ids[1]) :][: len(row.ids) - 1], "one stretch of the text"
        asked_for += row.ids[row.start :]
    assert asked_for == ids


def test_batches_hold_rows_of_like_length() -> None:
    lengths = [5, 1, 9, 2, 2, 30, 4]
    found = list(batches(lengths, 10))
    assert sorted(index for batch in found for index in batch) == list(range(7))
    assert all(len(batch) == 1 or len(batch) * max(lengths[i] for i in batch) <= 10 for batch in found)
    assert found[0] == [5] and found[-1] == [3, 4, 1]


def test_counting_predicts_each_half_of_a_text_by_the_other() -> None:
    documents, vocab, prior = [[1, 2, 2, 0], [3, 1], [1, 2]], 5, 32
    one, other = [(None, 1), (1, 2), (2, 2), (2, 0)], [(3, 1), (None, 1), (1, 2)]
    # The stream of 11 with a break before each document is cut after six: the 3 is context alone.
    nats = {"unigram": 0.0, "bigram": 0.0}
    for seen, told in ((one, other), (other, one)):
        counts, pairs = Counter(y for _, y in seen), Counter(seen)
        contexts = Counter(x for x, _ in seen)
        for x, y in told:
            p = (counts[y] + 0.5) / (len(seen) + 0.5 * (vocab + 1))
            nats["unigram"] -= math.log(p)
            nats["bigram"] -= math.log((pairs[x, y] + prior * p) / (contexts[x] + prior))
    assert counting(documents, vocab) == pytest.approx({name: total / 7 for name, total in nats.items()})
    assert counting([[1, 2, 3]], vocab) == {}


def test_positions_are_told_in_parts_that_double() -> None:
    assert parts(100) == [(1, 16), (17, 32), (33, 64), (65, 100)]
    assert parts(16) == [(1, 16)]


# Scorers ----------------------------------------------------------------------------------------------------------


def planted(nats: list[float], greedy: list[bool] | None = None) -> Any:
    """A reader that was told what to say of each row."""
    told = [Told(torch.tensor([one / 2, one / 2]), torch.tensor([True, right])) for one, right in
            zip(nats, greedy or [True] * len(nats), strict=True)]  # fmt: skip
    return SimpleNamespace(pair=lambda prompt, text: Row([0, 1], 1), nats=lambda rows, advance: told)


def task_of(folder: Path, records: list[dict], **keys: Any) -> Path:
    (folder / "items.json").write_text(json.dumps(records))
    (folder / "mine.yaml").write_text(json.dumps({"items": {"path": "items.json"}} | keys))  # JSON is YAML
    return folder / "mine.yaml"


def test_choices_are_normalised_by_bytes(tmp_path: Path) -> None:
    """Sums prefer the second, bytes the first, characters the second."""
    items = [{"q": "?", "options": ["日本", "abcd"], "right": 0}, {"q": "!", "options": ["a", "b"], "right": 1}]
    task = load_task(str(task_of(tmp_path, items, kind="choice", prompt="{{ q }}", choices="options", answer="right")))
    found = {one.metric: one.value for one in score(planted([3.0, 2.5, 2.0, 1.0]), task, silent).scores}
    assert found == {"acc": 0.5, "acc_bytes": 1.0}


def test_completions_count_bits_over_all_bytes(tmp_path: Path) -> None:
    items = [{"q": "?", "a": "é"}, {"q": "!", "a": "abcd"}]
    task = load_task(str(task_of(tmp_path, items, kind="completion", prompt="{{ q }}", answer="{{ a }}")))
    found = {one.metric: one.value for one in score(planted([3.0, 5.0], [True, False]), task, silent).scores}
    assert found == {"acc": 0.5, "bits_per_byte": pytest.approx(8 / math.log(2) / (3 + 5))}  # with the space before


def test_groups_are_told_apart(tmp_path: Path) -> None:
    items = [{"q": "?", "a": "b", "of": name} for name in ("x", "y", "x", "x")]
    words = {"kind": "completion", "prompt": "{{ q }}", "answer": "{{ a }}", "group": "of"}
    path = task_of(tmp_path, items, **words)
    found = score(planted([1.0] * 4, [True, False, False, False]), load_task(str(path)), silent)
    assert {group: of["acc"] for group, of in found.about["groups"].items()} == {"x": pytest.approx(1 / 3), "y": 0}
    assert [item.group for item in load_task(str(path), limit=2).items] == ["x", "y", "x"]


@pytest.mark.parametrize(
    ("answer", "is_seen_as"),
    [("So it is 1,234.\n#### 1,234.", "1234"), ("#### 5 #### 6", "5"), ("It is 5.", None), ("#### -0.5.", "-0.5")],
)
def test_an_answer_is_what_the_pattern_marks(answer: str, is_seen_as: str | None) -> None:
    assert extracted(answer, load_gsm8k_spec()) == is_seen_as


def load_gsm8k_spec() -> TaskSpec:
    import yaml

    return TaskSpec(**yaml.safe_load(shipped()["gsm8k"].read_text()))


def test_needles_are_found_by_who_reads_and_not_by_the_blind() -> None:
    from test_needles import TOKENIZERS

    tokenizer, lengths = TOKENIZERS["bpe"], [300, 600]

    def cheat(prompts: list[list[int]], tokens: int, advance: Any) -> list[str]:
        texts = [tokenizer.decode(prompt) for prompt in prompts]
        keys = [text.split("The code of ")[-1].removesuffix(" is") for text in texts]
        return [text.split(f"The code of {key} is ")[1].split(".")[0] for text, key in zip(texts, keys, strict=True)]

    def blind(prompts: list[list[int]], tokens: int, advance: Any) -> list[str]:
        return ["I see nothing." for _ in prompts]

    for write, value in ((cheat, 1), (blind, 0)):
        reader: Any = SimpleNamespace(tokenizer=tokenizer, opening=[0], write=write)
        found = needles(reader, "needle", lengths, 5, 0, [], silent).scores
        assert [(one.part, one.value, one.count) for one in found] == [("300", value, 5), ("600", value, 5)]


# Files of tasks ---------------------------------------------------------------------------------------------------

EXAM = {"question": " Which? ", "Question": " Which? ", "A": "w", "B": "x", "C": "y", "D": "z", "choices": [*"wxyz"]}
EXAM |= {"subject": "college_law", "other": ""}
LETTERS = "Which?\nA. w\nB. x\nC. y\nD. z\n"
READ = {  # an item of each shipped task, the prompt it becomes, and the right answer
    "hellaswag": (
        {"activity_label": "Roof [title] work", "ctx_a": "A man  sits.", "ctx_b": "then HE", "label": "1"}
        | {"endings": ["[substeps] falls .", "is [x] glad."]},
        "Roof. work: A man sits. Then he",
        "is glad.",
    ),
    "mmlu": (
        EXAM | {"answer": 2},
        f"Exam questions on college law, each with its answer.\n\n{LETTERS}Answer:",
        "C",
    ),
    "gsm8k": ({"question": "1+1?", "answer": "It is 2.\n#### 2"}, "Question: 1+1?\nAnswer:", "It is 2.\n#### 2"),
    "ceval": (
        EXAM | {"answer": "D"},
        f"college_law考试的选择题，每题只有一个正确选项。\n\n{LETTERS}答案：",
        "D",
    ),
    "cmmlu": (
        EXAM | {"Answer": "A"},
        f"college_law方面的选择题，每题附有答案。\n\n{LETTERS}答案：",
        "A",
    ),
}


@pytest.mark.parametrize("name", shipped())
def test_shipped_tasks_read_as_they_should(name: str, tmp_path: Path) -> None:
    record, prompt, answer = READ[name]
    (item,) = load_task(str(task_of(tmp_path, [record], base=name, shots=0))).items
    assert (item.prompt, item.answers[item.right]) == (prompt, answer)
    pool = [record | {"question": f"shot {n}", "Question": f"shot {n}", "ctx_a": f"shot {n}"} for n in range(12)]
    (tmp_path / "pool.json").write_text(json.dumps(pool))
    keys = {"base": name, "pool": {"path": "pool.json"}, "shots": load_task_shots(name)}
    (item,) = load_task(str(task_of(tmp_path, [record], **keys))).items
    assert item.prompt.count("hot ") == keys["shots"] and item.prompt.endswith(prompt[-20:])
    assert item.prompt.count(f" {answer}\n\n") == keys["shots"]


def load_task_shots(name: str) -> int:
    import yaml

    return yaml.safe_load(shipped()[name].read_text())["shots"]


def test_an_item_is_never_its_own_shot(tmp_path: Path) -> None:
    items = [{"q": f"q{n}", "a": f"a{n}"} for n in range(3)]
    path = task_of(tmp_path, items, kind="exact", prompt="{{ q }}", answer="{{ a }}", shots=2, lead="Now.\n")
    prompts = [item.prompt for item in load_task(str(path)).items]
    assert prompts == ["Now.\nq1 a1\n\nq2 a2\n\nq0", "Now.\nq0 a0\n\nq2 a2\n\nq1", "Now.\nq0 a0\n\nq1 a1\n\nq2"]
    with pytest.raises(ValueError, match=r"mine.yaml: shots=3, but the pool holds only 2 other items: take fewer"):
        load_task(str(path), shots=3)


GOOD = {"kind": "exact", "prompt": "{{ q }}", "answer": "{{ a }}"}
CHOICE = {"kind": "choice", "answer": "0"}


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"promt": "x"}, r"unknown key in .*mine.yaml 'promt': did you mean prompt"),
        ({"kind": "choices"}, r"kind is one of choice, exact, completion"),
        ({"kind": "choice"}, r"choice alone has the key choices"),
        ({"answer": 0}, r"mine.yaml: answer holds 0, write a text in quotes"),
        ({"shots": "two"}, r"shots holds 'two', write a whole number"),
        ({"shots": True}, r"shots holds True, write a whole number"),
        ({"shots": -1}, r"mine.yaml: shots=-1: must be a whole number from 0 up"),
        ({"tokens": 0}, r"mine.yaml: tokens=0: must be a whole number from 1 up"),
        ({"tokens": -5}, r"tokens=-5: must be"),
        ({"stop": "x"}, r"stop holds 'x', write a list of texts"),
        ({"stop": [1]}, r"stop holds \[1\], write a list of texts"),
        ({"stop": ["x", ""]}, r"stop holds an empty text, which would end every answer at once"),
        ({"pattern": "(a"}, r"mine.yaml: no pattern, \(a: missing \)"),
        ({"pattern": "(a{99999999999})"}, r"no pattern, .*repetition number is too large"),
        ({"pattern": "a"}, r"mark the answer by one group"),
        ({"pattern": "b|(c)"}, r"item 1: answer 'b' is empty or no match for the pattern"),
        ({"ignore": ["b"]}, r"item 1: answer 'b' is empty or no match for the pattern"),
        ({"ignore": ["("]}, r"no pattern, \(: missing \)"),
        ({"ignore": [1]}, r"ignore holds \[1\], write a list of texts"),
        ({"clean": [["[", ""]]}, r"no pattern, \[: unterminated"),
        ({"clean": [["a"]]}, r"clean holds \['a'\], write \[pattern, replacement\]"),
        ({"clean": [["a", "\\9"]]}, r"item 1: invalid group reference 9"),
        ({"prompt": "{{ question }}"}, r"mine.yaml: item 1: 'question' is undefined; its fields are q, a"),
        ({"prompt": "{{ q "}, r"a template is wrong"),
        ({"prompt": "{{ ''.__class__.__mro__[1].__subclasses__() }}"}, r"access to attribute '__class__'"),
        ({"pattern": "([0-9]+)"}, r"item 1: answer 'b' is empty or no match for the pattern"),
        ({"prompt": "{{ 1 / 0 }}"}, r"item 1: division by zero; its fields are q, a"),
        ({"prompt": "{{ range(10**9) | list }}"}, r"item 1: Range too big"),
        ({"prompt": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"}, r"item 1: maximum recursion depth exceeded"),
        ({"prompt": "{{ q.none or none }}"}, r"item 1: .*no attribute"),
        ({"prompt": "{{ none }}"}, r"item 1: null where a text should stand"),
        ({"prompt": "\ud83e {{ q }}"}, r"item 1: .*surrogates not allowed"),
        (CHOICE | {"choices": ["x", "y"]}, r"choices holds \['x', 'y'\], write a text in quotes"),
        (CHOICE | {"choices": "q"}, r"item 1: choices gives 'a', write what gives a list, such as \['yes'"),
        (CHOICE | {"choices": "of"}, r"item 1: 'of' is undefined"),
        (CHOICE | {"choices": "[q]"}, r"item 1: answer 0 of 1 choices: .* of two or more"),
        (CHOICE | {"choices": "[q, a]", "answer": "true"}, r"item 1: answer True of 2 choices: an index from 0 on"),
        (CHOICE | {"choices": "[q, a]", "answer": "1e999"}, r"item 1: name 'inf' is not defined"),
        (CHOICE | {"choices": "[q, none]"}, r"item 1: null where a text should stand"),
        ({"items": ["path"]}, r"items holds \['path'\], write texts by name, such as {path: FILE}"),
        ({"items": 5}, r"items holds 5, write texts by name"),
        ({"items": {"path": 5}}, r"items holds {'path': 5}, write texts by name"),
        ({"items": {"path": None}}, r"items holds {'path': None}, write texts by name"),
        ({"items": {"path": "~nosuchuser/x.json"}}, r"there is no home of ~nosuchuser here"),
        ({"items": {"path": "items.json", "split": "test"}}, r"items and pool lie somewhere"),
        ({"items": {"file": "x"}}, r"did you mean path|write path="),
        ({"items": {"path": "nowhere.json"}}, r"nowhere.json: No such file"),
        ({"items": {"split": "test"}}, r"items and pool lie somewhere"),
        ({"base": "mmul"}, r"base=mmul: one of ceval"),
        ({"base": ["mmlu"]}, r"base=\['mmlu'\]: one of ceval"),
        ({"group": "of"}, r"no field of in an item, but q, a"),
    ],
)
def test_what_is_wrong_with_a_task_is_said(keys: dict[str, Any], says: str, tmp_path: Path) -> None:
    assert re.search(says, refusal(task_of(tmp_path, [{"q": "a", "a": "b"}], **GOOD | keys)))


def refusal(path: Path) -> str:
    """The one line that says what is wrong with a task."""
    with pytest.raises(ValueError) as caught:
        load_task(str(path))
    (line,) = str(caught.value).splitlines()
    return line


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("1: x", "unknown key in .*mine.yaml '1': write kind=, "),
        ("kind", "not a task, it holds no keys"),
        ("kind: !!bool x", "tasks=.*mine.yaml: not YAML"),
        ("[" * 400, "tasks=.*mine.yaml: not YAML"),
    ],
)
def test_what_is_no_task_is_said(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    assert re.search(says, refusal(tmp_path / "mine.yaml"))


def test_a_line_of_jsonl_is_named_and_ends_at_a_line_end_alone(tmp_path: Path) -> None:
    file = tmp_path / "items.jsonl"
    file.write_text('\ufeff{"q": "a\u2028b"}\n\n{"q": "c"}\n', encoding="utf-8")
    assert records(file) == [{"q": "a\u2028b"}, {"q": "c"}]
    file.write_text('{"q": 1}\n{"q"}\n')
    with pytest.raises(ValueError, match=r"items.jsonl: row 2: not JSON"):
        records(file)


PASSAGE = {"text": "A text.", "question": "What?", "answer": "text"}


@pytest.mark.parametrize(
    "change", [{"text": None}, {"question": 5}, {"answer": ""}, {"answer": " \n"}, {"text": "\ud83e"}]
)
def test_passages_are_three_texts(change: dict[str, Any], tmp_path: Path) -> None:
    found: Any = SimpleNamespace(recipe=Recipe())
    words = asked(["run=a", "tasks=qa", f"passages={tmp_path / 'p.json'}"])
    (tmp_path / "p.json").write_text(json.dumps([PASSAGE, PASSAGE]))
    assert len(jobs_of(words, [found])) == 1
    (tmp_path / "p.json").write_text(json.dumps([PASSAGE, PASSAGE | change]))
    with pytest.raises(ValueError, match=r"^passages=.*p.json, item 2: text, question and answer are texts"):
        jobs_of(words, [found])


def test_tasks_of_one_name_are_refused(tmp_path: Path) -> None:
    keys = {"kind": "completion", "prompt": "{{ q }}", "answer": "b"}
    (tmp_path / "other").mkdir()
    files = [task_of(folder, [{"q": "a"}], **keys) for folder in (tmp_path, tmp_path / "other")]
    found: Any = SimpleNamespace(recipe=Recipe())
    with pytest.raises(ValueError, match="two go by one name"):
        jobs_of(asked(["run=a", f"tasks={files[0]},{files[1]}"]), [found])


def test_what_a_run_held_out_depends_on_its_fields(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    own = DataSpec(corpus="files", path="own.jsonl", holdout=0.25)
    assert choose(replace(own, path=str(tmp_path / "own.jsonl"), holdout=0.5), [own]) == (own, True)
    assert choose(replace(own, path="other.jsonl"), [own]) == (replace(own, path="other.jsonl"), False)
    with pytest.raises(ValueError, match=r"data=own.jsonl: a run was trained on it by other fields"):
        choose(replace(own, domain_field="kind"), [own])


def test_the_right_choice_is_one_of_them(tmp_path: Path) -> None:
    keys = {"kind": "choice", "prompt": "{{ q }}", "choices": "of", "answer": "right"}
    with pytest.raises(ValueError, match="item 1: answer 2 of 2 choices"):
        load_task(str(task_of(tmp_path, [{"q": "", "of": ["a", "b"], "right": 2}], **keys)))


# Words ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["tasks=perplexity"], "which models"),
        (["run=a"], "which tasks"),
        (["run=a,a", "tasks=needle"], "each once"),
        (["run=a", "tasks=hellasweg"], "did you mean hellaswag"),
        (["run=a", "tsks=needle"], "did you mean tasks=?"),
        (["run=a", "tasks"], "lacks a value"),
        (["run=a", "tasks=needle", "count=0"], "count=0: must be a whole number from 1 up"),
        (["run=a", "tasks=needle", "lengths=128,x"], "lengths=x"),
        (["run=a", "tasks=needle", "lengths=1048577"], "lengths=1048577: at most 1,048,576 tokens"),
        (["run=a", "tasks=needle", "out=~nosuchuser/x"], "there is no home of ~nosuchuser here"),
        (["run=a", "tasks=needle", f"out={__file__}"], "a file, give the folder"),
        (["run=a", "tasks=perplexity", "data=stdlib", "data.path=a.txt"], "both say what to read"),
        (["run=a", "tasks=perplexity", "data.domain_field=kind"], "data.path=FILE, which is missing"),
        (["run=a", "tasks=needle", "allow_code_execution=yes"], "write true or leave it out"),
    ],
)
def test_wrong_words_are_told(words: list[str], says: str) -> None:
    with pytest.raises(ValueError, match=says.replace("?", r"\?")):
        asked(words)


def test_the_longest_length_is_allowed() -> None:
    assert asked(["run=a", "tasks=needle", "lengths=1048576"]).lengths == [2**20]
