"""What each word of a synthetic caption looks like: tables of sketches and colors, no code.

To add a word, add a row. Coordinates are hundredths of the drawing's own box, y downwards.
"""

from dataclasses import dataclass

from m1clip.data.synthetic.polygons import Point, Sketch, sketch

RGB = tuple[int, int, int]
Tones = dict[str, RGB]


@dataclass(frozen=True)
class Look:
    """What an image shows, one field for each thing a caption can say."""

    subject: str
    color: str
    count: int  # 1 to 4
    size: str  # small, large
    position: str  # left, middle, right
    place: str
    time: str
    sky: str


@dataclass(frozen=True)
class Time:
    """The light of an hour: its sky from top to horizon, and the tint of everything that is no subject."""

    zenith: RGB
    horizon: RGB
    tint: tuple[float, float, float]
    orb: RGB  # sun or moon
    orb_y: float
    cloud: RGB
    bird: RGB
    glass: RGB  # windows are lit at night


@dataclass(frozen=True)
class Place:
    """A floor, whose y runs from the horizon to the bottom, and a motif repeated along the horizon."""

    ground: str
    floor: Sketch
    motif: Sketch = ()
    count: int = 0
    height: float = 0.0


# fmt: off
SIZES = {"small": 0.2, "large": 0.3}  # of the image's width
POSITIONS = {"left": 0.28, "middle": 0.5, "right": 0.72}

# Where the members of a group stand, in steps from its centre: across, and back from the front row.
GROUPS: dict[int, tuple[Point, ...]] = {
    1: ((0, 0),), 2: ((-.5, 0), (.5, 0)), 3: ((0, -1), (-.5, 0), (.5, 0)),
    4: ((-.5, -1), (.5, -1), (-.5, 0), (.5, 0)),
}

COLORS: Tones = {
    "red": (218, 38, 44), "orange": (247, 138, 28), "yellow": (252, 218, 48), "green": (58, 166, 72),
    "blue": (42, 108, 222), "purple": (132, 62, 186), "pink": (250, 134, 186), "brown": (134, 80, 46),
}

TIMES: dict[str, Time] = {
    "dawn": Time((178, 160, 214), (252, 206, 208), (0.96, 0.88, 0.95), (255, 240, 214), 0.33,
                 cloud=(250, 236, 242), bird=(104, 84, 124), glass=(214, 206, 224)),
    "noon": Time((92, 172, 236), (196, 230, 250), (1.0, 1.0, 1.0), (255, 226, 92), 0.11,
                 cloud=(255, 255, 255), bird=(70, 78, 104), glass=(172, 206, 226)),
    "dusk": Time((226, 92, 74), (255, 190, 96), (0.99, 0.83, 0.76), (255, 236, 150), 0.36,
                   cloud=(255, 214, 176), bird=(112, 48, 60), glass=(250, 200, 130)),
    "night": Time((18, 24, 62), (52, 66, 124), (0.5, 0.53, 0.72), (246, 242, 214), 0.11,
                  cloud=(112, 124, 168), bird=(206, 214, 240), glass=(250, 214, 120)),
}

# Tones no hour changes. On a subject they stay small, so that its own color is what one sees.
FIXED: Tones = {
    "white": (255, 255, 255), "black": (44, 42, 50), "grey": (150, 154, 162), "bark": (122, 92, 72),
    "stem": (92, 140, 84), "cream": (255, 244, 214), "pane": (206, 232, 246), "beak": (240, 160, 60),
    "patty": (96, 62, 50), "crust": (214, 168, 112), "flame": (255, 206, 84), "plane": (236, 238, 242),
    "steel": (150, 164, 184), "slate": (84, 86, 104),
}

# Tones of places, muted, and tinted by the hour.
PAINTS: Tones = {
    "grass": (150, 196, 112), "fern": (168, 210, 126), "moss": (128, 178, 104), "hedge": (112, 156, 104),
    "pines": (92, 126, 96), "trunk": (96, 84, 76), "soil": (128, 136, 92), "litter": (142, 148, 100),
    "sand": (240, 220, 168), "dune": (228, 204, 150), "ridge": (212, 172, 124), "path": (232, 216, 178),
    "snow": (244, 248, 252), "drift": (222, 232, 244), "ice": (204, 218, 236), "river": (134, 190, 222),
    "hill": (140, 184, 116), "water": (112, 170, 200), "wave": (142, 192, 214), "stone": (196, 190, 180),
    "joint": (174, 168, 160), "asphalt": (128, 130, 138), "mark": (236, 234, 222), "wall": (178, 182, 196),
    "paving": (226, 206, 178), "seam": (206, 182, 152), "arcade": (224, 196, 168), "arch": (170, 140, 122),
    "cornice": (200, 166, 140), "hut": (232, 222, 204), "roof": (192, 140, 120), "field": (206, 206, 126),
    "oak": (208, 172, 130), "plank": (196, 158, 114), "edge": (150, 114, 84), "cloth": (248, 238, 228),
    "check": (222, 138, 138), "linen": (136, 166, 168), "weave": (150, 178, 180), "silver": (212, 216, 222),
    "rim": (162, 168, 178), "shine": (228, 231, 236), "tile": (166, 202, 194), "grout": (218, 230, 226),
    "marble": (240, 238, 236), "lip": (146, 144, 152), "door": (150, 172, 178), "thicket": (80, 108, 88),
    "yolk": (240, 222, 120),
}

SUBJECTS: dict[str, Sketch] = {
    # nature
    "tree": sketch("""box bark 44 60 56 100; oval main 28 46 23 21; oval main 72 46 23 21;
        oval main 50 52 26 20; oval main 50 27 30 26; oval light 41 23 12 9; oval dark 68 52 12 7"""),
    "pine": sketch("""box bark 44 80 56 100; poly dark 50 40 90 86 10 86; poly main 50 40 86 80 14 80;
        poly dark 50 20 78 60 22 60; poly main 50 18 76 54 24 54; poly light 50 0 70 32 30 32"""),
    "palm": sketch("""curve bark 9 44 97 47 70 54 32; blob dark 54 28 30 30 16 62 36 46;
        blob dark 54 28 76 32 88 64 70 48; blob main 56 30 30 10 2 38 28 28;
        blob main 52 30 78 10 99 40 78 28; blob main 54 32 46 10 26 2 34 18;
        blob light 54 32 58 10 80 1 70 20; oval bark 50 36 5 5 * 2 9 1"""),
    "cactus": sketch("""line main 26 50 16 50 90; line main 15 50 70 17 70; line main 15 17 70 17 42;
        line main 15 50 58 83 58; line main 15 83 58 83 30; line light 4 43 16 43 90;
        line dark 4 57 16 57 90"""),
    "flower": sketch("""line stem 6 50 50 50 98; blob stem 50 92 62 74 82 70 70 88;
        blob stem 50 96 38 80 18 76 30 92; oval main 50 12 15 15 * 2 0 44; oval main 31 23 15 15 * 2 38 0;
        oval main 31 45 15 15 * 2 38 0; oval dark 50 34 17 17; oval flame 50 34 11 11"""),
    "mushroom": sketch("""blob cream 38 55 62 55 66 90 58 99 42 99 34 90; dome main 50 60 47 56;
        oval dark 50 60 46 7; oval white 50 20 10 8; oval white 25 40 8 8; oval white 72 38 9 9"""),
    "leaf": sketch("""curve dark 6 14 98 22 84 34 70; poly main 88 3 90 30 85 52 72 70 54 80 36 80 25 72
        20 58 24 40 36 23 56 10; poly light 88 3 56 10 36 23 24 40 20 58 25 72; line dark 4 24 78 84 8;
        line dark 3 50 47 78 50; line dark 3 50 47 44 25"""),
    "mountain": sketch("""poly dark 70 34 100 100 40 100; poly white 70 34 79 54 72 50 66 56 61 53;
        poly main 40 8 80 100 0 100; poly dark 40 8 80 100 48 100 40 60 46 36;
        poly white 40 8 53 38 45 33 39 42 33 34 27 38"""),
    # animals
    "cat": sketch("""curve dark 10 66 92 88 88 90 68 82 56; blob main 50 46 68 66 74 98 26 98 32 66;
        poly main 20 4 44 16 22 34; poly main 80 4 56 16 78 34; poly dark 25 11 36 17 26 25;
        poly dark 75 11 64 17 74 25; oval main 50 33 32 25; oval light 50 80 12 15; oval light 50 43 14 9;
        oval black 38 31 4.5 6 * 2 24 0; poly black 45 38 55 38 50 44"""),
    "duck": sketch("""line beak 6 42 86 42 97 50 97 * 2 16 0; poly beak 84 22 100 30 84 36; blob main 2
        44 20 52 42 52 56 42 76 42 84 64 70 86 40 90 16 78; oval main 70 26 20 20;
        blob dark 22 60 50 58 64 66 50 78 32 76; oval black 76 22 4 4.5"""),
    "rabbit": sketch("""oval white 13 78 12 12; oval dark 60 20 7 20; oval main 74 20 7.5 20;
        oval light 74 21 3 13; oval main 42 72 31 27; oval main 70 48 20 18; oval dark 36 78 16 14;
        oval main 38 94 20 6; oval main 68 90 8 10; oval black 76 44 3.5 4.5; oval white 89 50 3 3"""),
    "elephant": sketch("""box dark 26 70 38 96 * 2 24 0; box main 12 64 27 100 * 2 30 0;
        oval main 36 50 30 28; oval main 70 38 19 21; curve main 12 80 42 90 60 86 80 94 88;
        curve white 5 76 54 80 62 78 68; oval dark 58 40 14 19; oval black 76 33 3 3.5"""),
    "turtle": sketch("""oval light 86 60 14 12; line light 10 78 80 78 68; line light 16 24 84 24 92 * 2 40 0;
        poly light 10 78 0 90 14 88; dome main 44 84 40 56; poly dark 36 42 54 42 60 58 45 68 30 58;
        poly dark 10 74 22 60 34 74 30 80 10 80; poly dark 56 74 68 60 78 74 78 80 60 80;
        oval black 90 57 3 3.5"""),
    "snail": sketch("""line light 5 82 60 76 40; line light 5 88 60 94 42; blob light 2 98 30 84 66 84
        74 60 88 54 96 66 92 90 80 100 30 100; oval main 42 50 36 36; curve dark 6 42 50 48 46 50 55 42
        62 31 56 30 42 42 32 58 38 62 56 52 74; oval black 76 40 4.5 4.5; oval black 94 42 4.5 4.5"""),
    "fish": sketch("""poly dark 30 60 4 34 10 60 4 86; poly dark 36 42 56 22 74 42;
        poly dark 46 78 44 98 66 80; oval main 58 60 39 26; curve light 4 68 42 62 60 68 78;
        curve dark 4 36 51 33 60 36 69 * 2 14 0; oval white 80 54 7 7; oval black 82 54 3.5 4"""),
    "giraffe": sketch("""curve dark 4 16 58 7 66 8 78; line dark 4 68 2 69 12 * 2 7 0;
        line dark 7.5 30 70 30 96 * 2 20 0; line main 8.5 20 64 20 96 * 2 40 0; oval main 40 62 26 13;
        poly main 46 60 66 62 77 14 65 10; oval main 78 13 17 8; oval dark 26 60 6 5; oval dark 42 66 6 5;
        oval dark 60 54 4 5; oval dark 65 36 3.5 5; oval dark 70 23 3 4; oval black 78 10 2.5 3"""),
    # urban
    "car": sketch("""blob main 24 60 34 38 62 36 76 60; poly main 3 62 10 56 88 58 97 66 97 86 3 86;
        poly pane 30 57 37 43 48 42 48 57; poly pane 52 57 52 42 62 43 70 57; box dark 3 78 97 86;
        oval cream 92 69 5 5; oval black 24 86 13 13 * 2 51 0; oval grey 24 86 6 6 * 2 51 0"""),
    "bus": sketch("""box main 4 28 96 88; box light 4 22 96 30; box dark 4 74 96 88;
        box pane 9 37 23 56 * 3 18 0; box pane 63 37 75 84; box pane 81 37 96 58;
        oval black 23 89 11 11 * 2 56 0; oval grey 23 89 5 5 * 2 56 0"""),
    "house": sketch("""box dark 68 10 80 40; box main 14 44 86 100; poly dark 50 6 100 50 0 50;
        box light 42 66 58 100; box cream 21 60 36 77 * 2 43 0; oval cream 50 33 7 7"""),
    "tower": sketch("""box main 30 20 70 100; box dark 58 20 70 100; box main 22 12 78 27;
        box main 22 1 35 14 * 3 21.5 0; line black 8 50 40 50 50; dome black 50 82 9 9;
        box black 41 81 59 100"""),
    "bicycle": sketch("""ring main 22 76 22 6 * 2 56 0; line main 6 22 76 38 50; line main 6 38 50 68 48;
        line main 6 34 36 48 78; line main 6 48 78 68 48; line main 6 64 30 78 76; line dark 8 25 34 43 34;
        line dark 7 58 28 74 26"""),
    "lamp": sketch("""box dark 36 93 64 100; box main 42 82 58 94; box main 46 40 54 90;
        line dark 6 30 52 70 52; poly main 26 18 74 18 64 44 36 44; poly cream 33 21 47 21 47 39 40 39;
        poly cream 53 21 67 21 60 39 53 39; poly dark 18 19 50 2 82 19"""),
    "boat": sketch("""box bark 47 4 52 76; poly main 56 5 56 66 95 66 80 36; poly light 44 14 44 66 10 66;
        poly dark 0 73 100 73 84 100 18 100; poly main 2 73 98 73 92 85 10 85"""),
    "bench": sketch("""box dark 14 30 22 100 * 2 64 0; box main 6 30 94 41 * 2 0 16;
        poly light 10 64 90 64 95 74 5 74; box main 5 72 95 82; box dark 8 80 17 100 * 2 75 0"""),
    # food
    "apple": sketch("""blob main 50 26 74 20 93 42 84 80 64 99 50 95 36 99 16 80 7 42 26 20;
        blob dark 90 50 84 80 64 98 74 78; oval light 27 42 8 12; curve bark 6 50 30 50 16 56 6;
        blob stem 54 18 64 4 84 3 74 16"""),
    "banana": sketch("""blob main 10 28 20 30 34 56 60 68 90 60 97 66 84 86 58 97 30 88 12 62;
        blob dark 14 62 34 80 60 87 86 78 60 96 30 87; line dark 9 12 20 14 30; line dark 6 92 62 96 65;
        curve light 3.5 24 48 36 66 60 76 80 73"""),
    "cake": sketch("""oval white 50 94 49 6; box main 10 58 90 94; box main 22 34 78 60;
        line light 10 15 60 85 60; line light 10 27 36 73 36; line light 10 15 60 15 72 * 2 70 0;
        line light 10 38 60 38 68; line light 10 62 60 62 74; line light 10 27 36 27 46 * 2 46 0;
        line light 10 50 36 50 44; box dark 10 82 90 87; line white 5 34 20 34 30 * 3 16 0;
        oval flame 34 11 3.5 6 * 3 16 0"""),
    "pizza": sketch("""poly main 6 20 94 20 50 100; line main 8 26 30 26 60; line main 8 62 30 62 82;
        curve crust 16 8 20 30 12 70 12 92 20; oval dark 34 38 9 8.5 * 2 32 0; oval dark 50 64 8.5 8"""),
    "burger": sketch("""line main 18 14 90 86 90; line patty 12 10 72 90 72;
        curve stem 8 6 64 20 60 34 66 50 60 66 66 80 60 94 64; dome main 50 58 46 46; box dark 6 53 94 58;
        oval light 50 22 4.5 2.8; oval light 30 34 4.5 2.8 * 3 20 0"""),
    "cup": sketch("""ring main 76 64 20 8; blob main 10 38 42 34 74 38 74 70 64 98 42 100 20 98 10 70;
        oval light 42 38 33 9; oval patty 42 39 26 6; line light 5 20 56 22 80;
        curve white 5 32 26 28 18 34 12 30 4 * 2 20 0"""),
    "carrot": sketch("""blob stem 62 36 52 16 60 2 68 18; blob stem 66 34 84 24 99 34 84 42;
        blob stem 62 36 72 12 94 6 84 26; blob main 8 98 20 62 42 34 60 28 74 42 68 60 40 82;
        line dark 3.5 44 42 54 50; line dark 3.5 50 68 42 60"""),
    "donut": sketch("""ring dark 50 56 44 28; ring main 50 51 43 26.5; line white 4.5 78 56 78 62;
        line white 4.5 61 78 57 81; line white 4.5 23 41 27 35; line white 4.5 39 24 46 22;
        line white 4.5 68 28 74 32; curve light 5 14 42 24 26 40 17"""),
}

PLACES: dict[str, Place] = {
    "meadow": Place("grass", sketch("""blob fern -30 30 10 -6 50 6 80 30 30 50;
        blob moss 40 62 90 46 140 60 130 96 80 90; oval mark 8 30 1.2 1.8 * 5 21 13;
        oval mark 20 92 1.2 1.8 * 4 25 -18; oval yolk 5 60 1.4 2 * 4 30 9""")),
    "desert": Place("sand", sketch("""blob dune -40 30 10 4 46 20 80 34 30 42;
        blob dune 30 66 80 44 140 60 130 80 70 74; curve ridge 1.2 46 20 66 26 84 36"""),
        sketch("""blob ridge -20 120 30 20 60 50 120 120"""), 3, 0.1),
    "snow": Place("snow", sketch("""blob drift -40 30 10 6 46 20 80 34 30 46;
        blob drift 30 70 80 50 140 60 130 86 70 80; curve ice 1.2 40 20 62 27 84 34"""),
        sketch("""dome ice 50 110 70 100; dome snow 46 110 60 90"""), 3, 0.1),
    "valley": Place("fern", sketch("""blob moss -60 50 -30 -40 10 -46 36 -10 56 12 10 36;
        blob hill 160 60 130 -30 94 -36 70 -10 44 14 90 44; blob river 50 8 54 10 50 20 60 34 50 60 60
        110 30 110 34 60 50 36 46 20""")),
    "forest": Place("soil", sketch("""blob litter -30 40 20 14 70 20 90 36 40 50"""),
        sketch("""box thicket -20 50 120 110; box trunk 40 30 60 110; oval pines 50 30 62 30"""), 9, 0.3),
    "street": Place("silver", sketch("""box asphalt -30 20 130 84; box joint -30 84 130 87;
        box mark -16 48 -2 53 * 5 28 0"""),
        sketch("""box wall 4 10 96 110; box stone 4 10 30 110; box glass 40 22 56 34 * 3 0 22;
        box glass 68 22 84 34 * 3 0 22"""), 6, 0.24),
    "park": Place("fern", sketch("""blob path 44 0 56 0 50 14 78 40 66 70 86 120 34 120 40 70 56 42 36 16;
        blob moss -20 30 10 24 30 32 10 44"""),
        sketch("""box hedge -10 50 110 120; dome hedge 50 90 46 90; dome moss 42 86 24 60"""), 5, 0.13),
    "harbour": Place("water", sketch("""curve wave 1.4 -10 10 -4 8 2 10 8 8 * 4 31 3;
        curve wave 1.4 4 32 10 30 16 32 22 30 * 3 34 -3; box stone -30 40 130 84; box joint -30 84 130 110;
        box silver -30 40 130 44; box stone -28 86 -6 98 * 6 24 0"""),
        sketch("""poly rim 10 86 90 86 76 105 24 105; box joint 47 0 52 90; line joint 3 50 6 16 84;
        line joint 3 50 6 84 84"""), 5, 0.22),
    "square": Place("paving", sketch("""line seam 1 10 0 -86 100; line seam 1 20 0 -52 100;
        line seam 1 30 0 -18 100; line seam 1 40 0 16 100; line seam 1 50 0 50 100; line seam 1 60 0 84 100;
        line seam 1 70 0 118 100; line seam 1 80 0 152 100; line seam 1 90 0 186 100; box seam -30 5 130 6;
        box seam -30 14 130 15; box seam -30 27 130 28; box seam -30 46 130 47.5; box seam -30 72 130 74"""),
        sketch("""box arcade -10 14 110 110; box cornice -10 10 110 20; dome arch 50 70 30 26;
        box arch 20 69 80 110; box glass 36 26 64 40"""), 7, 0.2),
    "village": Place("grass", sketch("""blob field -40 30 10 10 40 16 50 30 20 46;
        blob field 60 50 100 30 140 40 130 70; curve path 5 60 -2 56 20 64 50 50 110"""),
        sketch("""box hut 16 50 84 110; poly roof 50 6 100 54 0 54;
        box glass 30 66 44 84 * 2 26 0"""), 5, 0.14),
    "table": Place("oak", sketch("""poly plank -5 0 6 0 -38 100 -60 100; poly plank 17 0 28 0 6 100 -16 100;
        poly plank 39 0 50 0 50 100 28 100; poly plank 61 0 72 0 94 100 72 100;
        poly plank 83 0 94 0 138 100 116 100; box edge -30 90 130 110; box edge -30 -2 130 1""")),
    "blanket": Place("moss", sketch("""poly cloth 10 10 90 10 108 96 -8 96; poly check 10 10 26 10 24 24 7 24;
        poly check 42 10 58 10 59 24 41 24; poly check 74 10 90 10 93 24 76 24;
        poly check 24 24 41 24 41 42 22 42; poly check 59 24 76 24 78 42 59 42;
        poly check 3 42 22 42 19 66 -2 66; poly check 41 42 59 42 60 66 40 66;
        poly check 78 42 97 42 102 66 81 66; poly check 19 66 40 66 38 96 15 96;
        poly check 60 66 81 66 85 96 62 96""")),
    "tray": Place("linen", sketch("""box weave -30 6 130 12 * 6 0 18; oval rim -2 50 8 12 * 2 104 0;
        oval rim 50 52 50 47; oval silver 50 50 48 44; oval rim 50 51 42 37; oval shine 50 52.5 41 36""")),
    "shelf": Place("hut", sketch("""box oak -30 -4 130 5 * 3 0 41; box edge -30 5 130 10 * 3 0 41;
        box seam -30 10 130 15 * 3 0 41; box edge -4 -4 1 110 * 2 104 0""")),
    "counter": Place("tile", sketch("""box grout -30 10 130 11.5 * 2 0 10; box grout -6 0 -4.8 30 * 9 14 0;
        box marble -30 30 130 86; curve silver 1.8 -10 40 20 50 36 44 70 64 90 60 120 50;
        curve silver 1.8 50 84 70 70 110 76; box lip -30 83 130 89; box door -30 89 130 110""")),
}

SKIES: dict[str, Sketch] = {
    "clouds": sketch("""oval cloud 24 60 22 16; oval cloud 76 60 24 17; oval cloud 40 44 22 20;
        oval cloud 60 40 22 22; box cloud 20 56 80 76"""),
    "birds": sketch("""curve bird 11 2 40 20 30 38 38 50 56; curve bird 11 50 56 62 38 80 30 98 40"""),
    "kites": sketch("""curve trim 5 42 62 50 76 36 86 46 104; poly trim 50 0 86 30 42 70 18 24;
        poly pale 50 0 46 28 18 24; poly pale 86 30 42 70 46 28; poly trim 30 80 44 90 44 76 30 94"""),
    "planes": sketch("""poly steel 2 26 16 26 28 50 10 50; blob plane 2 50 30 42 80 42 98 54 80 64 30 64;
        poly steel 44 54 62 54 40 86 28 86; poly steel 46 44 58 44 46 24 38 24; box glass 78 46 88 52"""),
    "balloons": sketch("""poly bark 40 84 60 84 57 100 43 100; poly pale 24 60 76 60 58 82 42 82;
        oval trim 50 38 38 38; oval pale 50 38 20 38; oval trim 50 38 7 38"""),
}
TRIMS: tuple[RGB, ...] = ((212, 112, 104), (96, 164, 164), (228, 190, 104), (164, 136, 186))
# fmt: on
