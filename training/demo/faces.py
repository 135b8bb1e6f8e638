"""Which typefaces words and numbers are drawn in, and where their files lie; knows nothing of pictures.

The files come from packages on PyPI, each with its free licence (SIL OFL 1.1, for Roboto Slab Apache 2.0); they are
collected into a folder, not committed. A family belongs to one split.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from PIL import ImageFont

from training.demo.splits import HELD_OUT, TRAIN, check_split

ASSETS = Path(__file__).parent / "assets"

# Glyphs are drawn once at this height and then scaled, as a user's picture would be.
GLYPH_PIXELS = 72


@dataclass(frozen=True)
class Face:
    """One font file of a package; `weights` are set on the file's own axis, none where it has no such axis."""

    package: str
    file: str
    split: str
    weights: tuple[int, ...] = ()


def plain(split: str, package: str, *files: str) -> list[Face]:
    return [Face(package, file, split) for file in files]


def variable(split: str, package: str, file: str, *weights: int) -> list[Face]:
    return [Face(package, file, split, weights or (400, 600, 700))]


FACES: tuple[Face, ...] = (
    *variable(TRAIN, "fontpkg_arimo", "Arimo[wght].ttf"),
    *variable(TRAIN, "fontpkg_roboto", "Roboto[wdth,wght].ttf"),
    *variable(TRAIN, "fontpkg_montserrat", "Montserrat[wght].ttf"),
    *variable(TRAIN, "fontpkg_nunito", "Nunito[wght].ttf"),
    *variable(TRAIN, "fontpkg_raleway", "Raleway[wght].ttf"),
    *variable(TRAIN, "fontpkg_work_sans", "WorkSans[wght].ttf"),
    *variable(TRAIN, "fontpkg_rubik", "Rubik[wght].ttf"),
    *variable(TRAIN, "fontpkg_cabin", "Cabin[wdth,wght].ttf"),
    *variable(TRAIN, "fontpkg_oswald", "Oswald[wght].ttf"),
    *variable(TRAIN, "fontpkg_dosis", "Dosis[wght].ttf"),
    *variable(TRAIN, "fontpkg_exo_2", "Exo2[wght].ttf"),
    *variable(TRAIN, "fontpkg_overpass", "Overpass[wght].ttf"),
    *variable(TRAIN, "fontpkg_mulish", "Mulish[wght].ttf"),
    *variable(TRAIN, "fontpkg_jost", "Jost[wght].ttf"),
    *variable(TRAIN, "fontpkg_josefin_sans", "JosefinSans[wght].ttf"),
    *variable(TRAIN, "fontpkg_comfortaa", "Comfortaa[wght].ttf"),
    *variable(TRAIN, "fontpkg_playfair_display", "PlayfairDisplay[wght].ttf"),
    *variable(TRAIN, "fontpkg_bitter", "Bitter[wght].ttf"),
    *variable(TRAIN, "fontpkg_domine", "Domine[wght].ttf"),
    *variable(TRAIN, "fontpkg_roboto_slab", "RobotoSlab[wght].ttf"),
    *variable(TRAIN, "fontpkg_roboto_mono", "RobotoMono[wght].ttf"),
    *variable(TRAIN, "fontpkg_source_code_pro", "SourceCodePro[wght].ttf"),
    *variable(TRAIN, "fontpkg_libre_baskerville", "LibreBaskerville[wght].ttf"),
    *plain(TRAIN, "fontpkg_poppins", "Poppins-Regular.ttf", "Poppins-Bold.ttf"),
    *plain(TRAIN, "fontpkg_barlow", "Barlow-Regular.ttf", "Barlow-Bold.ttf"),
    *plain(TRAIN, "fontpkg_arvo", "Arvo-Regular.ttf", "Arvo-Bold.ttf"),
    *plain(TRAIN, "fontpkg_crimson_text", "CrimsonText-Regular.ttf", "CrimsonText-Bold.ttf"),
    *plain(TRAIN, "fontpkg_zilla_slab", "ZillaSlab-Regular.ttf", "ZillaSlab-Bold.ttf"),
    *plain(TRAIN, "fontpkg_spectral", "Spectral-Regular.ttf", "Spectral-Bold.ttf"),
    *plain(TRAIN, "fontpkg_space_mono", "SpaceMono-Regular.ttf", "SpaceMono-Bold.ttf"),
    *plain(TRAIN, "fontpkg_varela_round", "VarelaRound-Regular.ttf"),
    *plain(TRAIN, "fontpkg_dm_serif_text", "DMSerifText-Regular.ttf"),
    *plain(TRAIN, "fontpkg_delius", "Delius-Regular.ttf"),
    *plain(TRAIN, "fontpkg_kalam", "Kalam-Bold.ttf"),
    *variable(HELD_OUT, "fontpkg_open_sans", "OpenSans[wdth,wght].ttf"),
    *variable(HELD_OUT, "fontpkg_lora", "Lora[wght].ttf"),
    *variable(HELD_OUT, "fontpkg_karla", "Karla[wght].ttf"),
    *variable(HELD_OUT, "fontpkg_quicksand", "Quicksand[wght].ttf"),
    *variable(HELD_OUT, "fontpkg_inconsolata", "Inconsolata[wdth,wght].ttf"),
    *plain(HELD_OUT, "fontpkg_titillium_web", "TitilliumWeb-Regular.ttf", "TitilliumWeb-Bold.ttf"),
    *plain(HELD_OUT, "fontpkg_ibm_plex_serif", "IBMPlexSerif-Regular.ttf", "IBMPlexSerif-Bold.ttf"),
    *plain(
        HELD_OUT,
        "fontpkg_atkinson_hyperlegible",
        "AtkinsonHyperlegible-Regular.ttf",
        "AtkinsonHyperlegible-Bold.ttf",
    ),
)


def families(split: str) -> dict[str, list[tuple[Face, int | None]]]:
    """Faces and weights of each family (package) of a split."""
    check_split(split)
    found: dict[str, list[tuple[Face, int | None]]] = {}
    for face in FACES:
        if face.split == split:
            found.setdefault(face.package, []).extend((face, weight) for weight in face.weights or (None,))
    return found


@cache
def load(face: Face, weight: int | None, folder: Path = ASSETS) -> ImageFont.FreeTypeFont:
    """The face at `GLYPH_PIXELS`; raises FileNotFoundError that names the command which collects the files."""
    path = folder / face.file
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing; run python -m training.demo.collect_assets {folder}")
    font = ImageFont.truetype(str(path), GLYPH_PIXELS)
    if weight is not None:
        axes = font.get_variation_axes()
        values = [weight if axis["name"] == b"Weight" else axis["default"] for axis in axes]
        font.set_variation_by_axes([float(value or 0) for value in values])
    return font
