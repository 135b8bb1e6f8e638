"""The small world the demo model talks about: colours, shapes, words, invented names and towns; knows no task."""

from __future__ import annotations

from functools import cache
from random import Random

from training.demo.splits import split_of


def listed(text: str) -> tuple[str, ...]:
    """The words of a text."""
    return tuple(text.split())


# Red, green, blue of each colour's middle; pictures vary it a little.
COLOURS = {
    "red": (215, 35, 35),
    "orange": (245, 135, 20),
    "yellow": (245, 220, 40),
    "green": (40, 160, 60),
    "blue": (40, 80, 215),
    "purple": (125, 45, 165),
    "pink": (250, 140, 190),
    "black": (20, 20, 20),
    "white": (248, 248, 248),
}
SHAPES = ("circle", "square", "triangle", "star", "cross", "heart", "diamond", "ring")
ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth")
SIDES = ("left", "right")

WORDS = listed(
    """
    cat dog cow pig hen fox owl bee ant bat rat ape elk ram bird fish frog duck goat lion bear wolf deer crab swan horse
    sheep tiger mouse whale zebra eagle snake camel goose sun sky sea ice fog air mud oil gas sand rain snow wind star
    moon tree leaf root seed rose lily wood rock lake hill cave reef pond river ocean beach stone earth cloud storm
    plant grass fruit field coast red blue pink gold grey green black white brown one two six ten four five nine three
    seven eight man boy son king girl baby wife aunt queen child uncle woman nurse pilot guest hand foot head nose neck
    face skin hair back knee bone heart mouth tooth thumb brain eye ear arm leg lip toe hat cap tie bag box cup pot pan
    jar lid key map pen ink book page door wall roof room desk lamp sofa bath soap comb ring coin bell drum harp flag
    chair table house clock glass plate knife spoon fork phone piano shirt dress shoe boot sock coat scarf paper brick
    wheel train plane truck boat ship bike car bus van cart road path gate bridge tower hotel shop bank farm park city
    town mill barn camp tent bread apple lemon grape peach mango onion sugar honey salt rice milk meat soup cake pie jam
    egg nut tea bean corn pear plum lime fig ham bun nap run sit hop jump walk swim sing play read draw cook bake dig
    cut hit win buy sell give take make help hold open close push pull turn stop start wait look hear feel smell taste
    think learn teach write speak laugh smile sleep dream dance drive climb throw catch build paint clean big small
    tall short long wide deep thin fat old new hot cold warm cool wet dry soft hard loud fast slow easy early late dark
    light sharp sweet sour fresh rich poor kind brave happy sad good bad nice calm proud quiet day week month year time
    hour night noon dawn dusk today north south east west left right up down over under near far here there home work
    game ball team race card chess toy doll kite song tune note voice sound music story poem word name line dot shape
    point edge side top end part half whole pair group class club crew army peace war law rule vote news fact idea plan
    goal hope love luck fear joy care trust power money price gift prize trade bill cash iron steel silk wool rope nail
    saw axe rod net hook tool fire smoke flame heat steam spark ash coal dust dirt clay
    """
)
PICTURE_WORDS = tuple(dict.fromkeys(word for word in WORDS if 3 <= len(word) <= 5))

FIRST_SYLLABLES = listed(
    "Ba Be Bo Bri Ca Ce Da De Do Dra Fa Fe Fi Ga Go Gra Ha He Hi Ja Jo Ka Ke Ki La Le Lo Lu Ma Me Mi Mo Na Ne No Pa Pe "
    "Po Ra Re Ro Sa Se So Ta Te To Va Ve Vi Wa We Wi Ya Yo Za Ze Zo"
)
LAST_SYLLABLES = listed(
    "ra lo mi nek tas vin dor lan ris mon bel gan lek mar nus pol rik sal tor vel wen dan fin gor kas lin mur nor pas "
    "ren sten tin ver zan bert din los mas ric son"
)
TOWN_MIDDLES = listed("la ri vo ne mu sa ti")

DISHES = listed(
    """bread cheese honey apples pears plums wool silk glass clocks boats bells lamps drums harps kites dolls maps coins
    knives spoons chairs tables carpets hats boots gloves ribbons buttons candles soap paper ink paint bricks tiles rope
    nets sails oars barrels baskets jam tea beer wine salt sugar pepper rice beans onions cakes pies soup fish crabs
    ducks geese horses goats sheep bees roses lilies tulips songs dances plays poems chess races"""
)
PLACES = tuple(
    f"the {adjective} {noun}"
    for adjective in ("east", "north", "old", "red", "small", "green", "iron", "upper")
    for noun in ("gate", "door", "mill", "tower", "barn", "chest", "bridge", "cellar")
)
BOXES = tuple("ABCDEFGH")


@cache
def names(split: str) -> tuple[str, ...]:
    """Invented names of two syllables that this split may use as keys; the two splits share none."""
    every = [first + last for first in FIRST_SYLLABLES for last in LAST_SYLLABLES]
    return tuple(name for name in every if split_of("name", name) == split)


@cache
def passwords() -> tuple[str, ...]:
    """Common words of four letters or more, as passwords."""
    return tuple(word for word in WORDS if len(word) >= 4)


@cache
def towns() -> tuple[str, ...]:
    """250 invented towns of three syllables."""
    random = Random("towns")
    found: dict[str, None] = {}
    while len(found) < 250:
        found[random.choice(FIRST_SYLLABLES) + random.choice(TOWN_MIDDLES) + random.choice(LAST_SYLLABLES)] = None
    return tuple(found)


def article(noun_phrase: str) -> str:
    """The phrase with its indefinite article."""
    return f"an {noun_phrase}" if noun_phrase[0] in "aeiou" else f"a {noun_phrase}"
