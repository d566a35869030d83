"""The text generator: same seed same text, training and test apart, answers in the text."""

import re
from itertools import islice
from random import Random

from mlxkv.texts.worlds import chat_questions, stories
from mlxkv.texts.worlds.facts import CODE, ask, more_values, new_facts
from mlxkv.texts.worlds.grammar import (
    article,
    choose_form,
    combination_held_out,
    counted,
    held_out,
    listed,
    made_up_name,
)
from mlxkv.texts.worlds.plots_away import AWAY
from mlxkv.texts.worlds.plots_home import HOME
from mlxkv.texts.worlds.stories import plot, simulate
from mlxkv.texts.worlds.words import PEOPLE


def sample_stories(n: int = 400) -> list[str]:
    return list(islice(stories(Random("test-sample")), n))


def test_chat_questions_are_fixed():
    assert chat_questions("test") == chat_questions("test")
    assert len(chat_questions("test")) == 50
    assert len(chat_questions("test", 7)) == 7


def test_made_up_names_are_split():
    rng = Random(5)
    train = {made_up_name(rng, "train") for _ in range(3000)}
    test = {made_up_name(rng, "test") for _ in range(500)}
    assert not any(map(held_out, train)) and all(map(held_out, test))


def test_keys_of_tests_are_held_out_names():
    rng = Random(6)
    assert all(held_out(fact.key) for fact in new_facts(rng, CODE, 200, names="test"))
    words = [word for fact in new_facts(rng, CODE, 400) for word in fact.key.split()]
    assert {word for word in words if held_out(word)} <= set(PEOPLE)  # ordinary names are in both


def test_ways_to_ask_are_split():
    forms = len(CODE.questions)
    assert forms >= 6
    for said in range(len(CODE.statements)):
        for split in ("train", "test"):
            form = choose_form(Random(0), CODE.name, said, forms, split)
            assert combination_held_out(CODE.name, said, form) == (split == "test")


def test_articles_plurals_and_lists():
    assert [article(w) for w in ("apple", "ball", "hour", "umbrella", "unicorn", "orange cup")] == [
        "an apple", "a ball", "an hour", "an umbrella", "a unicorn", "an orange cup",
    ]  # fmt: skip
    assert counted(1, "leaf", "leaves") == "one leaf"
    assert counted(3, "leaf", "leaves") == "three leaves"
    assert counted(0, "leaf", "leaves") == "no leaves"
    assert listed(["a"]) == "a" and listed(["a", "b", "c"]) == "a, b and c"


def test_stories_are_clean_sentences():
    for text in sample_stories():
        assert not re.search(r"[{}]|  |\.\.|\bNone\b", text)
        assert not re.search(r"\ba [aeio]", text), text
        assert not re.search(r"\ban [^aeiouh]", text), text
        assert not re.search(r"\bone \w+s\b(?! )", text) or "buttons" not in text
        assert not re.search(r"(?<!\w)(?:made|of|to) (?:she|he)\b", text), text
        assert text[0].isupper() or text[0] == '"'
        assert text[-1] in '.!?"'


def test_plots_fill_every_slot_and_answer_their_questions():
    assert len({id(p) for p in HOME + AWAY}) == len(HOME + AWAY) >= 19
    rng = Random(8)
    for _ in range(300):
        story = plot(rng)
        for forms, answer, _ in story.questions:
            assert len(forms) == 7
            assert not re.search(r"[{}]", " ".join(forms) + answer)
            names = [
                w for w in re.findall(r"\b[A-Z][a-z]+\b", answer) if w not in ("They", "The", "A")
            ]
            assert all(name in story.text for name in names)


def test_a_world_remembers_its_state():
    for seed in range(60):
        story = simulate(Random(seed))
        for name, answer in story.where.items():
            told = [s for s in story.sentences if name in s]
            assert told
            place = answer.rsplit(" ", 1)[1].rstrip(".")
            assert any(place in s for s in story.sentences)


def test_facts_have_keys_of_their_own_and_answers_name_them():
    rng = Random(9)
    facts = new_facts(rng, CODE, 30)
    assert len({f.key for f in facts}) == 30
    for fact in facts:
        assert fact.key in fact.sentence and fact.value in fact.sentence
        question, answer = ask(rng, fact, "test")
        assert fact.key in question and fact.value in answer
        same = more_values(rng, fact, 3)
        assert {f.key for f in same} == {fact.key} and len({f.value for f in same}) == 3
        assert same[0].value == fact.value
