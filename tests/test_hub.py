"""Sources by way of the `datasets` library, all from local folders: there is no network here."""

import datasets
import pytest

from m1clip.data import hf_datasets
from m1clip.data.index import Indexed
from photos import jpeg, listed, opened, photos


@pytest.fixture(autouse=True)
def own_caches(tmp_path, monkeypatch):
    monkeypatch.setenv("M1CLIP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


def rows(start: int, number: int) -> datasets.Dataset:
    some = range(start, start + number)
    text = datasets.Value("string")
    kinds = datasets.Features({"image": datasets.Image(), "caption": datasets.List(text)})
    images = [{"bytes": jpeg(i), "path": f"{i}.jpg"} for i in some]
    captions = [[f"scene {i}", f"again {i}"] for i in some]
    return datasets.Dataset.from_dict({"image": images, "caption": captions}, features=kinds)


def by_caption(pairs: Indexed) -> dict[str, bytes]:
    return {pairs.captions(i)[0]: pairs.read(i) for i in range(len(pairs))}


def test_a_dataset_saved_to_disk_with_its_splits(tmp_path):
    datasets.DatasetDict(train=rows(0, 12), validation=rows(12, 4)).save_to_disk(tmp_path / "saved")
    source = opened(f"hf:{tmp_path}/saved")
    assert by_caption(source.train) == {f"scene {i}": jpeg(i) for i in range(12)}
    assert by_caption(source.val) == {f"scene {i}": jpeg(i) for i in range(12, 16)}
    assert list(source.train.captions(3)) == ["scene 3", "again 3"]


def test_a_folder_of_parquet_as_the_hub_has_it(tmp_path):
    (tmp_path / "name" / "data").mkdir(parents=True)
    rows(0, 8).to_parquet(tmp_path / "name" / "data" / "train-00000-of-00001.parquet")
    rows(8, 3).to_parquet(tmp_path / "name" / "data" / "test-00000-of-00001.parquet")
    source = opened(f"hf:{tmp_path}/name")
    assert (len(source.train), len(source.val)) == (8, 3)
    assert len(opened(f"hf:{tmp_path}/name?split=test", val_size=1).every) == 3


@pytest.mark.parametrize("split", ["train[3:7]", "train[50%:]", "train[:2]%2Btest"])
def test_a_slice_keeps_images_with_their_captions(tmp_path, split):
    (tmp_path / "name").mkdir()
    rows(0, 8).to_parquet(tmp_path / "name" / "train-00000.parquet")
    rows(8, 3).to_parquet(tmp_path / "name" / "test-00000.parquet")
    found = by_caption(opened(f"hf:{tmp_path}/name?split={split}", val_size=1).every)
    assert 3 < len(found) < 8
    assert found == {f"scene {i}": jpeg(i) for i in range(11) if f"scene {i}" in found}


def test_numbers_of_classes_become_prompts(tmp_path):
    kinds = datasets.Features({"img": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "old_dog"])})
    some = {"img": [{"bytes": jpeg(i), "path": None} for i in range(4)], "label": [0, 1, 0, 1]}
    datasets.Dataset.from_dict(some, features=kinds).save_to_disk(tmp_path / "classes")
    assert listed(opened(f"hf:{tmp_path}/classes", val_size=1))["row 2"] == ["a photo of an old dog"]


def test_an_image_folder_of_the_library(tmp_path):
    photos(tmp_path / "images" / "train" / "cat", 3)
    photos(tmp_path / "images" / "train" / "dog", 3, start=3)
    source = opened(f"hf:{tmp_path}/images", val_size=1)
    assert sorted({words for captions in listed(source).values() for words in captions}) == [
        "a photo of a cat",
        "a photo of a dog",
    ]


def test_a_stream_is_kept_as_it_comes_and_goes_on_where_it_was(tmp_path, monkeypatch):
    monkeypatch.setattr(hf_datasets, "STREAMED", 5)
    (tmp_path / "big").mkdir()
    rows(0, 40).to_parquet(tmp_path / "big" / "train.parquet")
    spec = f"hf:{tmp_path}/big?stream=18"
    source = opened(spec, val_size=2)
    assert by_caption(source.every) == {f"scene {i}": jpeg(i) for i in range(18)}
    parts = sorted((tmp_path / "cache").glob("streamed-*/*.parquet"))
    assert len(parts) == 4
    before = parts[0].stat().st_mtime_ns
    parts[-1].unlink()  # broken off after the third
    assert by_caption(opened(spec, val_size=2).every) == {f"scene {i}": jpeg(i) for i in range(18)}
    assert parts[0].stat().st_mtime_ns == before


def test_what_the_hub_does_not_have_is_one_sentence():
    with pytest.raises(ValueError, match="no-such/dataset cannot be loaded by `datasets`"):
        opened("hf:no-such/dataset")
    with pytest.raises(ValueError, match="after the name there may be config=, split= and stream="):
        opened("hf:x?shuffle=1")
    with pytest.raises(ValueError, match="should be the number of rows"):
        opened("hf:x?stream=all")
