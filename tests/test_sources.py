import json
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from m1clip.config import DataConfig
from m1clip.data.folders import prompted
from m1clip.data.sources import open_sources, parts_of
from photos import coco_json, found, jpeg, karpathy_json, listed, names, opened, photos


def test_captions_beside_the_images(tmp_path):
    for i, name in enumerate(photos(tmp_path, 30)):
        (tmp_path / name).with_suffix(".txt").write_text(f"scene {i}\nthe same, scene {i}\n")
    (tmp_path / "README.txt").write_text("about this folder")
    source = opened(tmp_path)
    assert listed(source)["0003.jpg"] == ["scene 3", "the same, scene 3"]
    assert len(listed(source)) == 30
    assert not source.faults


def test_captions_beside_that_are_missing_empty_or_orphaned(tmp_path):
    for name in photos(tmp_path, 10):
        (tmp_path / name).with_suffix(".txt").write_text("a scene")
    (tmp_path / "0001.txt").unlink()
    (tmp_path / "0002.txt").write_text(" \n ")
    (tmp_path / "0003.txt").write_bytes(b"caf\xe9 in the rain")
    (tmp_path / "0004.jpg").unlink()
    source = opened(tmp_path)
    assert found(source) == {
        ("no caption", "0001.jpg"),
        ("no caption", "0002.jpg"),
        ("not UTF-8", "0003.jpg"),
        ("missing file", "0004.txt"),
    }
    assert len(listed(source)) == 6


def test_a_folder_with_metadata(tmp_path):
    photos(tmp_path / "train", 6)
    photos(tmp_path / "test", 3, start=6)
    for side, some in (("train", range(6)), ("test", range(6, 9))):
        lines = [json.dumps({"file_name": f"{i:04d}.jpg", "text": f"scene {i}"}) for i in some]
        (tmp_path / side / "metadata.jsonl").write_text("\n".join(lines))
    source = opened(tmp_path)
    assert listed(source)["train/0002.jpg"] == ["scene 2"]
    assert (len(source.train), len(source.val), source.why) == (6, 3, "the test split as given")
    (tmp_path / "flat").mkdir()
    photos(tmp_path / "flat", 4)
    (tmp_path / "flat" / "metadata.csv").write_text("file_name,text\n0000.jpg,one\n0001.jpg,two\n")
    assert listed(opened(tmp_path / "flat")) == {"0000.jpg": ["one"], "0001.jpg": ["two"]}


def test_names_of_folders_become_prompts(tmp_path):
    photos(tmp_path / "tabby_cat", 3)
    photos(tmp_path / "n02099601-airedale", 3, start=3)
    source = opened(tmp_path)
    assert listed(source)["tabby_cat/0001.jpg"] == ["a photo of a tabby cat"]
    assert listed(source)["n02099601-airedale/0004.jpg"] == ["a photo of an airedale"]
    assert listed(opened(tmp_path, prompt="{}, drawn"))["tabby_cat/0001.jpg"] == ["tabby cat, drawn"]
    assert prompted("An_apple", "this is a {}") == "this is an An apple"


def test_a_folder_of_images_without_captions_says_what_to_do(tmp_path):
    photos(tmp_path, 3)
    with pytest.raises(ValueError, match=r"no captions: put a .txt beside each"):
        opened(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="has no images in it"):
        opened(tmp_path / "empty")


TABLES = {
    "plain.csv": "image,caption\n{0},one\n{1},two\n",
    "wider.csv": 'id,filepath,title,split\n7,{0},"one, quoted",train\n8,{1},two,val\n',
    "semicolon.csv": "url;filename;description\nx;{0};one\ny;{1};two\n",
    "headless.csv": "{0},one\n{1},two\n",
    "tabs.tsv": "path\ttext\n{0}\tone\n{1}\ttwo\n",
    "bars.csv": "image_name| comment_number| comment\n{0}| 0| one\n{1}| 0| two\n",
    "odd names.csv": "bild,beschreibung,jahr\n{0},one,1999\n{1},two,2000\n",
    "lines.jsonl": '{{"file_name": "{0}", "text": "one"}}\n\n{{"file_name": "{1}", "text": "two"}}\n',
    "object.json": '{{"{0}": "one", "{1}": ["two", "second"]}}',
    "inside.json": '{{"data": [{{"image": "{0}", "caption": "one"}}, {{"image": "{1}", "caption": "two"}}]}}',
    "plain.txt": "image,caption\n{0},one\n{1},two\n",
    "token.txt": "{0}#0\tone\n{0}#1\tfirst\n{1}#0\ttwo\n",
    "array.json": '[{{"image": "{0}", "caption": "one"}}, {{"image": "{1}", "caption": "two"}}]',
}


@pytest.mark.parametrize("name", TABLES)
def test_tables_of_many_dialects(tmp_path, name):
    images = photos(tmp_path / "images", 2)
    (tmp_path / name).write_text(TABLES[name].format(*images))
    source = opened(tmp_path / name, val_size=1)
    assert sorted(captions[0].partition(",")[0] for captions in listed(source).values()) == ["one", "two"]
    assert not source.faults


def test_columns_can_be_said(tmp_path):
    images = photos(tmp_path, 2)
    table = tmp_path / "t.csv"
    table.write_text(f"image,thumb,caption,alt\n{images[0]},{images[1]},long,short\n{images[1]},{images[0]},l2,s2\n")
    source = opened(table, val_size=1, image_column="thumb", caption_column="alt")
    assert listed(source) == {images[1]: ["short"], images[0]: ["s2"]}
    with pytest.raises(ValueError, match="no column 'nope'; it has 'thumb', 'caption', 'alt'"):
        opened(table, caption_column="nope")
    table.rename(tmp_path / "t.txt")
    assert listed(opened(tmp_path / "t.txt", val_size=1, caption_column="alt"))[images[0]] == ["short"]
    (tmp_path / "n.csv").write_text("a,b\n1,2\n3,4\n")
    with pytest.raises(ValueError, match="which column is the image"):
        opened(tmp_path / "n.csv")


def test_several_captions_as_repeated_rows_lists_or_numbered_columns(tmp_path):
    a, b, c = photos(tmp_path, 3)
    repeated = tmp_path / "repeated.csv"
    repeated.write_text(f"image,caption\n{a},one\n{b},two\n{a},three\n{a},four\n{c},x\n")
    assert listed(opened(repeated, val_size=1)) == {a: ["one", "three", "four"], b: ["two"], c: ["x"]}
    lists = tmp_path / "lists.jsonl"
    lists.write_text(
        json.dumps({"image": a, "captions": ["one", "three"]}) + "\n" + json.dumps({"image": b, "captions": ["two"]})
    )
    assert listed(opened(lists, val_size=1)) == {a: ["one", "three"], b: ["two"]}
    written = tmp_path / "written.csv"
    written.write_text(f"""image,raw\n{a},"['one', 'three']"\n{b},"[""two""]"\n""")
    assert listed(opened(written, val_size=1)) == {a: ["one", "three"], b: ["two"]}
    numbered = tmp_path / "numbered.csv"
    numbered.write_text(f"image,caption_1,caption_2\n{a},one,three\n{b},two,\n")
    assert listed(opened(numbered, val_size=1)) == {a: ["one", "three"], b: ["two"]}


def test_broken_lines_are_named_and_cost_no_others(tmp_path):
    images = photos(tmp_path, 60)
    lines = ["image,caption,source", *(f'{name},"scene, {i}",web' for i, name in enumerate(images))]
    lines[3] = "0002.jpg"  # line 4: fields missing
    lines[10] = '0009.jpg,"a quotation that never ends,web'
    lines[20] = "0019.jpg,a,b,c,d,e"
    lines[30] = "0029.jpg,,web"
    lines[31] = '0030.jpg,"goes over\ntwo lines",web'  # good, and moves what follows by a line
    lines[40] = "gone.jpg,there is no such file,web"
    text = "\n".join(lines).encode().replace(b"scene, 49", b"sc\xffne")
    (tmp_path / "t.csv").write_bytes(text)
    source = opened(tmp_path / "t.csv")
    assert found(source) == {
        ("broken line", "t.csv line 4"),
        ("broken line", "t.csv line 11"),
        ("broken line", "t.csv line 21"),
        ("no caption", "t.csv line 31"),
        ("missing file", "t.csv line 42"),
        ("not UTF-8", "t.csv line 52"),
    }
    assert len(listed(source)) == 54
    assert listed(source)["0030.jpg"] == ["goes over\ntwo lines"]
    with pytest.raises(ValueError, match=r"6 of 60 rows are unusable \(3 broken line.*--max-bad-rows"):
        opened(tmp_path / "t.csv", max_bad=0.01)


def test_a_lost_quote_takes_no_other_line_with_it(tmp_path):
    photos(tmp_path, 6)
    lines = [
        "",
        "image,caption",
        '0000.jpg,"lost',
        "0001.jpg,fine",
        '0002.jpg,"quoted, good"',
        '0003.jpg,"also" fine, yes',
    ]
    (tmp_path / "t.csv").write_text("\n".join([*lines, "0004.jpg,commas, that nobody, quoted"]))
    source = opened(tmp_path / "t.csv", val_size=1)
    assert found(source) == {("broken line", "t.csv line 3")}
    assert listed(source) == {
        "0001.jpg": ["fine"],
        "0002.jpg": ["quoted, good"],
        "0003.jpg": ["also fine, yes"],
        "0004.jpg": ["commas, that nobody, quoted"],
    }


def test_faults_are_counted_against_what_they_cost(tmp_path):
    """A broken line of an image with five is a fifth of it; a missing image is all of it."""
    some = photos(tmp_path, 20)
    lines = [f"{name},caption {k}" for name in some for k in range(5)]
    lines[7] = "broken"
    (tmp_path / "t.csv").write_text("image,caption\n" + "\n".join(lines))
    assert opened(tmp_path / "t.csv").faults.share == pytest.approx(1 / 100)
    (tmp_path / some[9]).unlink()
    assert opened(tmp_path / "t.csv").faults.share == pytest.approx(1 / 100 + 1 / 21)


def test_broken_json_lines_are_named(tmp_path):
    images = photos(tmp_path, 4)
    lines = [json.dumps({"image": name, "caption": f"scene {i}"}).encode() for i, name in enumerate(images)]
    (tmp_path / "t.jsonl").write_bytes(b"\n".join([lines[0], lines[1][:20], b"[1]", b'{"image": "\xff"}', *lines[2:]]))
    assert found(opened(tmp_path / "t.jsonl", val_size=1)) == {
        ("broken line", "t.jsonl line 2"),
        ("broken line", "t.jsonl line 3"),
        ("not UTF-8", "t.jsonl line 4"),
    }


def test_parquet_with_paths_and_with_images_inside(tmp_path):
    images = photos(tmp_path, 6)
    captions = [[f"scene {i}", f"scene {i} again"] for i in range(6)]
    pq.write_table(pa.table({"image": images, "text": captions}), tmp_path / "paths.parquet")
    assert listed(opened(tmp_path / "paths.parquet"))["0004.jpg"] == captions[4]
    plain = pa.table({"image": [jpeg(i) for i in range(6)], "text": captions, "n": range(6)})
    pq.write_table(plain, tmp_path / "bytes.parquet")
    source = opened(tmp_path / "bytes.parquet")
    rows = {source.every.captions(i)[0]: source.every.read(i) for i in range(6)}
    assert rows == {f"scene {i}": jpeg(i) for i in range(6)}
    inside = pa.table({"pic": [{"bytes": jpeg(i), "path": f"{i}.jpg"} for i in range(6)], "text": captions})
    pq.write_table(inside, tmp_path / "structs.parquet", row_group_size=2)
    source = opened(tmp_path / "structs.parquet")
    assert [source.every.read(i) for i in range(6)] == [jpeg(i) for i in range(6)]
    (tmp_path / "broken.parquet").write_bytes((tmp_path / "bytes.parquet").read_bytes()[:-50])
    with pytest.raises(ValueError, match="is not Parquet that can be read"):
        opened(tmp_path / "broken.parquet")


def test_coco_as_it_is_distributed(tmp_path):
    for side, start, number in (("train2017", 0, 8), ("val2017", 8, 3)):
        some = photos(tmp_path / side, number, start)
        (tmp_path / "annotations").mkdir(exist_ok=True)
        (tmp_path / "annotations" / f"captions_{side}.json").write_text(coco_json(some, first=start + 1))
        (tmp_path / "annotations" / f"instances_{side}.json").write_text("{}")
    source = opened(f"coco:{tmp_path}")
    assert (len(source.train), len(source.val), source.why) == (8, 3, "the validation split as given")
    assert listed(source)["val2017/0009.jpg"] == [f"caption {k} of 0009.jpg" for k in range(5)]
    assert not source.faults
    one = tmp_path / "annotations" / "captions_val2017.json"
    assert len(listed(opened(one))) == 3  # the file by itself


def test_coco_faults_are_named(tmp_path):
    some = photos(tmp_path / "val2017", 4)
    (tmp_path / "val2017" / some[1]).unlink()
    values = json.loads(coco_json(some))
    values["annotations"].append({"id": 1, "image_id": 999, "caption": "of nothing"})
    values["annotations"] = [one for one in values["annotations"] if one["image_id"] != 3]
    (tmp_path / "annotations").mkdir()
    (tmp_path / "annotations" / "captions_val2017.json").write_text(json.dumps(values))
    source = opened(f"coco:{tmp_path}", val_size=1)
    assert source.faults.counts == {"broken line": 1, "no caption": 1, "missing file": 1}


def test_a_broken_first_line_of_a_token_file_is_told(tmp_path):
    some = photos(tmp_path / "images", 4)
    lines = ["what is this", *(f"{name}#0\tscene" for name in some)]
    (tmp_path / "Flickr8k.token.txt").write_text("\n".join(lines))
    assert found(opened(f"flickr8k:{tmp_path}", val_size=1)) == {("broken line", "Flickr8k.token.txt line 1")}


def test_karpathys_json(tmp_path):
    some = photos(tmp_path / "Images", 8)
    sides = dict(zip(some, ["train"] * 4 + ["restval", "val", "test", "test"], strict=True))
    (tmp_path / "dataset_flickr30k.json").write_text(karpathy_json(sides, "flickr30k"))
    source = opened(f"flickr30k:{tmp_path}")
    assert (len(source.train), len(source.val), len(source.test)) == (5, 1, 2)
    assert listed(source)["0005.jpg"][2] == "Caption 2 of 0005.jpg."
    coco = tmp_path / "coco"
    photos(coco / "val2014", 8)
    (coco / "dataset_coco.json").write_text(karpathy_json(sides, "coco", filepath="val2014"))
    assert names(opened(f"coco:{coco}").val) == {"val2014/0005.jpg"}


def test_flickr8k_as_it_is_distributed(tmp_path):
    some = photos(tmp_path / "Flicker8k_Dataset", 9)
    text = tmp_path / "Flickr8k_text"
    text.mkdir()
    lines = [f"{name}#{k}\tcaption {k} of {name} ." for name in some for k in range(5)]
    lines += ["2258277193_586949ec62.jpg.1#0\ta image that was never there"]  # the set has this line
    (text / "Flickr8k.token.txt").write_text("\n".join(lines))
    (text / "Flickr8k.lemma.token.txt").write_text("\n".join(lines).replace("caption", "lemma"))
    for side, part in (("train", some[:5]), ("dev", some[5:7]), ("test", some[7:8])):
        (text / f"Flickr_8k.{side}Images.txt").write_text("\n".join(part) + "\n")
    source = opened(f"flickr8k:{tmp_path}")
    assert (len(source.train), len(source.val), len(source.test)) == (5, 2, 1)
    assert listed(source)[some[8]][4] == f"caption 4 of {some[8]} ."  # listed, and on no side
    assert found(source) == {("missing file", "Flickr8k.token.txt line 46")}


def test_flickr30k_as_kaggle_has_it(tmp_path):
    some = photos(tmp_path / "flickr30k_images", 6)
    lines = [
        "image_name| comment_number| comment",
        *(f"{name}| {k}| caption {k}, {name} ." for name in some for k in range(5)),
    ]
    lines[8] = f"{some[1]}| 2   A dog runs across the grass ."  # as in the real file: a bar is missing
    (tmp_path / "results.csv").write_text("\n".join(lines))
    for side, part in (("train", some[:4]), ("val", some[4:])):
        (tmp_path / f"{side}.txt").write_text("\n".join(name.removesuffix(".jpg") for name in part))
    source = opened(f"flickr30k:{tmp_path}")
    assert (len(source.train), len(source.val)) == (4, 2)
    assert len(listed(source)[some[1]]) == 4
    assert listed(source)[some[0]][0] == f"caption 0, {some[0]} ."
    assert found(source) == {("broken line", "results.csv line 9")}


def test_an_image_never_stands_on_both_sides(tmp_path):
    """Splits go by the bytes: copies stay together, and neither names nor order nor other rows matter."""
    photos(tmp_path / "a", 60)
    for i in range(20):
        (tmp_path / "a" / f"copy{i}.jpg").write_bytes(jpeg(i))
    for image in (tmp_path / "a").iterdir():
        image.with_suffix(".txt").write_text("a scene")
    source = opened(tmp_path / "a", val_size=15)
    held = {source.val.read(i) for i in range(len(source.val))}
    train = {source.train.read(i) for i in range(len(source.train))}
    assert len(held) == 15
    assert not held & train
    lines = [f"a/{name},again" for name in sorted(f"{i:04d}.jpg" for i in range(60))[::-1]]
    (tmp_path / "other.csv").write_text("\n".join(["image,caption", *lines]))
    other = opened(tmp_path / "other.csv", val_size=15)
    assert {other.val.read(i) for i in range(len(other.val))} == held


def test_mixed_sources_keep_what_one_holds_out_from_the_other(tmp_path):
    photos(tmp_path, 40)
    for table, some in (("a.csv", range(30)), ("b.csv", range(10, 40))):
        (tmp_path / table).write_text("image,caption\n" + "\n".join(f"{i:04d}.jpg,scene {i}" for i in some))
    a, b = open_sources(DataConfig(data=f"{tmp_path}/a.csv@3+{tmp_path}/b.csv", val_size=8))
    assert (a.weight, b.weight) == (3, 1)
    kept = names(a.val) | names(b.val)
    assert not kept & (names(a.train) | names(b.train))


def test_a_spec_is_taken_apart(tmp_path):
    assert parts_of("coco:x@2+synthetic:5") == [("coco:x", 2), ("synthetic:5", 1)]
    (tmp_path / "a+b@2").mkdir()
    assert parts_of(f"{tmp_path}/a+b@2") == [(f"{tmp_path}/a+b@2", 1)]
    for wrong in ("a@0+b", "a@1.2.3", " "):
        with pytest.raises(ValueError, match=r"weight|number|empty"):
            parts_of(wrong)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("sinthetic:5", "did you mean synthetic"),
        ("synthetic:ten", "whole number"),
        ("synthetic:0", "1 to"),
        ("no/such/folder", "there is no such file or folder"),
        ("coco:/no/such", "needs the folder of coco"),
        ("nothing-{000..003}.tar", "no data source"),
        (__file__, "nothing m1clip can read"),
    ],
)
def test_a_spec_that_means_nothing_is_refused(spec, words):
    with pytest.raises((ValueError, FileNotFoundError), match=words):
        opened(spec)


@pytest.mark.parametrize(
    ("words", "sides"),
    [
        (["train", "val2017", "testA", "minival"], (1, 2, 1)),
        (["train", "val", "test-dev", "extra"], (1, 1, 1)),
        (["A", "B", "C", "D"], (3, 1, 0)),  # no sides: divided by hash
    ],
)
def test_words_for_sides(tmp_path, words, sides):
    some = photos(tmp_path, 4)
    lines = [f"{name},x,{word}" for name, word in zip(some, words, strict=True)]
    (tmp_path / "t.csv").write_text("image,caption,split\n" + "\n".join(lines))
    source = opened(tmp_path / "t.csv", val_size=2 if sides[2] else 1)
    assert (len(source.train), len(source.val), len(source.test or [])) == sides


def test_many_files_or_folders_are_one_source(tmp_path):
    for side, start in (("train2017", 0), ("val2017", 5)):
        some = photos(tmp_path / side, 5, start)
        (tmp_path / f"captions_{side}.json").write_text(coco_json(some, first=start + 1))
    source = opened(tmp_path / "captions_{train,val}2017.json")
    assert (len(source.train), len(source.val)) == (5, 5)
    photos(tmp_path / "a" / "cat", 3)
    photos(tmp_path / "b" / "dog", 3, start=3)
    assert set(listed(opened(tmp_path / "{a,b}"))) >= {"a/cat/0000.jpg", "b/dog/0003.jpg"}


def test_folders_of_known_sets_are_recognized_and_generic_names_are_no_labels(tmp_path):
    """Flickr8k as a plain folder once gave 7,000 times "a photo of an images"."""
    some = photos(tmp_path / "flickr" / "images", 4)
    with pytest.raises(ValueError, match="has images but no captions"):
        opened(tmp_path / "flickr")
    (tmp_path / "flickr" / "captions.txt").write_text("image,caption\n" + "\n".join(f"{n},scene {n}" for n in some))
    assert listed(opened(tmp_path / "flickr", val_size=1))["0001.jpg"] == ["scene 0001.jpg"]
    some = photos(tmp_path / "coco" / "train2014", 4)
    (tmp_path / "coco" / "annotations").mkdir()
    (tmp_path / "coco" / "annotations" / "captions_train2014.json").write_text(coco_json(some))
    assert len(listed(opened(tmp_path / "coco", val_size=1))["train2014/0002.jpg"]) == 5


def test_what_users_write_by_hand(tmp_path):
    """Backslashes, upper-case endings, captions named after the file, no endings, UTF-16, other folders."""
    photos(tmp_path / "set" / "images", 4)
    for i in range(4):
        (tmp_path / "set" / "images" / f"plain{i}").write_bytes(jpeg(i))
    tables = tmp_path / "set" / "annotations"
    tables.mkdir()
    (tables / "slash.csv").write_text("image,caption\n" + "\n".join(f"images\\000{i}.jpg,scene {i}" for i in range(4)))
    (tables / "bare.csv").write_text("image,caption\n" + "\n".join(f"plain{i},scene {i}" for i in range(4)))
    (tables / "wide.csv").write_text(
        "image\tcaption\n" + "\n".join(f"000{i}.jpg\tscene, {i}" for i in range(4)), "utf-16"
    )
    for name in ("slash.csv", "bare.csv", "wide.csv"):
        source = opened(tables / name, val_size=1)
        assert (name, len(source.every), len(source.faults)) == (name, 4, 0)
    photos(tmp_path / "beside", 2)
    (tmp_path / "beside" / "0000.jpg").rename(tmp_path / "beside" / "A.JPG")
    (tmp_path / "beside" / "A.TXT").write_text("one")
    (tmp_path / "beside" / "0001.jpg.txt").write_text("two")
    assert listed(opened(tmp_path / "beside", val_size=1)) == {"A.JPG": ["one"], "0001.jpg": ["two"]}


def test_ids_are_no_captions(tmp_path):
    photos(tmp_path, 2)
    turns = [{"from": "human", "value": "What is it?"}, {"from": "gpt", "value": "A scene."}]
    rows = [{"id": f"p{i}", "image": f"000{i}.jpg", "conversations": turns} for i in range(2)]
    (tmp_path / "llava.json").write_text(json.dumps(rows))
    assert listed(opened(tmp_path / "llava.json", val_size=1))["0000.jpg"] == ["A scene."]
    (tmp_path / "ids.csv").write_text("id,image\n1,0000.jpg\n2,0001.jpg")
    with pytest.raises(ValueError, match="which column is the caption"):
        opened(tmp_path / "ids.csv")


def test_a_table_of_addresses_needs_no_header(tmp_path):
    (tmp_path / "t.tsv").write_text("\n".join(f"scene {i}\thttp://x/{i}.jpg?size=8" for i in range(5)))
    with pytest.raises(ValueError, match="5 of 5 rows"):
        opened(tmp_path / "t.tsv")


def test_a_image_may_have_thousands_of_captions(tmp_path):
    photos(tmp_path, 2)
    lines = [f"000{i % 2}.jpg,caption {i}" for i in range(6000)]
    (tmp_path / "t.csv").write_text("image,caption\n" + "\n".join(lines))
    pairs = opened(tmp_path / "t.csv", val_size=1).every
    assert len(pairs.captions(1)) == 3000
    assert pairs.captions(1)[2999] == "caption 5999"


def test_sides_are_no_labels(tmp_path):
    photos(tmp_path / "train", 3)
    photos(tmp_path / "val", 3, start=3)
    with pytest.raises(ValueError, match="has images but no captions"):
        opened(tmp_path)


def test_too_many_val_leave_nothing_to_learn(tmp_path):
    photos(tmp_path / "cat", 5)
    with pytest.raises(ValueError, match="--val-size 5 of 5 different images leaves none"):
        opened(tmp_path, val_size=5)


MILLION = """
import resource, sys
from pathlib import Path
import numpy as np
import psutil
from m1clip.config import DataConfig
from m1clip.data.index import Builder, Indexed
from m1clip.data.rows import BadRows, Listing, Row

def rows():
    for i in range(1_000_000):
        said = f"caption {i}: a dog runs over the wet grass towards number {i % 977}"
        place = i * 7919 % 700_000
        yield Row(f"image-{place:07d}.jpg", [said], file=sys.argv[2], offset=place, length=100)

before = psutil.Process().memory_info().rss
folder = Path(sys.argv[1])
Builder(Listing(".", rows()), DataConfig(), BadRows()).write(folder, lambda n: None)
pairs = Indexed(folder)
some = np.random.default_rng(0).integers(0, len(pairs), 20_000)
words = sum(len(pairs.captions(int(i))[0]) for i in some)
assert words and pairs.column("file").shape == (700_000,)
if sys.platform == "linux":  # there, ru_maxrss remembers the process that started this one
    peak = 1024 * int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])
else:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(len(pairs), peak - before)
"""


def test_a_million_rows_need_less_than_300_mb(tmp_path):
    (tmp_path / "shard.tar").write_bytes(b"x")
    (tmp_path / "index").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", MILLION, str(tmp_path / "index"), str(tmp_path / "shard.tar")],
        capture_output=True,
        text=True,
        check=True,
    )
    images, grown = map(int, done.stdout.split())
    assert images == 700_000
    assert grown < 300e6
