"""A second question that means nothing without the first."""

from __future__ import annotations

from collections.abc import Callable

from training.demo.chat import Turn
from training.demo.lexicon import names
from training.demo.picture import number_picture, shape_picture, word_picture
from training.demo.tasks.room import Room
from training.demo.tasks.single_pictures import NUMBER, SHAPE, WORD, about
from training.demo.tasks.sums import PHRASINGS, addends

TASK = "second_turns"


def after_shape(room: Room) -> list[Turn]:
    picture = shape_picture(room.random, room.split)
    colour, kind = picture.content
    first = about(room, TASK, picture, SHAPE)
    if room.random.random() < 0.5:
        return [*first, Turn(TASK, (room.one_of(("What colour was it?", "And its colour?")),), f"It was {colour}.")]
    asked = room.one_of(("Which shape was it?", "What shape was that?"))
    return [*first, Turn(TASK, (asked,), f"It was a {kind}.")]


def after_number(room: Room) -> list[Turn]:
    picture = number_picture(room.random, room.split)
    digits = picture.content[0]
    which, digit = room.random.choice((("first", digits[0]), ("last", digits[-1])))
    asked = room.one_of(("What is its {which} digit?", "And its {which} digit?")).format(which=which)
    return [*about(room, TASK, picture, NUMBER), Turn(TASK, (asked,), f"Its {which} digit is {digit}.")]


def after_word(room: Room) -> list[Turn]:
    picture = word_picture(room.random, room.split)
    asked = room.one_of(("Which letter does it start with?", "What is its first letter?"))
    first = about(room, TASK, picture, WORD)
    return [*first, Turn(TASK, (asked,), f"It starts with {picture.content[0][0]}.")]


def after_sum(room: Room) -> list[Turn]:
    a, b = addends(room.random, room.split)
    more = room.random.randint(1, 9)
    asked = room.one_of(("Add {more} to that.", "And {more} more?", "Now add {more}."))
    return [
        Turn(TASK, (room.one_of(PHRASINGS).format(a=a, b=b),), f"The sum is {a + b}."),
        Turn(TASK, (asked.format(more=more),), f"The sum is {a + b + more}."),
    ]


def after_name(room: Room) -> list[Turn]:
    name = room.random.choice(names(room.split))
    said = room.one_of(("My name is {name}.", "Hello, I am {name}.", "I am called {name}."))
    asked = room.one_of(("What is my name?", "Who am I?", "Do you remember my name?"))
    return [
        Turn(TASK, (said.format(name=name),), f"Hello {name}."),
        Turn(TASK, (asked,), f"Your name is {name}."),
    ]


WITH_PICTURE: tuple[Callable[[Room], list[Turn]], ...] = (after_shape, after_number, after_word)
WITHOUT: tuple[Callable[[Room], list[Turn]], ...] = (after_sum, after_name)


def second_turn(room: Room) -> list[Turn]:
    """Two turns; with a picture in the first where the row has a place for one."""
    with_picture = room.pictures > 0 and room.random.random() < 0.65
    return room.random.choice(WITH_PICTURE if with_picture else WITHOUT)(room)
