"""Sources read through the `datasets` library, from local folders: tests have no network."""

import datasets
import pytest

from m1clip.data import containers
from m1clip.data.index import IndexedPairs
from photos import captions_by_image, jpeg, open_source, write_photos


@pytest.fixture(autouse=True)
def own_caches(tmp_path, monkeypatch):
    monkeypatch.setenv("M1CLIP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


def make_dataset(start: int, count: int) -> datasets.Dataset:
    numbers = range(start, start + count)
    text = datasets.Value("string")
    features = datasets.Features({"image": datasets.Image(), "caption": datasets.List(text)})
    images = [{"bytes": jpeg(i), "path": f"{i}.jpg"} for i in numbers]
    captions = [[f"scene {i}", f"again {i}"] for i in numbers]
    return datasets.Dataset.from_dict({"image": images, "caption": captions}, features=features)


def by_caption(pairs: IndexedPairs) -> dict[str, bytes]:
    return {pairs.captions(i)[0]: pairs.read(i) for i in range(len(pairs))}


def test_a_dataset_saved_to_disk_with_its_splits(tmp_path):
    datasets.DatasetDict(train=make_dataset(0, 12), validation=make_dataset(12, 4)).save_to_disk(tmp_path / "saved")
    source = open_source(f"hf:{tmp_path}/saved")
    assert by_caption(source.train) == {f"scene {i}": jpeg(i) for i in range(12)}
    assert by_caption(source.val) == {f"scene {i}": jpeg(i) for i in range(12, 16)}
    assert list(source.train.captions(3)) == ["scene 3", "again 3"]
    assert source.val.location(1) == f"{tmp_path}/saved validation row 2 (13.jpg)"


def test_a_parquet_repository_as_on_the_hub(tmp_path):
    (tmp_path / "name" / "data").mkdir(parents=True)
    make_dataset(0, 8).to_parquet(tmp_path / "name" / "data" / "train-00000-of-00001.parquet")
    make_dataset(8, 3).to_parquet(tmp_path / "name" / "data" / "test-00000-of-00001.parquet")
    source = open_source(f"hf:{tmp_path}/name")
    assert (len(source.train), len(source.val)) == (8, 3)
    assert len(open_source(f"hf:{tmp_path}/name?split=test", val_size=1).all) == 3


@pytest.mark.parametrize("split", ["train[3:7]", "train[50%:]", "train[:2]%2Btest"])
def test_a_slice_keeps_images_with_their_captions(tmp_path, split):
    (tmp_path / "name").mkdir()
    make_dataset(0, 8).to_parquet(tmp_path / "name" / "train-00000.parquet")
    make_dataset(8, 3).to_parquet(tmp_path / "name" / "test-00000.parquet")
    sliced = by_caption(open_source(f"hf:{tmp_path}/name?split={split}", val_size=1).all)
    assert 3 < len(sliced) < 8
    assert sliced == {f"scene {i}": jpeg(i) for i in range(11) if f"scene {i}" in sliced}


def test_class_labels_become_captions(tmp_path):
    features = datasets.Features({"img": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "old_dog"])})
    columns = {"img": [{"bytes": jpeg(i), "path": None} for i in range(4)], "label": [0, 1, 0, 1]}
    datasets.Dataset.from_dict(columns, features=features).save_to_disk(tmp_path / "classes")
    assert captions_by_image(open_source(f"hf:{tmp_path}/classes", val_size=1))["row 2"] == ["a photo of an old dog"]


def test_an_image_folder_of_the_library(tmp_path):
    write_photos(tmp_path / "images" / "train" / "cat", 3)
    write_photos(tmp_path / "images" / "train" / "dog", 3, start=3)
    source = open_source(f"hf:{tmp_path}/images", val_size=1)
    assert sorted({words for captions in captions_by_image(source).values() for words in captions}) == [
        "a photo of a cat",
        "a photo of a dog",
    ]


def test_an_interrupted_stream_continues(tmp_path, monkeypatch):
    monkeypatch.setattr(containers, "STREAM_CHUNK", 5)
    (tmp_path / "big").mkdir()
    make_dataset(0, 40).to_parquet(tmp_path / "big" / "train.parquet")
    spec = f"hf:{tmp_path}/big?stream=18"
    source = open_source(spec, val_size=2)
    assert by_caption(source.all) == {f"scene {i}": jpeg(i) for i in range(18)}
    parts = sorted((tmp_path / "cache").glob("streamed-*/*.parquet"))
    assert len(parts) == 4
    before = parts[0].stat().st_mtime_ns
    parts[-1].unlink()  # interrupted after the third
    assert by_caption(open_source(spec, val_size=2).all) == {f"scene {i}": jpeg(i) for i in range(18)}
    assert parts[0].stat().st_mtime_ns == before


def test_errors_are_one_sentence():
    with pytest.raises(ValueError, match="no-such/dataset cannot be loaded by `datasets`"):
        open_source("hf:no-such/dataset")
    with pytest.raises(ValueError, match="the options are config=, split= and stream="):
        open_source("hf:x?shuffle=1")
    with pytest.raises(ValueError, match="must be the number of rows"):
        open_source("hf:x?stream=all")


def test_the_script_of_a_dataset_is_never_run(tmp_path):
    write_photos(tmp_path / "scripted", 3)
    (tmp_path / "scripted" / "scripted.py").write_text(f"open({str(tmp_path / 'RAN')!r}, 'w')")
    with pytest.raises(ValueError, match="scripted"):
        open_source(f"hf:{tmp_path}/scripted")
    assert not (tmp_path / "RAN").exists()
