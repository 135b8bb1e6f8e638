"""Fills one row with a conversation of many turns; knows tokens and shares, not what the tasks are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from random import Random

from training.demo.catalogue import FAMILIES, TASKS
from training.demo.chat import Encoder, Turn, pictures
from training.demo.picture import Picture
from training.demo.tasks.room import Room

# Of a row that a long task leads, about this part is that task's own.
LED_PART = 0.75
# A second long task follows where the first has left this part of the row.
SECOND_LEADER_PART = 0.35
TRIES = 6

SYSTEM_TEXTS = ("You are a helpful assistant.", "You are a friendly assistant. Answer briefly.")
SYSTEM_PART = 0.06
CARELESS_PART = 0.12


@dataclass
class Row:
    """Ids of one conversation without padding, the task of each answer token (-1 elsewhere) and its pictures."""

    ids: list[int]
    task: list[int]
    shown: list[Picture] = field(default_factory=list)


class RowBuilder:
    """Draws turns by their shares until a row is full."""

    def __init__(self, encoder: Encoder, length: int, split: str, mix: Mapping[str, float]) -> None:
        self._encoder = encoder
        self._length = length
        self._split = split
        total = sum(mix.values())
        shares = {task: share / total for task, share in mix.items() if share > 0}
        self._leaders = {task: share for task, share in shares.items() if FAMILIES[task].fills}
        self._openers = {task: share for task, share in shares.items() if FAMILIES[task].opens}
        # Picked turn by turn, so a share of tokens has to be divided by what a turn costs.
        self._fillers = {
            task: share / FAMILIES[task].tokens
            for task, share in shares.items()
            if task not in self._leaders and task not in self._openers
        }
        self._without_pictures = {task: share for task, share in self._fillers.items() if needs_pictures(task) == 0}
        self._led = min(sum(self._leaders.values()) / LED_PART, 1.0) if len(self._leaders) < len(shares) else 1.0
        # How often a row has to begin with an opener to give it its share of tokens.
        self._opened = min(sum(share * length / FAMILIES[task].tokens for task, share in self._openers.items()), 1.0)

    def row(self, random: Random, most_pictures: int) -> Row:
        """One row of at most `length` ids and `most_pictures` pictures."""
        row = Row(list(self._encoder.prefix), [-1, -1])
        leaders = dict(self._leaders) if random.random() < self._led else {}
        if self._openers and random.random() < self._opened:
            self._add(random, row, pick(random, self._openers), most_pictures)
        # A long task comes first, or after a few short ones.
        before = random.randint(1, 3) if random.random() < 0.4 else 0
        failed = 0
        while failed < TRIES:
            left = self._length - len(row.ids)
            fresh = len(leaders) == len(self._leaders)
            if leaders and before <= 0 and (fresh or left > SECOND_LEADER_PART * self._length):
                task = pick(random, leaders)
                del leaders[task]
            else:
                fillers = self._fillers if len(row.shown) < most_pictures else self._without_pictures
                if not fillers:
                    if before <= 0:
                        break
                    before = 0
                    continue
                task = pick(random, fillers)
            before -= 1
            failed = 0 if self._add(random, row, task, most_pictures) else failed + 1
        return row

    def _add(self, random: Random, row: Row, task: str, most_pictures: int) -> bool:
        """Put the task's turns at the row's end; False where not even the first one fits."""
        family = FAMILIES[task]
        pictures_left = most_pictures - len(row.shown)
        if needs_pictures(task) > pictures_left or (family.opens and row.shown):
            return False
        room = Room(
            random,
            self._split,
            tokens=self._length - len(row.ids),
            pictures=pictures_left,
            pictures_before=len(row.shown),
            at_start=len(row.ids) == len(self._encoder.prefix),
        )
        if room.tokens < max(family.tokens, 24) * 0.8:
            return False
        added = False
        for made in family.make(room):
            turn = made if family.fills else carelessly(random, made)
            if room.at_start and not added and not turn.system and random.random() < SYSTEM_PART:
                turn = replace(turn, system=random.choice(SYSTEM_TEXTS))
            added = self._append(row, turn) or added
            if not added or len(row.ids) > self._length - 20:
                break
        return added

    def _append(self, row: Row, turn: Turn) -> bool:
        question, answer = self._encoder.question(turn), self._encoder.answer(turn)
        # The answer's end token is the next turn's <|user|>; the row holds it once.
        start = len(row.ids) - 1 if row.task[-1] >= 0 else len(row.ids)
        if turn.system:
            assert start == len(row.ids), "a system message may only come first"
        if start + len(question) + len(answer) > self._length:
            return False
        del row.ids[start:]
        row.ids += question
        row.ids += answer
        # The token at `start` keeps the label of the answer that it ends.
        row.task += [-1] * (start + len(question) - len(row.task))
        row.task += [TASKS.index(turn.task)] * len(answer)
        row.shown += pictures([turn])
        return True


def pick(random: Random, shares: Mapping[str, float]) -> str:
    """A task by its share."""
    return random.choices(tuple(shares), tuple(shares.values()))[0]


def needs_pictures(task: str) -> int:
    """The places for pictures without which a task cannot be used."""
    family = FAMILIES[task]
    return 0 if family.may_lack_pictures else min(family.pictures, 2)


def carelessly(random: Random, turn: Turn) -> Turn:
    """The turn as some people type: no capital at the start, or nothing at the end."""
    if random.random() > CARELESS_PART:
        return turn
    lower, bare = random.random() < 0.7, random.random() < 0.7
    user = (typed(part, lower, bare) if isinstance(part, str) else part for part in turn.user)
    return replace(turn, user=tuple(user))


def typed(text: str, lower: bool, bare: bool) -> str:
    """The text without a capital at its start, or without its last marks; never empty."""
    if lower and not text.startswith("I "):
        text = text[:1].lower() + text[1:]
    return (text.rstrip("?.! ") or text) if bare else text
