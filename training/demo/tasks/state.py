"""Things that change while one reads: boxes refilled, a mode set long ago, a running total."""

from __future__ import annotations

from random import Random

from training.demo.chat import Turn
from training.demo.lexicon import BOXES
from training.demo.prose import excerpt
from training.demo.tasks.room import Room

WRITE_TOKENS = 8.5
QUESTION_TOKENS = 26

WRITES = (
    "Put {value} in box {box}.",
    "Box {box} holds {value}.",
    "Now box {box} holds {value}.",
    "Box {box} gets {value}.",
    "Change box {box} to {value}.",
)
BOX_QUESTIONS = (
    "What is in box {box}?",
    "What does box {box} hold?",
    "What is in box {box} now?",
    "Tell me what box {box} holds.",
)

MODES = ("plain", "backwards", "first", "last", "double")
MODE_INTRODUCTIONS = (
    "The mode is {mode}.",
    "From now on the mode is {mode}.",
    "Use the mode {mode}.",
    "Mode: {mode}.",
)
MODE_CHANGES = ("Now use the mode {mode}.", "The mode is now {mode}.", "Change the mode to {mode}.")
MODE_QUESTIONS = ("Take {digits}.", "What about {digits}?", "Now {digits}.", "{digits}", "And {digits}?")

TOTAL_QUESTIONS = ("What is the total?", "What is the total now?", "How much is it now?", "What is the sum so far?")


def writes(random: Random, boxes: str, count: int, held: dict[str, str]) -> str:
    """`count` sentences that each fill a box anew; `held` ends with what each box holds."""
    said = []
    for _ in range(count):
        box = random.choice(boxes)
        held[box] = str(random.randrange(10, 100))
        said.append(random.choice(WRITES).format(box=box, value=held[box]))
    return " ".join(said)


def last_write(room: Room) -> list[Turn]:
    """Boxes filled again and again, with text between at times; the last filling counts."""
    random = room.random
    boxes = "".join(random.sample(BOXES, random.randint(2, len(BOXES))))
    left = room.tokens * random.uniform(0.5, 1.0) - 40
    held: dict[str, str] = {}
    turns: list[Turn] = []
    while True:
        count = random.randint(1, max(int(left * 0.6 / WRITE_TOKENS), 1)) if not turns else random.randint(0, 6)
        said = [writes(random, boxes, count, held)] if count else []
        filler = random.randint(0, max(int(left * 0.5 - count * WRITE_TOKENS), 0)) if random.random() < 0.3 else 0
        if filler > 25:
            said.append(excerpt(random, room.split, filler))
        box = random.choice(sorted(held))
        said.append(random.choice(BOX_QUESTIONS).format(box=box))
        turns.append(Turn("last_write", (" ".join(said),), f"Box {box} holds {held[box]}."))
        left -= count * WRITE_TOKENS + filler + QUESTION_TOKENS
        if left < QUESTION_TOKENS + 6 * WRITE_TOKENS or len(turns) == 40:
            return turns


def in_mode(mode: str, digits: str) -> str:
    """What a mode makes of a string of digits."""
    match mode:
        case "plain":
            return digits
        case "backwards":
            return digits[::-1]
        case "first":
            return digits[0]
        case "last":
            return digits[-1]
        case "double":
            return digits + digits
    raise ValueError(f"no mode {mode}")


def mode_word(room: Room) -> list[Turn]:
    """A mode set at the start decides every answer, far later too; it may be changed on the way."""
    random = room.random
    mode = random.choice(MODES)
    introduction = random.choice(MODE_INTRODUCTIONS).format(mode=mode)
    # A conversation has one system message at most, at its start.
    as_system = room.pictures_before == 0 and room.at_start and random.random() < 0.5
    left = room.tokens * random.uniform(0.3, 1.0) - 40
    turns: list[Turn] = []
    while True:
        said = []
        if not turns and not as_system:
            said.append(introduction)
        elif turns and random.random() < 0.15:
            mode = random.choice(MODES)
            said.append(random.choice(MODE_CHANGES).format(mode=mode))
        filler = random.randint(0, max(int(left * 0.5), 0)) if random.random() < 0.3 else 0
        if filler > 25:
            said.append(excerpt(random, room.split, filler))
        digits = "".join(random.choices("0123456789", k=random.randint(2, 5)))
        said.append(random.choice(MODE_QUESTIONS).format(digits=digits))
        turns.append(
            Turn(
                "mode_word",
                (" ".join(said),),
                f"The answer is {in_mode(mode, digits)}.",
                system=introduction if as_system and not turns else "",
            )
        )
        left -= filler + QUESTION_TOKENS
        if left < 2 * QUESTION_TOKENS or len(turns) == 30:
            return turns


def running_sum(room: Room) -> list[Turn]:
    """A total that grows and shrinks over many turns, with text between at times."""
    random = room.random
    total = random.randint(0, 60)
    left = room.tokens * random.uniform(0.3, 1.0) - 40
    turns: list[Turn] = []
    while True:
        said = [] if turns else [f"Start with {total}."]
        for _ in range(random.choices((1, 2, 3), (5, 3, 1))[0]):
            step = random.randint(1, 9)
            if total >= step and random.random() < 0.4:
                total -= step
                said.append(random.choice((f"Take away {step}.", f"Subtract {step}.")))
            else:
                total += step
                said.append(random.choice((f"Add {step}.", f"Now add {step}.")))
        filler = random.randint(0, max(int(left * 0.4), 0)) if random.random() < 0.2 else 0
        if filler > 25:
            said.append(excerpt(random, room.split, filler))
        said.append(random.choice(TOTAL_QUESTIONS))
        turns.append(Turn("running_sum", (" ".join(said),), f"The total is {total}."))
        left -= filler + QUESTION_TOKENS + 6
        if left < 2 * QUESTION_TOKENS or len(turns) == 20:
            return turns
