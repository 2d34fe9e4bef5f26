"""Check, convert, train and eval on files, as they are typed."""

import io
import json
from dataclasses import replace

import datasets
import numpy as np
import pytest
import webdataset
from PIL import Image
from safetensors.numpy import load_file

from m1clip import cli
from m1clip.config import DataConfig
from m1clip.data.check import alike, examine
from photos import SCENES, jpeg, opened, photos
from trained import Quiet, trained


def said(capsys, *words: str) -> tuple[int, str, str]:
    code = cli.run([str(word) for word in words])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.fixture
def spoiled(tmp_path):
    """100 images of which six rows are unusable, two are copies, one is on both sides, three are odd."""
    folder = tmp_path / "set"
    names = write_photos(folder, 100)
    sides = ["val" if i % 10 == 9 else "train" for i in range(100)]
    lines = [f"{name},scene {i},{side}" for i, (name, side) in enumerate(zip(names, sides, strict=True))]
    (folder / names[3]).write_bytes(jpeg(3)[:400])
    (folder / names[4]).write_bytes(b"")
    (folder / names[5]).write_text("<html>")
    (folder / names[6]).unlink()
    lines[7] = f"{names[7]},,train"
    lines[8] = f"{names[8]},x"
    (folder / names[11]).write_bytes(jpeg(10))  # a copy, on the same side
    (folder / names[19]).write_bytes(jpeg(20))  # a copy, on the other
    SCENES.image(22).save(folder / names[21], "JPEG", quality=60)  # the next one, larger and saved anew
    Image.fromarray(np.arange(4096, dtype=np.uint16).reshape(64, 64) * 16).save(folder / names[30], "PNG")
    SCENES.image(31).convert("CMYK").save(folder / names[31], "JPEG")
    SCENES.image(32).resize((20, 20)).save(folder / names[32], "JPEG")
    lines[40] = f"{names[40]},scene 41,train"  # the words of the next
    table = tmp_path / "set" / "t.csv"
    table.write_text("\n".join(["image,caption,split", *lines]))
    return table


def test_check_finds_every_fault_and_no_other(spoiled, tmp_path, capsys):
    code, out, _ = said(capsys, "data", "check", spoiled, "--json", "--sheet", tmp_path / "s.png", "--workers", "1")
    report = json.loads(out)
    assert code == 1  # six in a hundred are more than one
    places = {(fault["kind"], fault["where"].rpartition("t.csv ")[2].partition(" (")[0]) for fault in report["named"]}
    assert places == {
        ("truncated", "line 5"),
        ("empty file", "line 6"),
        ("unreadable", "line 7"),
        ("missing file", "line 8"),
        ("no caption", "line 9"),
        ("broken line", "line 10"),
    }
    assert (report["unusable"], report["rows"]) == (6, 100)
    assert report["sides"] == {"train": 87, "val": 10}
    couples = {
        key: [tuple(row.partition("(")[2][:4] for row in two) for two in report[key]]
        for key in ("same_bytes", "look_alike", "leaks")
    }
    assert couples["same_bytes"] == [("0010", "0011"), ("0019", "0020")]
    assert couples["look_alike"] == [("0021", "0022")]
    assert couples["leaks"] == [("0019", "0020")]
    assert report["odd"] == {"tiny": 1, "CMYK": 1, "16-bit": 1}
    assert report["sizes"] == {
        "below 64": 91,
        "64–127": 1,
        "224–335": 2,
        **dict.fromkeys(("128–223", "336–511", "512–1023", "1024–2047", "2048 up"), 0),
    }
    assert (report["repeated_captions"], report["most_repeated"]) == (2, [["scene 41", 2]])
    assert report["words_per_caption"] == {"least": 2, "median": 2, "most": 2}
    assert Image.open(tmp_path / "s.png").size[0] > 1000


def test_check_tells_a_person(spoiled, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, _ = said(capsys, "data", "check", spoiled, "--max-bad-rows", "0.1", "--workers", "1")
    assert code == 0
    for words in (
        "6 of 100 rows (6.00%)",
        "t.csv line 8: there is no 0006.jpg",
        "1 couple of these on different sides",
        "check.png",
    ):
        assert words in out


def test_check_reports_even_where_nothing_can_be_used(tmp_path, capsys):
    (tmp_path / "t.csv").write_text("image,caption\na.jpg,x\nb\x1b[31m.jpg,y\n")
    code, out, _ = said(capsys, "data", "check", tmp_path / "t.csv", "--json")
    report = json.loads(out)
    assert (code, report["unusable"], report["faults"]) == (1, 2, {"missing file": 2})
    code, out, _ = said(capsys, "data", "check", tmp_path / "t.csv")
    assert (code, "there is no a.jpg" in out, "\x1b[31m" in out) == (1, True, False)


def test_images_that_look_alike_are_found_and_others_are_not():
    found = examine(SCENES, range(100))[0]
    assert alike(found) == []
    changed = []
    for side, quality in ((64, 90), (200, 30), (224, 50), (500, 95), (100, 70)):
        made = io.BytesIO()
        SCENES.image(42).resize((side, side)).save(made, "JPEG", quality=quality)

        class Alone:
            def image(self, row, least=0, made=made):
                return Image.open(made)

        changed.append(examine(Alone(), [0])[0])
    both = np.concatenate([found, *changed])
    assert {couple for couple in alike(both) if couple[0] == 42} == {(42, 100 + k) for k in range(5)}


@pytest.mark.parametrize("to", ["shards", "parquet"])
def test_convert_keeps_bytes_captions_and_sides(spoiled, tmp_path, capsys, to):
    out = tmp_path / "out"
    words = ("data", "convert", spoiled, out, "--to", to, "--per-file", "30", "--max-bad-rows", "0.1")
    code, told, _ = said(capsys, *words, "--json")
    done = json.loads(told)
    assert (code, done["pairs"], done["files"], done["skipped"]) == (0, 94, 4, 6)
    ending = "tar" if to == "shards" else "parquet"
    source, back = open_source(spoiled), open_source(out / f"*.{ending}")
    assert (len(back.train), len(back.val)) == (84, 10)
    for ours, theirs in ((source.train, back.train), (source.val, back.val)):
        before = {ours.captions(i)[0]: ours.read(i) for i in range(len(ours))}
        after = {theirs.captions(i)[0]: theirs.read(i) for i in range(len(theirs))}
        assert after.items() <= before.items()
    if to == "shards":
        others = webdataset.WebDataset(str(out / "train-000000.tar"), shardshuffle=False)
        assert {one["txt"].decode() for one in others} <= {f"scene {i}" for i in range(100)}
    else:
        other = datasets.load_dataset(
            "parquet", data_files=str(out / "val-000000.parquet"), split="train", cache_dir=str(tmp_path)
        )
        assert other[0]["image"].size == (48, 48)

    first, second = sorted(out.glob(f"*.{ending}"))[:2]
    kept = first.stat().st_mtime_ns
    second.write_bytes(second.read_bytes()[:-1])  # damaged: made again; the others are left alone
    manifest = {
        one["file"]: one["sha256"] for one in map(json.loads, (out / "manifest.jsonl").read_text().splitlines()[1:])
    }
    assert said(capsys, *words, "--json")[0] == 0
    assert first.stat().st_mtime_ns == kept
    again = {
        one["file"]: one["sha256"] for one in map(json.loads, (out / "manifest.jsonl").read_text().splitlines()[1:])
    }
    assert again == manifest  # the same bytes
    code, _, err = said(capsys, *words[:3], out, "--to", to, "--per-file", "7", "--max-bad-rows", "0.1")
    assert (code, "other settings" in err) == (2, True)


def test_a_conversion_of_other_captions_or_sides_is_not_continued(spoiled, tmp_path, capsys):
    words = ("data", "convert", spoiled, tmp_path / "out", "--max-bad-rows", "0.1")
    assert said(capsys, *words)[0] == 0
    spoiled.write_text(spoiled.read_text().replace("scene 50,", "scene fifty,"))
    code, _, err = said(capsys, *words)
    assert (code, "conversion of other data" in err) == (2, True)


def test_a_run_passes_over_bad_rows_and_says_so(spoiled, tiny_run, tmp_path):
    config = replace(tiny_run, data=str(spoiled), val_size="auto", max_bad_rows=0.1, workers=1)
    console = Quiet()
    result = trained(config, tmp_path / "r", console=console)
    assert (result.finished, result.scores.images) == (True, 10)
    assert any("6 of 100 rows are unusable" in text for text in console.warnings)
    kept = json.loads((tmp_path / "r" / "data.json").read_text())
    assert (kept["train"], kept["val"], sum(kept["skipped"].values())) == (84, 10, 6)
    with pytest.raises(ValueError, match=r"3 of 100 rows are unusable.*--max-bad-rows allows 1\.00%"):
        trained(replace(config, max_bad_rows=0.01), tmp_path / "s")


@pytest.mark.parametrize("how", [{"cache_gb": 0.0}, {"crop": 0.5, "flip": True, "color": 0.3}])
def test_a_run_on_files_resumes_exactly_stored_or_live(spoiled, tiny_run, tmp_path, how):
    config = replace(tiny_run, data=str(spoiled), val_size="auto", max_bad_rows=0.1, workers=2, **how)
    trained(config, tmp_path / "whole")
    trained(config, tmp_path / "broken", stop_at=6)
    trained(config, tmp_path / "broken")
    one, other = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("whole", "broken"))
    assert all(np.array_equal(one[name], other[name]) for name in one)


def test_stored_and_live_images_train_the_same_model(tiny_run, tmp_path):
    names = write_photos(tmp_path / "set", 64)
    (tmp_path / "set" / "t.csv").write_text(
        "image,caption\n" + "\n".join(f"{n},scene {i}" for i, n in enumerate(names))
    )
    config = replace(tiny_run, data=str(tmp_path / "set" / "t.csv"), val_size=8, workers=2, epochs=1)
    for name, gigabytes in (("stored", 1.0), ("live", 0.0)):
        trained(replace(config, cache_gb=gigabytes), tmp_path / name)
    one, other = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("stored", "live"))
    assert all(np.array_equal(one[name], other[name]) for name in one)


def test_a_resumed_run_has_its_images_as_before_whatever_the_cache_allows_now(spoiled, tiny_run, tmp_path):
    config = replace(tiny_run, data=str(spoiled), val_size="auto", max_bad_rows=0.1, workers=2, cache_gb=0.0)
    trained(config, tmp_path / "whole")
    trained(config, tmp_path / "broken", stop_at=3)
    trained(replace(config, cache_gb=5.0), tmp_path / "broken")
    one, other = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("whole", "broken"))
    assert all(np.array_equal(one[name], other[name]) for name in one)


def test_a_run_is_not_resumed_on_other_data(spoiled, tiny_run, tmp_path):
    config = replace(tiny_run, data=str(spoiled), val_size="auto", max_bad_rows=0.1, workers=1)
    trained(config, tmp_path / "r", stop_at=3)
    spoiled.write_text(spoiled.read_text().replace("scene 50,", "scene fifty,"))
    with pytest.raises(ValueError, match=r"the data is not what .* began with"):
        trained(config, tmp_path / "r")


def test_eval_takes_any_side_and_any_data(spoiled, tiny_run, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trained(replace(tiny_run, data=str(spoiled), val_size="auto", max_bad_rows=0.1, workers=1), tmp_path / "runs" / "r")
    for words, images in (
        ((), 10),
        (("--split", "all"), 94),
        (("--data", "synthetic", "--val-size", "12"), 12),
    ):
        code, out, _ = said(capsys, "eval", "runs/r", "--device", "cpu", "--json", *words)
        assert (code, json.loads(out)["images"]) == (0, images)
    code, _, err = said(capsys, "eval", "runs/r", "--split", "test")
    assert (code, "has no test split" in err) == (2, True)


def test_preview_of_files(spoiled, tmp_path, capsys):
    assert said(capsys, "data", "preview", spoiled, "--max-bad-rows", "1", "--out", tmp_path / "p.png")[0] == 0
    assert Image.open(tmp_path / "p.png").size[0] > 1000


def test_data_flags_are_checked():
    for wrong in (
        {"max_bad": 2.0},
        {"cache_gb": -1.0},
        {"val": 0},
        {"prompt": "no place"},
        {"workers": -1},
    ):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            DataConfig(**wrong)
