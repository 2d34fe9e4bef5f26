"""When a library has nothing like a text: words of captions, the rule, and libraries it was not learned on."""

import numpy as np
import pytest

from m1clip.calibration import (
    SEARCH_REFERENCE,
    Calibration,
    Peak,
    Simulated,
    calibrate,
    choose_rule,
    find_peak,
    read_calibration,
    read_reference,
    word_queries,
    write_reference,
)

WIDTH, CONCEPTS = 48, 60
WORDS = ["".join(chr(97 + (7 * n + 3 * i + n * i) % 26) for i in range(5)) + chr(97 + n % 26) for n in range(CONCEPTS)]


def unit(vectors):
    return (vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)).astype(np.float32)


class World:
    """Images of one thing each, whose texts have similar vectors. A quarter of the words means nothing to the model."""

    def __init__(self, seed):
        rng = np.random.default_rng(seed)
        self.things = unit(np.random.default_rng(0).standard_normal((CONCEPTS, WIDTH)))
        self.texts = self.things.copy()
        self.texts[::4] = unit(rng.standard_normal((len(self.texts[::4]), WIDTH)))
        self.thing_N = rng.integers(0, CONCEPTS, 600)
        self.image_NE = unit(self.things[self.thing_N] + 0.15 * rng.standard_normal((600, WIDTH)))
        self.captions = [[f"{WORDS[thing]} one", f"the {WORDS[thing]}", "nothing much"] for thing in self.thing_N]

    def encode(self, texts):
        return np.stack([self.texts[WORDS.index(text)] if text in WORDS else self.image_NE.mean(0) for text in texts])


def test_an_image_fits_a_word_of_two_captions_and_is_not_used_for_a_word_of_one():
    captions = [["a red bird", "the bird", "red"], ["a bird", "grass", "green"], *[["grass", "green", "land"]] * 40]
    captions += [["a bird", "bird", "tree"], *[["old", "stone", "wall"]] * 60]
    queries = word_queries(captions)
    row = queries.texts.index("bird")
    assert np.flatnonzero(queries.is_fitting_QN[row]).tolist() == [0, 42]
    assert not queries.is_other_QN[row, [0, 1, 42]].any()
    assert queries.is_other_QN[row].sum() == len(captions) - 3


def test_with_a_single_caption_an_image_fits_its_words():
    captions = [["a red bird"], ["a blue bird"], *[["grass"]] * 40]
    assert word_queries(captions).is_fitting_QN[word_queries(captions).texts.index("bird")].sum() == 2


def test_a_rule_of_one_library_holds_in_another():
    world, other = World(1), World(2)
    found = calibrate(world.encode, word_queries(world.captions), world.image_NE)
    assert found.precision >= 0.9
    right = wrong = 0
    for thing in range(CONCEPTS):
        text_E, is_fitting_N = other.texts[thing], other.thing_N == thing
        for is_present in (False, True):
            score_N = other.image_NE[is_present | ~is_fitting_N] @ text_E
            if found.is_nothing(find_peak(text_E, world.image_NE), score_N.max(), score_N.mean()):
                right, wrong = right + (not is_present), wrong + is_present
    assert right >= 20
    assert right / (right + wrong) >= 0.9


def test_a_library_of_fitting_images_alone_is_not_nothing():
    world = World(1)
    found = calibrate(world.encode, word_queries(world.captions), world.image_NE)
    for thing in range(1, CONCEPTS, 4):
        score_N = world.image_NE[world.thing_N == thing] @ world.texts[thing]
        assert not found.is_nothing(find_peak(world.texts[thing], world.image_NE), score_N.max(), score_N.mean())


def test_a_text_that_fits_no_reference_image_is_not_judged():
    rule = Calibration(0.5, 3.0, 0.95, 0.2, 100, 100)
    assert rule.is_nothing(Peak(0.0, 0.4, 0.1), best=0.1, mean=0.0)
    assert not rule.is_nothing(Peak(0.0, 0.2, 0.1), best=0.05, mean=0.0)
    assert not Calibration(None, None, 0.0, 0.0, 100, 100).is_nothing(Peak(0.0, 0.4, 0.1), best=0.1, mean=0.0)


def test_the_rule_with_the_most_right_answers_is_chosen():
    ratio = np.linspace(0, 1, 1000)
    peak = np.where(np.arange(1000) % 2, 4.0, 1.0)
    is_present = np.where(peak > 2, ratio > 0.4, np.arange(1000) % 4 == 0)  # a low peak says nothing
    best, min_peak, precision, recall = choose_rule(Simulated(ratio, peak, is_present))
    assert 0.4 <= best < 0.45
    assert 1.0 < min_peak <= 4.0
    assert 0.9 <= precision < 0.92
    assert recall == pytest.approx(200 / (~is_present).sum())


def test_too_few_words_or_images_give_no_rule():
    world = World(1)
    assert calibrate(world.encode, word_queries(world.captions[:50]), world.image_NE[:50]) is None
    assert calibrate(world.encode, word_queries([["same words"]] * 600), world.image_NE) is None


@pytest.mark.parametrize(
    "array",
    [np.zeros((5, 7), np.float16), np.zeros((5, 8), np.float32), np.zeros(8, np.float16), np.zeros((0, 8), np.float16)],
)
def test_a_reference_of_another_shape_is_refused(tmp_path, array):
    np.save(tmp_path / SEARCH_REFERENCE, array)
    with pytest.raises(ValueError, match="damaged"):
        read_reference(tmp_path / SEARCH_REFERENCE, 8)


def test_a_reference_is_a_sample_in_half_precision(tmp_path):
    image_NE = unit(np.random.default_rng(0).standard_normal((3000, 8)))
    write_reference(tmp_path / SEARCH_REFERENCE, image_NE)
    reference_RE = read_reference(tmp_path / SEARCH_REFERENCE, 8)
    assert reference_RE.shape == (1000, 8)
    assert (reference_RE @ image_NE.T).max(1).min() > 0.999


@pytest.mark.parametrize("record", [None, [], {"ratio": "x"}, {"ratio": 0.5, "min_peak": 2, "precision": None}])
def test_a_record_that_is_none_gives_no_rule(record):
    assert read_calibration(record) is None


def test_a_record_is_read_as_it_was_written():
    rule = Calibration(0.5, 3.0, 0.95, 0.2, 100, 100)
    assert read_calibration(rule.record()) == rule
