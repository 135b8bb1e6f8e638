"""Pictures that have to be told apart: two in order, several in one chat, one far from its question."""

from __future__ import annotations

from training.demo.chat import Part, Turn
from training.demo.lexicon import ORDINALS
from training.demo.picture import Picture, any_picture
from training.demo.prose import excerpt
from training.demo.tasks.room import Room
from training.demo.tasks.single_pictures import ANY

MAX_PICTURES = 4
MAX_TEXT_TOKENS = 1500

TWO = (
    "What do the two pictures show, in order?",
    "Describe both pictures in order.",
    "What is in the first and in the second picture?",
    "What are these two, in order?",
    "What do you see in the two pictures?",
)
RECALL = (
    "What was in the {which} picture?",
    "What did the {which} picture show?",
    "What do you see in the {which} picture?",
    "Describe the {which} picture.",
    "What is in the {which} picture?",
)
FAR = (
    "What was in the picture?",
    "What did the picture show?",
    "What is in the picture?",
    "Describe the picture.",
    "What did you see in the picture?",
)
READ = ("", "", "Read this. ", "Here is a text. ", "Look at the picture and read this. ")


def two_pictures(room: Room) -> list[Turn]:
    first, second = (any_picture(room.random, room.split) for _ in range(2))
    question = room.one_of(TWO)
    user: tuple[Part, ...]
    if room.random.random() < 0.15:
        user = ("First picture: ", first, " Second picture: ", second, " " + question)
    else:
        user = room.beside(question, first, second)
    return [Turn("two_pictures", user, f"First {first.phrase}, then {second.phrase}.")]


def recall(room: Room, shown: list[Picture], index: int, user: tuple[Part, ...] = ()) -> Turn:
    """A question about the picture at `index` of those shown so far."""
    which = ORDINALS[index]
    question = room.one_of(RECALL).format(which=which)
    parts = (*user, question) if user else (question,)
    return Turn("several_pictures", parts, f"The {which} picture shows {shown[index].phrase}.")


def several_pictures(room: Room) -> list[Turn]:
    """Two to four pictures, in turns of their own or all at once, then questions about them.

    Ordinals count the conversation's pictures, so it may hold none before.
    """
    assert room.pictures_before == 0, "ordinals would count earlier pictures"
    random = room.random
    most = max(min(MAX_PICTURES, room.pictures, (room.tokens - 40) // 48), 2)
    shown = [any_picture(random, room.split) for _ in range(random.randint(2, most))]
    turns: list[Turn] = []
    if random.random() < 0.35:
        turns.append(recall(room, shown, random.randrange(len(shown)), tuple(shown)))
    else:
        for picture in shown:
            turns.append(Turn("several_pictures", room.beside(room.one_of(ANY), picture), picture.sentence))
    used = 52 * len(shown)
    for index in random.sample(range(len(shown)), random.randint(1, len(shown))):
        if turns and used + 30 > room.tokens:
            break
        turns.append(recall(room, shown, index))
        used += 30
    return turns


def far_picture(room: Room) -> list[Turn]:
    """Up to four pictures, up to 1,500 tokens of text, then a question about each."""
    random = room.random
    most = 1 if room.pictures_before else max(min(MAX_PICTURES, room.pictures, (room.tokens - 100) // 60), 1)
    count = random.randint(1, most)
    free = room.tokens - 60 - 56 * count
    return far_turns(room, count, random.randint(0, max(min(MAX_TEXT_TOKENS, free), 10)))


def far_turns(room: Room, count: int, text_tokens: int) -> list[Turn]:
    """`count` pictures, asked for about `text_tokens` tokens later, in one message or in turns of their own.

    More than one picture needs a conversation without earlier ones, since their ordinals are asked for.
    """
    assert count == 1 or room.pictures_before == 0, "ordinals would count earlier pictures"
    random = room.random
    shown = [any_picture(random, room.split) for _ in range(count)]
    text = room.one_of(READ) + excerpt(random, room.split, text_tokens) if text_tokens > 15 else ""
    joint = random.choice((" ", "\n", "\n\n"))
    turns: list[Turn] = []
    opening: tuple[Part, ...] = tuple(shown)
    if random.random() < 0.4:
        opening = ()
        for picture in shown:
            turns.append(Turn("far_picture", room.beside(room.one_of(ANY), picture), picture.sentence))
    for index in random.sample(range(count), count):
        if count > 1:
            which, questions = ORDINALS[index] + " picture", RECALL
        elif room.pictures_before:
            which, questions = "last picture", RECALL
        else:
            which, questions = "picture", FAR
        question = room.one_of(questions).format(which=which.removesuffix(" picture"))
        asked = text + joint + question if text else question
        turns.append(Turn("far_picture", (*opening, asked), f"The {which} shows {shown[index].phrase}."))
        opening, text = (), ""
    return turns
