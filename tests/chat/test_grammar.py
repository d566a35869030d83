"""The grammar that writes the training dialogues of `tiny-chat`: phrases, frames, and questions in other words."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from random import Random

import pytest

TRAINING = str(Path(__file__).parents[2] / "training")
sys.path.insert(0, TRAINING)
try:
    from chat.dialogues import dialogue  # training/chat
    from chat.grammar import asking, frames, phrases
finally:
    sys.path.remove(TRAINING)


def test_phrases_have_choices_in_brackets_and_slots():
    made = {
        phrases.filled(Random(n), "(a|the|) {t} (is|was) here.", {"t": "owl"}) for n in range(60)
    }
    assert made == {f"{a} {be} here." for a in ("An owl", "The owl", "Owl") for be in ("is", "was")}


def test_every_frame_answers_with_words_that_were_told():
    rng = Random(1)
    for frame in frames.frames():
        words = frames.words_of(rng, frame, [])
        fact = frames.fact(rng, frame, words)
        assert len(set(words.values())) == len(words)
        for _, answer in fact.asked:
            assert any(word.lower() in answer.lower() for word in words.values()), frame[0]


@pytest.mark.parametrize(
    ("question", "inside", "last"),
    [
        ("What colour is the kite?", "what colour the kite is", "the kite is what colour"),
        ("Where does Anna live?", "where Anna lives", "Anna lives where"),
        ("What did Tom buy?", "what Tom bought", "Tom bought what"),
        ("Who has the kite?", "who has the kite", ""),
        ("Where is the cat sleeping?", "where the cat is sleeping", "the cat is sleeping where"),
    ],
)
def test_questions_become_clauses(question, inside, last):
    assert asking.parts(question) == (inside, last)


@pytest.mark.parametrize(
    ("question", "statement"),
    [
        ("Is the kite red?", "the kite is red"),
        ("Does Anna live in Rome?", "Anna lives in Rome"),
        ("Is a car a vehicle?", "a car is a vehicle"),
        ("Can birds fly?", "birds can fly"),
        ("Who is there?", None),
    ],
)
def test_what_yes_or_no_answers_becomes_a_statement(question, statement):
    assert asking.checked(question) == statement


def test_dialogues_have_no_slot_and_no_bracket_left():
    rng = Random("left")
    for _ in range(600):
        for user, answer in dialogue(rng):
            assert user.strip() and answer.strip()
            assert not re.search(r"[{}|]", user + answer), user
