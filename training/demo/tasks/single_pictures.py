"""One picture and one question: a coloured shape, how many shapes, left or right, a number, a digit, a word."""

from __future__ import annotations

from training.demo.chat import Turn
from training.demo.picture import (
    Picture,
    count_picture,
    digit_picture,
    number_picture,
    shape_picture,
    sides_picture,
    word_picture,
)
from training.demo.tasks.room import Room

# Fit every picture that shows one thing; the empty one is a picture sent without a word.
ANY = (
    "What is this?",
    "What do you see?",
    "What is in the picture?",
    "What does the picture show?",
    "Describe the picture.",
    "What is in this image?",
    "What can you see here?",
    "",
)
SHAPE = (
    "What shape is this and what colour is it?",
    "Which shape do you see?",
    "What colour is the shape?",
    "Name the shape and its colour.",
    "What kind of shape is this?",
    "What shape is this?",
    "What colour is this?",
    "What color is the shape?",
)
COUNT = (
    "How many shapes are there?",
    "How many shapes do you see?",
    "Count the shapes.",
    "How many shapes are in the picture?",
    "How many are there?",
    "How many shapes can you see?",
)
SIDES = (
    "What is on the {side}?",
    "Which shape is on the {side}?",
    "What do you see on the {side}?",
    "What is on the {side} side?",
    "Name the shape on the {side}.",
)
NUMBER = (
    "Which number is this?",
    "What number do you see?",
    "What number is this?",
    "What number is in the picture?",
    "Read the number.",
    "What is the number in the picture?",
    "What does it say?",
)
DIGIT = (
    "Which digit is this?",
    "What digit is this?",
    "What digit do you see?",
    "Read the digit.",
    "Which digit was written here?",
)
WORD = (
    "Which word is this?",
    "What word do you see?",
    "What word is this?",
    "What word is in the picture?",
    "Read the word.",
    "What does it say?",
    "What is written here?",
)


def about(room: Room, task: str, picture: Picture, own: tuple[str, ...]) -> list[Turn]:
    """A question of the task's own, or one that fits any picture."""
    question = room.one_of(own if room.random.random() < 0.55 else ANY)
    return [Turn(task, room.beside(question, picture), picture.sentence)]


def shape(room: Room) -> list[Turn]:
    return about(room, "shapes", shape_picture(room.random, room.split), SHAPE)


def number(room: Room) -> list[Turn]:
    return about(room, "numbers", number_picture(room.random, room.split), NUMBER)


def digit(room: Room) -> list[Turn]:
    return about(room, "digits", digit_picture(room.random, room.split), DIGIT)


def word(room: Room) -> list[Turn]:
    return about(room, "words", word_picture(room.random, room.split), WORD)


def count(room: Room) -> list[Turn]:
    picture = count_picture(room.random, room.split)
    return [Turn("counts", room.beside(room.one_of(COUNT), picture), count_sentence(picture))]


def count_sentence(picture: Picture) -> str:
    many = picture.content[0]
    return "There is 1 shape." if many == "1" else f"There are {many} shapes."


def side(room: Room) -> list[Turn]:
    picture = sides_picture(room.random, room.split)
    chosen = room.random.randrange(2)
    name = ("left", "right")[chosen]
    return [
        Turn(
            "sides",
            room.beside(room.one_of(SIDES).format(side=name), picture),
            side_sentence(picture, chosen),
        )
    ]


def side_sentence(picture: Picture, side: int) -> str:
    """The sentence on the left (0) or right (1) shape."""
    colour, shape = picture.content[2 * side : 2 * side + 2]
    name = ("left", "right")[side]
    return f"On the {name} is {'an' if colour[0] in 'aeiou' else 'a'} {colour} {shape}."
