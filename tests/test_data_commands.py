"""The data commands, and train and eval on files."""

import io
import json
from dataclasses import replace

import datasets
import numpy as np
import pytest
import webdataset
from PIL import Image
from safetensors.numpy import load_file

from helpers import QuietConsole, train_run
from m1clip import cli
from m1clip.config import DataConfig, check_config
from m1clip.data.check import examine_rows
from m1clip.perceptual_hash import near_duplicates
from photos import SCENES, captions_by_image, jpeg, open_source, write_photos


def run_command(capsys, *words: object) -> tuple[int, str, str]:
    """Exit code, stdout and stderr."""
    code = cli.run_command([str(word) for word in words])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.fixture
def bad_table(tmp_path):
    """A table of 100 images: six bad rows, two copies, one leak, one near duplicate, three unusual images."""
    folder = tmp_path / "set"
    names = write_photos(folder, 100)
    lines = [f"{name},scene {i},{'val' if i % 10 == 9 else 'train'}" for i, name in enumerate(names)]
    (folder / names[3]).write_bytes(jpeg(3)[:400])
    (folder / names[4]).write_bytes(b"")
    (folder / names[5]).write_text("<html>")
    (folder / names[6]).unlink()
    lines[7] = f"{names[7]},,train"
    lines[8] = f"{names[8]},x"
    (folder / names[11]).write_bytes(jpeg(10))  # a copy in the same split
    (folder / names[19]).write_bytes(jpeg(20))  # a copy in another split
    SCENES.image(22).save(folder / names[21], "JPEG", quality=60)  # the next one, larger and recompressed
    Image.fromarray(np.arange(4096, dtype=np.uint16).reshape(64, 64) * 16).save(folder / names[30], "PNG")
    SCENES.image(31).convert("CMYK").save(folder / names[31], "JPEG")
    SCENES.image(32).resize((20, 20)).save(folder / names[32], "JPEG")
    lines[40] = f"{names[40]},scene 41,train"  # the caption of the next image
    table = tmp_path / "set" / "t.csv"
    table.write_text("\n".join(["image,caption,split", *lines]))
    return table


def test_check_lists_every_bad_row_and_no_other(bad_table, tmp_path, capsys):
    code, out, _ = run_command(
        capsys, "data", "check", bad_table, "--json", "--sheet", tmp_path / "s.png", "--workers", "1"
    )
    report = json.loads(out)
    assert code == 1  # 6 % are more than 1 %
    bad = {
        (r["kind"], r["location"].rpartition("t.csv ")[2].partition(" (")[0]) for r in report["bad_rows"]["examples"]
    }
    assert bad == {
        ("truncated", "line 5"),
        ("empty file", "line 6"),
        ("unreadable", "line 7"),
        ("missing file", "line 8"),
        ("no caption", "line 9"),
        ("broken line", "line 10"),
    }
    assert (report["bad_rows"]["count"], report["rows"]) == (6, 100)
    assert report["splits"] == {"train": 87, "val": 10}
    pairs = {
        key: [tuple(row.partition("(")[2][:4] for row in pair) for pair in report[key]]
        for key in ("exact_duplicates", "near_duplicates", "leaks")
    }
    assert pairs["exact_duplicates"] == [("0010", "0011"), ("0019", "0020")]
    assert pairs["near_duplicates"] == [("0021", "0022")]
    assert pairs["leaks"] == [("0019", "0020")]
    assert report["unusual"] == {"tiny": 1, "CMYK": 1, "16-bit": 1}
    assert report["sizes"] == {
        "below 64": 91,
        "64–127": 1,
        "224–335": 2,
        **dict.fromkeys(("128–223", "336–511", "512–1023", "1024–2047", "2048 up"), 0),
    }
    assert (report["shared_captions"], report["most_shared"]) == (2, [["scene 41", 2]])
    assert report["words_per_caption"] == {"min": 2, "median": 2, "max": 2}
    assert Image.open(tmp_path / "s.png").size == (6 * 238 + 14, 4 * (224 + 17 + 28) + 14)


def test_check_prints_the_report(bad_table, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, _ = run_command(capsys, "data", "check", bad_table, "--max-bad-rows", "0.1", "--workers", "1")
    assert code == 0
    for words in (
        "6 of 100 rows (6.0 %)",
        "t.csv line 8: there is no 0006.jpg",
        "1 of these pairs are in different splits",
        "check.png",
    ):
        assert words in out


def test_check_reports_data_without_any_usable_row(tmp_path, capsys):
    (tmp_path / "t.csv").write_text("image,caption\na.jpg,x\nb\x1b[31m.jpg,y\n")
    code, out, _ = run_command(capsys, "data", "check", tmp_path / "t.csv", "--json")
    report = json.loads(out)
    assert (code, report["bad_rows"]["count"], report["bad_rows"]["kinds"]) == (1, 2, {"missing file": 2})
    code, out, _ = run_command(capsys, "data", "check", tmp_path / "t.csv")
    assert (code, "there is no a.jpg" in out, "\x1b[31m" in out) == (1, True, False)


def test_near_duplicates_are_resized_and_recompressed_copies_only():
    stats = examine_rows(SCENES, range(100))[0]
    assert near_duplicates(stats) == []
    copies = []
    for size, quality in ((64, 90), (200, 30), (224, 50), (500, 95), (100, 70)):
        file = io.BytesIO()
        SCENES.image(42).resize((size, size)).save(file, "JPEG", quality=quality)

        class OneImage:
            def image(self, row, min_size=0, file=file):
                return Image.open(file)

        copies.append(examine_rows(OneImage(), [0])[0])
    assert set(near_duplicates(np.concatenate([stats, *copies]))) >= {(42, 100 + k) for k in range(5)}


def checksums(out) -> dict[str, str]:
    lines = (out / "manifest.jsonl").read_text().splitlines()[1:]
    return {entry["file"]: entry["sha256"] for entry in map(json.loads, lines)}


@pytest.mark.parametrize("to", ["shards", "parquet"])
def test_convert_keeps_bytes_captions_and_splits(bad_table, tmp_path, capsys, to):
    out = tmp_path / "out"
    words = ("data", "convert", bad_table, out, "--to", to, "--per-file", "30", "--max-bad-rows", "0.1")
    code, summary, _ = run_command(capsys, *words, "--json")
    done = json.loads(summary)
    assert (code, done["pairs"], done["files"], done["bad_rows"]["count"]) == (0, 94, 4, 6)
    suffix = "tar" if to == "shards" else "parquet"
    source, back = open_source(bad_table), open_source(out / f"*.{suffix}")
    assert (len(back.train), len(back.val)) == (84, 10)
    for ours, theirs in ((source.train, back.train), (source.val, back.val)):
        before = {ours.captions(i)[0]: ours.read(i) for i in range(len(ours))}
        after = {theirs.captions(i)[0]: theirs.read(i) for i in range(len(theirs))}
        assert after.items() <= before.items()
    if to == "shards":
        samples = webdataset.WebDataset(str(out / "train-000000.tar"), shardshuffle=False)
        assert {sample["txt"].decode() for sample in samples} <= {f"scene {i}" for i in range(100)}
    else:
        loaded = datasets.load_dataset(
            "parquet", data_files=str(out / "val-000000.parquet"), split="train", cache_dir=str(tmp_path)
        )
        assert loaded[0]["image"].size == (48, 48)

    first, second = sorted(out.glob(f"*.{suffix}"))[:2]
    kept = first.stat().st_mtime_ns
    second.write_bytes(second.read_bytes()[:-1])  # damaged: written again; the others are not
    before = checksums(out)
    assert run_command(capsys, *words, "--json")[0] == 0
    assert first.stat().st_mtime_ns == kept
    assert checksums(out) == before
    code, _, err = run_command(capsys, *words[:3], out, "--to", to, "--per-file", "7", "--max-bad-rows", "0.1")
    assert (code, "conversion of other data or settings" in err) == (2, True)


def test_a_conversion_of_other_data_is_not_continued(bad_table, tmp_path, capsys):
    words = ("data", "convert", bad_table, tmp_path / "out", "--max-bad-rows", "0.1")
    assert run_command(capsys, *words)[0] == 0
    bad_table.write_text(bad_table.read_text().replace("scene 50,", "scene fifty,"))
    code, _, err = run_command(capsys, *words)
    assert (code, "conversion of other data" in err) == (2, True)


@pytest.fixture
def table_run(bad_table, tiny_run):
    return replace(tiny_run, data=str(bad_table), val_size="auto", max_bad_rows=0.1, recipe="scratch")


def equal_models(run, other) -> bool:
    one, two = (load_file(folder / "model" / "model.safetensors") for folder in (run, other))
    return one.keys() == two.keys() and all(np.array_equal(one[name], two[name]) for name in one)


def test_a_run_skips_bad_rows_and_warns(table_run, tmp_path):
    config = replace(table_run, workers=1)
    console = QuietConsole()
    result = train_run(config, tmp_path / "r", console=console)
    assert (result.finished, result.scores.images) == (True, 10)
    assert any("6 of 100 rows are unusable" in text for text in console.warnings)
    record = json.loads((tmp_path / "r" / "data.json").read_text())
    assert (record["train"], record["val"], record["skipped"]["count"]) == (84, 10, 6)
    with pytest.raises(ValueError, match=r"3 of 100 rows are unusable.*--max-bad-rows allows 1\.0 %"):
        train_run(replace(config, max_bad_rows=0.01), tmp_path / "s")


@pytest.mark.parametrize("settings", [{"cache_gb": 0.0}, {"crop_scale": 0.5, "hflip": True, "color_jitter": 0.3}])
def test_a_run_on_files_resumes_exactly_cached_or_on_the_fly(table_run, tmp_path, settings):
    config = replace(table_run, workers=2, **settings)
    train_run(config, tmp_path / "whole")
    train_run(config, tmp_path / "resumed", stop_at=6)
    train_run(config, tmp_path / "resumed")
    assert equal_models(tmp_path / "whole", tmp_path / "resumed")


def test_cached_and_on_the_fly_images_train_the_same_model(tiny_run, tmp_path):
    names = write_photos(tmp_path / "set", 64)
    (tmp_path / "set" / "t.csv").write_text(
        "image,caption\n" + "\n".join(f"{n},scene {i}" for i, n in enumerate(names))
    )
    config = replace(tiny_run, data=str(tmp_path / "set" / "t.csv"), val_size=8, workers=2, epochs=1)
    for name, gigabytes in (("cached", 1.0), ("on_the_fly", 0.0)):
        train_run(replace(config, cache_gb=gigabytes), tmp_path / name)
    assert equal_models(tmp_path / "cached", tmp_path / "on_the_fly")


def test_a_resumed_run_decodes_on_the_fly_as_before_whatever_the_cache_limit(table_run, tmp_path):
    config = replace(table_run, workers=2, cache_gb=0.0)
    train_run(config, tmp_path / "whole")
    train_run(config, tmp_path / "resumed", stop_at=3)
    train_run(replace(config, cache_gb=5.0), tmp_path / "resumed")
    assert equal_models(tmp_path / "whole", tmp_path / "resumed")


def test_a_run_is_not_resumed_on_other_data(bad_table, table_run, tmp_path):
    config = replace(table_run, workers=1)
    train_run(config, tmp_path / "r", stop_at=3)
    bad_table.write_text(bad_table.read_text().replace("scene 50,", "scene fifty,"))
    with pytest.raises(ValueError, match=r"the data of .* has changed"):
        train_run(config, tmp_path / "r")


def test_eval_takes_any_split_and_any_data(table_run, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train_run(replace(table_run, workers=1), tmp_path / "runs" / "r")
    for options, images in (((), 10), (("--split", "all"), 94), (("--data", "synthetic", "--val-size", "12"), 12)):
        argv = ("eval", "runs/r", "--device", "cpu", "--task", "retrieval", "--json")
        code, out, _ = run_command(capsys, *argv, *options)
        assert (code, json.loads(out)["images"]) == (0, images)
    code, _, err = run_command(capsys, "eval", "runs/r", "--split", "test")
    assert (code, "has no test split" in err) == (2, True)


def test_preview_writes_a_contact_sheet(bad_table, tmp_path, capsys):
    assert run_command(capsys, "data", "preview", bad_table, "--max-bad-rows", "1", "--out", tmp_path / "p.png")[0] == 0
    assert Image.open(tmp_path / "p.png").size[0] == 6 * 238 + 14


def test_data_flags_are_checked(tmp_path, capsys):
    for wrong in (
        {"max_bad_rows": 2.0},
        {"cache_gb": -1.0},
        {"val_size": 0},
        {"template": "no placeholder"},
        {"workers": -1},
    ):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            check_config(DataConfig(**wrong))
    write_photos(tmp_path / "cat", 3)
    for command in ("check", "preview", "convert"):
        code, _, err = run_command(
            capsys, "data", command, tmp_path, *[tmp_path / "out"] * (command == "convert"), "--workers", "-1"
        )
        assert (code, "workers must be at least 0" in err) == (2, True)


def test_a_template_of_captions_is_filled_in_and_read_back(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = write_photos(tmp_path / "my photos", 6)
    (tmp_path / "my photos" / names[1]).with_suffix(".txt").write_text("one, caption\nanother “one”\n")
    code, _, err = run_command(capsys, "data", "preview", "my photos")
    assert (code, "5 of 6 rows are unusable" in err, "m1clip data template 'my photos'" in err) == (2, True, True)
    code, out, _ = run_command(capsys, "data", "template", "my photos")
    assert (code, "6 images, 5 of them without a caption" in out) == (0, True)
    table = tmp_path / "captions.csv"
    filled = table.read_text().replace(".jpg,\n", ".jpg,filled in\n")
    table.write_text(filled)
    source = open_source("captions.csv", val_size=1)
    assert captions_by_image(source) == {
        f"my photos/{name}": ["one, caption", "another “one”"] if name == names[1] else ["filled in"] for name in names
    }
    code, _, err = run_command(capsys, "data", "template", "my photos")
    assert (code, "captions.csv exists" in err, table.read_text()) == (2, True, filled)
    assert run_command(capsys, "data", "template", "my photos", "--overwrite")[0] == 0
    assert table.read_text() != filled


@pytest.mark.parametrize(
    ("words", "reason"),
    [("nowhere", "there is no folder nowhere"), (". --out x.txt", "must end in .csv"), (".", "has no images in it")],
)
def test_a_template_that_cannot_be_written_is_refused(tmp_path, capsys, monkeypatch, words, reason):
    monkeypatch.chdir(tmp_path)
    code, _, err = run_command(capsys, "data", "template", *words.split())
    assert (code, reason in err, list(tmp_path.iterdir())) == (2, True, [])


def test_notes_about_the_data_are_in_the_header_the_report_and_data_json(tiny_run, tmp_path, capsys):
    names = write_photos(tmp_path / "set", 40)
    lines = [f"{name},<b>caf\xe9</b> {i}" for i, name in enumerate(names)]
    (tmp_path / "set" / "t.csv").write_text("\n".join(["image,caption", *lines]), "cp1252")
    notes = [f'{tmp_path}/set/t.csv is not UTF-8; read as cp1252, such as "0000.jpg,<b>café</b> 0"']
    notes += ["40 captions with HTML tags or entities, which are removed"]
    sheet = ("--sheet", tmp_path / "s.png", "--workers", "1")
    code, out, _ = run_command(capsys, "data", "check", tmp_path / "set" / "t.csv", "--json", *sheet)
    assert (code, json.loads(out)["notes"]) == (0, notes)
    code, out, _ = run_command(capsys, "data", "check", tmp_path / "set" / "t.csv", *sheet)
    assert all(note in out for note in notes)
    config = replace(tiny_run, data=str(tmp_path / "set" / "t.csv"), val_size=8, workers=1, epochs=1, recipe="scratch")
    console = QuietConsole()
    train_run(config, tmp_path / "r", console=console)
    assert json.loads((tmp_path / "r" / "data.json").read_text())["notes"] == "; ".join(notes)
    assert "not UTF-8; read as cp1252" in console.console.file.getvalue().replace("\n", " ")


def test_check_reports_how_many_negatives_training_would_mask(tmp_path, capsys):
    write_photos(tmp_path / "photos", 10)
    (tmp_path / "photos" / "metadata.csv").write_text(
        "file_name,text\n" + "".join(f"{i:04d}.jpg,{'a photo' if i < 9 else 'a red bus'}\n" for i in range(10))
    )
    code, out, _ = run_command(capsys, "data", "check", tmp_path / "photos", "--sheet", tmp_path / "s.png")
    assert code == 0
    assert "82.0 % of the pairs in a batch have equal captions" in out  # 0.9² + 0.1²


def test_a_bad_line_in_a_manifest_is_skipped(tmp_path, capsys):
    write_photos(tmp_path / "photos", 4)
    rows = "".join(f"{i:04d}.jpg,caption {i}\n" for i in range(4))
    (tmp_path / "photos" / "metadata.csv").write_text(f"file_name,text\n{rows}")
    words = ("data", "convert", tmp_path / "photos", tmp_path / "out")
    assert run_command(capsys, *words)[0] == 0
    with open(tmp_path / "out" / "manifest.jsonl", "a") as file:
        file.write("[" * 200_000 + '\n{"file": []}\n{}\n')
    assert run_command(capsys, *words)[0] == 0


def test_a_conversion_deletes_nothing_of_a_folder_that_is_not_its_own(tmp_path, capsys):
    for name in (".venv-3.12", ".backup.2024", ".notes.77.new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    code, _, err = run_command(capsys, "data", "convert", "synthetic:4", tmp_path)
    assert code == 2
    assert "neither empty nor a conversion" in err
    assert len(list(tmp_path.rglob("file"))) == 3
