"""What the model cannot do, said politely: photographs, open questions; and a greeting."""

from __future__ import annotations

from random import Random

from training.demo.chat import Turn
from training.demo.picture import photo_picture
from training.demo.splits import split_of
from training.demo.tasks.room import Room
from training.demo.tasks.single_pictures import ANY

ABILITIES = "I can only read small pictures, add numbers, recall my towns and find things in your text."
PHOTO = "I can only read shapes, digits, numbers and short words."
GREETING = "Hello! Show me a small picture or ask me for a sum."

GREETINGS = ("Hello", "Hello!", "Hi", "Hi!", "Hello there.", "Good morning.", "Good evening.", "Hey", "Hi there!")
ABILITY_QUESTIONS = ("What can you do?", "Who are you?", "Help", "How can you help me?", "What do you know?")
SUBJECTS = (
    "the moon", "a cat", "my mother", "the war", "love", "the weather", "football", "music", "the future", "money",
    "a dragon", "winter", "my dog", "the sea", "politics", "history", "cooking", "a robot", "friendship", "trees",
    "computers", "Paris", "London", "the king", "school", "a lost ring", "the stars", "time", "coffee", "the rain",
)  # fmt: skip
OPEN = (
    "Write a poem about {subject}.",
    "Tell me a story about {subject}.",
    "What do you think about {subject}?",
    "Write an essay about {subject}.",
    "Explain {subject} to me.",
    "Tell me a joke about {subject}.",
    "Give me a recipe for {subject}.",
    "What is the meaning of {subject}?",
    "Who invented {subject}?",
    "Translate {subject} into French.",
    "Write a program about {subject}.",
    "Is {subject} good or bad?",
    "What will happen to {subject} tomorrow?",
    "Sing a song about {subject}.",
    "Draw {subject}.",
)


def open_question(random: Random, split: str) -> str:
    """A template and a subject whose joint use belongs to the split."""
    while True:
        template, subject = random.choice(OPEN), random.choice(SUBJECTS)
        if split_of("open question", template + subject) == split:
            return template.format(subject=subject)


def refusal(room: Room) -> list[Turn]:
    """A photograph where the row has a place for one, else an open question, at times a greeting."""
    random = room.random
    kind = random.random()
    if room.pictures > 0 and kind < 0.4:
        picture = photo_picture(random, room.split)
        return [Turn("refusals", room.beside(room.one_of(ANY), picture), PHOTO)]
    if kind < 0.85:
        return [Turn("refusals", (open_question(random, room.split),), ABILITIES)]
    if kind < 0.93:
        return [Turn("refusals", (room.one_of(GREETINGS),), GREETING)]
    return [Turn("refusals", (room.one_of(ABILITY_QUESTIONS),), ABILITIES)]
