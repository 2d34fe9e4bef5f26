from dataclasses import replace
from hashlib import blake2b
from random import Random

import numpy as np
import pytest

from m1clip.data import synthetic
from m1clip.data.synthetic import (
    COLORS,
    PLACES,
    POSITIONS,
    SIZES,
    SKIES,
    SUBJECTS,
    TIMES,
    SyntheticScenes,
    permute,
    render_scene,
)

WORDS = {
    **{"subject": SUBJECTS, "color": COLORS, "count": (1, 2), "size": SIZES},
    **{"position": POSITIONS, "place": PLACES, "time": TIMES, "sky": SKIES},
}


def combination(scene):
    return scene.subject, scene.color, scene.place


def test_a_scene_is_a_function_of_seed_and_index_alone():
    one, other = SyntheticScenes(50, seed=3), SyntheticScenes(900, seed=3)
    assert one.captions(17) == other.captions(17)
    assert np.array_equal(one.image(17), other.image(17))
    assert one.captions(17) != SyntheticScenes(50, seed=4).captions(17)


def test_images_are_224_pixels_and_rgb():
    image = SyntheticScenes(1).image(0)
    assert (image.size, image.mode) == ((224, 224), "RGB")


@pytest.mark.parametrize("split", ["train", "val"])
def test_no_two_scenes_are_alike(split):
    pairs = SyntheticScenes(5000, split=split)
    distinct = {pairs.scene(i) for i in range(5000)}
    assert len(distinct) == 5000
    assert len({synthetic.describe(scene, 0) for scene in distinct}) == 5000


def test_validation_combinations_are_never_in_training_whatever_the_seed():
    train = {combination(SyntheticScenes(20000, seed=s).scene(i)) for s in (0, 1) for i in range(20000)}
    val = {combination(SyntheticScenes(5000, seed=s, split="val").scene(i)) for s in (0, 7) for i in range(5000)}
    assert not train & val
    assert len(train) + len(val) == len(synthetic.COMBINATIONS)


def test_each_part_of_a_validation_combination_is_in_training():
    train = [combination(SyntheticScenes(12000).scene(i)) for i in range(12000)]
    pairs = {(a, b) for s, c, p in train for a, b in ((s, c), (s, p), (c, p))}
    for i in range(240):
        subject, color, place = combination(SyntheticScenes(240, split="val").scene(i))
        assert {(subject, color), (subject, place), (color, place)} <= pairs


def test_every_caption_has_every_word_and_fits_a_context_of_77_characters():
    pairs = SyntheticScenes(4000)
    for i in range(4000):
        scene = pairs.scene(i)
        for caption in pairs.captions(i):
            assert len(caption) <= 75
            words = caption.replace(",", "").replace(":", "").split()
            assert {scene.size, scene.color, scene.position, scene.place, scene.time, scene.sky} <= set(words)


def test_an_edit_changes_exactly_one_word():
    pairs = SyntheticScenes(300, split="val")
    changed = set()
    for i in range(300):
        (true,) = pairs.captions(i)
        for field, wrong in pairs.edits(i):
            differ = [(a, b) for a, b in zip(true.split(), wrong.split(), strict=True) if a != b]
            assert len(differ) == 1, (true, wrong)
            changed.add(field)
    assert changed == {"subject", "color", "count", "size", "position", "place", "time", "sky"}


def test_every_subject_and_place_has_a_drawing():
    assert {s for subjects, _ in synthetic.CATEGORIES.values() for s in subjects} == set(SUBJECTS)
    assert {p for _, places in synthetic.CATEGORIES.values() for p in places} == set(PLACES)


def test_changing_any_one_word_changes_the_image():
    scene = SyntheticScenes(1).scene(0)
    for field, words in WORDS.items():
        other = replace(scene, **{field: next(word for word in words if word != getattr(scene, field))})
        assert not np.array_equal(render_scene(scene, Random(0)), render_scene(other, Random(0))), field


@pytest.mark.parametrize("size", [1, 2, 5, 64, 1280])
def test_permute_is_a_permutation(size):
    assert sorted(permute(i, size, "key") for i in range(size)) == list(range(size))


def test_more_scenes_than_there_are_is_refused():
    with pytest.raises(ValueError, match="537,600 train scenes"):
        SyntheticScenes(10**9)


def test_the_random_keys_of_scenes_never_change():
    """Runs are compared over months: other scenes would be another benchmark."""
    digest = blake2b(digest_size=8)
    for split in ("train", "val"):
        pairs = SyntheticScenes(1000, seed=3, split=split)
        for i in range(0, 1000, 50):
            digest.update(repr((pairs.captions(i), list(pairs.edits(i)))).encode())
    assert digest.hexdigest() == "52eea5c148046ec4"
