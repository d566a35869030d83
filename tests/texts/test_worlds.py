"""The text generator: same seed same text, training and test apart, answers in the text."""

import re
from itertools import islice
from random import Random

import pytest

from mlxkv.texts.worlds import KINDS, chat_questions, documents, haystack, stories
from mlxkv.texts.worlds.chat import conversation
from mlxkv.texts.worlds.facts import RELATIONS, new_facts, new_key
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


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_seed_gives_the_same_haystack(kind):
    assert haystack(kind, Random("a"), 400) == haystack(kind, Random("a"), 400)
    assert haystack(kind, Random("a"), 400) != haystack(kind, Random("b"), 400)


def test_chat_questions_are_fixed():
    assert chat_questions("test") == chat_questions("test")
    assert len(chat_questions("test")) == 50
    assert len(chat_questions("test", 7)) == 7


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [300, 2000])
def test_a_haystack_holds_its_answers(kind, length):
    stack = haystack(kind, Random(f"holds-{kind}"), length, questions=12)
    assert 0.9 * length <= len(stack.text.split()) <= 1.05 * length
    assert stack.needles
    for needle in stack.needles:
        assert needle.kind == kind
        assert 0 <= needle.depth < 1
        cursor = 0
        for value in needle.values:
            assert value in stack.text
            cursor = needle.answer.index(value, cursor) + len(value)
        assert needle.question[-1] in "?." and needle.answer[-1] == "."


def test_kinds_ask_for_as_many_values_as_they_say():
    for kind, least, most in (
        ("single", 1, 1),
        ("multi2", 2, 2),
        ("multi4", 4, 4),
        ("values", 2, 3),
    ):
        needles = haystack(kind, Random(1), 600).needles
        assert all(least <= len(needle.values) <= most for needle in needles)


def test_needles_stand_at_every_depth():
    depths = [n.depth for s in range(6) for n in haystack("single", Random(s), 900).needles]
    assert min(depths) < 0.1 and max(depths) > 0.9


def test_distractors_have_the_form_of_the_needle():
    stack = haystack("single", Random(2), 1500, facts=40)
    assert len(re.findall(r"\b\d{4}\b", stack.text)) == 40


def test_length_may_be_measured_in_another_unit():
    stack = haystack("single", Random(3), 4000, measure=len)
    assert 0.9 * 4000 <= len(stack.text) <= 1.05 * 4000


def test_an_unknown_kind_is_named_with_the_choices():
    with pytest.raises(ValueError, match="unknown kind 'triple'. Choose from: single"):
        haystack("triple", Random(0), 100)


def test_made_up_names_are_split():
    rng = Random(5)
    train = {made_up_name(rng, "train") for _ in range(3000)}
    test = {made_up_name(rng, "test") for _ in range(500)}
    assert not any(map(held_out, train)) and all(map(held_out, test))


def test_training_keys_never_are_held_out_names():
    rng = Random(6)
    words = [word for _ in range(4000) for word in new_key(rng).split()]
    assert {word for word in words if held_out(word)} <= set(PEOPLE)  # ordinary names are in both


def test_unseen_haystacks_ask_for_held_out_names_only():
    for needle in haystack("unseen", Random(7), 900).needles:
        key = next(f for f in re.findall(r"[A-Z][a-z]+", needle.answer) if f != "The")
        assert held_out(key)


def test_ways_to_ask_are_split():
    for relation in RELATIONS:
        for said in range(len(relation.statements)):
            forms = len(relation.questions)
            assert forms >= 6
            for split in ("train", "test"):
                form = choose_form(Random(0), relation.name, said, forms, split)
                assert combination_held_out(relation.name, said, form) == (split == "test")


def test_no_test_question_comes_up_in_training():
    asked = {messages[-1]["content"] for messages, _ in chat_questions("test")}
    rng = Random("train-sample")
    seen = {user for _ in range(4000) for user, _ in conversation(rng)}
    assert not asked & seen


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


def test_facts_of_one_relation_have_keys_of_their_own():
    for relation in RELATIONS:
        facts = new_facts(Random(9), relation, 30)
        assert len({f.key for f in facts}) == 30
        for fact in facts:
            assert fact.key.removeprefix("the ") in fact.sentence and fact.value in fact.sentence


def test_documents_mark_answers():
    source = documents(Random("train-test"), 1024)
    pieces = [piece for _ in range(60) for piece in next(source)]
    assert {weight for _, weight in pieces} >= {1, 3, 4}
    assert all(text for text, _ in pieces)
