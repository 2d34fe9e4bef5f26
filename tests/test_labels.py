"""Classes of images from every kind of source, and splits that keep groups of images together."""

import json
from collections import Counter

import datasets
import pytest
from PIL import Image

from m1clip.data.convert import convert_dataset
from m1clip.data.index import IndexedPairs, no_progress
from m1clip.data.splits import Source
from m1clip.prompts import parse_labels
from photos import SCENES, captions_by_image, jpeg, open_source, write_photos, write_tar


def labels_of(source: Source) -> dict[str, str]:
    pairs = source.all
    assert isinstance(pairs, IndexedPairs)
    return dict(zip(pairs.texts("image"), pairs.texts("label"), strict=True))


def write_csv(path, header, rows):
    path.write_text("\n".join([header, *(",".join(map(str, row)) for row in rows)]))
    return path


def test_folders_name_the_labels_and_empty_ones_are_counted(tmp_path):
    write_photos(tmp_path / "train" / "n02099601-golden_retriever", 3)
    write_photos(tmp_path / "train" / "tabby cat", 3, start=3)
    (tmp_path / "train" / "owl").mkdir()
    source = open_source(tmp_path, val_size=1)
    assert set(labels_of(source).values()) == {"golden retriever", "tabby cat"}
    assert source.bad_rows.notes["folders without images, such as train/owl"] == 1


def test_a_label_column_beside_captions(tmp_path):
    names = write_photos(tmp_path, 4)
    rows = [(name, f"a drawing {i}", ("cat", "dog")[i % 2]) for i, name in enumerate(names)]
    source = open_source(write_csv(tmp_path / "t.csv", "image,caption,category", rows), val_size=1)
    assert labels_of(source) == {name: ("cat", "dog")[i % 2] for i, name in enumerate(names)}
    assert captions_by_image(source)[names[1]] == ["a drawing 1"]


def test_class_numbers_need_names_and_then_become_captions_too(tmp_path):
    names = write_photos(tmp_path, 4)
    rows = [(name, i % 2, "train") for i, name in enumerate(names)]
    table = write_csv(tmp_path / "t.csv", "image,label,split", rows)
    source = open_source(table, val_size=1, labels="cat,old dog")
    assert set(labels_of(source).values()) == {"cat", "old dog"}
    assert captions_by_image(source)[names[1]] == ["a photo of an old dog"]
    assert set(labels_of(open_source(table, val_size=1, label_column="label")).values()) == {"0", "1"}
    with pytest.raises(ValueError, match="has no column 'breed'; it has 'label', 'split'"):
        open_source(table, label_column="breed")


def test_an_image_with_several_labels_is_counted(tmp_path):
    names = write_photos(tmp_path, 3)
    rows = [(names[0], "cat"), (names[0], "dog"), (names[1], "cat"), (names[2], "owl"), (names[2], "owl")]
    source = open_source(write_csv(tmp_path / "t.csv", "image,label", rows), val_size=1)
    assert source.bad_rows.notes["images with several labels, of which the first is used"] == 1
    assert labels_of(source)[names[0]] == "cat"


def test_class_labels_of_the_datasets_library(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    kinds = {"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "old_dog"])}
    columns = {"image": [{"bytes": jpeg(i), "path": f"{i}.jpg"} for i in range(4)], "label": [0, 1, 1, 0]}
    columns["file_name"] = [f"x{i}.jpg" for i in range(4)]
    features = datasets.Features({**kinds, "file_name": datasets.Value("string")})
    datasets.Dataset.from_dict(columns, features=features).save_to_disk(tmp_path / "saved")
    source = open_source(f"hf:{tmp_path}/saved", val_size=1)
    assert list(labels_of(source).values()) == ["cat", "old dog", "old dog", "cat"]
    assert captions_by_image(source)["1.jpg"] == ["a photo of an old dog"]


def test_cls_members_of_shards_with_the_class_names_of_clip_benchmark(tmp_path):
    for split, start in (("train", 0), ("test", 6)):
        members = {}
        for i in range(start, start + 6):
            members |= {f"{i}.jpg": jpeg(i), f"{i}.cls": str(i % 3).encode()}
        write_tar(tmp_path / split / "0.tar", members)
    (tmp_path / "classnames.txt").write_text("cat\nold dog\nowl\n")
    source = open_source(tmp_path)
    assert [source.val.label(i) for i in range(6)] == ["cat", "old dog", "owl"] * 2
    assert (len(source.train), len(source.val)) == (6, 6)
    assert source.train.captions(1) == ["a photo of an old dog"]


def test_a_class_number_without_a_name_is_a_bad_row(tmp_path):
    members = {"0.jpg": jpeg(0), "0.cls": b"7", "1.jpg": jpeg(1), "1.cls": b"cat", "2.jpg": jpeg(2), "2.cls": b"owl"}
    source = open_source(write_tar(tmp_path / "s.tar", members), val_size=1)
    assert [str(row) for row in source.bad_rows.examples] == [
        f"{tmp_path}/s.tar: 0: class 7 has no name: --labels, or classnames.txt beside it"
    ]
    assert set(labels_of(source).values()) == {"cat", "owl"}


def test_synthetic_scenes_are_labelled_by_their_subject():
    assert SCENES.label(3) == SCENES.scene(3).subject
    assert SCENES.label(3) in SCENES.captions(3)[0] or SCENES.scene(3).count > 1


# Groups.
@pytest.fixture
def products(tmp_path):
    """Thirty products with three images each, in a table with other columns."""
    names = write_photos(tmp_path, 90)
    rows = [(name, f"photo {i}", f"p{i // 3}", i % 7) for i, name in enumerate(names)]
    return write_csv(tmp_path / "t.csv", "image,caption,product_id,price", rows)


def groups_in(pairs: IndexedPairs) -> set[int]:
    return {int(pairs.value("image", row)[:4]) // 3 for row in range(len(pairs))}


def test_group_by_a_column_keeps_its_images_in_one_split(products):
    source = open_source(products, val_size=12, group_by="product_id")
    assert len(source.val) == 12
    assert not groups_in(source.train) & groups_in(source.val)
    assert source.split_reason == "images with the same product_id stay in one split"
    with pytest.raises(ValueError, match="--group-by must be none, caption, label, folder, duplicates or a column of"):
        open_source(products, group_by="sku")


def test_a_column_that_names_groups_is_suggested(products):
    (note,) = (note for note in open_source(products).bad_rows.notes if "group-by" in note)
    assert note.startswith("column 'product_id' has 30 values for 90 images; --group-by product_id")
    assert not any("--group-by" in note for note in open_source(products, group_by="product_id").bad_rows.notes)


def test_group_by_label_holds_whole_labels_out(tmp_path):
    for number, label in enumerate(("cat", "dog", "owl", "bus", "tree")):
        write_photos(tmp_path / label, 5, start=5 * number)
    source = open_source(tmp_path, val_size=5, group_by="label")
    train, val = ({pairs.label(row) for row in range(len(pairs))} for pairs in (source.train, source.val))
    assert len(val) == 1
    assert train | val == {"cat", "dog", "owl", "bus", "tree"}
    with pytest.raises(ValueError, match="these captions are labels; --group-by label holds out whole labels"):
        open_source(tmp_path, val_size=5, group_by="caption")


def test_group_by_duplicates_keeps_images_that_look_the_same_together(tmp_path):
    """Each image three times: at another size and quality, so that no bytes are equal."""
    for i in range(12):
        image = SCENES.image(i)
        for size, quality in ((256, 95), (200, 90), (160, 85)):
            image.resize((size, size), Image.Resampling.LANCZOS).save(tmp_path / f"{i}-{size}.jpg", quality=quality)
            (tmp_path / f"{i}-{size}.txt").write_text(f"scene {i} at {size}")
    source = open_source(tmp_path, val_size=6, group_by="duplicates")
    train, val = ({name.partition("-")[0] for name in pairs.texts("image")} for pairs in (source.train, source.val))
    assert len(source.val) == 6
    assert not train & val
    assert source.split_reason == "near duplicates stay in one split"
    again = open_source(tmp_path, val_size=6, group_by="duplicates")  # from the cache
    assert again.val.texts("image") == source.val.texts("image")


def test_group_by_a_column_needs_a_table(tmp_path):
    write_photos(tmp_path / "cat", 3)
    write_photos(tmp_path / "dog", 3, start=3)
    with pytest.raises(ValueError, match="--group-by product: no image has one; choose from none, caption, label"):
        open_source(tmp_path, val_size=1, group_by="product")


# Labels and files of labels.
def test_labels_come_from_a_list_a_text_file_or_json(tmp_path):
    assert parse_labels("cat, dog ,hot dog") == ["cat", "dog", "hot dog"]
    (tmp_path / "l.txt").write_text("\ufeffcat\n\n hot dog \n")
    assert parse_labels(str(tmp_path / "l.txt")) == ["cat", "hot dog"]
    for encoding in ("utf-16", "cp1252"):
        (tmp_path / "l.txt").write_bytes("café\nhot dog".encode(encoding))
        assert parse_labels(str(tmp_path / "l.txt")) == ["café", "hot dog"]
    (tmp_path / "l.json").write_text(json.dumps({"1": "dog", "0": "cat", "10": "owl"}))
    assert parse_labels(str(tmp_path / "l.json")) == ["cat", "dog", "owl"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("cat", "at least two, and only 'cat' is given"),
        (",", "at least two, and none is given"),
        ("cat,dog,cat", "label 'cat' is given twice"),
        ("cat,Cat", "label 'Cat' is given twice, also as 'cat'"),
        ("gone.txt", "there is no file gone.txt"),
        ("gone.csv", "only 'gone.csv' is given, and there is no such file"),
    ],
)
def test_wrong_labels_are_one_sentence(text, expected):
    with pytest.raises((ValueError, FileNotFoundError), match=expected):
        parse_labels(text)


@pytest.mark.parametrize("to", ["shards", "parquet"])
def test_converted_data_keeps_its_labels(tmp_path, to):
    for number, label in enumerate(("cat", "old dog")):
        write_photos(tmp_path / "pets" / label, 4, start=4 * number)
    source = open_source(tmp_path / "pets", val_size=2)
    convert_dataset([source], tmp_path / "out", to, 3, 0.0, no_progress)
    converted = open_source(tmp_path / "out")
    counts = Counter(labels_of(converted).values())
    assert counts == Counter(labels_of(source).values()) == {"cat": 4, "old dog": 4}
    assert len(converted.val) == 2


def test_names_that_come_with_the_data_are_not_replaced_by_labels_to_choose_from(tmp_path):
    members = {}
    for i in range(6):
        members |= {f"{i}.jpg": jpeg(i), f"{i}.cls": str(i % 3).encode()}
    write_tar(tmp_path / "s,t" / "0.tar", members)
    (tmp_path / "s,t" / "classnames.txt").write_text("dog\ncat\nbus")
    source = open_source(tmp_path / "s,t", val_size=1, labels="cat,bus")
    assert list(labels_of(source).values()) == ["dog", "cat", "bus"] * 2


def test_a_class_number_outside_of_the_names_is_no_label(tmp_path):
    names = write_photos(tmp_path, 4)
    rows = [(names[0], "a", 0), (names[1], "b", -1), (names[2], "c", ""), (names[3], "d", "1.0")]
    source = open_source(write_csv(tmp_path / "t.csv", "image,caption,label", rows), val_size=1, labels="cat,dog")
    assert labels_of(source) == dict(zip(names, ("cat", "", "", "dog"), strict=True))
    table = write_csv(tmp_path / "t.csv", "image,caption,label", [*rows, (names[0], "e", 7)])
    with pytest.raises(ValueError, match="class number 7 has no name; --labels has 2 names, from 0"):
        open_source(table, val_size=1, labels="cat,dog")


def test_the_caption_column_may_be_one_of_several_class_columns(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    kinds = {
        "fine": datasets.ClassLabel(names=["tabby", "poodle"]),
        "coarse": datasets.ClassLabel(names=["cat", "dog"]),
    }
    columns = {"image": [{"bytes": jpeg(i), "path": f"{i}.jpg"} for i in range(4)]}
    columns |= {"fine": [0, 1, 1, 0], "coarse": [0, 1, 1, 0]}
    features = datasets.Features({"image": datasets.Image(), **kinds})
    datasets.Dataset.from_dict(columns, features=features).save_to_disk(tmp_path / "saved")
    source = open_source(f"hf:{tmp_path}/saved", val_size=1, caption_column="coarse")
    assert captions_by_image(source)["1.jpg"] == ["a photo of a dog"]


def test_shards_in_other_folders_do_not_hide_the_images(tmp_path):
    write_photos(tmp_path / "cat", 3)
    write_photos(tmp_path / "dog", 3, start=3)
    write_tar(tmp_path / "backup" / "old.tar", {"0.jpg": jpeg(9), "0.txt": b"old"})
    assert set(labels_of(open_source(tmp_path, val_size=1)).values()) == {"cat", "dog"}


def test_folders_with_the_same_words_are_named(tmp_path):
    write_photos(tmp_path / "n02012849-crane", 3)
    write_photos(tmp_path / "n03126707-crane", 3, start=3)
    write_photos(tmp_path / "cat", 3, start=6)
    notes = open_source(tmp_path, val_size=1).bad_rows.notes
    assert "2 folders have the same label, 'crane': n02012849-crane, n03126707-crane" in notes


def test_a_group_may_be_the_number_0(tmp_path):
    names = write_photos(tmp_path, 8)
    lines = [json.dumps({"image": name, "caption": f"c{i}", "item": i // 4}) for i, name in enumerate(names)]
    (tmp_path / "t.jsonl").write_text("\n".join(lines))
    source = open_source(tmp_path / "t.jsonl", val_size=4, group_by="item")
    assert set(source.val.texts("group")) in ({"0"}, {"1"})
    assert len(source.val) == 4
